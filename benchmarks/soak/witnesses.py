"""Who changes the catalogue, who acts, and who asks: each knows what is right.

A request whose connection was cut, or that was turned away, is sent again until it is answered: all
of them may be repeated. So what was acknowledged is known, and nothing else happens.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.siege.client import Client, Reply
from benchmarks.soak.ledger import CONDITIONS, Answer, Filters, Ledger
from recprune import Recommender
from recprune.search import reference
from recprune.types import CodeArray, Json

_AGAIN_S = 0.1
_PATIENCE_S = 120.0  # from when a service may answer by a new recommender until we have read it
_FIRST_TIME = 1_700_000_000


@dataclass
class Seen:
    """What all of them have seen."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    latest_s: float = 0.0  # by how much a version that was answered was late


@dataclass(frozen=True)
class Scene:
    """What they share."""

    port: int
    recommenders: dict[str, Recommender]  # all that were ever in place, by their version
    ledger: Ledger
    seen: Seen
    end: threading.Event
    changing: threading.Lock  # held by whoever changes the catalogue
    kept: int  # events of a user: what came before is not known to have been seen

    def ask(self, client: Client, method: str, path: str, body: Json | None = None) -> Reply | None:
        """Ask until there is an answer; None if the soak ends before."""
        while True:
            reply = client.ask(method, path, body)
            if not self.is_to_be_repeated(reply):
                return reply
            if self.end.wait(_AGAIN_S):
                return None

    def is_to_be_repeated(self, reply: Reply) -> bool:
        """Count a reply; return whether it is none. Asked for too late, all else is in doubt."""
        self.seen.counts["requests"] += 1
        if reply.cut == "late":
            self.seen.failed.append("no answer for a minute")
            self.end.set()
        if not reply.cut and reply.status != 503:
            return False
        self.seen.counts["cut" if reply.cut else "turned away"] += 1
        return True

    def recommender_of(self, version: str) -> Recommender | None:
        """Return the recommender of an answer; one that is just put in place is waited for."""
        patience = time.monotonic() + _PATIENCE_S
        while version not in self.recommenders and time.monotonic() < patience:
            time.sleep(_AGAIN_S)
        return self.recommenders.get(version)


class Changer:
    """Adds, replaces, amends and removes items, one change after the other."""

    pause_s = 0.03

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._added = 0

    def act(self, client: Client, rng: random.Random) -> None:
        with self._scene.changing:
            self._change(client, rng)

    def _change(self, client: Client, rng: random.Random) -> None:
        kinds = ("add", "replace", "amend", "remove", "remove new")
        what = rng.choices(kinds, (3, 2, 3, 2, 3))[0]
        there = self._scene.ledger.present()
        if what == "remove" or (what == "remove new" and not self._added):
            self._remove(client, rng.choice(there))
        elif what == "remove new":
            new = [item for item in there[-200:] if item.startswith("new")]
            self._remove(client, rng.choice(new or there))
        elif what == "replace":
            self._put(client, [rng.choice(there)], rng)
        elif what == "amend":
            self._amend(client, rng.choice(there[-200:] + there[:200]), rng)
        else:
            count = rng.choice((1, 1, 1, 5))
            self._put(client, [f"new {self._added + at}" for at in range(count)], rng)
            self._added += count

    def _put(self, client: Client, items: list[str], rng: random.Random) -> None:
        scene, ledger = self._scene, self._scene.ledger
        codes = [self._code(rng) for _ in items]
        said = [_said(rng) if rng.random() < 0.6 else {} for _ in items]
        body = {
            "items": [
                {"id": item, "code": code.tolist()} | ({"attributes": values} if values else {})
                for item, code, values in zip(items, codes, said, strict=True)
            ],
            "replace": True,  # so that it may be sent again
        }
        # Before it is sent, as an answer may have it before it is acknowledged.
        change = ledger.begin()
        expected = ledger.put(items, np.array(codes, np.uint8), said)
        reply = scene.ask(client, "POST", "/items", body)
        if reply is None:
            return
        if reply.status != 200:
            scene.seen.failed.append(f"POST /items: {reply.status} {reply.body[:300]!r}")
        elif reply.json()["numbers"] != expected:
            scene.seen.wrong.append(f"numbers {reply.json()['numbers']}, expected {expected}")
        change.acknowledge()
        scene.seen.counts["put"] += len(items)

    def _amend(self, client: Client, item: str, rng: random.Random) -> None:
        """Say something else of an item that is there."""
        scene, said = self._scene, _said(rng)
        change = scene.ledger.begin()
        scene.ledger.put([item], scene.ledger.code_of(item)[None], [said])
        reply = scene.ask(client, "PATCH", _path_of(item), {"attributes": said})
        if reply is None:
            return
        if reply.status != 200:
            scene.seen.failed.append(f"PATCH: {reply.status} {reply.body[:300]!r}")
        change.acknowledge()
        scene.seen.counts["amended"] += 1

    def _code(self, rng: random.Random) -> CodeArray:
        """Return the code of some item with a few sub-items changed: as good as others are."""
        ledger = self._scene.ledger
        code = ledger.code_of(rng.choice(ledger.present()))
        for _ in range(rng.randrange(3)):
            code[rng.randrange(len(code))] = rng.randrange(256)
        return code

    def _remove(self, client: Client, item: str) -> None:
        scene = self._scene
        change = scene.ledger.begin()
        scene.ledger.remove(item)
        reply = scene.ask(client, "DELETE", _path_of(item))
        if reply is None:
            return
        if reply.status not in (200, 404):  # 404: it was removed by what had no answer
            scene.seen.failed.append(f"DELETE: {reply.status} {reply.body[:300]!r}")
        change.acknowledge()
        scene.seen.counts["removed"] += 1


