"""The sharded index on a real Ray cluster: one index's answers, whatever is lost."""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recprune import METHODS, Attributes, Index, InputError, RecpruneError, Scan, StorageError
from recprune.attributes.diversity import Limit, search_at_most
from recprune.cli import main
from recprune.cluster import connected
from recprune.data.identifiers import RowNumbers
from recprune.search.checks import checked_boosts, checked_exclude
from recprune.search.top_k import RECORD_WORDS, TopK
from recprune.shards.answers import ShardedTopK, cut, merge
from recprune.shards.folder import (
    Shard,
    ShardLostError,
    load_shard,
    read_folder,
    shard_folder,
    shard_ranges,
    write_shards,
)
from recprune.types import Json
from tests.support.clusters import (
    Cluster,
    descendants,
    is_running,
    ray_environment,
    running_cluster,
)
from tests.support.search_cases import some_boosts
from tests.support.serving import wait_until

pytest.importorskip("ray", reason="needs Ray: pip install 'recprune[ray]'")

from recprune.shards import deployment, sharded_index
from recprune.shards.sharded_index import ShardedIndex

NUM_ITEMS = 3_000
LARGEST = float(np.finfo(np.float32).max)
NUM_SHARDS = 3
CPUS = 6  # of each of two nodes


class Model:
    """A catalogue as one index and as a sharded one."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(8)
        self.codes = rng.integers(0, 256, (NUM_ITEMS, 8)).astype(np.uint8)
        self.codes[:500] = self.codes[2_000:2_500]  # equal scores in the first and last shard
        self.embeddings = rng.standard_normal((8, 256, 4)).astype(np.float32)
        self.bias = rng.standard_normal(NUM_ITEMS).astype(np.float32)
        self.bias[:500] = self.bias[2_000:2_500]
        self.queries = rng.standard_normal((30, 32)).astype(np.float32)
        self.whole = Index.build(self.codes, self.embeddings, item_bias=self.bias)
        self.folder = folder / "sharded"
        write_shards(self.codes, self.embeddings, self.folder, NUM_SHARDS, item_bias=self.bias)

    def copy(self, folder: Path) -> Path:
        """A folder that a test may damage."""
        return Path(shutil.copytree(self.folder, folder / "copy"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_environment() as folder, running_cluster(folder, CPUS) as started:
        with connected(started.address):
            yield started
        wait_until(lambda: not started.workers("ServeReplica"), "all replicas are gone")


@pytest.fixture(scope="module")
def sharded(model: Model, cluster: Cluster) -> Iterator[ShardedIndex]:
    with ShardedIndex.open(model.folder, address=cluster.address) as opened:
        yield opened


def assert_same(found: TopK, expected: TopK, where: object = None) -> None:
    assert found.ids.dtype == expected.ids.dtype
    assert found.ids.shape == expected.ids.shape
    assert np.array_equal(found.ids, expected.ids), where
    assert np.array_equal(found.scores.view(np.uint32), expected.scores.view(np.uint32)), where


def assert_whole(opened: ShardedIndex, model: Model, k: int = 10) -> None:
    found = opened.search(model.queries, k)
    assert_same(found, model.whole.search(model.queries, k))
    assert found.stats.exact.all()
    assert found.missing_share == 0


def places(opened: ShardedIndex) -> list[list[Json]]:
    """The replicas of every shard that answer: nodes and processes."""
    return [shard["places"] for shard in opened.describe()["shards"]]


def wait_until_all_answer(opened: ShardedIndex) -> None:
    wait_until(lambda: all(places(opened)), "every shard has somebody who answers")


# As one index ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_method_returns_what_one_index_returns(
    sharded: ShardedIndex, model: Model, method: str
) -> None:
    rng = np.random.default_rng(1)
    exclude = [rng.integers(0, NUM_ITEMS, rng.integers(20)).tolist() for _ in model.queries]
    mask = rng.random(NUM_ITEMS) < 0.3
    masks = rng.random((30, NUM_ITEMS)) < 0.3
    words = np.frombuffer(rng.bytes(8 * 47), np.uint64)
    boosts = [some_boosts(rng, NUM_ITEMS, rng.choice([0.001, 0.1, 0.9])) for _ in model.queries]
    for k, filters in (
        (1, {}),
        (NUM_ITEMS + 5, {}),
        (10, {"exclude": exclude}),
        (10, {"exclude": [[] for _ in exclude]}),
        (10, {"allow": mask}),
        (40, {"allow": words, "exclude": exclude}),
        (2_000, {"allow": masks, "exclude": exclude}),
        (10, {"boosts": boosts}),
        (40, {"boosts": boosts, "exclude": exclude, "allow": masks, "floor": 2.0}),
        (NUM_ITEMS + 5, {"boosts": boosts}),
        (10, {"boosts": [([], []) for _ in boosts]}),
    ):
        expected = model.whole.search(model.queries, k, method=method, **filters)
        found = sharded.search(model.queries, k, method=method, threads=2, **filters)
        assert_same(found, expected, (k, list(filters)))
        assert found.stats.exact.all()
        if k <= NUM_ITEMS:
            assert np.array_equal(found.stats.threshold, expected.stats.threshold)
        assert (found.stats.nanoseconds > 0).all()


@pytest.mark.parametrize("rounds", [None, 1, 2, 3, 9])
def test_any_number_of_rounds_and_queries(
    sharded: ShardedIndex, model: Model, rounds: int | None
) -> None:
    for count in (0, 1, 2, 3, 4, 30):
        queries = model.queries[:count]
        assert_same(sharded.search(queries, 20, rounds=rounds), model.whole.search(queries, 20))
    one = sharded.search(model.queries[0], 20, rounds=rounds, exclude=[1, 2, 2_999])
    assert_same(one, model.whole.search(model.queries[0], 20, exclude=[1, 2, 2_999]))
    many = np.tile(model.queries, (120, 1))  # more than one call, and more than Ray sends inline
    assert_same(sharded.search(many, 10, rounds=rounds), model.whole.search(many, 10))


def test_conditions_and_limits_are_those_of_one_index(sharded: ShardedIndex, model: Model) -> None:
    rng = np.random.default_rng(3)
    table = {
        "item_id": np.arange(NUM_ITEMS),
        "price": rng.random(NUM_ITEMS),
        "brand": rng.integers(0, 9, NUM_ITEMS),
    }
    attributes = Attributes.from_table(table, RowNumbers(NUM_ITEMS))
    bits = attributes.where("price < 0.1 or brand = 3")
    found = sharded.search(model.queries, 10, allow=bits)
    assert_same(found, model.whole.search(model.queries, 10, allow=bits))
    method = METHODS["auto"]
    for k, count in ((5, 1), (10, 1), (40, 3)):
        limit = Limit(attributes.limited("brand", count), count)
        answers = [
            search_at_most(index, model.queries, k, limit, method=lambda: method, allow=bits.words)
            for index in (sharded, model.whole)
        ]
        assert_same(*answers)
        assert answers[0].stats.exact.all()
        assert isinstance(answers[0], ShardedTopK)


def test_large_batches_are_asked_in_two_rounds(sharded: ShardedIndex, model: Model) -> None:
    many = np.tile(model.queries, (30, 1))
    scored = {
        rounds: int(sharded.search(many, 10, method="scan", rounds=rounds).stats.items_scored.sum())
        for rounds in (None, 1, 2)
    }
    # Not to the item: every call begins with another shard.
    assert scored[2] < 0.8 * scored[1]
    assert scored[None] < 0.8 * scored[1]


def test_scores_and_tables(sharded: ShardedIndex, model: Model) -> None:
    tables = model.whole.sub_item_scores(model.queries)
    assert np.array_equal(sharded.sub_item_scores(model.queries), tables)
    assert np.array_equal(sharded.sub_item_embeddings(), model.embeddings)
    assert_same(sharded.search_scores(tables, 10), model.whole.search_scores(tables, 10))
    assert_same(sharded.search_scores(tables[0], 10), model.whole.search_scores(tables[0], 10))
    items = [2_999, 0, 5, 5, 1_500, 0]
    for queries in (model.queries, model.queries[0]):
        for wanted in (items, items[:1], np.empty(0, np.int64)):
            found = sharded.score(queries, wanted)
            expected = model.whole.score(queries, wanted)
            assert found.dtype == np.float32
            assert np.array_equal(found, expected)


def test_what_is_wrong_is_said_as_one_index_says_it(sharded: ShardedIndex, model: Model) -> None:
    queries = model.queries
    nan = queries.copy()
    nan[17, 3] = np.nan
    huge = queries.copy()
    huge[20] = 1e38
    compact = np.zeros((3, 8, 256), np.float32)
    compact[2, :, 5] = 3e38
    wrong: list[Callable[[Any], Any]] = [
        lambda index: index.search(queries[:, :5]),
        lambda index: index.search(queries.astype(np.float64)),
        lambda index: index.search(queries.tolist()),
        lambda index: index.search(nan),
        lambda index: index.search(nan[17]),
        lambda index: index.search(huge),
        lambda index: index.search_scores(compact),
        lambda index: index.search_scores(compact, method="default"),
        lambda index: index.search(queries, -1),
        lambda index: index.search(queries, 2**40),
        lambda index: index.search(queries, "ten"),
        lambda index: index.search(queries, threads=0),
        lambda index: index.search(queries, method="best"),
        lambda index: index.search(queries, exclude=[[1]]),
        lambda index: index.search(queries[0], exclude=[NUM_ITEMS]),
        lambda index: index.search(queries[0], exclude=["a"]),
        lambda index: index.search(queries, allow=[True]),
        lambda index: index.search(queries, allow=np.ones(5, bool)),
        lambda index: index.search(queries, boosts=[([1], [0.5])]),
        lambda index: index.search(queries[0], boosts=([NUM_ITEMS], [0.5])),
        lambda index: index.search(queries[0], boosts=([7, 7], [0.5, 0.5])),
        lambda index: index.search(queries[0], boosts=([7], [np.nan])),
        lambda index: index.search(nan, boosts=[([7], [0.5])] * 30),
        lambda index: index.search(huge, boosts=[([7], [0.5])] * 30),
        lambda index: index.search(queries, boosts=[([7], [0.5])] * 25 + [([9], [LARGEST])] * 5),
        lambda index: index.score(queries, [NUM_ITEMS]),
        lambda index: index.score(queries, [0.5]),
        lambda index: index.score(nan, [1]),
    ]
    for number, ask in enumerate(wrong):
        with pytest.raises(InputError) as expected:
            ask(model.whole)
        with pytest.raises(InputError) as said:
            ask(sharded)
        assert str(said.value) == str(expected.value), number
    with pytest.raises(InputError, match="rounds is 0, expected 1 or more"):
        sharded.search(queries, rounds=0)
    many = np.tile(nan, (100, 1))  # in several calls, of which the shards refuse more than one
    with pytest.raises(InputError, match=r"sequence_embeddings\[17, 3\] is nan"):
        sharded.search(many)


def test_unsafe_limits_reach_the_shards(sharded: ShardedIndex, model: Model) -> None:
    found = sharded.search(model.queries, 10, method=Scan(max_steps=1))
    assert not found.stats.exact.any()
    exact = model.whole.search(model.queries, NUM_ITEMS)
    for query, ids in enumerate(found.ids):
        missing = ~np.isin(exact.ids[query], ids)
        assert exact.scores[query][missing].max() <= found.stats.upper_bound[query]


def test_many_threads_may_ask(sharded: ShardedIndex, model: Model) -> None:
    expected = model.whole.search(model.queries, 10)

    def ask(number: int) -> bool:
        query = number % 30
        found = sharded.search(model.queries[query], 10)
        return bool((found.ids == expected.ids[query]).all())

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, range(120)))


def test_it_says_what_it_is(sharded: ShardedIndex, model: Model) -> None:
    said = sharded.describe()
    assert said["items"] == NUM_ITEMS
    assert sum(shard["items"] for shard in said["shards"]) == NUM_ITEMS
    assert len(said["nodes"]) == 2, "shards are spread over the nodes"
    assert said["bytes"] > 51 * NUM_ITEMS
    assert repr(sharded) == "ShardedIndex(3,000 items, 3 shards)"
    alone = sharded.search(model.queries[0], 10)
    # A query of 32 numbers to each of three shards; from each, ten ids and scores and one record.
    arrays = 3 * (4 * 32 + 10 * 8 + 64)
    assert arrays < alone.network_bytes < arrays + 3 * 500


@pytest.mark.parametrize("num_items", [0, 1, 65])
def test_fewer_items_than_shards(
    cluster: Cluster, model: Model, tmp_path: Path, num_items: int
) -> None:
    codes = model.codes[:num_items]
    write_shards(codes, model.embeddings, tmp_path / "few", 4)
    whole = Index.build(codes, model.embeddings)
    with ShardedIndex.open(tmp_path / "few", address=cluster.address) as few:
        for queries in (model.queries, model.queries[0]):
            assert_same(few.search(queries, 70), whole.search(queries, 70))
        assert few.describe()["items"] == num_items
        with pytest.raises(InputError, match="expected a finite number"):
            few.search(model.queries * np.float32(np.inf))


@pytest.mark.parametrize("rounds", [1, 3])
def test_below_a_floor_nothing_is_returned(
    sharded: ShardedIndex, model: Model, rounds: int
) -> None:
    own = model.whole.search(model.queries, 10).scores
    tables = model.whole.sub_item_scores(model.queries)
    for floor in (own[:, 4], own[:, 9], own[:, 0] + np.float32(1), -np.inf, float(own[3, 2])):
        expected = model.whole.search(model.queries, 10, floor=floor)
        for found in (
            sharded.search(model.queries, 10, floor=floor, rounds=rounds),
            sharded.search_scores(tables, 10, floor=floor, rounds=rounds),
        ):
            assert_same(found, expected, floor)
            assert found.stats.exact.all()
            assert np.array_equal(found.stats.threshold, expected.stats.threshold)
    with pytest.raises(InputError, match="floor holds NaN, expected scores"):
        sharded.search(model.queries, floor=np.nan)


@pytest.mark.parametrize("name", ["search", "search_scores", "score", "sub_item_scores"])
def test_it_is_asked_as_one_index_is(name: str) -> None:
    whole = inspect.signature(getattr(Index, name)).parameters
    own = inspect.signature(getattr(ShardedIndex, name)).parameters
    assert list(own.values())[: len(whole)] == list(whole.values())
    assert set(own) - set(whole) <= {"rounds", "allow_partial"}


def test_ids_beyond_what_a_shard_counts() -> None:
    far = Shard(1, 1 << 32, 1_000, "", 0.0, 0.0)
    excluded = [[5, (1 << 32) + 7], [], [(1 << 32) + 999, (1 << 32) - 1]]
    exclude = checked_exclude(excluded, 3, False, far.stop)
    assert exclude is not None
    own_offsets, own_items, _ = cut(exclude.offsets, exclude.items, slice(0, 3), far)
    assert own_offsets is not None
    assert own_items is not None
    assert own_offsets.tolist() == [0, 1, 1, 2]
    assert own_items.tolist() == [7, 999]
    assert own_items.dtype == np.uint32
    pairs = [(np.array(row, np.int64), np.ones(len(row), np.float32)) for row in excluded]
    pairs[2][1][0] = 0.5
    boosts = checked_boosts(pairs, 3, False, far.stop)
    assert boosts is not None
    boosted = cut(boosts.offsets, boosts.items, slice(0, 3), far, boosts.values)
    assert [part.tolist() for part in boosted if part is not None] == [
        [0, 1, 1, 2],
        [7, 999],
        [1.0, 0.5],
    ]
    ids = np.array([[7]], np.uint32)
    record = np.zeros((1, RECORD_WORDS), np.int64)
    merged, _ = merge([(far, (ids, np.ones((1, 1), np.float32), record))], 1, 1)
    assert merged.tolist() == [[(1 << 32) + 7]]
    assert sum(count for _, count in shard_ranges(10**10, 4)) == 10**10
    with pytest.raises(InputError, match="items in a shard, which holds fewer than"):
        shard_ranges(10**10, 2)


# Beginning and end -------------------------------------------------------------------------------


ENDLESS = """
import sys
from recprune import ShardedIndex
opened = ShardedIndex.open(sys.argv[1], address=sys.argv[2])
print(*(place["pid"] for shard in opened.describe()["shards"] for place in shard["places"]))
sys.stdout.flush()
sys.stdin.read()
"""


def test_shards_end_with_a_program_that_was_killed(cluster: Cluster, model: Model) -> None:
    words = [sys.executable, "-c", ENDLESS, str(model.folder), cluster.address]
    program = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    pids = [int(word) for word in program.stdout.readline().split()]
    assert len(pids) == NUM_SHARDS
    assert all(map(is_running, pids))
    program.kill()
    program.communicate()
    wait_until(lambda: not any(map(is_running, pids)), "nobody has them open any more")


def test_each_of_two_versions_is_answered_by_itself(
    cluster: Cluster, model: Model, tmp_path: Path
) -> None:
    folder = model.copy(tmp_path)
    with ShardedIndex.open(folder, address=cluster.address) as old:
        assert_whole(old, model)
        other = Index.build(model.codes ^ np.uint8(1), model.embeddings, item_bias=model.bias)
        shutil.rmtree(folder)
        write_shards(
            model.codes ^ np.uint8(1), model.embeddings, folder, NUM_SHARDS, item_bias=model.bias
        )
        # Through the same replicas, as a service does that is given a new folder.
        handles = [one._handle for one in old._shards]
        new = ShardedIndex(read_folder(folder), handles)
        for _ in range(3):
            assert_same(new.search(model.queries, 10), other.search(model.queries, 10))
            assert_whole(old, model)
        os.kill(places(new)[0][0]["pid"], signal.SIGKILL)
        assert_same(new.search(model.queries, 10), other.search(model.queries, 10))
        assert not old.is_superseded
        with pytest.raises(ShardLostError, match="holds another sharded index by now"):
            old.search(model.queries, 10)
        assert old.is_superseded


@pytest.mark.usefixtures("cluster")  # it asks Ray which node this is
def test_a_shard_that_loads_for_longer_than_it_is_waited_for(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, as a replica would: who asks gives up, and what was loaded is kept."""
    loads = []

    def slow(*arguments: Any, **settings: Any) -> Index:
        loads.append(arguments)
        time.sleep(1.0)
        return load_shard(*arguments, **settings)

    monkeypatch.setattr(deployment, "load_shard", slow)

    async def ask() -> Any:
        server = deployment.ShardServer(0, verify=True)
        version = deployment.version_of(read_folder(model.folder))
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await server.describe(version)
        await asyncio.sleep(1.0)
        return await server.describe(version)

    assert asyncio.run(ask())["items"] > 0
    assert len(loads) == 1


