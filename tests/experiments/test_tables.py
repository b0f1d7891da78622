"""Tables of data sets, peers and prunable models: their figures, and the sections made of them."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recprune.data.interactions import read_interactions
from recprune.experiments.framework.experiment import LogFolder, Need, Setup
from recprune.experiments.framework.inputs import wanted_models
from recprune.experiments.framework.record import Record
from recprune.experiments.framework.timing import recall
from recprune.experiments.framework.workload import Workload
from recprune.experiments.ours.peer_table import (
    PeerTable,
    _Contender,
    _sweep,
    by_codes,
    measure,
    same_codes,
)
from recprune.experiments.ours.prunable import Prunable, differing, relative_slack
from recprune.experiments.paper.appendix import Appendix
from recprune.experiments.paper.dataset_table import DatasetTable
from recprune.experiments.peers.faiss_hnsw import FaissHNSW
from recprune.experiments.peers.families import FAMILIES
from recprune.experiments.peers.usearch_peer import Usearch
from recprune.experiments.report.document import (
    Picture,
    Section,
    Table,
    write_html,
    write_markdown,
)
from recprune.models.settings import Settings
from recprune.preparation.codebook import assign_random
from recprune.preparation.holdout import temporal_holdout
from recprune.preparation.prepared import Prepared, prepare
from recprune.types import Float32Array, InputError, Int64Array, Json, no_progress
from tests.support.experiments import MACHINE, recorded, words_of

PLENTY = 8 << 30


def setup_of(
    workloads: Sequence[Workload] = (),
    variants: Sequence[Workload] = (),
    logs: Sequence[LogFolder] = (),
) -> Setup:
    return Setup(tuple(logs), tuple(workloads), tuple(variants), quick=True, memory_bytes=PLENTY)


def table_of(section: Section, at: int = 0) -> list[dict[str, str]]:
    """The rows of a table by the names of its columns."""
    table = [block for block in section.blocks if isinstance(block, Table)][at]
    return [dict(zip(table.header, row, strict=True)) for row in table.rows]


def check_written(section: Section, folder: Path) -> None:
    """Both shapes of the report take the section."""
    write_markdown("Results", [section], folder / "results.md", folder / "pictures")
    write_html("Results", [section], folder / "results.html")
    pictures = [block for block in section.blocks if isinstance(block, Picture)]
    assert len(list((folder / "pictures").glob("*.svg"))) == len(pictures)


# Data sets


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> LogFolder:
    """Three users of 5, 5 and 10 interactions with items 0 to 9, and one who is too short."""
    folder = tmp_path_factory.mktemp("log")
    rows = [
        *((1, item, 100 + item) for item in range(5)),
        *((2, item, 100 + item) for item in (0, 0, 1, 1, 9)),
        *((3, item, 100 + item) for item in range(10)),
        (4, 0, 100),
    ]
    source = folder / "log.csv"
    lines = [f"{user},{item},{86_400 * time}" for user, item, time in rows]
    source.write_text("\n".join(["user_id,item_id,timestamp", *lines]) + "\n")
    holdout = temporal_holdout(read_interactions(source), validation_users=1)
    codebook = assign_random(holdout.log.num_items, num_splits=2, num_sub_items=4)
    prepare(holdout, codebook, {"holdout": "temporal"}).save(folder / "prepared")
    return LogFolder("tiny", source, "auto", folder / "prepared", {}, {})


def test_a_log_is_described_by_its_file(log: LogFolder, tmp_path: Path) -> None:
    section = DatasetTable().section(recorded(DatasetTable(), setup_of(logs=[log]), tmp_path))
    row, *published = table_of(section)
    assert row["log"] == "tiny"
    assert (row["users"], row["items"], row["interactions"]) == ("3", "10", "20")
    assert (row["average length"], row["median"], row["longest"]) == ("6.67", "5", "10")
    assert row["repeats"] == "10.0%"  # two of twenty
    assert row["on the top 1 % of items"] == "20.0%"  # item 0, four times
    assert row["items seen once"] == "40.0%"  # items 5 to 8
    assert (row["from"], row["to"]) == ("1970-04-11", "1970-04-20")
    assert [(row["log"], row["items"], row["repeats"]) for row in published] == [
        ("Gowalla (published)", "1,271,638", ""),
        ("Tmall (published)", "2,194,464", ""),
    ]
    notes = [block.note for block in section.blocks if isinstance(block, Table)]
    assert "tiny: left out for fewer than 5 interactions: 1 of its users" in notes[0]
    assert "everything up to one moment" in notes[1]
    assert words_of(section) == "", "no word on the paper's logs: this is neither of them"
    check_written(section, tmp_path)


def test_without_its_file_a_log_is_described_by_what_was_prepared(
    log: LogFolder, tmp_path: Path
) -> None:
    both = [log, replace(log, name="prepared-only", source=None)]
    section = DatasetTable().section(recorded(DatasetTable(), setup_of(logs=both), tmp_path))
    bare, whole, *_ = table_of(section)
    assert (bare.pop("log"), whole.pop("log")) == ("prepared-only", "tiny")
    assert (bare.pop("from"), bare.pop("to")) == ("", "")
    assert bare.items() <= whole.items()
    held, same = table_of(section, 1)
    assert held.items() - same.items() == {("log", "prepared-only")}
    prepared = held["training interactions"], held["test users"]
    assert prepared == ("17", "2"), "90 % of 20, the validation target taken out; two go on after"


def test_a_log_of_the_paper_is_compared_with_the_published_figures(
    log: LogFolder, tmp_path: Path
) -> None:
    records = recorded(DatasetTable(), setup_of(logs=[replace(log, name="gowalla")]), tmp_path)
    assert "gowalla is not the paper's Gowalla" in words_of(DatasetTable().section(records))
    size = {"users": 86_168, "items": 1_271_638, "interactions": 6_397_903}
    records[0].figures["statistics"] |= size
    assert "gowalla has exactly the paper's" in words_of(DatasetTable().section(records))


def test_a_part_depends_on_the_log(log: LogFolder, tmp_path: Path) -> None:
    (before,) = DatasetTable().parts(setup_of(logs=[log]))
    (again,) = DatasetTable().parts(setup_of(logs=[log]))
    assert before.settings == again.settings
    longer = tmp_path / "log.csv"
    assert log.source is not None
    longer.write_text(log.source.read_text() + "3,5,99999999\n")
    (changed,) = DatasetTable().parts(setup_of(logs=[replace(log, source=longer)]))
    assert changed.settings != before.settings


# Models


def appendix_section(**changes: Json | int) -> Section:
    figures: Json = {
        "log": "toy",
        "model": "gsasrecjpq",
        "items": 10,
        "users": 600,
        "epochs": 41,
        "median_history": 7.0,
        "ndcg": 0.2,
        "ndcg_low": 0.1,
        "ndcg_high": 0.3,
        "recall": 0.4,
        "torch_ms": 2.0,
        "torch_p95_ms": 3.0,
        "megabytes": 1.0,
        "full_megabytes": 2.0,
        "settings": {
            "model": {"width": 8, "dropout": 0.2},
            "training": {
                "loss": "gbce",
                "num_negatives": 256,
                "windows": "last",
                "max_epochs": 200,
                "patience": 50,
            },
        },
    }
    return Appendix().section([Record("appendix", "toy", {}, MACHINE, figures | changes)])


def test_a_training_that_ran_out_of_time_is_said_to_have() -> None:
    ended = "41 epochs (ended by a time limit, before early stopping could act)"
    assert ended in words_of(appendix_section()), "an older record lacks the best epoch"
    assert ended in words_of(appendix_section(best_epoch=20))
    for changes in ({"epochs": 90, "best_epoch": 40}, {"epochs": 200, "best_epoch": 199}):
        words = words_of(appendix_section(**changes))
        assert f"{changes['epochs']} epochs." in words
        assert "time limit" not in words


def test_published_models_stand_beside_ours() -> None:
    published = table_of(appendix_section(), 1)
    assert {
        "published": "Tmall",
        "model": "gBERT4RecJPQ",
        "NDCG@10": "0.0155",
        "φ ms": "37.62",
        "checkpoint MB": "258",
    } in published
    tables = [b for b in appendix_section().blocks if isinstance(b, Table)]
    assert "times to φ over 512 of them" in tables[0].note


EVERYTHING: frozenset[Need] = frozenset({"log", "models", "full", "workloads", "variants", "codes"})


def test_models_are_trained_as_those_of_the_report(log: LogFolder) -> None:
    prepared = Prepared.load(log.prepared)

    def wanted(name: str, needs: frozenset[Need] = EVERYTHING) -> dict[str, Settings]:
        return wanted_models(name, prepared, needs, PLENTY, {})

    own = wanted("gitlog")
    assert all(settings.training.windows == "random" for settings in own.values())
    assert own["models/gsasrecjpq"].model.dropout == 0.5
    assert own["models/sasrecjpq"].model.dropout == own["models/sasrec"].model.dropout == 0.2
    variants = {
        (settings.training.pruning_loss, settings.training.pruning_weight, settings.model.dropout)
        for name, settings in own.items()
        if name.startswith("variants")
    }
    assert variants == {
        (loss, weight, 0.5) for loss in ("agreement", "concentration") for weight in (0.0003, 0.003)
    }
    codes = {
        name: (settings.model.codes, settings.model.num_splits)
        for name, settings in wanted("gitlog", frozenset({"codes"})).items()
    }
    assert codes == {
        "codes/svd-codes": ("svd", 8),
        "codes/learnt-m-8": ("learnt", 8),
        "codes/learnt-m-16": ("learnt", 16),
    }
    for settings in (*own.values(), *wanted("gowalla").values()):
        assert settings.training.patience < settings.training.max_epochs, "or it never stops early"
    assert wanted("gowalla")["models/gsasrecjpq"].training.windows == "last", "as in the paper"
    assert wanted("gitlog", frozenset({"log"})) == {}
    assert set(wanted("gitlog", frozenset({"workloads"}))) == {
        "models/sasrecjpq",
        "models/gsasrecjpq",
        "models/gbert4recjpq",
    }


# Models trained to be pruned

USERS, ITEMS = 60, 3000


def toy_workload(model: str, confidence: float, training: Json | None = None) -> Workload:
    """A model that looks for its users' targets, the more sharply the higher its confidence."""
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 64, (ITEMS, 8)).astype(np.uint8)
    embeddings = rng.standard_normal((8, 64, 4)).astype(np.float32)
    targets = rng.integers(0, ITEMS, USERS).astype(np.int32)
    wanted = embeddings[np.arange(8), codes[targets]].reshape(USERS, 32)
    noise = rng.standard_normal((USERS, 32)).astype(np.float32)
    users = np.float32(confidence) * wanted + noise
    return Workload("toy", model, codes, embeddings, users, targets, {"training": training or {}})


