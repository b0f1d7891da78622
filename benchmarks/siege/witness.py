"""The witness: clients of our own beside the load, which know what is right and forget nothing.

Some ask questions whose answers are known. Others are users: they write events one after the other,
each again until it is acknowledged, and ask after each for recommendations, which must be those of
exactly the events that were acknowledged.
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from benchmarks.siege.client import Client, Reply
from benchmarks.siege.folders import Answer, Oracle, Question, answer_of
from recprune.serve.histories.histories import Histories
from recprune.types import Json

_EVENTS_OF_USER = 30  # fewer than the encoder sees, so that none of them may be missing
_PAUSE_S = 0.03  # between requests: it watches, the load is another's
_TURNED_AWAY_S = 0.2
_MOST_TRIES = 3000  # of one event, over minutes; a store that stays away so long is a fault


class Witness:
    """What was seen, by all its threads."""

    def __init__(
        self, port: int, oracles: Mapping[str, Oracle], questions: Sequence[Question]
    ) -> None:
        """`oracles` are by version: an answer says which it is of."""
        self._port = port
        self._oracles = oracles
        self._questions = questions
        self._items = next(iter(oracles.values())).items
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.acknowledged: dict[str, list[int]] = {}  # user: items, in order
        self.wrong: list[str] = []
        self.failed: list[str] = []
        self.no_store: list[float] = []  # when the store was said to be away
        self.late_s = 0.0  # the longest that an event took until it was acknowledged

    @contextmanager
    def watching(self, askers: int = 2, users: int = 2) -> Iterator[Witness]:
        """Ask and write while the `with` block lasts."""
        end = threading.Event()

        def run(number: int) -> None:
            client, rng = Client(self._port), random.Random(number)
            try:
                while not end.wait(_PAUSE_S):
                    if number < askers:
                        self._ask_known(client, rng)
                    else:
                        self._be_user(client, rng, end)
            except Exception:
                self.failed.append(traceback.format_exc())
            finally:
                client.close()

        threads = [threading.Thread(target=run, args=(number,)) for number in range(askers + users)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            end.set()
            for thread in threads:
                thread.join()

    # Asking ------------------------------------------------------------------------------------

    def _ask_known(self, client: Client, rng: random.Random) -> None:
        question = rng.choice(self._questions)
        reply = self._asked(client, question.path, question.body)
        if reply.status == 200:
            self._compare(reply, {v: one.answer(question.body) for v, one in self._oracles.items()})

    def _compare(self, reply: Reply, expected: Mapping[str, Answer]) -> None:
        """Compare an answer, ids and bits, with that of the version that it says it is of."""
        body = reply.json()
        right = expected.get(body["version"])
        self.counts["compared"] += 1
        if answer_of(body) != right:
            self.wrong.append(f"of {body['version']}: {answer_of(body)}, expected {right}")

    def _asked(self, client: Client, path: str, body: Json) -> Reply:
        """Ask, once more where the connection was cut before an answer began; count what came."""
        self.counts["requests"] += 1
        reply = client.ask("POST", path, body)
        if reply.cut == "unanswered":
            self.counts["cut"] += 1
            reply = client.ask("POST", path, body)
        if reply.cut:
            self.failed.append(f"{path}: {reply.cut}")
        elif reply.status == 503 and reply.code == "overloaded":
            self.counts["turned away"] += 1
        elif reply.status == 503 and reply.code == "histories_unavailable":
            self.counts["no store"] += 1
            self.no_store.append(time.monotonic())
        elif reply.status == 200:
            self.counts["answered"] += 1
        else:
            self.failed.append(f"{path}: {reply.status} {reply.body[:300]!r}")
        if reply.status in (429, 503) and reply.header("retry-after") is None:
            self.failed.append(f"{path}: {reply.status} without Retry-After")
        return reply

    # Being a user --------------------------------------------------------------------------------

    def _be_user(self, client: Client, rng: random.Random, end: threading.Event) -> None:
        """Write the events of a user, and look after each whether recommendations know it."""
        with self._lock:
            number = len(self.acknowledged)
            user = f"witness-{number}"
            mine = self.acknowledged.setdefault(user, [])
        # Of some users the service is to say when their events were.
        is_dated = bool(number % 2)
        for place in range(_EVENTS_OF_USER):
            item = self._items[rng.randrange(len(self._items))]
            event: Json = {"user": user, "item": item, "key": str(place)}
            if is_dated:
                event["timestamp"] = 1_700_000_000 + place
            if not self._acknowledged(client, event, end):
                return
            mine.append(item)
            reply = self._asked(client, "/recommend", {"user": user, "k": 10})
            if reply.status == 200:
                history = tuple(mine)
                self._compare(
                    reply, {v: one.of_history(history, 10) for v, one in self._oracles.items()}
                )
            if end.wait(_PAUSE_S):
                return

    def _acknowledged(self, client: Client, event: Json, end: threading.Event) -> bool:
        """Send an event until it is acknowledged; False if the siege ends before."""
        begun = time.monotonic()
        for _ in range(_MOST_TRIES):
            if self._asked(client, "/events", {"events": [event]}).status == 200:
                self.late_s = max(self.late_s, time.monotonic() - begun)
                self.counts["acknowledged"] += 1
                return True
            if end.wait(_TURNED_AWAY_S):
                # It may have been kept without a word of it: this user's story ends here.
                self._forget(event["user"])
                return False
        self.failed.append(f"an event was not taken within {time.monotonic() - begun:.0f} s")
        return False

    def _forget(self, user: str) -> None:
        """Leave open whether an event that was never answered was kept."""
        self.acknowledged[user].append(OPEN)

    def read_back(self, client: Client) -> None:
        """Ask once more for every user, who must be answered by exactly what was acknowledged."""
        for user, items in self.acknowledged.items():
            if not items or OPEN in items:
                continue
            reply = self._asked(client, "/recommend", {"user": user, "k": 10})
            if reply.status != 200:
                self.failed.append(f"{user}: {reply.status} after all was over")
                continue
            history = tuple(items)
            self._compare(
                reply, {v: one.answer({"k": 10}, history) for v, one in self._oracles.items()}
            )


OPEN = -1  # in the place of an item that was sent, and may or may not have been kept


def lost_events(
    histories: Histories, acknowledged: Mapping[str, Sequence[int | str]], *, ordered: bool
) -> tuple[int, int]:
    """Read histories back; return how many acknowledged events are missing, and how many misplaced.

    A misplaced one is there, but not where its time puts it. Events that were never acknowledged
    may be there.
    """
    lost = misplaced = 0
    for user, given in acknowledged.items():
        items = [str(item) for item in given if item != OPEN]
        kept = histories.history(user)
        missing = Counter(items) - Counter(kept)
        lost += missing.total()
        if ordered and not missing and kept[: len(items)] != items:
            misplaced += sum(one != other for one, other in zip(kept, items, strict=False))
    return lost, misplaced