def _said(rng: random.Random) -> Json:
    """Draw new values of one attribute or of both, some of them none."""
    drawn: Json = {
        "price": None if rng.random() < 0.2 else round(rng.uniform(0, 100), 2),
        "brand": rng.choice([None, "a", "b", "c", "d", "e"]),
    }
    names = rng.choice([["price"], ["brand"], ["price", "brand"]])
    return {name: drawn[name] for name in names}


def _path_of(item: str) -> str:
    return f"/items/{item.replace(' ', '%20')}"


class Asker:
    """A user who acts and asks; and asks for others, with every kind of filter."""

    pause_s = 0.01

    def __init__(self, scene: Scene, name: str) -> None:
        self._scene = scene
        self._name = name
        self._users: dict[str, list[str]] = {}
        (first,) = scene.recommenders.values()
        self._trained = [str(item) for item in first.item_ids.take(range(len(first.item_ids)))]

    def act(self, client: Client, rng: random.Random) -> None:
        user = f"{self._name} {rng.randrange(20)}"
        history = self._users.setdefault(user, [])
        acts = not history or rng.random() < 0.3
        if acts and not self._write_event(client, user, history, rng):
            return
        history = history[-self._scene.kept :]
        asked: Json = {"user": user}
        if rng.random() < 0.3:
            history = rng.sample(self._trained, rng.randrange(1, 30))
            asked = {"history": history}
        filters = self._filters(rng)
        self._compare(client, asked, history, filters, rng.choice((1, 10, 10, 100)))

    def _write_event(
        self, client: Client, user: str, history: list[str], rng: random.Random
    ) -> bool:
        item = rng.choice(self._trained)
        event: Json = {"user": user, "item": item, "key": str(len(history))}
        event["timestamp"] = _FIRST_TIME + len(history)
        reply = self._scene.ask(client, "POST", "/events", {"events": [event]})
        if reply is None:
            return False
        if reply.status != 200:
            self._scene.seen.failed.append(f"POST /events: {reply.status} {reply.body[:300]!r}")
        history.append(item)
        self._scene.seen.counts["events"] += 1
        return True

    def _filters(self, rng: random.Random) -> Filters:
        there = self._scene.ledger.present()
        condition = rng.choice(CONDITIONS) if rng.random() < 0.4 else None
        exclude = rng.sample(there, 20) if rng.random() < 0.3 else ()
        return Filters(exclude, condition)

    def _compare(
        self, client: Client, asked: Json, history: Sequence[str], filters: Filters, k: int
    ) -> None:
        scene, seen = self._scene, self._scene.seen
        body: Json = {**asked, "k": k, "exclude": list(filters.exclude), "exclude_seen": True}
        if filters.condition is not None:
            body["where"] = filters.condition.text
        while True:
            begun = time.monotonic()
            reply = client.ask("POST", "/recommend", body)
            ended = time.monotonic()
            if not scene.is_to_be_repeated(reply):
                break
            if scene.end.wait(_AGAIN_S):
                return
        if reply.status != 200:
            seen.failed.append(f"/recommend: {reply.status} {reply.body[:300]!r}")
            return
        found: Answer = tuple(
            (entry["item"], float(np.float32(entry["score"])))
            for entry in reply.json()["answers"][0]["items"]
        )
        seen.counts["compared"] += 1
        # The version of an answer is that of the recommender, then that of the live index.
        recommender = scene.recommender_of(reply.json()["version"].split("-")[0])
        if recommender is None:
            seen.wrong.append(f"{body}: version {reply.json()['version']} was never put in place")
            return
        internal = recommender.item_ids.find_all(list(history)).astype(np.int32)
        embedding = recommender.encoder.encode([internal], [None])[0]
        scores = reference.sub_item_scores(embedding, recommender.index.sub_item_embeddings())
        whole = Filters([*filters.exclude, *history], filters.condition)
        expected: Answer | None = None
        for version, late in scene.ledger.versions(begun, ended):
            right = scene.ledger.answer(version, scores, k, whole)
            expected = right if expected is None else expected
            if found == right:
                seen.latest_s = max(seen.latest_s, late)
                return
        seen.wrong.append(f"{body}: {found[:5]}, expected {(expected or ())[:5]}")