CLOSING = """
import sys
import numpy as np
import ray
from recprune import ShardedIndex
first, second = (ShardedIndex.open(sys.argv[1], address=sys.argv[2]) for _ in range(2))
queries = np.ones((1, first.width), np.float32)
expected = first.search(queries).ids
first.close()
first.close()
assert ray.is_initialized()
assert (second.search(queries).ids == expected).all()
second.close()
assert not ray.is_initialized()
with ShardedIndex.open(sys.argv[1], address=sys.argv[2]) as third:
    assert (third.search(queries).ids == expected).all()
assert not ray.is_initialized()
first, second = (ShardedIndex.open(sys.argv[1], address=sys.argv[2]) for _ in range(2))
ray.shutdown()
first.close()
assert not ray.is_initialized(), "closing connects to nothing"
ray.init(sys.argv[2], log_to_driver=False, logging_level="ERROR")
second.close()
assert ray.is_initialized(), "a connection that somebody else has made since"
unclosed = ShardedIndex.open(sys.argv[1], address=sys.argv[2], verify=True)
assert (unclosed.search(queries).ids == expected).all()
"""


def test_the_last_to_close_disconnects(cluster: Cluster, model: Model) -> None:
    words = [sys.executable, "-c", CLOSING, str(model.folder), cluster.address]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "nor does one complain that is never closed"