VAGUE = toy_workload("gsasrecjpq", 0.2)
SHARP = toy_workload("sharp", 2.0, {"pruning_loss": "agreement", "pruning_weight": 0.003})


def test_a_model_that_prunes_better_and_loses_nothing_is_named(tmp_path: Path) -> None:
    (record,) = recorded(Prunable(), setup_of([VAGUE], [SHARP]), tmp_path)
    base, variant = record.figures["models"]
    for entry, workload in ((base, VAGUE), (variant, SHARP)):
        every = workload.sequence_embeddings
        exact = workload.index.search(every, 10, method="pqtopk")
        assert entry["ndcg"] == pytest.approx(workload.ndcg(exact.ids))
        timed = workload.index.search(every[:20], 10, method="recjpqprune").stats
        assert entry["methods"]["recjpqprune"]["items_scored"] == np.median(timed.items_scored)
        timed = workload.index.search(every[:20], 10, method="cells").stats
        assert entry["methods"]["cells"]["items_touched"] == np.median(timed.items_touched)
    assert variant["difference"] == pytest.approx(variant["ndcg"] - base["ndcg"])
    assert variant["difference_low"] > 0
    work = variant["work"]["recjpqprune"]
    assert work["difference_high"] < 0
    assert work["difference"] == pytest.approx(
        work["mean_share"] - base["work"]["recjpqprune"]["mean_share"]
    )
    assert variant["relative_slack"] < base["relative_slack"]
    # How many of so few items cells look at differs between instruction sets.
    variant["work"]["cells"]["difference_high"] = -0.01
    section = Prunable().section([record])
    for method in ("`recjpqprune` scores", "`cells` looks at"):
        assert f"For 1 of 1 variants {method} fewer items" in words_of(section)
    assert "1 of them without a measurable loss" in words_of(section)
    assert "The best of those is agreement 0.003" in words_of(section)
    assert "These are 2 comparisons at 95 % each" in words_of(section)
    assert "All other settings are those of the base." in words_of(section)
    assert "slack ÷ reach" in table_of(section, 2)[0]
    for at in range(3):
        assert [row["model"] for row in table_of(section, at)] == ["base", "agreement 0.003"]
    check_written(section, tmp_path)


