"""A live index in shards: whatever changes, and whatever is lost, answers are of one moment."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from recprune import InputError, LiveIndex
from recprune.live import division
from recprune.live.snapshot import LiveSnapshot
from recprune.search.question import Question
from recprune.search.top_k import RECORD_WORDS, SearchStats
from recprune.shards.answers import (
    Answer,
    ShardedTopK,
    answer,
    kth_scores,
    merge,
    merge_records,
    message_for,
    plan_rounds,
    read_answer,
)
from recprune.shards.live_shards import LiveShard, LiveShards, ShardedSnapshot
from tests.support.clusters import Cluster, ray_environment, running_cluster
from tests.support.live_cases import Shop, check_snapshot
from tests.support.serving import wait_until

pytest.importorskip("ray", reason="needs Ray: pip install 'recprune[ray]'")

from recprune.cluster import connected
from recprune.shards.folder import PastMomentError, ShardLostError
from recprune.shards.sharded_index import ShardedIndex, at_a_known_moment

METHODS = ("auto", "pqtopk")


def sharded(shop: Shop, shards: list[LiveIndex], rounds: int) -> ShardedSnapshot:
    """What shards in this process make of the catalogue, by the messages that a cluster sees."""
    whole = shop.live.snapshot()
    parts = [shard.at(whole.moment) for shard in shards]

    def ask(question: Question) -> ShardedTopK:
        found = []
        for rows, steps in plan_rounds(len(question.queries), len(parts), rounds, 1):
            answers: dict[int, Answer] = {}
            for step in steps:
                floors = kth_scores(list(answers.values()), question.k)
                for place in step:
                    shard = LiveShard(place, len(parts))
                    message = message_for(question, rows, shard, floors)
                    answers[place] = read_answer(answer(parts[place], message))
            pairs = [(LiveShard(place, len(parts)), said) for place, said in answers.items()]
            ids, scores = merge(pairs, rows.stop - rows.start, question.k)
            floors = question.floors[rows] if question.floors is not None else None
            found.append((ids, scores, merge_records(list(answers.values()), scores, floors)))
        ids, scores, records = (np.concatenate(one) for one in zip(*found, strict=True))
        stats = SearchStats(records.view(np.int64).reshape(-1, RECORD_WORDS))
        single = question.single
        return ShardedTopK(ids[0] if single else ids, scores[0] if single else scores, stats)

    return ShardedSnapshot.of(whole, ask)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_shards_answer_as_one_index(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(division, "_BLOCK", 16)
    rng = np.random.default_rng(seed)
    shop = Shop(
        tmp_path / "shop",
        rng,
        num_items=int(rng.choice([0, 65, 500])),
        has_bias=bool(seed & 1),
        few_codes=bool(seed & 2),
        ids=["strings", "integers", None][seed % 3],
    )
    num_shards = int(rng.integers(1, 5))
    shop.live.compact(shards=num_shards).result()
    shards = [LiveIndex.open(shop.folder, shard=shard) for shard in range(num_shards)]
    for _ in range(15):
        what = rng.choice(["add", "remove", "replace", "seal", "compact", "note"])
        if what == "add":
            shop.add(int(rng.integers(0, 100)), with_notes=bool(rng.integers(2)))
        elif what == "note":
            shop.note(int(rng.integers(0, 20)))
        elif what in ("remove", "replace"):
            getattr(shop, what)(int(0.2 * len(shop.items)))
        else:
            getattr(shop, what)()
        for _ in range(4):
            check_snapshot(sharded(shop, shards, int(rng.integers(1, 4))), shop, METHODS)
    # Which share of the items each has, and what their biases are at most.
    whole = shop.live.snapshot()
    parts = LiveShards(whole)
    for number, shard in enumerate(shards):
        own, label = shard.at(whole.moment), LiveShard(number, num_shards)
        share = parts.share_of([label])
        assert share == pytest.approx(own.num_present / max(whole.num_present, 1))
        bias = own.item_bias(own.numbers())
        if bias is not None and len(bias):
            assert bias.max() <= parts.highest_bias([label])
            assert np.abs(bias).max() <= parts.largest_bias()
        shard.close()
    assert parts.share_of(LiveShard(number, num_shards) for number in range(num_shards)) in (0, 1)
    shop.live.close()


# On a cluster ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_environment() as folder, running_cluster(folder, 6) as started:
        with connected(started.address):
            yield started
        wait_until(lambda: not started.workers("ServeReplica"), "all replicas are gone")


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path / "shop", np.random.default_rng(1), num_items=3_000, has_bias=True)
    made.live.compact(shards=3).result()
    yield made
    made.live.close()


def replicas(index: ShardedIndex) -> list[list[int]]:
    """The processes that answer for each shard."""
    return [[at["pid"] for at in one["places"]] for one in index.describe()["shards"]]


def change(shop: Shop, what: str) -> None:
    if what == "add":  # two blocks, so that every shard gets items in the end
        shop.add(int(shop.rng.choice([1, 8_000])))
    elif what in ("remove", "replace"):
        getattr(shop, what)(int(shop.rng.integers(1, 50)))
    else:
        getattr(shop, what)()


def check(index: ShardedIndex, shop: Shop) -> None:
    """Hold what shards answer against the oracle, of a moment that is kept and of this one."""
    assert index.live is not None
    index.live.refresh()  # else within a tenth of a second
    moment = index.snapshot()
    check_snapshot(moment, shop, METHODS)
    queries = shop.rng.standard_normal((5, moment.width)).astype(np.float32)
    expected = shop.live.search(queries, 20)
    for rounds in (1, 2, None):
        found = index.search(queries, 20, rounds=rounds)
        assert np.array_equal(found.ids, expected.ids)
        assert np.array_equal(found.scores.view(np.uint32), expected.scores.view(np.uint32))
        assert found.stats.exact.all()
        assert found.missing_share == 0
    some = shop.some(7)
    assert np.array_equal(index.score(queries, some), shop.live.score(queries, some))


def test_answers_are_those_of_one_index_whatever_changes_and_is_killed(
    cluster: Cluster, shop: Shop
) -> None:
    with ShardedIndex.open(shop.folder, address=cluster.address, replicas=2) as index:
        assert index.live is not None
        assert repr(index) == "ShardedIndex(3,000 items, 3 shards, live)"
        kept: list[tuple[ShardedSnapshot, LiveSnapshot]] = []
        for step in range(24):
            change(shop, str(shop.rng.choice(["add", "add", "remove", "replace", "seal"])))
            if step in (8, 16):
                shop.compact()
            if step in (5, 10, 15):  # the next question is the first that one in its place hears
                os.kill(replicas(index)[step % 3][0], signal.SIGKILL)
            check(index, shop)
            kept.append((index.snapshot(), shop.live.snapshot()))
            if step % 6 == 5:  # what was kept answers of what was then
                asked, whole = kept[-3]
                queries = shop.rng.standard_normal((2, whole.width)).astype(np.float32)
                found, expected = asked.search(queries, 50), whole.search(queries, 50)
                assert np.array_equal(found.ids, expected.ids)
                assert np.array_equal(found.scores, expected.scores)
        # Changed through the index itself, by a process that only asks.
        index.live.remove(shop.some(1))
        assert index.live.num_present == len(shop.items) - 1

        def is_seen() -> bool:  # by all replicas within a second, whether or not they are asked
            said = index.describe()
            return bool(said["items"] == sum(one["items"] for one in said["shards"]))

        wait_until(is_seen, "all shards have seen it")
        for one in (
            lambda: index.search(np.ones(3, np.float32)),
            lambda: index.score(np.ones(3, np.float32), [1]),
        ):
            with pytest.raises(InputError):
                one()
        with pytest.raises(InputError, match="method default needs an index in one piece"):
            index.search(np.ones(index.width, np.float32), method="default")
        huge = np.full((2, index.width), 3e38, np.float32)
        for where in (index, shop.live):
            with pytest.raises(InputError) as refused:
                where.search(huge, boosts=[([1], [1.0])] * 2)
            assert "float32" in str(refused.value)


def test_a_shard_that_is_lost_is_missed_and_said_so(cluster: Cluster, shop: Shop) -> None:
    shop.add(5_000)
    with ShardedIndex.open(shop.folder, address=cluster.address, timeout=2.0) as index:
        whole = shop.live.snapshot()
        (frozen,) = replicas(index)[1]
        os.kill(frozen, signal.SIGSTOP)
        try:
            shop.remove(100)
            assert index.live is not None
            index.live.refresh()
            whole = shop.live.snapshot()
            queries = shop.rng.standard_normal((4, index.width)).astype(np.float32)
            with pytest.raises(ShardLostError, match="shard 1 of 3 has said nothing"):
                index.search(queries, 30)
            found = index.search(queries, 30, allow_partial=True)
            expected = whole.search(queries, 5_000)
            missing = whole.division.shards_of(expected.ids.ravel()).reshape(expected.ids.shape)
            assert not found.stats.exact.any()
            own = whole.of_shard(1)
            assert found.missing_share == pytest.approx(own.num_present / whole.num_present)
            for row in range(4):
                there = missing[row] != 1
                assert np.array_equal(found.ids[row], expected.ids[row][there][:30])
                assert found.stats.upper_bound[row] >= expected.scores[row][~there].max()
        finally:
            os.kill(frozen, signal.SIGCONT)
        wait_until(lambda: all(replicas(index)), "the shard is back")
        check(index, shop)


def test_shards_that_were_divided_anew_are_opened_anew(cluster: Cluster, shop: Shop) -> None:
    with ShardedIndex.open(shop.folder, address=cluster.address) as old:
        check(old, shop)
        shop.live.compact(shards=2).result()
        shop.add(10)
        check(old, shop)  # by the shards that there were: the log says what has changed
        with ShardedIndex.open(shop.folder, address=cluster.address) as new:
            check(new, shop)
            assert len(new.describe()["shards"]) == 2
        os.kill(replicas(old)[0][0], signal.SIGKILL)
        with pytest.raises(ShardLostError, match="holds other shards by now"):
            old.search(np.ones(old.width, np.float32))
        assert old.is_superseded


def test_who_asks_of_a_moment_before_all_that_a_new_shard_knows_is_told_or_asks_again(
    cluster: Cluster, shop: Shop
) -> None:
    with ShardedIndex.open(shop.folder, address=cluster.address) as index:
        assert index.live is not None
        index.live._stop_following()  # it does not look by itself
        past = index.snapshot()
        for _ in range(2):
            shop.add(3)
            shop.remove(2)
            shop.compact()
        for (process,) in replicas(index):
            os.kill(process, signal.SIGKILL)
        queries = shop.rng.standard_normal((2, index.width)).astype(np.float32)
        with pytest.raises(PastMomentError, match=r"shard \d of 3 cannot answer: .* is past"):
            past.search(queries)
        assert index.live.snapshot().moment == past.moment
        found = index.search(queries, 30)
        assert index.live.snapshot().moment == shop.live.snapshot().moment
        assert np.array_equal(found.ids, shop.live.search(queries, 30).ids)


def test_one_that_knows_no_past_moment_is_asked_of_the_next_and_not_missed(
    cluster: Cluster, shop: Shop
) -> None:
    """Where a part of the answer is enough, too: the shard is there."""
    address = cluster.address
    with ShardedIndex.open(shop.folder, address=address, allow_partial=True) as index:
        assert index.live is not None
        index.live._stop_following()
        past = index.snapshot()
        for _ in range(2):
            shop.add(3)
            shop.compact()
        os.kill(replicas(index)[1][0], signal.SIGKILL)
        queries = shop.rng.standard_normal((2, index.width)).astype(np.float32)
        with pytest.raises(PastMomentError, match=r"shard 1 of 3 cannot answer: .* is past"):
            past.search(queries)
        found = index.search(queries, 30)
        assert found.missing_share == 0.0
        assert np.array_equal(found.ids, shop.live.search(queries, 30).ids)


def test_a_question_is_asked_of_three_moments(shop: Shop) -> None:
    with LiveIndex.open(shop.folder) as live:
        live._stop_following()
        asked: list[int] = []

        def ask() -> int:
            asked.append(live.snapshot().sequence)
            shop.add(1)
            if len(asked) < known_at:
                raise PastMomentError("is past")
            return len(asked)

        known_at, first = 3, live.snapshot().sequence
        assert at_a_known_moment(live, ask) == 3
        assert asked == [first, first + 1, first + 2]
        asked.clear()
        known_at = 4
        with pytest.raises(PastMomentError):
            at_a_known_moment(live, ask)
        assert len(asked) == 3
        asked.clear()
        with pytest.raises(PastMomentError):
            at_a_known_moment(None, ask)  # such shards do not change
        assert len(asked) == 1
