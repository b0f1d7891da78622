"""The experiments on searches: figures against the oracle and by hand, sections from files alone."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from recprune.experiments.framework.experiment import Experiment, Setup
from recprune.experiments.framework.record import Record
from recprune.experiments.framework.timing import (
    Answer,
    Search,
    Timed,
    agreement,
    agreement_in_words,
    interleaved,
    milliseconds,
    recall,
)
from recprune.experiments.framework.workload import Workload
from recprune.experiments.ours import scaling, unsafe
from recprune.experiments.ours.scaling import Scaling
from recprune.experiments.ours.unsafe import Unsafe
from recprune.experiments.paper import heat_map, rq2, rq3
from recprune.experiments.paper.difficulty import Difficulty, best_predictor, taken_sub_items
from recprune.experiments.paper.heat_map import HeatMap, one_of_each_log
from recprune.experiments.paper.rq1 import RQ1
from recprune.experiments.paper.rq2 import RQ2
from recprune.experiments.paper.rq3 import RQ3
from recprune.experiments.paper.score_shape import STATISTICS, spearman, statistics_of
from recprune.experiments.report.document import (
    Picture,
    Section,
    Table,
    write_html,
    write_markdown,
)
from recprune.experiments.report.introduction import introduction
from recprune.search.methods import RecJPQPrune
from recprune.search.posting_lists import build_posting_lists
from recprune.search.reference import exhaustive, recjpqprune, sub_item_scores
from recprune.types import Float32Array, Json, RecpruneError, no_progress
from tests.support.experiments import MACHINE, recorded, words_of

EXPERIMENTS: tuple[Experiment, ...] = (RQ2(), RQ3(), HeatMap(), Difficulty(), Unsafe())


def toy(log: str = "toy", model: str = "gsasrecjpq", seed: int = 0, items: int = 3000) -> Workload:
    """A random model; users take the item that suits them best."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 32, (items, 8), dtype=np.uint8)
    embeddings = rng.standard_normal((8, 32, 4), np.float32)
    users = rng.standard_normal((60, 32), np.float32)
    users = users * np.abs(users)
    targets = np.array(
        [exhaustive(sub_item_scores(user, embeddings), codes, 1)[0][0] for user in users], np.int32
    )
    return Workload(log, model, codes, embeddings, users, targets, {})


@pytest.fixture(scope="module")
def workload() -> Workload:
    return toy()


def with_figures(record: Record, figures: Json) -> Record:
    return Record(record.experiment, record.part, record.settings, record.machine, figures)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_a_section_is_made_from_files_alone(experiment: Experiment, tmp_path: Path) -> None:
    workloads = (toy(model="sasrecjpq"), toy(seed=1), toy("other-log", "mine", seed=2))
    setup = Setup((), workloads, (), quick=True, memory_bytes=1 << 30)
    records = recorded(experiment, setup, tmp_path)
    logs_only = experiment.name == "heat-map"
    assert len(records) == (2 if logs_only else 3)
    section = experiment.section(records)
    assert section == experiment.section(records)
    assert section.title == experiment.title
    pictures = [block for block in section.blocks if isinstance(block, Picture)]
    expected = {"heat-map": 2, "difficulty": 2 * (3 + 1), "unsafe": 3 * 2}
    assert len(pictures) == expected.get(experiment.name, 3)
    write_markdown("Results", [section], tmp_path / "results.md", tmp_path / "pictures")
    write_html("Results", [section], tmp_path / "results.html")
    written = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "other-log" in written
    assert not re.search(r"\b(nan|inf|None)\b(?! is faster| of )", written)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_parts_say_what_they_depend_on(experiment: Experiment, workload: Workload) -> None:
    quick, full, other = (
        experiment.parts(Setup((), (chosen,), (), quick=quick, memory_bytes=1 << 30))[0]
        for chosen, quick in ((workload, True), (workload, False), (toy(seed=5), False))
    )
    assert len({json.dumps(part.settings) for part in (quick, full, other)}) == 3


# Timing


def timed_of(ids: list[list[int]], scores: list[list[float]], numbers: list[int]) -> Timed:
    return Timed(
        np.ones(len(ids)), np.array(numbers), np.array(ids), np.array(scores, np.float32), None
    )