def test_a_negative_result_is_told_as_one(tmp_path: Path) -> None:
    base = replace(SHARP, model="gsasrecjpq", settings={})
    worse = replace(VAGUE, model="worse", settings=SHARP.settings)
    (record,) = recorded(Prunable(), setup_of([base], [worse]), tmp_path)
    words = words_of(Prunable().section([record]))
    assert "For none of 1 variants `recjpqprune` scores fewer items" in words
    # Less work, but at a price that is more than chance.
    record.figures["models"][1]["work"]["recjpqprune"]["difference_high"] = -0.01
    words = words_of(Prunable().section([record]))
    assert "For 1 of 1 variants `recjpqprune` scores fewer items" in words
    assert "none of them without a measurable loss of NDCG@10" in words
    assert "best of those" not in words


def test_slack_that_does_not_tell_the_work_is_said_not_to(tmp_path: Path) -> None:
    (record,) = recorded(Prunable(), setup_of([VAGUE], [SHARP]), tmp_path)

    def note() -> str:
        tables = [b for b in Prunable().section([record]).blocks if isinstance(b, Table)]
        return tables[2].note

    assert "does not tell" not in note(), "less slack, less work"
    record.figures["models"][1]["relative_slack"] = 9.0
    assert "agreement 0.003 has the largest, and `recjpqprune` scores less with it" in note()


