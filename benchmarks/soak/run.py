"""One soak, from the first start of the service to the last look at its catalogue."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.siege.client import Client
from benchmarks.siege.folders import save_untrained
from benchmarks.siege.places import Service
from benchmarks.soak.ledger import NOTHING_KNOWN, Filters, Ledger
from benchmarks.soak.ledger import Attributes as Known
from benchmarks.soak.refreshes import GrowingLog, is_usual, run_refresh
from benchmarks.soak.witnesses import Asker, Changer, Scene, Seen
from recprune import Attributes, LiveIndex, Recommender
from recprune.commands.console import showing_progress
from recprune.search import reference
from recprune.serve.engine.backend import kind_and_version
from recprune.types import InputError, Json


@dataclass(frozen=True)
class Plan:
    """How long, and of what size."""

    minutes: float
    items: int = 5_000
    workers: int = 2
    askers: int = 2
    kept: int = 200  # events of a user, of whom some have more
    seed: int = 0


@dataclass(frozen=True)
class Trouble:
    """Something that happens again and again."""

    name: str
    least_s: float  # between one and the next
    most_s: float
    strike: Callable[[random.Random], None]


class Soak:
    """A service over a live catalogue, whoever uses it, and what happens to it."""

    def __init__(self, plan: Plan, place: Path) -> None:
        self.plan = plan
        self.folder = folder = place / "recommender"
        save_untrained(folder, plan.items, plan.seed, named=True)
        recommender = Recommender.load(folder)
        rng = np.random.default_rng(plan.seed)
        count = len(recommender.item_ids)
        ids = [str(name) for name in recommender.item_ids.take(range(count))]
        known = [
            NOTHING_KNOWN
            if rng.random() < 0.1
            else Known(round(float(rng.uniform(0, 100)), 2), rng.choice(["a", "b", "c", "d"]))
            for _ in ids
        ]
        table = {
            "item_id": ids,
            "price": [one.price for one in known],
            "brand": [one.brand for one in known],
        }
        recommender.with_attributes(Attributes.from_table(table, recommender.item_ids)).save(folder)
        self.live = place / "live"
        recommender.make_live(self.live).close()
        self.disk = place / "disk"
        self.disk.mkdir()
        self.service = Service(
            folder,
            self.disk,
            f"sqlite:///{place / 'histories.db'}",
            workers=plan.workers,
            options=["--live", str(self.live), "--max-history", str(plan.kept)],
        )
        self.end = threading.Event()
        self.seen = Seen()
        ledger = Ledger(recommender.index.item_codes(), ids, known)
        self.scene = Scene(
            self.service.port,
            {kind_and_version(folder)[1]: recommender},
            ledger,
            self.seen,
            self.end,
            threading.Lock(),
            plan.kept,
        )
        self.log = GrowingLog(place / "log", ids)
        self._refresh_s = 5.0  # what one took
        # Held while the service is started anew, or folders are written by other processes.
        self.is_up = threading.Lock()
        self._is_starting = threading.Lock()  # a service whose first worker is killed gives up

    # What happens ----------------------------------------------------------------------------------

    def troubles(self) -> list[Trouble]:
        return [
            Trouble("workers killed", 2.0, 6.0, self._kill_worker),
            Trouble("service killed", 40.0, 80.0, self._kill_service),
            Trouble("compactions", 10.0, 30.0, self._compact),
            Trouble("reloads", 15.0, 45.0, self._reload),
            Trouble("refreshes", 60.0, 180.0, self._refresh),
        ]

    def _kill_worker(self, rng: random.Random) -> None:
        with self._is_starting:
            workers = self.service.workers
            if workers:
                with suppress(ProcessLookupError):
                    os.kill(rng.choice(workers), signal.SIGKILL)

    def _kill_service(self, _: random.Random) -> None:
        with self.is_up, self._is_starting:
            self.service.kill_all()
            self.service.start()

    def _compact(self, rng: random.Random) -> None:
        """Compact from another process, which is killed at a random moment every other time."""
        command = [sys.executable, "-m", "recprune.cli", "index", "compact", str(self.live)]
        with self.is_up:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            if rng.random() < 0.5:
                time.sleep(rng.uniform(0.2, 1.5))
                process.kill()
            _, said = process.communicate()
        if process.returncode not in (0, -signal.SIGKILL):
            self.seen.failed.append(f"compact: {said.decode(errors='replace')[-300:]}")

    def _reload(self, _: random.Random) -> None:
        with self.is_up:
            self._ask_to_reload()

    def _ask_to_reload(self) -> bool:
        """Return whether the service has loaded what is there."""
        client = Client(self.service.port)
        reply = client.ask("POST", "/admin/reload")
        client.close()
        # One that a killed worker took part in may fail, and is made again.
        if not reply.cut and reply.status not in (200, 409, 503):
            self.seen.failed.append(f"reload: {reply.status} {reply.body[:300]!r}")
        return not reply.cut and reply.status == 200

    def _refresh(self, rng: random.Random) -> None:
        """Train the model on with one more day, by a process that is killed every other time.

        The next one goes on from there. Meanwhile nobody else changes the catalogue: what is added
        then has a number that only the new live index knows.
        """
        self.log.add_day(rng)
        with self.is_up, self.scene.changing:
            kills = [self._refresh_s * rng.uniform(0.3, 1.1)] if rng.random() < 0.5 else []
            for kill_after_s in (*kills, None):
                change = self.scene.ledger.begin()
                code, said, seconds = run_refresh(
                    self.folder, self.log.folder, self.live, kill_after_s
                )
                if not is_usual(code):
                    self.seen.failed.append(f"refresh: {code} {said[-300:]}")
                if code == 0:
                    self._refresh_s = seconds
                if self._note_what_is_in_place():
                    while not self._ask_to_reload() and not self.end.wait(0.2):
                        pass
                change.acknowledge()

    def _note_what_is_in_place(self) -> bool:
        """Take note of a new recommender; return whether its live index is in place too."""
        version = kind_and_version(self.folder)[1]
        recommender, scene = Recommender.load(self.folder), self.scene
        with LiveIndex.open(self.live) as live:
            try:
                recommender.with_live(live)
            except InputError:
                return False
            if version not in scene.recommenders:
                numbers = live.snapshot().numbers()
                names = map(str, live.external_ids(numbers))
                found = dict(zip(names, numbers.tolist(), strict=True))
                differing = found.keys() ^ set(scene.ledger.present())
                if differing:
                    self.seen.wrong.append(f"after a refresh, items differ: {sorted(differing)}")
                    self.end.set()
                    return True
                scene.ledger.renumber(found, live.num_items)
                scene.recommenders[version] = recommender
                self.seen.counts["put in place"] += 1
        return True

    # All of it -------------------------------------------------------------------------------------

    def run(self) -> Json:
        self.service.start()
        begun = time.monotonic()
        changer = Changer(self.scene)
        threads = [threading.Thread(target=self._acting, args=(changer, 0))]
        threads += [
            threading.Thread(target=self._acting, args=(Asker(self.scene, f"asker {at}"), at + 1))
            for at in range(self.plan.askers)
        ]
        threads += [
            threading.Thread(target=self._troubling, args=(trouble,)) for trouble in self.troubles()
        ]
        for thread in threads:
            thread.start()
        with showing_progress("soaking") as progress:
            while time.monotonic() - begun < 60.0 * self.plan.minutes:
                counts = self.seen.counts
                progress(
                    f"{(time.monotonic() - begun) / 60:.1f} of {self.plan.minutes:g} minutes: "
                    f"{counts['compared']:,} answers compared, {len(self.seen.wrong)} wrong, "
                    f"{counts['put'] + counts['removed']:,} changes"
                )
                if self.end.wait(5.0):
                    break
        self.end.set()
        for thread in threads:
            thread.join()
        record = {
            "plan": asdict(self.plan),
            "seconds": round(time.monotonic() - begun, 1),
            "counts": dict(self.seen.counts),
            "wrong": self.seen.wrong[:20],
            "failed": self.seen.failed[:20],
            "late_s": round(self.seen.latest_s, 3),
            "read_back": self._read_back(),
        }
        self.service.stop()
        return record

    def _acting(self, who: Changer | Asker, seed: int) -> None:
        client, rng = Client(self.scene.port), random.Random(100 * self.plan.seed + seed)
        try:
            while not self.end.wait(who.pause_s):
                who.act(client, rng)
        except (Exception, SystemExit):  # the latter of a service that does not start
            self.seen.failed.append(traceback.format_exc())
            self.end.set()
        finally:
            client.close()

    def _troubling(self, trouble: Trouble) -> None:
        rng = random.Random(f"{self.plan.seed} {trouble.name}")
        try:
            while not self.end.wait(rng.uniform(trouble.least_s, trouble.most_s)):
                trouble.strike(rng)
                self.seen.counts[trouble.name] += 1
        except (Exception, SystemExit):
            self.seen.failed.append(traceback.format_exc())
            self.end.set()

    def _read_back(self) -> Json:
        """Open the folder once more, and compare all of the catalogue with the acknowledged changes.

        The last change may have been sent without an answer: then it is there or not.
        """
        ledger = self.scene.ledger
        newest = len(ledger.changes)
        answered = newest and np.isfinite(ledger.changes[-1].acknowledged)
        with LiveIndex.open(self.live) as live:
            rng = np.random.default_rng(self.plan.seed)
            queries = rng.normal(size=(20, live.width)).astype(np.float32)
            equal = 0
            for query in queries:
                scores = reference.sub_item_scores(query, live.snapshot().sub_item_embeddings())
                top = live.search(query, k=live.num_present)
                names = map(str, live.external_ids(top.ids))
                found = tuple(zip(names, map(float, top.scores), strict=True))
                equal += any(
                    found == ledger.answer(version, scores, live.num_items, Filters())
                    for version in range(newest if answered else newest - 1, newest + 1)
                )
            return {
                "items": live.num_present,
                "numbers": live.num_items,
                "rankings": len(queries),
                "equal": equal,
            }