def test_methods_must_agree_to_the_bit() -> None:
    first = timed_of([[1, 2], [3, 4], [5, 6]], [[2, 1], [4, 3], [6, 5]], [0, 1, 2])
    fewer = timed_of([[1, 2], [5, 6]], [[2, 1], [6, 5]], [0, 2])
    agreed = agreement({"pqtopk": first, "auto": first, "default": fewer})
    assert agreed == {"pqtopk": 3, "auto": 3, "default": 2}
    assert agreement_in_words(agreed) == (
        "All 3 ways to search gave the same items and the same bits of their scores, on every one "
        "of 3 queries (`default` answered 2 of them)."
    )
    assert agreement_in_words(None) == "", "a record of old"
    one_bit_more = float(np.nextafter(np.float32(5), np.float32(6)))
    for other in (
        timed_of([[1, 2], [6, 5]], [[2, 1], [6, 5]], [0, 2]),
        timed_of([[1, 2], [5, 6]], [[2, 1], [6, one_bit_more]], [0, 2]),
    ):
        with pytest.raises(RecpruneError, match="auto and pqtopk differ in their answers"):
            agreement({"pqtopk": first, "auto": other})


def test_a_block_begins_with_queries_that_are_not_timed() -> None:
    asked: dict[str, list[int]] = {"fast": [], "slow": []}

    def search_of(name: str) -> Search:
        def search(query: Float32Array, k: int) -> Answer:
            asked[name].append(int(query[0]))
            return np.arange(k), None, None

        return search

    queries = np.arange(10, dtype=np.float32)[:, None]
    searches = {name: search_of(name) for name in asked}
    timed = interleaved(searches, queries, 2, seed=0, block=5, warm=3, limits={"slow": 2})
    assert asked["fast"] == [7, 8, 9, *range(5), 2, 3, 4, *range(5, 10)]
    assert asked["slow"] == [9, 0, 4, 5], "one is enough for it"
    assert timed["fast"].numbers.tolist() == list(range(10))
    assert timed["slow"].numbers.tolist() == [0, 5]


def test_percentiles_need_queries() -> None:
    entry = {"queries": 99, "p50_us": 1500.0, "p95_us": 2500.0, "p99_us": 3500.0}
    names = ("p50_us", "p95_us", "p99_us")
    assert [milliseconds(entry, name) for name in names] == ["1.500", "", ""]
    assert [milliseconds(entry | {"queries": 100}, name) for name in names][1:] == ["2.500", ""]
    assert milliseconds(entry | {"queries": 500}, "p99_us") == "3.500"


def test_recall_by_hand() -> None:
    exact = np.array([[1, 2, 3], [4, 5, -1]])
    found = np.array([[3, 9, 1], [-1, -1, -1]])
    assert recall(found, exact) == 2 / 5
    assert recall(np.full((2, 3), -1), exact) == 0
    assert recall(exact, exact) == 1


# RQ1


@pytest.fixture(scope="module")
def rq1_record(workload: Workload, tmp_path_factory: pytest.TempPathFactory) -> Record:
    setup = Setup((), (workload,), (), quick=True, memory_bytes=1 << 30)
    (record,) = recorded(RQ1(), setup, tmp_path_factory.mktemp("rq1"))
    return record


def test_rq1_says_on_how_many_queries_methods_agree(rq1_record: Record, workload: Workload) -> None:
    figures = rq1_record.figures
    assert set(figures["agreed"]) == set(figures["methods"])
    assert figures["agreed"]["auto"] == 20
    met = figures["agreed"]["default"]
    assert met < 20
    exact = workload.index.search(workload.sequence_embeddings[:met], 10, method="pqtopk").ids
    expected = workload.ndcg(exact)
    assert figures["methods"]["default"]["met"] == {"default": expected, "pqtopk": expected}
    section = RQ1().section([rq1_record])
    assert f"on every one of 20 queries (`default` answered {met} of them)" in words_of(section)
    table = next(block for block in section.blocks if isinstance(block, Table))
    assert f"of the {met} users whom `default` answered: {expected:.4f}" in table.note
    row = dict(zip(table.header, table.rows[0], strict=True))
    assert (row["queries"], row["p95 ms"], row["p99 ms"]) == ("20", "", "")


def test_rq1_stands_beside_what_was_published(rq1_record: Record) -> None:
    figures = copy.deepcopy(rq1_record.figures)
    for method, time in (("recjpqprune", 3000.0), ("pqtopk", 2000.0)):
        figures["methods"][method]["p50_us"] = time
    figures["methods"]["pqtopk"]["items_scored"] = figures["items"]
    section = RQ1().section([with_figures(rq1_record, figures)])
    assert (
        "In the median, `recjpqprune` takes 1.50 × (gSASRecJPQ) the time of `pqtopk`: **Algorithm 1 is slower than "
        "scoring every item for every model**, the other way round than published (0.19 × to 0.67 ×)."
    ) in words_of(section)
    beside = [block for block in section.blocks if isinstance(block, Table)][-1]
    assert (beside.rows[0][0], beside.rows[0][-1]) == ("toy", "1.50 ×")
    assert ("Tmall (published)", "SASRecJPQ", "204.18", "16.72", "3.18", "0.19 ×") in beside.rows
    assert "Published: Table 2 of Petrov" in beside.note
    figures["methods"]["recjpqprune"]["p50_us"] = 1000.0
    words = words_of(RQ1().section([with_figures(rq1_record, figures)]))
    assert "0.50 × (gSASRecJPQ) the time of `pqtopk`: Algorithm 1 is faster" in words
    assert "as published" in words
    # Where a filter goes first, it is another engine than the paper's.
    figures["methods"]["pqtopk"]["items_scored"] = figures["items"] / 50
    words = words_of(RQ1().section([with_figures(rq1_record, figures)]))
    assert "0.5 × (gSASRecJPQ) the time of `pqtopk`, which here filters all items" in words
    assert "scores 2.00% of them at most: that is not the published comparison" in words