def test_what_else_differs_from_the_base_is_told(tmp_path: Path) -> None:
    base = replace(VAGUE, settings={"model": {"width": 32}, "training": {"max_epochs": 9}})
    training = {"pruning_loss": "agreement", "pruning_weight": 0.003, "max_epochs": 9, "seed": 7}
    variant = replace(SHARP, settings={"model": {"width": 64}, "training": training})
    assert differing(base, variant) == {"model.width": [32, 64], "training.seed": [None, 7]}
    (record,) = recorded(Prunable(), setup_of([base], [variant]), tmp_path)
    words = words_of(Prunable().section([record]))
    assert "cannot be put down to it alone" in words
    assert (
        "agreement 0.003: `model.width` 64 in place of 32, `training.seed` 7 in place of" in words
    )
    assert "All other settings are those of the base." not in words


def test_variants_are_compared_with_the_one_trained_as_long() -> None:
    base = replace(VAGUE, model="base")
    other = replace(SHARP, model="other", settings={"training": {"pruning_weight": 0.0}})

    def compared(workloads: list[Workload], variants: list[Workload]) -> list[list[str]]:
        parts = Prunable().parts(setup_of(workloads, variants))
        return [list(part.settings["workloads"]) for part in parts]

    assert compared([VAGUE], [SHARP]) == [["gsasrecjpq", "sharp"]]
    assert compared([VAGUE], [SHARP, base, other]) == [["base", "sharp"]]
    assert compared([VAGUE], [other]) == [], "nothing was trained to be pruned"
    assert compared([replace(VAGUE, model="sasrecjpq")], [SHARP]) == [], "no base"
    assert compared([replace(VAGUE, log="elsewhere")], [SHARP]) == []


