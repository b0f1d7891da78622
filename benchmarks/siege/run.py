"""One siege, from the first start of the service to the last look into its store."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.siege.client import Client
from benchmarks.siege.diary import Diary
from benchmarks.siege.folders import Oracle, make_questions, save_two
from benchmarks.siege.hardships.broken_clients import BrokenClients
from benchmarks.siege.hardships.clock_jumps import ClockJumps
from benchmarks.siege.hardships.full_disk import FullDisk
from benchmarks.siege.hardships.hardship import Hardship, befallen
from benchmarks.siege.hardships.killing import Killing
from benchmarks.siege.hardships.slow_clients import SlowClients
from benchmarks.siege.hardships.store_away import RedisAway, SqliteLocked
from benchmarks.siege.hardships.swapping import Swapping
from benchmarks.siege.load import Load, LoadReport, as_json
from benchmarks.siege.memory import Memory, Sample, slope
from benchmarks.siege.places import Redis, Service, SmallDisk
from benchmarks.siege.witness import Witness, lost_events
from recprune.commands.console import showing_progress
from recprune.serve.histories.histories import open_histories
from recprune.types import Json, Progress

_DISK_MB = 1024  # half an hour of events fits in three quarters of it
_WARM_S, _CAPACITY_S, _HALF_S = 10.0, 10.0, 20.0
_FITTING = 8  # connections for each worker, of which hardly any request is turned away
_SLOW_CLIENTS = 100
_CLIENT_S = 10.0  # what the service gives a client, by default
_STORED_USERS = 100  # whose histories are there before the siege
# Until a store that is back is believed to be: calls to one that hung give up after 5 s.
_GRACE_S = 7.0
_SPARED = 0.75  # of the siege, for which one worker is not killed
_MOST_HISTORY = 1000  # events that the service keeps of a user, by default


@dataclass(frozen=True)
class Plan:
    """What kind of siege it is."""

    minutes: float
    histories: str  # sqlite or redis
    workers: int = 2
    items: int = 20_000
    swaps: int = 100
    connections: int = 64  # of the load
    seed: int = 0

    @property
    def seconds(self) -> float:
        return 60.0 * self.minutes


class Siege:
    """A service, the load on it, and everything that happens to it."""

    def __init__(self, plan: Plan, place: Path, progress: Progress) -> None:
        self.plan = plan
        self.progress = progress
        progress("two recommenders, and what they have to answer")
        self.served, self.spare = save_two(place, plan.items)
        self.oracles = [Oracle(folder) for folder in (self.served, self.spare)]
        self.disk = SmallDisk(place / "disk", _DISK_MB)
        self.redis = Redis(self.disk.place / "redis") if plan.histories == "redis" else None
        self.database = self.disk.place / "histories.db"
        url = self.redis.url if self.redis else f"sqlite:///{self.database}"
        self.service = Service(self.served, self.disk.place, url, workers=plan.workers)
        self.diary = Diary()
        questions = make_questions(self.oracles[0], 60, plan.seed)
        by_version = {oracle.version: oracle for oracle in self.oracles}
        self.witness = Witness(self.service.port, by_version, questions)
        self.load = Load(place, self.service.port, plan.connections)
        items = self.oracles[0].items
        self.users = {
            f"stored-{at}": items[20 * at % len(items) :][:20] for at in range(_STORED_USERS)
        }
        self.load.plan(questions, self.users, items[:100], self.oracles)
        self.acknowledged: dict[str, list[str]] = {}

    def start(self) -> None:
        self.service.start()
        for user, items in self.users.items():
            events = [
                {"user": user, "item": item, "timestamp": at, "key": str(at)}
                for at, item in enumerate(items)
            ]
            if self.service.client.ask("POST", "/events", {"events": events}).status != 200:
                raise SystemExit("the service does not take events before the siege")

    def warm_up(self) -> None:
        """Have everything done once that makes a worker grow: threads, buffers, a second folder."""
        running = self.load.start(_WARM_S, 0)
        while running.process.poll() is None:
            self.service.client.ask("POST", "/admin/reload")
        self._kept(running.report())

    def loaded(self, what: str, seconds: float, rate: float, connections: int = 0) -> LoadReport:
        """Run the load alone, without hardship."""
        self.progress(what)
        return self._kept(self.load.run(seconds, rate, connections))

    def _kept(self, report: LoadReport) -> LoadReport:
        for user, items in report.acknowledged.items():
            self.acknowledged.setdefault(user, []).extend(items)
        return report

    def hardships(self, begun: float) -> list[Hardship]:
        plan, service, diary = self.plan, self.service, self.diary
        rare = min(40.0, plan.seconds / 3)
        self.killing = Killing(service, diary, begun + _SPARED * plan.seconds)
        self.swapping = Swapping(service, self.spare, diary, plan.swaps, begun + plan.seconds)
        self.broken = BrokenClients(service, diary)
        self.slow = SlowClients(
            service, diary, self.oracles[0].items, most=_SLOW_CLIENTS, allowed_s=_CLIENT_S
        )
        away: Hardship = (
            RedisAway(self.redis, diary, rare)
            if self.redis is not None
            else SqliteLocked(self.database, diary, rare)
        )
        return [
            self.killing,
            self.swapping,
            FullDisk(self.disk, self.redis, diary, rare),
            away,
            ClockJumps(service, diary),
            self.slow,
            self.broken,
        ]

    def besiege(self, rate: float, memory: Memory) -> LoadReport:
        """Let everything happen at once."""
        plan = self.plan
        running = self.load.start(plan.seconds, rate)
        begun = time.monotonic()
        with self.witness.watching(), befallen(self.hardships(begun), plan.seed) as faults:
            while running.process.poll() is None:
                time.sleep(1.0)
                done = (time.monotonic() - begun) / plan.seconds
                self.progress(
                    f"under siege, {done:.0%}: {len(memory.samples)} looks at its memory, "
                    f"{self.witness.counts['compared']} answers compared, "
                    f"{self.swapping.swaps} swaps"
                )
        if faults:
            raise SystemExit(f"a hardship ended before its time: {faults[0]}")
        return self._kept(running.report())

    def close(self) -> None:
        if self.service.process is not None:
            self.service.stop()
        if self.redis is not None:
            self.redis.kill()
        self.disk.close()


@contextmanager
def _siege(plan: Plan, place: Path, keep: Path | None) -> Iterator[Siege]:
    with showing_progress(f"siege, {plan.histories}") as progress:
        siege = Siege(plan, place, progress)
        try:
            yield siege
        finally:
            if keep is not None:
                shutil.copytree(place, keep, ignore=shutil.ignore_patterns("filler"))
            siege.close()


def besiege(plan: Plan, place: Path, keep: Path | None = None) -> Json:
    """Run a siege in a folder; return its record."""
    with _siege(plan, place, keep) as siege:
        siege.start()
        siege.warm_up()
        fitting = siege.loaded("its capacity", _CAPACITY_S, 0, _FITTING * plan.workers)
        capacity = fitting.total(["right"]).count / _CAPACITY_S
        memory = Memory(siege.service, siege.service.workers[0])
        with memory.sampling():
            begun = time.monotonic()
            half = siege.loaded("half of its capacity", _HALF_S, capacity / 2)
            siege_begun = time.monotonic()
            report = siege.besiege(2 * capacity, memory)
            siege_ended = time.monotonic()
            siege.progress("recovering")
            siege.service.wait_until_ready()
            recovery = time.monotonic() - siege_ended
            after_begun = time.monotonic()
            after = siege.loaded("half of its capacity, afterwards", _HALF_S, capacity / 2)
        figures = _own_figures(siege)
        lost = _lost(siege)
        return {
            "plan": asdict(plan),
            "capacity_per_second": round(capacity, 1),
            "offered_per_second": round(2 * capacity, 1),
            "load": as_json(report),
            "half": _quiet(half),
            "after": _quiet(after),
            "siege_p99_ms": round(report.total(["right"]).milliseconds(0.99), 2),
            "siege_p50_ms": round(report.total(["right"]).milliseconds(0.5), 2),
            "turned_away_p99_ms": round(report.total(["turned-away"]).milliseconds(0.99), 2),
            "no_store_at_other_times": _no_store_at_other_times(siege, report),
            "strange": report.strange[:20] + half.strange[:5] + after.strange[:5],
            "witness": dict(siege.witness.counts)
            | {
                "wrong": len(siege.witness.wrong),
                "failed": len(siege.witness.failed),
                "longest_until_acknowledged_s": round(siege.witness.late_s, 1),
                "said": siege.witness.failed[:15] + siege.witness.wrong[:15],
            },
            "events": lost,
            "hardships": _hardships(siege),
            "service": figures,
            "recovery_s": round(recovery, 1),
            "memory": _memory(memory.samples, begun, siege_begun, siege_ended, after_begun),
            "course": _course(report, memory.samples, siege_begun),
            "diary": [
                entry
                for entry in siege.diary.to_json(siege_begun)
                if entry["hardship"] not in (siege.slow.name, siege.broken.name)
            ],
        }


def _quiet(report: LoadReport) -> Json:
    right = report.total(["right"])
    return {
        "p50_ms": round(right.milliseconds(0.5), 2),
        "p99_ms": round(right.milliseconds(0.99), 2),
        "outcomes": report.outcomes(),
    }


def _no_store_at_other_times(siege: Siege, report: LoadReport) -> int:
    """Count answers that the store is away at moments when it was not."""
    moments = Counter(
        {
            second + 0.5: report.total(["no-store"], seconds=range(second, second + 1)).count
            for second in report.seconds()
        }
    )
    moments.update(siege.witness.no_store)
    return sum(
        count
        for moment, count in moments.items()
        if count and not siege.diary.store_was_away(moment, _GRACE_S)
    )


def _own_figures(siege: Siege) -> Json:
    """Return what the service itself has counted and logged."""
    begun = time.monotonic()
    text = siege.service.client.ask("GET", "/metrics").body.decode()
    scrape_ms = 1000.0 * (time.monotonic() - begun)
    statuses: Counter[str] = Counter()
    for line in text.splitlines():
        if line.startswith("recprune_requests_total{"):
            name, _, value = line.rpartition(" ")
            statuses[name.partition('status="')[2][:3]] += int(float(value))
    logged: Counter[str] = Counter()
    errors: list[Json] = []
    for line in siege.service.log().splitlines():
        try:
            entry = json.loads(line)
            logged[entry["event"]] += 1
        except (ValueError, KeyError, TypeError):  # cut short by a full disk
            logged["(not whole)"] += 1
            continue
        if "error" in entry and len(errors) < 20:
            errors.append(entry)
    scratch = siege.disk.place / "tmp"
    return {
        "statuses": dict(sorted(statuses.items())),
        "logged": dict(logged),
        "errors": errors,
        "metrics_ms": round(scrape_ms, 1),
        "scratch_files": sum(path.is_file() for path in scratch.rglob("*")),
    }


def _lost(siege: Siege) -> Json:
    """Read everything back, then once more after a power cut, and look into the store itself."""
    client = Client(siege.service.port)
    siege.progress("reading back what was acknowledged")
    siege.witness.read_back(client)
    siege.progress("and again, after kill -9 of everything")
    siege.service.kill_all()
    if siege.redis is not None:
        siege.redis.kill()
        siege.redis.start()
    siege.service.start()
    client.close()
    siege.witness.read_back(client)
    client.close()
    siege.service.stop()
    with closing(open_histories(siege.service.histories, _MOST_HISTORY)) as histories:
        of_witness = lost_events(histories, siege.witness.acknowledged, ordered=True)
        of_load = lost_events(histories, siege.acknowledged, ordered=False)
    return {
        "acknowledged_to_witness": siege.witness.counts["acknowledged"],
        "acknowledged_to_load": sum(map(len, siege.acknowledged.values())),
        "lost": of_witness[0] + of_load[0],
        "misplaced": of_witness[1],
    }


def _hardships(siege: Siege) -> Json:
    strikes = Counter(entry.hardship for entry in siege.diary.entries())
    reloads = [
        entry.figures["status"]
        for entry in siege.diary.entries()
        if entry.hardship == siege.swapping.name and "status" in entry.figures
    ]
    away = [entry for entry in siege.diary.entries() if entry.store_is_away]
    return {
        "strikes": dict(strikes),
        "swaps": siege.swapping.swaps,
        "reload_statuses": dict(Counter(f"{status:.0f}" for status in reloads)),
        "store_away_s": round(sum(entry.ended - entry.begun for entry in away), 1),
        "slow_clients_ended": dict(siege.slow.ended),
        "slow_clients_held": dict(siege.slow.held),
        "broken_clients": dict(siege.broken.answers),
        "broken_clients_faults": siege.broken.faults,
    }


def _memory(
    samples: list[Sample], begun: float, siege_begun: float, siege_ended: float, after: float
) -> Json:
    """Compare memory under the same load, half of the capacity, before and after the siege."""

    def median(values: list[int]) -> float:
        return round(float(np.median(values)) / 1e6, 1) if values else float("nan")

    before = [one for one in samples if begun + 4.0 <= one.moment < siege_begun]
    during = [one for one in samples if siege_begun <= one.moment < siege_ended]
    later = [one for one in samples if one.moment >= after + 4.0]
    spared = [one for one in during if one.spared_bytes]
    quarter = max(1, len(spared) // 4)
    return {
        "start_mb": median([one.all_bytes for one in before]),
        "end_mb": median([one.all_bytes for one in later]),
        "siege_mb_per_10_min": round(
            slope([one.moment for one in during], [one.all_bytes / 1e6 for one in during]), 2
        ),
        "spared_start_mb": median([one.spared_bytes for one in spared[:quarter]]),
        "spared_end_mb": median([one.spared_bytes for one in spared[-quarter:]]),
        "spared_mb_per_10_min": round(
            slope([one.moment for one in spared], [one.spared_bytes / 1e6 for one in spared]), 2
        ),
    }


def _course(report: LoadReport, samples: list[Sample], zero: float) -> Json:
    """Return what the picture shows, in steps of as many seconds as make two hundred of them."""
    seconds = report.seconds()
    step = max(1, len(seconds) // 200)
    steps = [range(first, first + step) for first in seconds[::step]]
    by_second: dict[int, LoadReport] = {}
    for key, tally in report.tallies.items():
        at = (key[0] - seconds[0]) // step
        by_second.setdefault(at, LoadReport()).tallies[key] = tally
    course = []
    for at, part in enumerate(steps):
        one = by_second.get(at, LoadReport())
        right = one.total(["right"])
        away = one.total(["turned-away", "no-store"])
        p99 = right.milliseconds(0.99)
        course.append(
            {
                "second": round(part[0] - zero, 1),
                "admitted_per_second": round(right.count / step, 1),
                "turned_away_per_second": round(away.count / step, 1),
                "p99_ms": None if np.isnan(p99) else round(p99, 2),
            }
        )
    every = max(1, len(samples) // 300)
    memory = [
        {
            "second": round(one.moment - zero, 1),
            "mb": round(one.all_bytes / 1e6, 1),
            "spared_mb": round(one.spared_bytes / 1e6, 1),
        }
        for one in samples[::every]
    ]
    return {"load": course, "memory": memory}