# In short


def test_noise_and_torch_are_told_in_short() -> None:
    machine: Json = {"cores": 2, "memory_gigabytes": 8.0}

    def splits(number: int, auto: float, scan: float) -> Record:
        read = 10.0 if number < 16 else 70.0  # by cells, or by a scan
        methods = {
            "auto": {"p50_us": auto, "bytes_touched": read},
            "scan": {"p50_us": scan, "bytes_touched": 70.0},
        }
        return Record("splits", f"{number}", {}, machine, {"splits": number, "methods": methods})

    records = [splits(8, 10.0, 900.0), splits(16, 300.0, 240.0), splits(32, 100.0, 110.0)]
    words = words_of(introduction(records))
    assert "codes of 16 and 32 splits" in words, "with eight splits, the work differs"
    assert "their medians differ by up to 1.25 ×" in words

    def same_work(experiment: str, cores: int, auto: float) -> Record:
        timed = {"p50_us": auto, "p95_us": auto, "queries": 500, "items_scored": 10}
        figures: Json = {"log": "toy", "model": "gsasrecjpq", "items": 10, "agreed": {}}
        figures["methods"] = dict.fromkeys(("auto", "recjpqprune", "pqtopk"), timed)
        figures["references"] = {"auto": timed}
        return Record(experiment, "toy", {}, machine | {"cores": cores}, figures)

    words = words_of(introduction([same_work("rq1", 2, 100.0), same_work("rq3", 2, 140.0)]))
    assert "differs by up to 1.40 ×" in words
    words = words_of(introduction([same_work("rq1", 2, 100.0), same_work("rq3", 16, 140.0)]))
    assert "Across experiments" not in words, "of two machines"
    entries = [
        {"name": name, "family": family, "p50_us": time, "exact": True, "recall": 1.0}
        for name, family, time in (
            ("auto", "recprune", 100.0),
            ("torch PQTopK", "torch PQTopK", 800.0),
            ("torch RecJPQPrune, BS 8", "torch RecJPQPrune", 200.0),
        )
    ]
    peers = Record("peers", "toy", {}, machine, {"log": "toy", "peers": entries})
    words = words_of(introduction([peers]))
    assert "In torch, on toy, Algorithm 1 takes 0.25 × the time of scoring every item" in words
    assert "Noise" not in words


# RQ2


def test_rq2_takes_every_cutoff_that_there_are_items_for(workload: Workload) -> None:
    figures = rq2.measure(workload, (1, 8, 64, 4096), 20, 0, no_progress)
    assert list(figures["methods"]) == ["auto", "scan", "recjpqprune", "pqtopk"]
    for entries in figures["methods"].values():
        assert [entry["k"] for entry in entries] == [1, 8, 64]
        assert all(0 < entry["p50_us"] <= entry["p95_us"] for entry in entries)
    scored = [entry["items_scored"] for entry in figures["methods"]["recjpqprune"]]
    assert scored == sorted(scored)
    assert scored[0] < scored[-1]
    assert all(entry["items_touched"] == 3000 for entry in figures["methods"]["pqtopk"])
    assert all(entry["by_cells"] == 0 for entry in figures["methods"]["auto"]), "few items: a scan"


def test_rq2_leaves_out_what_the_codes_do_not_allow() -> None:
    small = toy(items=500)
    wide = Workload(  # more sub-items than a byte can tell apart
        "toy",
        "wide",
        small.codes.astype(np.uint16),
        np.tile(small.sub_item_embeddings, (1, 9, 1)),
        small.sequence_embeddings,
        small.targets,
        {},
    )
    figures = rq2.measure(wide, (1, 2), 5, 0, no_progress)
    assert "scan" not in figures["methods"]
    record = Record("rq2", "toy-wide", {}, MACHINE, figures)
    (table,) = (block for block in RQ2().section([record]).blocks if isinstance(block, Table))
    assert "scan: method scan needs codes of type uint8" in table.note


