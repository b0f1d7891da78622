"""The experiments on searches: figures against the oracle and by hand, sections from files alone."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from recprune.experiments import heat_map, rq2, rq3, scaling, unsafe
from recprune.experiments.difficulty import Difficulty, best_predictor, taken_sub_items
from recprune.experiments.experiment import Experiment, Plan
from recprune.experiments.heat_map import HeatMap, one_of_each_log
from recprune.experiments.record import Record, load_record, save_record
from recprune.experiments.report import Picture, Section, Table, Text, write_html, write_markdown
from recprune.experiments.rq2 import RQ2
from recprune.experiments.rq3 import RQ3
from recprune.experiments.scaling import Scaling
from recprune.experiments.score_shape import STATISTICS, spearman, statistics_of
from recprune.experiments.unsafe import Unsafe
from recprune.experiments.workload import Workload
from recprune.machine import machine
from recprune.methods import RecJPQPrune
from recprune.posting_lists import build_posting_lists
from recprune.reference import exhaustive, recjpqprune, sub_item_scores
from recprune.types import Json, no_progress

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


def recorded(experiment: Experiment, plan: Plan, folder: Path) -> list[Record]:
    """Run everything, and return what its files say."""
    for part in experiment.parts(plan):
        record = Record(experiment.name, part.name, part.settings, machine(), part.run(no_progress))
        save_record(folder, record)
    return [load_record(path) for path in sorted(folder.glob(f"{experiment.name}.*.json"))]


def words_of(section: Section) -> str:
    return "\n".join(block.markdown for block in section.blocks if isinstance(block, Text))


def with_figures(record: Record, figures: Json) -> Record:
    return Record(record.experiment, record.part, record.settings, record.machine, figures)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_a_section_is_made_from_files_alone(experiment: Experiment, tmp_path: Path) -> None:
    workloads = (toy(model="sasrecjpq"), toy(seed=1), toy("other-log", "mine", seed=2))
    plan = Plan((), workloads, (), quick=True, memory_bytes=1 << 30)
    records = recorded(experiment, plan, tmp_path)
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
        experiment.parts(Plan((), (chosen,), (), quick=quick, memory_bytes=1 << 30))[0]
        for chosen, quick in ((workload, True), (workload, False), (toy(seed=5), False))
    )
    assert len({json.dumps(part.settings) for part in (quick, full, other)}) == 3


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
    assert all(entry["items_scored"] == 3000 for entry in figures["methods"]["pqtopk"])
    assert all(entry["by_cells"] == 0 for entry in figures["methods"]["auto"]), "few items: a scan"


def test_rq2_leaves_out_what_the_codes_do_not_allow() -> None:
    small = toy(items=500)
    wide = Workload(  # more sub-items than a byte can tell apart
        "toy", "wide", small.codes.astype(np.uint16), np.tile(small.sub_item_embeddings, (1, 9, 1)),
        small.sequence_embeddings, small.targets, {},
    )  # fmt: skip
    figures = rq2.measure(wide, (1, 2), 5, 0, no_progress)
    assert "scan" not in figures["methods"]
    record = Record("rq2", "toy-wide", {}, machine(), figures)
    (table,) = (block for block in RQ2().section([record]).blocks if isinstance(block, Table))
    assert "scan: method scan needs codes of type uint8" in table.note


def test_rq2_says_where_auto_is_not_the_fastest(workload: Workload) -> None:
    figures = rq2.measure(workload, (1, 8), 5, 0, no_progress)
    for method, times in {
        "auto": (10.0, 60.0), "scan": (20.0, 40.0), "recjpqprune": (50.0, 75.0),
        "pqtopk": (90.0, 90.0),
    }.items():  # fmt: skip
        for entry, time in zip(figures["methods"][method], times, strict=True):
            entry["p50_us"] = time
    record = Record("rq2", "toy-gsasrecjpq", {}, machine(), figures)
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
    record = Record("rq3", "toy-gsasrecjpq", {}, machine(), figures)
    words = words_of(RQ3().section([record]))
    assert (
        "Best: **4**, in 10.000 ms (1 within 5% of it); the published 8 takes 1.30 ×, `auto` takes "
        "0.25 × that time, `pqtopk` takes 1.50 × that time."
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
    record = Record("heat-map", "hand", {}, machine(), figures)
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
    plan = Plan((), (workload,), (), quick=True, memory_bytes=1 << 30)
    (record,) = recorded(Difficulty(), plan, tmp_path)
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
    plan = Plan((), (workload,), (), quick=True, memory_bytes=1 << 30)
    (record,) = recorded(Difficulty(), plan, tmp_path)

    def words(**correlations: float | None) -> str:
        figures = copy.deepcopy(record.figures)
        for name, row in figures["correlations"].items():
            row["scored"] = correlations.get(name, 0.1)
        return words_of(Difficulty().section([with_figures(record, figures)]))

    assert best_predictor([record.figures]) in STATISTICS
    found = words(gap=-0.9, high_30=0.8, fall_to_threshold=0.99)
    assert f"best with **{STATISTICS['gap'].name}**, that is {STATISTICS['gap'].words}" in found, (
        "what needs θ foresees nothing"
    )
    assert "Its ρ is −0.90 (gSASRecJPQ)" in found
    assert "The smaller it is, the more has to be scored." in found
    assert "holds" not in found
    assert "few sub-items score high" in words(high_30=0.9)
    assert len({entry.name for entry in STATISTICS.values()}) == len(STATISTICS)
    assert "too little to foresee" in words(high_30=0.3)
    nothing = dict.fromkeys(STATISTICS, None)
    assert "No statistic of S varies" in words(**nothing)


# Unsafe settings


def test_recall_by_hand() -> None:
    exact = np.array([[1, 2, 3], [4, 5, -1]])
    found = np.array([[3, 9, 1], [-1, -1, -1]])
    assert unsafe.recall(found, exact) == 2 / 5
    assert unsafe.recall(exact, exact) == 1


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
    assert (figures["users"], figures["hits"]) == (50, 50), "everybody's target is their best item"
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
    assert figures["halves"] == [{"users": 25, "hits": 25}] * 2
    for entry in figures["entries"]:
        for what in ("ndcg", "recall", "same", "proven"):
            halves = [half[what] for half in entry["halves"]]
            assert entry[what] == pytest.approx(np.mean(halves)), "both halves are as large"
    second = workload.index.search(
        workload.sequence_embeddings[25:50], 10, method=RecJPQPrune(max_steps=1)
    )
    exact = workload.index.search(workload.sequence_embeddings[25:50], 10)
    told = entries["recjpqprune", "max_steps", 1]["halves"][1]
    assert told["recall"] == unsafe.recall(second.ids, exact.ids)


def entry(
    method: str, kind: str, value: float | None, time: float, ndcg: float, told: float | None = None
) -> Json:
    """An entry whose NDCG@10 is `ndcg` on the half that chooses, and `told` on the other."""
    quality: Json = {"recall": 0.5, "same": 0.25, "proven": 0.125, "gap": None}
    halves = [quality | {"ndcg": ndcg}, quality | {"ndcg": ndcg if told is None else told}]
    return {
        "method": method, "kind": kind, "value": value, "p50_us": time, "p95_us": 2 * time,
        **quality, "ndcg": (halves[0]["ndcg"] + halves[1]["ndcg"]) / 2, "halves": halves,
    }  # fmt: skip


def test_the_cheapest_setting_that_keeps_its_quality(tmp_path: Path) -> None:
    entries = [
        entry("recjpqprune", "exact", None, 1000, 0.2),
        entry("recjpqprune", "max_steps", 1, 100, 0.197, told=0.2),
        entry("recjpqprune", "max_steps", 2, 200, 0.1981, told=0.1),
        entry("recjpqprune", "over_inflation", 0.5, 500, 0.2),
        entry("auto", "exact", None, 150, 0.2),
        entry("auto", "max_steps", 8, 100, 0.19),
        entry("auto", "over_inflation", 0.1, 160, 0.21),
        entry("auto", "deadline_us", 50, 145, 0.2),
    ]
    assert unsafe.cheapest(entries, "recjpqprune") is entries[2]
    assert unsafe.cheapest(entries, "auto") is entries[4], "3 % faster is no gain"
    halves = [{"users": 4, "hits": 1}, {"users": 3, "hits": 1}]
    figures = {
        "log": "toy", "model": "gsasrecjpq", "items": 5, "users": 7, "hits": 2, "halves": halves,
        "instruction_set": "avx2", "entries": entries,
    }  # fmt: skip
    save_record(tmp_path, Record("unsafe", "toy-gsasrecjpq", {}, machine(), figures))
    record = load_record(tmp_path / "unsafe.toy-gsasrecjpq.json")
    section = Unsafe().section([record])
    words = words_of(section)
    assert (
        "**max_steps = 2**: 5.00 × as fast as exact search; on the other half it keeps 50.0% of "
        "NDCG@10, and finds 50.0% of the exact top 10."
    ) in words
    assert "No unsafe setting of `auto` that keeps 99% of NDCG@10 is faster" in words
    assert "rests on 2 of 7 test users" in words
    assert "1 and 1 of the two halves" in words
    assert "Faster than exact `auto` is `recjpqprune` with max_steps = 1." in words
    (table,) = (block for block in section.blocks if isinstance(block, Table))
    assert [row[:2] for row in table.rows] == [
        ("recjpqprune", "exact"),
        ("recjpqprune", "max_steps = 2"),
        ("recjpqprune", "over_inflation = 0.5"),
        ("auto", "exact"),
    ]
    assert table.rows[1][table.header.index("NDCG@10")] == "0.1000", "that of the other half"
    assert (
        "None is faster than exact search by 5%: auto, max_steps; auto, over_inflation; auto, "
        "deadline_us."
    ) in table.note
    halves[1]["hits"] = 0
    without = words_of(Unsafe().section([with_figures(record, figures)]))
    assert "there is no NDCG@10 to keep" in without
    assert "The fastest setting" not in without
    pictures = [block.name for block in section.blocks if isinstance(block, Picture)]
    assert pictures == ["unsafe-toy-gsasrecjpq"], "no gap was reported"


def test_curves_go_by_the_value_of_the_setting() -> None:
    """Noise made the second of three values the slowest."""
    times = {1: 1000.0, 2: 4000.0, 3: 3000.0}
    exact = [entry(method, "exact", None, 9000, 0.2) for method in ("recjpqprune", "auto")]
    steps = [entry("auto", "max_steps", value, times[value], 0.2) for value in (3, 1, 2)]
    figures = {
        "log": "toy", "model": "gsasrecjpq", "items": 5, "users": 7, "hits": 2,
        "halves": [{"users": 4, "hits": 1}, {"users": 3, "hits": 1}], "instruction_set": "avx2",
        "entries": [*exact, *steps],
    }  # fmt: skip
    section = Unsafe().section([Record("unsafe", "toy-gsasrecjpq", {}, machine(), figures)])
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
    return Scaling().section([
        Record("scaling", f"{figures['items']}", {}, machine() | {"cores": count}, figures)
        for figures, count in zip(sizes, cores, strict=False)
    ])  # fmt: skip


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
    assert next(row for row in rows if row["method"] == "faiss_pq")["scored"] == ""


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