def test_who_is_searching_hears_at_once_that_it_was_closed(cluster: Cluster, model: Model) -> None:
    opened = ShardedIndex.open(model.folder, address=cluster.address, timeout=60.0)
    frozen = places(opened)[0][0]["pid"]
    os.kill(frozen, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(2) as others:
            asked = [others.submit(opened.search, model.queries, 10) for _ in range(2)]
            wait_until(lambda: opened._in_flight.count == 2, "both are waiting")
            begun = time.monotonic()
            opened.close()
            for search in asked:
                with pytest.raises(RecpruneError, match="the sharded index is closed"):
                    search.result()
            assert time.monotonic() - begun < 10
    finally:
        with suppress(ProcessLookupError):
            os.kill(frozen, signal.SIGCONT)


# Faults ------------------------------------------------------------------------------------------


def test_a_replica_answers_for_a_killed_or_frozen_actor(cluster: Cluster, model: Model) -> None:
    expected = model.whole.search(model.queries, 10)
    options: Any = {"replicas": 2, "address": cluster.address, "timeout": 5.0}
    with ShardedIndex.open(model.folder, **options) as opened:
        wait_until(lambda: all(len(two) == 2 for two in places(opened)), "all replicas are up")
        before = places(opened)
        assert all(first["node"] != second["node"] for first, second in before)
        stop, counted = threading.Event(), []

        def keep_asking() -> None:
            while not stop.is_set():
                assert_same(opened.search(model.queries, 10), expected)
                counted.append(time.monotonic())

        with ThreadPoolExecutor(1) as other:
            asking = other.submit(keep_asking)
            wait_until(lambda: len(counted) > 5, "searches are under way")
            for replicas in before:
                os.kill(replicas[0]["pid"], signal.SIGKILL)
            already = len(counted)
            wait_until(lambda: len(counted) > already + 20 or asking.done(), "they go on")
            stop.set()
            asking.result()
        wait_until(lambda: all(len(two) == 2 for two in places(opened)), "Ray restarts them")
        assert places(opened) != before
        assert_whole(opened, model)
        frozen = places(opened)[0][0]["pid"]
        os.kill(frozen, signal.SIGSTOP)
        try:
            for _ in range(2):  # both take their turn
                assert_whole(opened, model)
        finally:
            os.kill(frozen, signal.SIGCONT)


def test_without_a_replica_a_call_waits_for_the_restart(cluster: Cluster, model: Model) -> None:
    with ShardedIndex.open(model.folder, address=cluster.address) as opened:
        os.kill(places(opened)[1][0]["pid"], signal.SIGKILL)
        assert_whole(opened, model)
        assert opened.score(model.queries[0], [1_500]).shape == (1,)


def test_a_full_object_store_is_no_obstacle(
    cluster: Cluster, model: Model, sharded: ShardedIndex
) -> None:
    many = np.tile(model.queries, (120, 1))
    cluster.tell("fill the object store")
    try:
        assert_same(sharded.search(many, 100), model.whole.search(many, 100))
    finally:
        cluster.tell("empty the object store")


def test_a_truncated_shard_is_lost_and_may_come_back(
    cluster: Cluster, model: Model, tmp_path: Path
) -> None:
    folder = model.copy(tmp_path)
    exact = model.whole.search(model.queries, NUM_ITEMS)
    with ShardedIndex.open(folder, address=cluster.address) as opened:
        assert_whole(opened, model)
        for path in shard_folder(folder, 1).glob("*.npy"):  # under the actor that has mapped them
            os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(ShardLostError) as lost:
            opened.search(model.queries, 10, method="pqtopk")
        assert "shard 1 (items 960 to 1983) cannot answer" in str(lost.value)
        assert "truncated?" in str(lost.value)
        with pytest.raises(ShardLostError):
            opened.score(model.queries, [1_000])
        assert np.isfinite(opened.score(model.queries, [5])).all(), "of a shard that is well"

        rest = np.ones(NUM_ITEMS, bool)
        rest[960:1984] = False
        for queries in (model.queries, model.queries[0]):
            found = opened.search(queries, 10, allow_partial=True)
            assert_same(found, model.whole.search(queries, 10, allow=rest))
            assert not found.stats.exact.any()
            assert found.missing_share == 1024 / NUM_ITEMS
            best_missing = [
                row[~rest[ids]].max() for ids, row in zip(exact.ids, exact.scores, strict=True)
            ]
            bounds = found.stats.upper_bound
            assert (bounds >= best_missing[: len(bounds)]).all()
            assert np.isfinite(bounds).all()

        shutil.rmtree(shard_folder(folder, 1))
        with pytest.raises(ShardLostError, match="no such folder"):
            opened.search(model.queries, 10)
        shutil.copytree(shard_folder(model.folder, 1), shard_folder(folder, 1))
        assert_whole(opened, model)


def test_a_foreign_shard_is_refused_when_opening(
    cluster: Cluster, model: Model, tmp_path: Path
) -> None:
    folder = model.copy(tmp_path)
    other = Index.build(model.codes[960:1984] ^ np.uint8(1), model.embeddings)
    other.save(shard_folder(folder, 1))
    with pytest.raises(ShardLostError, match="shard 1 .* holds another index than the one that"):
        ShardedIndex.open(folder, address=cluster.address)
    with ShardedIndex.open(folder, address=cluster.address, allow_partial=True) as opened:
        assert opened.search(model.queries, 10).missing_share == 1024 / NUM_ITEMS
        with pytest.raises(ShardLostError):
            opened.search(model.queries, 10, allow_partial=False)


def test_a_damaged_shard_is_refused_where_bytes_are_compared(
    cluster: Cluster, model: Model, tmp_path: Path
) -> None:
    folder = model.copy(tmp_path)
    path = shard_folder(folder, 1) / "codes.npy"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ShardLostError, match="codes.npy: checksum does not match"):
        ShardedIndex.open(folder, address=cluster.address, verify=True)