def test_rq2_says_where_auto_is_not_the_fastest(workload: Workload) -> None:
    figures = rq2.measure(workload, (1, 8), 5, 0, no_progress)
    for method, times in {
        "auto": (10.0, 60.0),
        "scan": (20.0, 40.0),
        "recjpqprune": (50.0, 75.0),
        "pqtopk": (90.0, 90.0),
    }.items():
        for entry, time in zip(figures["methods"][method], times, strict=True):
            entry["p50_us"] = time
    record = Record("rq2", "toy-gsasrecjpq", {}, MACHINE, figures)
    words = words_of(RQ2().section([record]))
    assert "K = 8: `auto` 6.0 ×, `scan` 2.0 ×, `recjpqprune` 1.5 ×, `pqtopk` 1.0 ×." in words
    assert "or within 5% of it, at all K but K = 8 (`scan` is 1.50 × as fast)." in words
    figures["methods"]["auto"][0]["p50_us"] = 30.0
    assert (
        "At most K, `auto` is **not** the fastest or within 5% of it: K = 1 (`scan` is 1.50 × as "
        "fast), K = 8 (`scan` is 1.50 × as fast)."
    ) in words_of(RQ2().section([record]))
    figures["methods"]["auto"][0]["p50_us"] = 10.0
    figures["methods"]["auto"][1]["p50_us"] = 41.0
    assert "fastest at every K, or within 5% of it" in words_of(RQ2().section([record]))


# RQ3


def test_rq3_counts_the_steps_of_the_paper(workload: Workload) -> None:
    figures = rq3.measure(workload, (1, 4, 32, 64), 20, 0, no_progress)
    sizes = [entry["sub_items_per_step"] for entry in figures["steps"]]
    assert sizes == [1, 4, 32], "a split has 32 sub-items"
    lists = build_posting_lists(workload.codes, 32)
    tables = workload.index.sub_item_scores(workload.sequence_embeddings[:20])
    for entry in figures["steps"]:
        size = entry["sub_items_per_step"]
        steps = [recjpqprune(table, workload.codes, lists, 10, size)[2] for table in tables]
        assert entry["steps"] == np.median(steps)
    assert figures["steps"][-1]["items_scored"] == 3000, "one step is a whole split"


def test_rq3_names_the_best_setting(workload: Workload) -> None:
    figures = rq3.measure(workload, (1, 4, 8), 5, 0, no_progress)
    for entry, time in zip(figures["steps"], (10_400.0, 10_000.0, 13_000.0), strict=True):
        entry["p50_us"] = time
    figures["references"]["auto"]["p50_us"] = 2_500.0
    figures["references"]["pqtopk"]["p50_us"] = 15_000.0
    record = Record("rq3", "toy-gsasrecjpq", {}, MACHINE, figures)
    words = words_of(RQ3().section([record]))
    assert (
        "Best: **4**, in 10.000 ms (1 within 5% of it); the published 8 takes 1.30 ×, `auto` takes "
        "0.25 × the time of the best, `pqtopk` takes 1.50 × the time of the best."
    ) in words
    figures["steps"][2]["p50_us"] = 9_000.0
    assert "Best: **8**, in 9.000 ms; `auto` takes" in words_of(RQ3().section([record]))


# The heat map


def test_heat_map_by_hand() -> None:
    """Two splits of three sub-items whose scores are their embeddings: the user is all ones."""
    embeddings = np.array([[[1], [3], [2]], [[0.5], [-1], [4]]], np.float32)
    codes = np.array([[0, 0], [1, 2], [2, 1], [0, 1]], np.uint8)  # scores 1.5, 7, 1, 0
    users = np.ones((1, 2), np.float32)
    workload = Workload("hand", "made", codes, embeddings, users, np.zeros(1, np.int32), {})
    figures = heat_map.measure(workload, 10, no_progress)
    assert figures["scores"] == [[3, 2, 1], [4, 0.5, -1]]
    assert figures["marks"] == {
        "top": {"rank": 1, "places": [[0, 0], [1, 0]]},  # item 1
        "middle": {"rank": 3, "places": [[0, 1], [1, 2]]},  # item 2
        "bottom": {"rank": 4, "places": [[0, 2], [1, 2]]},  # item 3
    }
    # The best tenth of three is the very best: 2 of the 8 sub-items of all four items.
    assert figures["among_best"] == 0.25
    record = Record("heat-map", "hand", {}, MACHINE, figures)
    section = HeatMap().section([record])
    assert "25% of the sub-items of their ten best items" in words_of(section)
    assert "as principle P1 has it" in words_of(section)
    (picture,) = (block for block in section.blocks if isinstance(block, Picture))
    assert "top 1, middle 2, bottom 3" in picture.caption
    figures["among_best"] = 0.1
    assert "so principle P1 fails here" in words_of(HeatMap().section([record]))


def test_one_model_of_each_log_is_drawn() -> None:
    first, second = toy(model="sasrecjpq"), toy(model="gsasrecjpq")
    third, fourth = toy("other", "a"), toy("other", "b")
    assert one_of_each_log([first, second, third, fourth]) == [second, third]
    assert one_of_each_log([second, first]) == [second]