def test_other_users_cannot_be_compared() -> None:
    other = replace(SHARP, targets=np.roll(SHARP.targets, 1))
    (part,) = Prunable().parts(setup_of([VAGUE], [other]))
    with pytest.raises(InputError, match=r"toy-sharp: its test users are not those of toy-gsasrec"):
        part.run(no_progress)


def test_slack_is_the_way_down_from_the_best_sub_items() -> None:
    # One user, S = [[3, 1], [4, 0]]: the best sub-items make 7, a random item 2 + 2.
    embeddings = np.array([[[3], [1]], [[4], [0]]], np.float32)
    user = np.ones((1, 2), np.float32)

    def slack(codes: list[tuple[int, int]]) -> float:
        array = np.array(codes, np.uint8)
        workload = Workload("toy", "m", array, embeddings, user, np.zeros(1, np.int32), {})
        return relative_slack(workload, 1)

    assert slack([(0, 0)] * 10) == 0.0
    assert slack([(0, 0)] * 9 + [(1, 0)]) == pytest.approx(2 / 3)  # the 10th best has 5
    assert slack([(1, 1)] * 12) == pytest.approx(2.0)  # 1


# Peers


@pytest.fixture(scope="module")
def peer_records(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    folder = tmp_path_factory.mktemp("peers")
    other = replace(VAGUE, model="sasrecjpq")
    return recorded(PeerTable(), setup_of([other, VAGUE]), folder)


def test_peers_are_built_for_the_first_log_alone() -> None:
    elsewhere = replace(VAGUE, log="elsewhere")
    other = replace(elsewhere, model="sasrecjpq")
    assert [part.name for part in PeerTable().parts(setup_of([VAGUE, elsewhere]))] == ["toy"]
    parts = PeerTable().parts(setup_of([other, elsewhere, VAGUE]))
    assert [part.settings["workload"] for part in parts] == [elsewhere.checksum()]
    assert PeerTable().parts(setup_of([other]))
    assert not PeerTable().parts(setup_of([]))


def test_every_peer_is_measured_or_accounted_for(peer_records: list[Record]) -> None:
    (record,) = peer_records
    figures = record.figures
    assert figures["model"] == "gsasrecjpq"
    entries = {entry["name"]: entry for entry in figures["peers"]}
    assert list(entries)[:4] == ["auto", "scan", "recjpqprune", "pqtopk"]
    peers = [entry for entry in figures["peers"] if entry["family"] != "recprune"]
    # One tree of ScaNN, one index of Seismic.
    families = {re.split(", (?:reorder|heap)", entry["family"])[0] for entry in peers}
    assert len(families) + len(figures["left_out"]) == len(FAMILIES)
    for entry in figures["peers"]:
        assert entry["users"] == 50
        assert entry["p50_us"] > 0
        assert entry["bytes"] >= VAGUE.codes.nbytes
        if entry["exact"]:
            assert entry["recall"] > 0.99
            assert entry["ndcg"] == pytest.approx(entry["exact_ndcg"])
    assert all(entries[method]["recall"] == 1.0 for method in ("auto", "scan", "recjpqprune"))
    exact = VAGUE.index.search(VAGUE.sequence_embeddings[:50], 10, method="pqtopk").ids
    assert entries["auto"]["ndcg"] == pytest.approx(VAGUE.ndcg(exact))
    by_probes = [entry for entry in peers if entry["family"] == "FAISS IVF-PQ, 256 lists"]
    recalls = [entry["recall"] for entry in by_probes]
    assert recalls == sorted(recalls), "more groups searched, more found"


def test_the_section_of_peers_says_what_the_figures_say(
    peer_records: list[Record], tmp_path: Path
) -> None:
    section = PeerTable().section(peer_records)
    rows = table_of(section)
    assert rows[0]["search"] == "**recprune auto**"
    assert (rows[0]["recall@10"], rows[0]["NDCG@10 lost"]) == ("1.0000", "+0.00%")
    assert len(rows) == len(peer_records[0].figures["peers"])
    assert len([block for block in section.blocks if isinstance(block, Picture)]) == 2
    built = [block for block in section.blocks if isinstance(block, Table)][1]
    for entry in peer_records[0].figures["peers"]:
        assert entry["family"] in {row[0] for row in built.rows}
        assert (entry["settings"] == "") == (entry["family"] == "recprune")
        assert entry["settings"] in built.note
    check_written(section, tmp_path)


def test_usearch_is_built_as_its_authors_have_it() -> None:
    index = pytest.importorskip("usearch.index").Index(ndim=4)
    assert (Usearch().links, Usearch().build_breadth) == (index.connectivity, index.expansion_add)


def test_new_build_settings_make_a_new_part(monkeypatch: pytest.MonkeyPatch) -> None:
    (before,) = PeerTable().parts(setup_of([VAGUE]))
    monkeypatch.setitem(FAMILIES, "faiss_hnsw", FaissHNSW(links=8))
    (after,) = PeerTable().parts(setup_of([VAGUE]))
    assert before.settings != after.settings


class Answers:
    """A search that finds the first items, so many of them, whoever asks."""

    def __init__(self, found: int) -> None:
        self.found, self.asked = found, 0

    def __call__(self, _: Float32Array, k: int) -> tuple[Int64Array, None, None]:
        self.asked += 1
        ids = np.full(k, -1, np.int64)
        ids[: self.found] = np.arange(self.found)
        return ids, None, None


def test_a_sweep_ends_where_enough_is_found() -> None:
    answers = {found: Answers(found) for found in (5, 9, 10, 7)}
    contenders = {
        f"graph, {at}": _Contender(f"graph, {at}", "graph", False, 1, 1.0, own, "")
        for at, own in enumerate(answers.values())
    } | {"lists": _Contender("lists", "lists", False, 1, 1.0, Answers(3), "")}
    exact = np.tile(np.arange(10), (4, 1))
    queries, apart = np.zeros((9, 2), np.float32), np.arange(10)
    seconds, not_tried = _sweep(contenders, queries, exact, apart, no_progress)
    assert list(seconds) == ["graph, 0", "graph, 1", "graph, 2", "lists"]
    assert not_tried == {"graph": 1}
    assert answers[7].asked == 0, "what comes after ten of ten needs no trying"


def test_a_sweep_ends_where_an_exact_search_is_faster() -> None:
    def slowly(_: Float32Array, k: int) -> tuple[Int64Array, None, None]:
        time.sleep(0.01)
        return np.full(k, -1), None, None

    contenders = {
        "graph, 1": _Contender("graph, 1", "graph", False, 1, 1.0, slowly, ""),
        "graph, 2": _Contender("graph, 2", "graph", False, 1, 1.0, slowly, ""),
        "FAISS PQ": _Contender("FAISS PQ", "FAISS PQ", True, 1, 1.0, Answers(10), ""),
    }
    exact = np.tile(np.arange(10), (2, 1))
    queries, apart = np.zeros((9, 2), np.float32), np.arange(10)
    seconds, not_tried = _sweep(contenders, queries, exact, apart, no_progress)
    assert list(seconds) == ["FAISS PQ", "graph, 1"]
    assert not_tried == {"graph": 1}


def test_a_tie_that_is_broken_otherwise_is_no_miss() -> None:
    codes = np.array([[1, 2], [3, 4], [1, 2], [5, 6], [1, 2]], np.uint8)
    twins = same_codes(codes)
    assert len(set(twins.tolist())) == 3
    exact = by_codes(np.array([[0, 2, 1]]), twins)
    for found, expected in (
        ([[4, 2, 1]], 1.0),  # the third of the twins in place of the first
        ([[4, 1, 2]], 1.0),
        ([[0, 1, 3]], 2 / 3),  # one of the twins alone
        ([[0, 3, -1]], 1 / 3),
        ([[3, -1, -1]], 0.0),
    ):
        assert recall(by_codes(np.array(found), twins), exact) == pytest.approx(expected)


def entry_of(name: str, milliseconds: float, found: float, exact: bool = False) -> Json:
    return {
        "name": name,
        "family": "recprune" if name == "auto" else name.split(",")[0],
        "exact": exact,
        "bytes": 10**6,
        "build_seconds": 1.0,
        "users": 50,
        "recall": found,
        "settings": "" if name == "auto" else f"{name} as usual",
        "ndcg": 0.1 * found,
        "exact_ndcg": 0.1,
        "queries": 500,
        "p50_us": 1000 * milliseconds,
        "p95_us": 2000 * milliseconds,
    }


def peers_section(*entries: Json) -> Section:
    figures: Json = {
        "log": "toy",
        "model": "gsasrecjpq",
        "items": ITEMS,
        "instruction_set": "avx2",
        "build_threads": 2,
        "budget_bytes": 1,
        "peers": [entry_of("auto", 1.0, 1.0, True), *entries],
        "left_out": {"scann": "scann is not installed: pip install scann"},
    }
    return PeerTable().section([Record("peers", "toy", {}, MACHINE, figures)])


def test_sentences_on_peers_follow_the_figures() -> None:
    section = peers_section(
        entry_of("flat", 50.0, 0.998, True),
        entry_of("graph, 16", 0.5, 0.72),
        entry_of("graph, 64", 2.0, 0.91),
        entry_of("groups, 9", 3.0, 0.96),
    )
    words = words_of(section)
    assert "The fastest exact peer is flat: 50.000 ms, 50.0 × `auto`." in words
    assert "Exact peers find 99.80% of our top 10 or more" in words
    assert (
        "Of the 3 approximate settings tried, 1 is faster than `auto`; the best recall@10 " in words
    )
    assert "among them is 0.720." in words
    assert "recall@10 of 0.9 or more, the fastest of them is graph, 64: 2.000 ms" in words
    assert "None of them reaches a recall@10 of 0.99." in words
    assert "disagrees" not in words
    assert [row["NDCG@10 lost"] for row in table_of(section)][2:4] == ["+28.00%", "+9.00%"]
    table = next(block for block in section.blocks if isinstance(block, Table))
    assert "Left out: scann: scann is not installed: pip install scann." in table.note


def test_an_exact_peer_that_is_not_is_told_apart() -> None:
    words = words_of(
        peers_section(entry_of("flat", 50.0, 0.998, True), entry_of("broken", 60.0, 0.8, True))
    )
    assert "**broken disagrees**: it finds 80.00% of our top 10" in words
    assert "The other exact peers find 99.80% of our top 10 or more" in words


def test_settings_that_were_not_tried_are_told() -> None:
    def note(figures: Json) -> str:
        section = PeerTable().section([Record("peers", "toy", {}, MACHINE, figures)])
        return next(block.note for block in section.blocks if isinstance(block, Table))

    figures: Json = {
        "log": "toy",
        "model": "gsasrecjpq",
        "items": ITEMS,
        "instruction_set": "avx2",
        "build_threads": 2,
        "budget_bytes": 1,
        "peers": [entry_of("auto", 1.0, 1.0, True)],
        "left_out": {},
    }
    assert "not tried" not in note(figures)
    assert "more thorough ones, not tried: graph: 2. No peer" in note(
        figures | {"not_tried": {"graph": 2}}
    )


def test_recall_is_spread_where_it_crowds() -> None:
    """Ours at 1 stands right of everything, and the same step of what is missing is as wide."""
    found = (0.9, 0.99, 0.999)
    section = peers_section(*(entry_of(f"graph, {recall}", 5.0, recall) for recall in found))
    picture = next(block for block in section.blocks if isinstance(block, Picture))
    words = re.findall(r"<text[^>]*>([^<]*)</text>", picture.svg)
    assert {"0.9", "0.99", "1", "auto"} <= set(words)
    (graph,) = re.findall(r'<path d="(M[^"]+)"[^>]*stroke-width: 0.9', picture.svg)
    first, second, third = (float(x) for x in re.findall(r"[ML] (\S+) ", graph))
    assert second - first == pytest.approx(third - second, rel=1e-3)
    auto, _ = re.findall(r'<use [^>]*x="(\S+)"[^>]*style="fill: #0072b2', picture.svg)
    assert float(auto) > third, "the other one is in the legend"


def test_the_scale_of_recall_ends_where_the_data_end() -> None:
    section = peers_section(entry_of("graph, 1", 5.0, 0.6), entry_of("graph, 2", 6.0, 0.95))
    picture = next(block for block in section.blocks if isinstance(block, Picture))
    words = re.findall(r"<text[^>]*>([^<]*)</text>", picture.svg)
    assert {"0.5", "0.9", "1"} <= set(words)
    assert not {"0.99", "0.999"} & set(words)


def test_where_exact_answers_have_no_ndcg_nothing_is_said_of_it() -> None:
    none = [entry_of(name, 1.0, 1.0) | {"exact_ndcg": 0.0} for name in ("graph, 1", "graph, 2")]
    section = peers_section(*none)
    assert [row["NDCG@10 lost"] for row in table_of(section)] == ["+0.00%", "–", "–"]
    assert len([block for block in section.blocks if isinstance(block, Picture)]) == 1


def test_engines_of_sparse_vectors_are_cited_where_they_were_measured() -> None:
    assert "sparse vectors" not in words_of(peers_section(entry_of("flat", 5.0, 1.0, True)))
    words = words_of(peers_section(entry_of("Seismic, heap factor 1", 5.0, 0.9)))
    assert "Seismic hold items as sparse vectors" in words
    assert "[SIGIR 2024](https://doi.org/10.1145/3626772.3657769)" in words
    assert "Block-Max" not in words
    both = [entry_of(name, 5.0, 0.9) for name in ("BMP, blocks of 8", "Seismic, heap factor 1")]
    words = words_of(peers_section(*both))
    assert "BMP and Seismic hold items as sparse vectors" in words
    assert "Mallia, Suel and Tonellotto" in words


def test_without_peers_there_is_still_a_table() -> None:
    words = words_of(peers_section())
    assert "`auto` takes 1.000 ms" in words
    assert "peer is" not in words
    assert "approximate" not in words


def test_what_does_not_fit_is_left_out_with_its_reason() -> None:
    index_bytes = VAGUE.index.describe()["bytes"]
    vectors = 4 * ITEMS * 32
    figures = measure(VAGUE, 5, 5, index_bytes + vectors, 0, no_progress)
    assert {entry["family"] for entry in figures["peers"]} >= {"recprune", "torch PQTopK"}
    assert "faiss_flat" in figures["left_out"]
    assert all(
        "the budget is" in reason or "not installed" in reason
        for reason in figures["left_out"].values()
    )