def test_nothing_is_no_partial_answer(cluster: Cluster, model: Model, tmp_path: Path) -> None:
    folder = model.copy(tmp_path)
    with ShardedIndex.open(folder, address=cluster.address, allow_partial=True) as opened:
        pids = [only["pid"] for (only,) in places(opened)]
        for number in range(NUM_SHARDS):
            shutil.rmtree(shard_folder(folder, number))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(ShardLostError, match="no such folder"):
            opened.search(model.queries, 10)


def test_replicas_answer_for_a_lost_node(cluster: Cluster, model: Model) -> None:
    options: Any = {"replicas": 2, "address": cluster.address, "timeout": 20.0}
    try:
        with ShardedIndex.open(model.folder, **options) as opened:
            wait_until(lambda: all(len(two) == 2 for two in places(opened)), "all are up")
            away = pids_away(opened)
            cluster.tell("lose the second node")
            for _ in range(3):
                assert_whole(opened, model)
            # Processes find out after a while that their node is gone, and answer until then.
            wait_until(lambda: not any(map(is_running, away)), "its processes end")
            for _ in range(3):
                assert_whole(opened, model)
            assert len(opened.describe()["nodes"]) == 1
    finally:
        cluster.tell("add a second node")


def pids_away(opened: ShardedIndex) -> list[int]:
    """The processes that are not on the head node."""
    import ray

    head = ray.get_runtime_context().get_node_id()
    return [
        place["pid"] for replicas in places(opened) for place in replicas if place["node"] != head
    ]