# Difficulty


def test_statistics_by_hand() -> None:
    scores = np.array([[[4, 0, 0, 0], [0, 2, 0, 0]]], np.float32)
    found = {
        name: float(value[0]) for name, value in statistics_of(scores, np.array([3.0])).items()
    }
    assert set(found) == set(STATISTICS)
    # The mean of S is 0.75 and its maximum 4: 30 % of the way is 1.725, half of it 2.375.
    assert (found["high_30"], found["high_50"]) == (2, 1)
    # σ is 6, then 2 without the 4, then 0 without the 2.
    assert found["fall"] == 1  # to 6 − 4.5 / 2
    assert found["fall_to_threshold"] == 1
    assert found["near"] == 2  # within 0.9 of their maxima
    variance = 3 + 0.75
    assert found["spread"] == pytest.approx(variance**0.5)
    assert found["widest"] == pytest.approx(3 / variance)
    assert found["reach"] == pytest.approx((3 + 1.5) / variance**0.5)
    assert found["gap"] == pytest.approx(3**0.5)
    assert found["slack"] == pytest.approx(3 / variance**0.5)
    assert found["slack_share"] == pytest.approx(3 / 4.5)
    assert found["height"] == pytest.approx((3 - 1.5) / variance**0.5)
    shares = [np.exp(row) / np.exp(row).sum() for row in (scores[0, 0], scores[0, 1], scores[0])]
    entropies = [-(share * np.log(share)).sum() for share in shares]
    assert found["entropy"] == pytest.approx((entropies[0] + entropies[1]) / 2)
    assert found["entropy_all"] == pytest.approx(entropies[2])
    cubes = ((3 / 3**0.5) ** 3 + 3 * (-1 / 3**0.5) ** 3) / 4
    assert found["skewness"] == pytest.approx(cubes)


def test_statistics_of_scores_that_are_all_the_same() -> None:
    found = statistics_of(np.ones((1, 2, 4), np.float32), np.array([2.0]))
    assert all(np.isfinite(value).all() for value in found.values())


def test_algorithm_1_takes_what_a_known_threshold_would_need_or_more(workload: Workload) -> None:
    users = workload.sequence_embeddings
    stats = workload.index.search(users, 10, method=RecJPQPrune(sub_items_per_step=1)).stats
    needed = statistics_of(workload.index.sub_item_scores(users), stats.threshold)
    assert (stats.steps >= needed["fall_to_threshold"]).all()
    assert (stats.steps == needed["fall_to_threshold"]).mean() > 0.9


def test_spearman_is_that_of_scipy() -> None:
    rng = np.random.default_rng(4)
    for values in (5, 1000):
        first, second = rng.integers(0, values, 200), rng.standard_normal(200)
        assert spearman(first, second) == pytest.approx(spearmanr(first, second).statistic)
    assert spearman(first, np.exp(first / 100)) == pytest.approx(1)
    assert spearman(first, np.zeros(200)) is None


def test_sub_items_taken_account_for_the_items_scored(workload: Workload) -> None:
    users = workload.sequence_embeddings
    stats = workload.index.search(users, 10, method="recjpqprune").stats
    tables = workload.index.sub_item_scores(users)
    for table, steps, scored in zip(tables, stats.steps, stats.items_scored, strict=True):
        order = np.argsort(-table, axis=1, kind="stable")
        taken = taken_sub_items(table, int(steps))
        assert scored == sum(
            np.isin(workload.codes[:, split], order[split, :count]).sum()
            for split, count in enumerate(taken)
        )


def test_a_split_without_sub_items_left_is_not_taken_from() -> None:
    """Split 0 has the better scores throughout: 8 of its 10 sub-items, then the last 2, then 1's."""
    scores = np.stack([np.linspace(20, 11, 10), np.linspace(10, 1, 10)]).astype(np.float32)
    taken = [taken_sub_items(scores, steps) for steps in range(5)]
    assert taken == [[0, 0], [8, 0], [10, 0], [10, 8], [10, 10]]


def test_difficulty_shows_users_by_cost(workload: Workload, tmp_path: Path) -> None:
    setup = Setup((), (workload,), (), quick=True, memory_bytes=1 << 30)
    (record,) = recorded(Difficulty(), setup, tmp_path)
    figures = record.figures
    fast, average, slow = (figures["shown"][name] for name in ("fast", "average", "slow"))
    assert fast["scored"] <= average["scored"] <= slow["scored"]
    assert fast["scored"] < slow["scored"]
    users = workload.sequence_embeddings[:40]
    stats = workload.index.search(users, 10, method="recjpqprune").stats
    for user in (fast, average, slow):
        assert user["scored"] == stats.items_scored[user["user"]]
        assert user["steps"] == stats.steps[user["user"]]
    assert np.sort(stats.items_scored)[20] == average["scored"]
    values = statistics_of(workload.index.sub_item_scores(users), stats.threshold)
    expected = spearmanr(values["high_30"], stats.items_scored).statistic
    assert figures["correlations"]["high_30"]["scored"] == pytest.approx(expected)
    assert figures["correlations"]["fall_to_threshold"]["scored"] > 0.7
    assert sorted(figures["points"]["scored"]) == sorted(stats.items_scored.tolist())


