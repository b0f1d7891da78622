"""A trained model that came as arrays is measured like one that was trained here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recprune.cli import main
from recprune.experiments.framework.record import load_record
from recprune.experiments.framework.workload import Workload
from recprune.search import reference

USERS, ITEMS = 30, 2_000


def write_model(folder: Path, *, targets: bool) -> Path:
    rng = np.random.default_rng(0)
    folder.mkdir()
    np.save(folder / "codes.npy", rng.integers(0, 256, (ITEMS, 8), dtype=np.uint8))
    embeddings = rng.standard_normal((8, 256, 4), dtype=np.float32)
    np.save(folder / "sub_item_embeddings.npy", embeddings)
    np.save(folder / "sequence_embeddings.npy", rng.standard_normal((USERS, 32), dtype=np.float32))
    if targets:
        np.save(folder / "targets.npy", rng.integers(0, ITEMS, USERS))
    return folder


def test_what_is_given_is_what_is_searched(tmp_path: Path) -> None:
    workload = Workload.from_files("mine", write_model(tmp_path / "model", targets=False))
    found = workload.index.search(workload.sequence_embeddings, 10)
    for user, query in enumerate(workload.sequence_embeddings):
        scores = reference.sub_item_scores(query, workload.sub_item_embeddings)
        ids, values = reference.exhaustive(scores, workload.codes, 10)
        assert found.ids[user].tolist() == ids.tolist()
        assert found.scores[user].tobytes() == values.tobytes()
    assert workload.ndcg(found.ids) is None, "nobody knows what the users took"


def test_ndcg_is_that_of_the_given_targets(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", targets=True)
    found = Workload.from_files("mine", folder).index.search(
        np.load(folder / "sequence_embeddings.npy"), 10
    )
    # Every user took the second best item: 1 / log2(1 + 2) for each.
    np.save(folder / "targets.npy", found.ids[:, 1])
    workload = Workload.from_files("mine", folder)
    assert workload.ndcg(found.ids) == pytest.approx(1 / np.log2(3))


def test_a_part_has_what_its_users_took_and_the_codes_of_the_whole(tmp_path: Path) -> None:
    whole = Workload.from_files("mine", write_model(tmp_path / "model", targets=True))
    part = whole.in_small(100, 20)
    assert part.codes.shape == (100, 8)
    assert (part.codes[part.targets] == whole.codes[whole.targets[:20]]).all()
    rows = {bytes(row) for row in whole.codes}
    assert {bytes(row) for row in part.codes} <= rows
    assert (part.sequence_embeddings == whole.sequence_embeddings[:20]).all()
    assert (whole.in_small(ITEMS + 1, USERS + 1).codes == whole.codes).all()
    unknown = Workload.from_files("mine", write_model(tmp_path / "other", targets=False))
    assert unknown.in_small(100, 20).codes.shape == (100, 8)


def test_a_quick_run_is_on_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recprune.commands.reproduce._QUICK_ITEMS", 500)
    folder = write_model(tmp_path / "model", targets=True)
    command = ["reproduce", "--out", str(tmp_path), "--workload", f"mine={folder}", "--only", "rq1"]
    assert main([*command, "--quick"]) == 0
    record = load_record(tmp_path / "quick-records" / "rq1.mine-given.json")
    assert record.figures["items"] == 500


@pytest.mark.parametrize("targets", [False, True])
def test_experiments_with_searches_run_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], targets: bool
) -> None:
    folder = write_model(tmp_path / "model", targets=targets)
    command = ["reproduce", "--quick", "--out", str(tmp_path), "--workload", f"mine={folder}"]
    only = ("datasets", "rq1", "rq3", "heat-map", "unsafe", "peers")
    for name in only:
        command += ["--only", name]
    assert main(command) == 0, capsys.readouterr().err
    records = {path.name for path in (tmp_path / "quick-records").glob("*.json")}
    own = {"rq1.mine-given.json", "rq3.mine-given.json", "heat-map.mine.json", "peers.mine.json"}
    assert records == own | ({"unsafe.mine-given.json"} if targets else set())
    assert not (tmp_path / "quick").exists(), "no log was made, and nothing trained"
    methods = load_record(tmp_path / "quick-records" / "rq1.mine-given.json").figures["methods"]
    assert ("ndcg" in methods["auto"]) == targets
    text = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "**mine**, given model, 2,000 items" in text
    assert ("What they took next is not known." in text) != targets


def test_what_is_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "model", targets=True)

    def refused(message: str, *given: str) -> None:
        workloads = [text for each in given for text in ("--workload", each)]
        command = ["reproduce", "--quick", "--out", str(tmp_path / "out"), "--only", "rq1"]
        assert main([*command, *workloads]) == 2, given
        assert message in capsys.readouterr().err

    refused("expected NAME=FOLDER", str(folder))
    refused("expected NAME=FOLDER", "mine=")
    refused("expected NAME=FOLDER", f"my model={folder}")
    refused("mine is given twice", f"mine={folder}", f"mine={folder}")
    refused("nowhere: no such folder", f"mine={tmp_path / 'nowhere'}")

    targets = np.load(folder / "targets.npy")
    for broken, message in (
        (targets[:-1], "targets.npy: int64[29], expected integers [30]"),
        (targets.astype(np.float64), "targets.npy: float64[30], expected integers [30]"),
        (np.where(np.arange(USERS) == 4, ITEMS, targets), "targets[4] is 2000, expected an item"),
        (np.where(np.arange(USERS) == 7, -1, targets), "targets[7] is -1, expected an item"),
    ):
        np.save(folder / "targets.npy", broken)
        refused(message, f"mine={folder}")
    (folder / "targets.npy").write_bytes(b"")
    refused("targets.npy: not a readable .npy file", f"mine={folder}")
    (folder / "targets.npy").unlink()
    np.save(folder / "sequence_embeddings.npy", np.zeros((5, 31), np.float32))
    refused("sequence_embeddings has shape [5, 31], expected [32]", f"mine={folder}")
    np.save(folder / "sequence_embeddings.npy", np.zeros((0, 32), np.float32))
    refused("sequence_embeddings has no rows", f"mine={folder}")
    np.save(folder / "sequence_embeddings.npy", np.full((5, 32), np.nan, np.float32))
    refused("sequence_embeddings[0, 0] is nan", f"mine={folder}")
    (folder / "codes.npy").unlink()
    refused("codes.npy: no such file", f"mine={folder}")
