"""States of users, kept: one contract, real SQLite files, a real Redis and a real cluster."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import redis

from recprune.models.continuation import Continuation, KeptState
from recprune.serve.histories.histories import Event, open_histories
from recprune.serve.histories.redis_states import RedisStates
from recprune.serve.histories.sqlite_states import SqliteStates
from recprune.serve.histories.states import (
    States,
    StatesUnavailableError,
    StoredState,
    head_of,
    rows_of,
    state_of,
)
from recprune.serve.histories.user_states import UserStates, open_states
from tests.support.continued_models import NUM_ITEMS, ContinuedModel
from tests.support.histories_places import RedisCluster, RedisServer

MODEL, OTHER = ContinuedModel(), ContinuedModel(seed=1)
LENGTH = MODEL.settings.length
MANY = 1 << 20


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), "--appendfsync", "no")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.kill()


@pytest.fixture(params=["sqlite", "redis", "cluster"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/histories.db"
    if request.param == "cluster":
        cluster: RedisCluster = request.getfixturevalue("shared_cluster")
        for one in cluster.servers:
            with redis.Redis(port=one.port) as client:
                client.flushall()
        return cluster.url
    server: RedisServer = request.getfixturevalue("shared_server")
    with redis.Redis(port=server.port) as client:
        client.flushall()
    return server.url


def opened(url: str, most: int = 1000) -> States:
    states = open_states(url, most)
    assert states is not None
    return states


@pytest.fixture
def states(url: str) -> Iterator[States]:
    with closing(opened(url)) as states:
        yield states


def kept(states: States, user: str, model: ContinuedModel = MODEL) -> KeptState | None:
    stored = states.read(user)
    return None if stored is None else state_of(stored, model.continuation)


def check_same(found: KeptState | None, expected: KeptState) -> None:
    assert found is not None
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


def written_rows(states: States, user: str) -> list[bytes]:
    stored = states.read(user)
    assert stored is not None
    return list(stored.rows)


def test_what_was_written_is_read_event_by_event(states: States) -> None:
    assert states.read("ann") is None
    history = np.random.default_rng(0).integers(0, NUM_ITEMS, 3 * LENGTH, np.int32)
    state = MODEL.continuation.anew(history[:1])
    before: list[bytes] = []
    for count in range(1, len(history) + 1):
        found = MODEL.continuation.continued(state, history[:count])
        assert found is not None
        state = found
        states.write("ann", state, MODEL.continuation)
        check_same(kept(states, "ann"), state)
        rows = written_rows(states, "ann")  # one came, and at most one went
        assert rows[:-1] == before[len(before) + 1 - len(rows) :]
        before = rows
    assert states.read("an") is None


def test_several_events_and_other_histories_take_the_place_of_a_state(states: States) -> None:
    rng = np.random.default_rng(1)
    for user in ("ann", "{bob}", "tea é", ""):
        history = rng.integers(0, NUM_ITEMS, 2, np.int32)
        for _ in range(60):
            if rng.random() < 0.2:
                history = rng.integers(0, NUM_ITEMS, int(rng.integers(1, 3 * LENGTH)), np.int32)
            new = rng.integers(0, NUM_ITEMS, int(rng.integers(0, 2 * LENGTH)), np.int32)
            history = np.concatenate([history, new])
            found = kept(states, user)
            state = None if found is None else MODEL.continuation.continued(found, history)
            state = MODEL.continuation.anew(history) if state is None else state
            MODEL.check(state.embedding, history.tolist())
            states.write(user, state, MODEL.continuation)
            check_same(kept(states, user), state)


def test_a_state_of_another_model_is_none_and_is_replaced(states: States) -> None:
    history = np.arange(20, dtype=np.int32)
    states.write("ann", MODEL.continuation.anew(history), MODEL.continuation)
    assert kept(states, "ann", OTHER) is None
    state = OTHER.continuation.anew(history)
    states.write("ann", state, OTHER.continuation)
    check_same(kept(states, "ann", OTHER), state)
    assert kept(states, "ann") is None


def test_two_processes_that_write_by_turns_keep_what_is_right(url: str) -> None:
    rng = np.random.default_rng(2)
    history = rng.integers(0, NUM_ITEMS, 5, np.int32)
    with closing(opened(url)) as first, closing(opened(url)) as second:
        own = [MODEL.continuation.anew(history) for _ in range(2)]
        for _ in range(40):
            history = np.append(history, rng.integers(0, NUM_ITEMS, 1).astype(np.int32))
            turn = int(rng.integers(2))
            found = MODEL.continuation.continued(own[turn], history)
            own[turn] = found if found is not None else MODEL.continuation.anew(history)
            (first, second)[turn].write("ann", own[turn], MODEL.continuation)
            read = kept((second, first)[turn], "ann")
            assert read is not None
            assert np.array_equal(read.items, history[-LENGTH:])
            MODEL.check(read.embedding, history.tolist())
            after = np.append(history, np.int32(3))
            following = MODEL.continuation.continued(read, after)
            assert following is not None
            MODEL.check(following.embedding, after.tolist())


def test_the_number_of_users_is_bounded(url: str) -> None:
    state = MODEL.continuation.anew(np.arange(20, dtype=np.int32))
    with closing(opened(url, most=10)) as states:
        for user in range(200):
            states.write(f"user {user}", state, MODEL.continuation)
        left = [user for user in range(200) if states.read(f"user {user}") is not None]
    assert 10 <= len(left) <= 10 + 64
    assert left == list(range(200 - len(left), 200))


def test_states_outlive_the_process_that_wrote_them(url: str) -> None:
    state = MODEL.continuation.anew(np.arange(20, dtype=np.int32))
    with closing(opened(url)) as states:
        states.write("ann", state, MODEL.continuation)
    with pytest.raises(StatesUnavailableError):
        states.read("ann")
    with closing(opened(url)) as states:
        check_same(kept(states, "ann"), state)


def test_histories_are_not_touched(url: str) -> None:
    with closing(open_histories(url, 50)) as histories, closing(opened(url)) as states:
        histories.append([Event("ann", "a", 1.0)])
        for count in (5, 20):
            state = MODEL.continuation.anew(np.arange(count, dtype=np.int32))
            states.write("ann", state, MODEL.continuation)
        assert histories.append([Event("ann", "b", 2.0)]) == 1
        assert histories.history("ann") == ["a", "b"]
        assert kept(states, "ann") is not None


# Bytes -------------------------------------------------------------------------------------------


def test_no_changed_byte_is_taken_for_a_state() -> None:
    state = MODEL.continuation.anew(np.arange(20, dtype=np.int32))
    head = head_of(state, MODEL.continuation)
    rows = rows_of(state, len(state.rows), MODEL.continuation)
    whole = StoredState(head, rows)
    check_same(state_of(whole, MODEL.continuation), state)
    for at in range(len(head)):
        changed = bytearray(head)
        changed[at] ^= 0x10
        assert state_of(StoredState(bytes(changed), rows), MODEL.continuation) is None
    for place, row in enumerate(rows):
        for at in range(len(row)):
            changed = bytearray(row)
            changed[at] ^= 0x01
            others = [*rows[:place], bytes(changed), *rows[place + 1 :]]
            assert state_of(StoredState(head, others), MODEL.continuation) is None
    shortened = [rows[:-1], rows[1:], [*rows, rows[-1]], rows[::-1], [], [b"", *rows[1:]]]
    for others in shortened:
        assert state_of(StoredState(head, others), MODEL.continuation) is None
    for end in range(len(head)):
        assert state_of(StoredState(head[:end], rows), MODEL.continuation) is None
    assert state_of(whole, OTHER.continuation) is None


def test_rows_of_another_history_are_not_taken() -> None:
    first = MODEL.continuation.anew(np.arange(20, dtype=np.int32))
    second = MODEL.continuation.anew(np.arange(1, 21, dtype=np.int32))
    count = len(first.rows)
    mixed = StoredState(
        head_of(first, MODEL.continuation), rows_of(second, count, MODEL.continuation)
    )
    assert state_of(mixed, MODEL.continuation) is None
    for one, other in pairwise(rows_of(first, count, MODEL.continuation)):
        assert one != other


# In front of a place -----------------------------------------------------------------------------


class Counted:
    """What a worker counts."""

    def __init__(self) -> None:
        self.how: list[str] = []


def user_states(shared: States | None, most_bytes: int = MANY) -> tuple[UserStates, Counted]:
    counted = Counted()
    return UserStates(shared, most_bytes, counted.how.append), counted


@pytest.mark.parametrize("most_bytes", [0, 3000, MANY])
def test_random_questions_restarts_and_evictions(url: str, most_bytes: int) -> None:
    rng = np.random.default_rng(3)
    histories: dict[str, list[int]] = {}
    shared = opened(url)
    kept_states, counted = user_states(shared, most_bytes)
    models = [MODEL, OTHER]
    hows: list[str] = []
    for step in range(1500):
        model = models[step // 500 % 2]  # swapped twice
        user = f"user {rng.integers(8)}"
        history = histories.setdefault(user, [])
        what = rng.random()
        if what < 0.7 or not history:
            history.append(int(rng.integers(NUM_ITEMS)))
        elif what < 0.75:
            history.insert(int(rng.integers(len(history))), int(rng.integers(NUM_ITEMS)))
        elif what < 0.77:
            del history[: int(rng.integers(len(history)))]
        if rng.random() < 0.01:
            kept_states.close()
            hows += counted.how
            kept_states, counted = user_states(opened(url), most_bytes)
        embedding = kept_states.encode(model.continuation, user, np.array(history, np.int32))
        model.check(embedding, history)
    kept_states.close()
    hows += counted.how
    assert len(hows) == 1500
    if most_bytes == MANY:
        assert hows.count("continued") > 700


def test_a_restart_continues_what_was_written(url: str) -> None:
    history = np.arange(20, dtype=np.int32)
    first, counted = user_states(opened(url))
    first.encode(MODEL.continuation, "ann", history[:18])
    first.encode(MODEL.continuation, "ann", history[:19])
    first.close()
    assert counted.how == ["anew", "continued"]
    second, counted = user_states(opened(url))
    second.encode(MODEL.continuation, "ann", history[:19])
    second.encode(MODEL.continuation, "ann", history)
    second.clear()
    second.encode(OTHER.continuation, "ann", history)
    second.close()
    assert counted.how == ["unchanged", "continued", "anew"]


def test_memory_is_bounded() -> None:
    state = MODEL.continuation.anew(np.arange(20, dtype=np.int32))
    size = state.rows.nbytes + state.items.nbytes + state.embedding.nbytes
    kept_states, counted = user_states(None, 3 * size)
    history = np.arange(20, dtype=np.int32)
    for user in "abcd":
        kept_states.encode(MODEL.continuation, user, history)
    for user in "bcda":  # the last does not fit beside the others
        kept_states.encode(MODEL.continuation, user, history)
    assert counted.how == ["anew"] * 4 + ["unchanged"] * 3 + ["anew"]


def test_no_more_is_in_memory_than_is_counted() -> None:
    """A state has no part of an array that is larger: only what is counted is kept."""
    continuation = MODEL.continuation
    history = np.arange(40, dtype=np.int32)
    state = continuation.anew(history[:30])
    for count in (30, 31, 35):  # anew, by one item, and by several
        found = continuation.continued(state, history[:count])
        assert found is not None
        state = found
        assert len(state.rows) == continuation.most_rows < LENGTH
        for array in state:
            assert array.base is None


class SlowStates:
    """A place that writes when it is told to, or fails."""

    def __init__(self, errors: list[Exception]) -> None:
        self.go, self.began = threading.Event(), threading.Event()
        self.written: list[str] = []
        self._errors = errors

    def read(self, user: str) -> StoredState | None:  # noqa: ARG002
        return None

    def write(self, user: str, state: KeptState, continuation: Continuation) -> None:  # noqa: ARG002
        self.began.set()
        self.go.wait()
        if self._errors:
            raise self._errors.pop()
        self.written.append(user)

    def close(self) -> None: ...


def test_what_waits_to_be_written_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    history = np.arange(20, dtype=np.int32)
    state = MODEL.continuation.anew(history)
    size = state.rows.nbytes + state.items.nbytes + state.embedding.nbytes
    monkeypatch.setattr("recprune.serve.histories.user_states._WAITING_BYTES", 3 * size)
    slow = SlowStates([])
    kept_states, _ = user_states(slow)
    for user in "abcdefgf":
        kept_states.encode(MODEL.continuation, user, history)
        slow.began.wait()  # the first is being written, and waits no more
    slow.go.set()
    kept_states.close()
    assert slow.written == ["a", "e", "f", "g"]


def test_what_fails_unforeseen_does_not_end_what_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recprune.serve.histories.user_states._RESTS_S", 0.0)
    slow = SlowStates([TypeError("unforeseen")])
    slow.go.set()
    kept_states, _ = user_states(slow)
    for user in "ab":
        kept_states.encode(MODEL.continuation, user, np.arange(20, dtype=np.int32))
    kept_states.close()
    assert slow.written == ["b"]


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE states SET head = 'text'",
        "UPDATE states SET head = CAST(x'ff' AS TEXT)",
        "UPDATE states SET head = 7",
        "UPDATE states SET last = 'text'",
        "UPDATE state_rows SET numbers = 'text' WHERE place = 2",
        "UPDATE state_rows SET numbers = 7 WHERE place = 2",
    ],
)
def test_values_of_other_types_are_no_state_and_are_replaced(tmp_path: Path, change: str) -> None:
    path, history = tmp_path / "states", np.arange(21, dtype=np.int32)
    with closing(SqliteStates(path, 10)) as states:
        states.write("ann", MODEL.continuation.anew(history[:5]), MODEL.continuation)
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute(change).rowcount == 1
            connection.commit()
        is_whole = "last" in change
        assert (kept(states, "ann") is not None) == is_whole
        for count in (21, 6):  # of other items
            state = MODEL.continuation.anew(history[:count])
            states.write("ann", state, MODEL.continuation)
            check_same(kept(states, "ann"), state)


@pytest.mark.parametrize(
    "broken",
    [
        lambda _: RedisStates("redis://127.0.0.1:1", 10),
        lambda _: RedisStates("redis+cluster://127.0.0.1:1", 10),
        lambda folder: SqliteStates(folder / "missing" / "states", 10),
        lambda folder: SqliteStates(_text(folder / "text"), 10),
        lambda folder: SqliteStates(_other_database(folder / "other"), 10),
    ],
)
def test_a_place_that_fails_costs_no_answer(
    tmp_path: Path, broken: Callable[[Path], States]
) -> None:
    states = broken(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(StatesUnavailableError):
        states.read("ann")
    kept_states, counted = user_states(states)
    history = np.arange(20, dtype=np.int32)
    for count in range(10, 21):
        found = kept_states.encode(MODEL.continuation, "ann", history[:count])
        MODEL.check(found, history[:count].tolist())
    kept_states.close()
    assert counted.how == ["anew"] + ["continued"] * 10
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def _text(path: Path) -> Path:
    path.write_text("notes " * 1000)
    return path


def _other_database(path: Path) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE notes (text)")
        connection.commit()
    return path


def test_no_states_are_kept_where_none_may_be() -> None:
    assert open_states("sqlite:///anywhere", 0) is None