def test_the_predictor_in_words(workload: Workload, tmp_path: Path) -> None:
    setup = Setup((), (workload,), (), quick=True, memory_bytes=1 << 30)
    (record,) = recorded(Difficulty(), setup, tmp_path)

    def words(**correlations: float | None) -> str:
        figures = copy.deepcopy(record.figures)
        for name, row in figures["correlations"].items():
            row["scored"] = correlations.get(name, 0.1)
        return words_of(Difficulty().section([with_figures(record, figures)]))

    assert best_predictor([record.figures]) in STATISTICS
    found = words(gap=-0.9, high_30=0.8, fall_to_threshold=0.99)
    assert (
        f"the items that `recjpqprune` scores go best with **{STATISTICS['gap'].name}**, on average "
        f"over models: {STATISTICS['gap'].words}. Its ρ is −0.90 (gSASRecJPQ)"
    ) in found, "what needs θ foresees nothing"
    assert "Model by model the best is best − mean for gSASRecJPQ (−0.90)." in found
    assert "The smaller it is, the more `recjpqprune` has to score." in found
    assert "holds" not in found
    assert "holds for Algorithm 1: it is fast where few sub-items score high" in words(high_30=0.9)
    assert len({entry.name for entry in STATISTICS.values()}) == len(STATISTICS)
    assert "too little to foresee" in words(high_30=0.3)
    nothing = dict.fromkeys(STATISTICS, None)
    assert "No statistic of S varies" in words(**nothing)


def test_the_predictor_of_each_model_is_named(workload: Workload, tmp_path: Path) -> None:
    """What is best on average may be best for no model by itself."""
    setup = Setup((), (workload,), (), quick=True, memory_bytes=1 << 30)
    (record,) = recorded(Difficulty(), setup, tmp_path)
    records = []
    for model, own in (("sasrecjpq", "fall"), ("gsasrecjpq", "near")):
        figures = copy.deepcopy(record.figures) | {"model": model}
        for row in figures["correlations"].values():
            row["scored"] = 0.1
        figures["correlations"]["high_30"]["scored"] = 0.8
        figures["correlations"][own]["scored"] = 0.9
        figures["shown"] = {}
        records.append(with_figures(record, figures))
    words = words_of(Difficulty().section(records))
    assert "**high, 30 %**, on average over models" in words
    assert (
        "Model by model the best is fall to half for SASRecJPQ (+0.90), near the best for "
        "gSASRecJPQ (+0.90)."
    ) in words


# Unsafe settings


def test_unsafe_searches_report_what_they_lose(workload: Workload) -> None:
    grid: unsafe.Grid = {
        "recjpqprune": {"max_steps": [1, 3, 64], "over_inflation": [0.5, 0.9]},
        "auto": {"deadline_us": [1e9]},
    }
    figures = unsafe.measure(workload, grid, 10, 50, 0, no_progress)
    entries = {
        (entry["method"], entry["kind"], entry["value"]): entry for entry in figures["entries"]
    }
    assert len(entries) == 8
    assert (figures["users"], figures["hits"]) == (50, 50), "every user's target is their best item"
    whole = [
        ("recjpqprune", "exact", None),
        ("auto", "exact", None),
        ("recjpqprune", "max_steps", 64),
        ("auto", "deadline_us", 1e9),
    ]
    for name in whole:
        entry = entries[name]
        assert (entry["recall"], entry["same"], entry["proven"], entry["gap"]) == (1, 1, 1, 0)
        assert entry["ndcg"] == 1
    recalls = [entries["recjpqprune", "max_steps", steps]["recall"] for steps in (1, 3, 64)]
    assert recalls == sorted(recalls)
    assert recalls[0] < 1
    assert entries["recjpqprune", "max_steps", 1]["gap"] > 0
    inflated = [entries["recjpqprune", "over_inflation", share] for share in (0.5, 0.9)]
    assert inflated[1]["recall"] < inflated[0]["recall"]
    assert inflated[1]["proven"] < inflated[0]["same"]
    assert all(entry["proven"] <= entry["same"] for entry in figures["entries"])
    entry = entries["recjpqprune", "max_steps", 1]
    users = workload.sequence_embeddings[:50]
    found = workload.index.search(users, 10, method=RecJPQPrune(max_steps=1))
    assert entry["recall"] == recall(found.ids, workload.index.search(users, 10).ids)
    # Exact answers have an NDCG@10 of 1 for every user: what is left of it is the lower end.
    assert entries["auto", "exact", None]["margin_low"] == pytest.approx(0.01)
    assert entry["margin_low"] < entry["ndcg"] - 0.99 < 0