class _Taker:
    def ready(self) -> bool:
        return True


def free_cpus() -> dict[str, float]:
    """The CPUs of every node that nobody has."""
    import ray

    resources: Any = ray._private.state.available_resources_per_node
    return {node: free.get("CPU", 0) for node, free in resources().items()}


def take_cpus(node: str) -> Any:
    """Let somebody else have all CPUs of a node that are free; return the one to be killed."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    actor_class: Any = ray.remote(_Taker)
    taker = actor_class.options(num_cpus=free_cpus()[node], scheduling_strategy=there).remote()
    assert ray.get(taker.ready.remote(), timeout=20)
    return taker


def test_a_node_that_nobody_can_replace(
    cluster: Cluster, model: Model, sharded: ShardedIndex
) -> None:
    import ray

    address = cluster.address
    with ShardedIndex.open(model.folder, address=address, timeout=4.0) as opened:
        head = ray.get_runtime_context().get_node_id()
        shards = opened.describe()["shards"]
        away = sum(
            shard["items"] for shard in shards for place in shard["places"] if place["node"] != head
        )
        assert 0 < away < NUM_ITEMS
        num_actors = len(places(sharded)) + len(places(opened))
        wait_until(lambda: sum(free_cpus().values()) == 2 * CPUS - num_actors, "all have theirs")
        taker, pids = take_cpus(head), pids_away(opened)
        cluster.tell("lose the second node")
        try:
            wait_until(lambda: not any(map(is_running, pids)), "its processes end")
            with pytest.raises(ShardLostError, match="shard . .items"):
                opened.search(model.queries, 10)
            begun = time.monotonic()
            found = opened.search(model.queries, 10, allow_partial=True)
            assert found.missing_share == away / NUM_ITEMS
            assert time.monotonic() - begun < 3, "who is known to be lost is not waited for"
        finally:
            ray.kill(taker)
            cluster.tell("add a second node")
        wait_until_all_answer(opened)
        assert_whole(opened, model)


def test_a_cluster_that_is_too_small_is_said_to_be(
    cluster: Cluster, model: Model, sharded: ShardedIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(sharded_index, "_START_SECONDS", 3.0)
    num_actors = len(places(sharded))
    wait_until(lambda: sum(free_cpus().values()) == 2 * CPUS - num_actors, "all have theirs")
    takers = [take_cpus(node) for node in free_cpus()]
    try:
        with pytest.raises(ShardLostError, match="3 replicas need a CPU each, and none is free"):
            ShardedIndex.open(model.folder, address=cluster.address, timeout=3.0)
    finally:
        for taker in takers:
            ray.kill(taker)


def test_bad_arguments_and_addresses(model: Model, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="replicas is 0, expected 1 to 100"):
        ShardedIndex.open(model.folder, replicas=0)
    with pytest.raises(InputError, match="timeout is 0, expected seconds, more than 0"):
        ShardedIndex.open(model.folder, timeout=0)
    for wrong in ("5", None, True, float("nan")):
        with pytest.raises(InputError, match="timeout is .*, expected seconds, more than 0"):
            ShardedIndex.open(model.folder, timeout=wrong)  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="not a saved sharded index: no such folder"):
        ShardedIndex.open(tmp_path / "nothing")
    with pytest.raises(InputError, match="no Ray cluster at 127.0.0.1:1: "):
        ShardedIndex.open(model.folder, address="127.0.0.1:1")


def test_closing_ends_the_actors(cluster: Cluster, model: Model) -> None:
    opened = ShardedIndex.open(model.folder, address=cluster.address)
    pids = [only["pid"] for (only,) in places(opened)]
    assert all(map(is_running, pids))
    opened.close()
    opened.close()
    wait_until(lambda: not any(map(is_running, pids)), "their processes end")
    with pytest.raises(RecpruneError, match="the sharded index is closed"):
        opened.search(model.queries, 10)
    with pytest.raises(RecpruneError, match="the sharded index is closed"):
        opened.describe()


# Building, and a cluster of one's own ------------------------------------------------------------


def test_shards_built_by_tasks_are_the_same_bytes(
    cluster: Cluster, model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, array in (("c", model.codes), ("e", model.embeddings), ("b", model.bias)):
        np.save(tmp_path / f"{name}.npy", array)
    files = [str(tmp_path / f"{name}.npy") for name in "ceb"]
    out = tmp_path / "built"
    command = ["index", "shard", *files[:2], "--item-bias", files[2], "--out", str(out)]
    command += ["--shards", str(NUM_SHARDS), "--address", cluster.address]
    assert main(command) == 0, capsys.readouterr().err
    assert "3 of 3 shards" in capsys.readouterr().err
    assert read_folder(out).shards == read_folder(model.folder).shards
    for threads, message in (("0", "threads is 0"), ("7", "the largest node of the cluster has 6")):
        other = [*command, "--threads", threads, "--out", str(tmp_path / "never")]
        assert main(other) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "never").exists()
    bad = model.codes % 250
    bad[2_999, 7] = 255
    np.save(files[0], bad)
    np.save(files[1], model.embeddings[:, :251])
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "shard 2 (items 1984 to 2999): codes[1015, 7] is 255, expected less than 251" in said
    assert "Traceback" not in said


OWN = """
import sys
import numpy as np
from recprune import ShardedIndex
queries = np.load(sys.argv[2])
with ShardedIndex.open(sys.argv[1]) as opened:
    np.save(sys.argv[3], opened.search(queries, 10).ids)
"""


def test_without_an_address_it_starts_its_own_cluster(model: Model, tmp_path: Path) -> None:
    np.save(tmp_path / "queries.npy", model.queries)
    paths = [str(path) for path in (model.folder, tmp_path / "queries.npy", tmp_path / "ids.npy")]
    log = tmp_path / "log"
    with ray_environment(), log.open("wb") as file:  # a pipe would be held open by Ray's agents
        process = subprocess.Popen([sys.executable, "-c", OWN, *paths], stderr=file)
        below: dict[int, str] = {}
        while process.poll() is None:
            below |= descendants(process.pid)
            time.sleep(0.2)
    assert process.returncode == 0, log.read_text()
    ids = np.load(paths[2])
    assert np.array_equal(ids, model.whole.search(model.queries, 10).ids)
    assert any("raylet" in line for line in below.values())
    wait_until(lambda: not any(map(is_running, below)), "its processes end with it")