def entry(
    method: str, kind: str, value: float | None, time: float, ndcg: float, low: float = 0.0
) -> Json:
    """An entry whose NDCG@10 minus 99 % of the exact one is `low` or more, by its interval."""
    return {
        "method": method,
        "kind": kind,
        "value": value,
        "queries": 200,
        "p50_us": time,
        "p95_us": 2 * time,
        "recall": 0.5,
        "same": 0.25,
        "proven": 0.125,
        "gap": None,
        "ndcg": ndcg,
        "margin_low": low,
    }


ENTRIES = (
    entry("recjpqprune", "exact", None, 1000, 0.2),
    entry("recjpqprune", "max_steps", 1, 100, 0.2, low=-0.001),  # as good, perhaps by chance
    entry("recjpqprune", "max_steps", 2, 200, 0.199),
    entry("recjpqprune", "over_inflation", 0.5, 500, 0.2),
    entry("auto", "exact", None, 150, 0.2),
    entry("auto", "max_steps", 8, 100, 0.19, low=-0.01),
    entry("auto", "over_inflation", 0.1, 160, 0.21),
    entry("auto", "deadline_us", 50, 145, 0.2),
)


def unsafe_section(entries: list[Json], hits: int = 2) -> Section:
    figures = {
        "log": "toy",
        "model": "gsasrecjpq",
        "items": 5,
        "users": 7,
        "hits": hits,
        "instruction_set": "avx2",
        "entries": entries,
    }
    return Unsafe().section([Record("unsafe", "toy-gsasrecjpq", {}, MACHINE, figures)])


def test_the_cheapest_setting_that_keeps_its_quality() -> None:
    entries = copy.deepcopy(list(ENTRIES))
    assert unsafe.cheapest(entries, "recjpqprune") is entries[2], "the first may be chance"
    assert unsafe.cheapest(entries, "auto") is entries[4], "3 % faster is no gain"
    section = unsafe_section(entries)
    words = words_of(section)
    assert (
        "**max_steps = 2**: 5.00 × as fast as exact search; it keeps 99.5% of NDCG@10, and finds "
        "50.0% of the exact top 10."
    ) in words
    assert "No setting of `auto` that is faster than the exact search by 25% or more keeps" in words
    assert "rests on 2 of 7 test users" in words
    assert "no interval" not in words
    assert "Faster than exact `auto` is `recjpqprune` with max_steps = 1." in words
    (table,) = (block for block in section.blocks if isinstance(block, Table))
    assert [row[:2] for row in table.rows] == [
        ("recjpqprune", "exact"),
        ("recjpqprune", "max_steps = 2"),
        ("recjpqprune", "over_inflation = 0.5"),
        ("auto", "exact"),
    ]
    assert table.rows[1][table.header.index("NDCG@10")] == "0.1990"
    assert "faster than exact search by 25%: auto, max_steps; auto, over_inflation; " in table.note
    assert "times over 200 queries" in table.note
    without = words_of(unsafe_section(entries, hits=0))
    assert "there is no NDCG@10 to keep" in without
    assert "The fastest setting" not in without
    pictures = [block.name for block in section.blocks if isinstance(block, Picture)]
    assert pictures == ["unsafe-toy-gsasrecjpq"], "no gap was reported"


def test_what_may_be_chance_is_no_answer() -> None:
    entries = [
        entry("recjpqprune", "exact", None, 1000, 0.2),
        entry("recjpqprune", "max_steps", 1, 100, 0.2, low=-0.001),
        entry("auto", "exact", None, 150, 0.2),
    ]
    words = words_of(unsafe_section(entries))
    assert (
        "Whether a faster setting of `recjpqprune` keeps 99% of NDCG@10 cannot be told with 2 such "
        "users: max_steps = 1 may, or may by chance."
    ) in words
    assert "**max_steps" not in words
    assert unsafe.gains({"hits": 2, "entries": entries}) == [1.0, 1.0]


def test_of_records_without_an_interval_both_halves_must_agree() -> None:
    entries = copy.deepcopy(list(ENTRIES))
    for old in entries:
        del old["margin_low"]
        old["halves"] = [{"ndcg": 0.2}, {"ndcg": 0.2}]
    entries[1]["halves"][1]["ndcg"] = 0.19
    assert unsafe.cheapest(entries, "recjpqprune") is entries[2]
    assert "This record has no interval" in words_of(unsafe_section(entries))


def test_curves_go_by_the_value_of_the_setting() -> None:
    """Noise made the second of three values the slowest."""
    times = {1: 1000.0, 2: 4000.0, 3: 3000.0}
    exact = [entry(method, "exact", None, 9000, 0.2) for method in ("recjpqprune", "auto")]
    steps = [entry("auto", "max_steps", value, times[value], 0.2) for value in (3, 1, 2)]
    section = unsafe_section([*exact, *steps])
    (picture,) = (block for block in section.blocks if isinstance(block, Picture))
    curves = re.findall(r'<path d="([^"]+)"[^>]*stroke-width: 1.8', picture.svg)
    for curve in curves:
        first, second, third = (float(x) for x in re.findall(r"[ML] (\S+) ", curve))
        assert first < third < second
    assert len(curves) == 2


# Scaling


@pytest.fixture(scope="module")
def sizes() -> list[Json]:
    return [scaling.measure(items, 8, 5, 1 << 30, 0, no_progress) for items in (1000, 2000, 4000)]


def scaling_section(sizes: list[Json], cores: tuple[int, ...]) -> Section:
    return Scaling().section(
        [
            Record("scaling", f"{figures['items']}", {}, MACHINE | {"cores": count}, figures)
            for figures, count in zip(sizes, cores, strict=False)
        ]
    )


def test_scaling_says_what_the_scan_takes_at_both_ends(sizes: list[Json]) -> None:
    figures = copy.deepcopy(sizes)
    for entry, (scan, auto) in zip(figures, ((30.0, 60.0), (1.0, 1.0), (90.0, 30.0)), strict=True):
        entry["methods"]["scan"]["p50_us"] = scan
        entry["methods"]["auto"]["p50_us"] = auto
    words = words_of(scaling_section(figures, (2, 2, 2)))
    assert (
        "is 0.5 × that of `auto` at 1,000 items and 3.0 × that of `auto` at 4,000 items." in words
    )
    alone = words_of(scaling_section(figures[:1], (2,)))
    assert "is 0.5 × that of `auto` at 1,000 items." in alone


def test_scaling_tells_what_is_scored_from_what_is_looked_at(sizes: list[Json]) -> None:
    (table,) = (b for b in scaling_section(sizes, (2, 2, 2)).blocks if isinstance(b, Table))
    rows = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    pqtopk = next(row for row in rows if row["method"] == "pqtopk")
    assert (pqtopk["looked at"], pqtopk["scored"]) == ("100.00%", "100.00%")
    scan = next(row for row in rows if row["method"] == "scan")
    scored = sizes[0]["methods"]["scan"]["items_scored"] / 1000
    assert scan["scored"] == f"{scored:.2%}"
    assert float(scan["looked at"].rstrip("%")) > 100 * scored
    assert next(row for row in rows if row["method"] == "FAISS PQ")["scored"] == ""


def test_every_method_that_is_left_out_has_a_reason(sizes: list[Json]) -> None:
    hurried = scaling.measure(1000, 8, 5, 1 << 30, 0, no_progress, seconds=1e-9)
    assert set(hurried["methods"]) == {"auto", "scan"}
    assert all("would take longer than 0 minutes" in why for why in hurried["left_out"].values())
    small = scaling.measure(1000, 8, 5, 1 << 20, 0, no_progress)
    assert small["left_out"]["default"] == "needs 0 GB of item vectors"
    old = copy.deepcopy(sizes[0])
    del old["methods"]["recjpqprune"], old["agreed"]
    (table,) = (b for b in scaling_section([old], (2,)).blocks if isinstance(b, Table))
    assert "1,000 items, recjpqprune: not run, and no reason was recorded." in table.note
    assert "default" in sizes[0]["methods"]


def test_scaling_says_on_how_many_queries_methods_agree(sizes: list[Json]) -> None:
    assert sizes[0]["agreed"] == {"auto": 5, "scan": 5, "pqtopk": 3, "recjpqprune": 3, "default": 3}
    assert "1,000 items: All 5 ways to search gave the same items" in words_of(
        scaling_section(sizes, (2, 2, 2))
    )


def test_what_other_machines_measured_is_not_joined(sizes: list[Json]) -> None:
    def drawn(*cores: int) -> tuple[Picture, list[int]]:
        section = scaling_section(sizes, cores)
        (picture,) = (block for block in section.blocks if isinstance(block, Picture))
        lines = re.findall(r'<path d="([^"]+)"[^>]*stroke-width: 1.[48]', picture.svg)
        return picture, sorted({line.count("L") + 1 for line in lines if "M" in line})

    picture, points = drawn(2, 2, 2)
    assert points == [3]
    assert "another machine" not in picture.caption
    picture, points = drawn(2, 2, 16)
    assert max(points) == 2
    assert "are from another machine: 4,000 items." in picture.caption
