"""From a log to recommendations, as typed: prepare, train, export; and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recprune.cli import main
from recprune.preparation.prepared import Prepared
from recprune.recommender.recommender import Recommender
from recprune.training.checkpoint import MODEL
from tests.support.shops import SETTINGS, SIZES, Shop, run_shown


def prepared_again(shop: Shop, name: str, *options: str) -> str:
    out = str(shop.folder / name)
    run_shown("prepare", str(shop.folder / "log.csv"), "--out", out, *options, *SIZES)
    return out


def test_a_log_becomes_a_recommender_in_three_commands(shop: Shop) -> None:
    assert "60 items in 4 splits of 8 sub-items" in shop.shown["prepare"]
    assert "sasrec (recjpq) for 60 items" in shop.shown["train"]
    assert (
        shop.shown["export"]
        == f"saved Recommender(sasrec, svd codes, 60 items) to {shop.recommender}\n"
    )
    prepared = Prepared.load(shop.prepared)
    trained = Recommender.from_training(prepared, shop.model)
    exported = Recommender.load(shop.recommender, verify=True)
    history = ["salt, fine", "éclair", "tea5"]
    assert exported.recommend([history], 10).items == trained.recommend([history], 10).items
    assert exported.settings["preparation"]["log"] == "log.csv"
    assert exported.settings["model"]["width"] == 16


def test_exporting_again_replaces_the_recommender(shop: Shop, tmp_path: Path) -> None:
    out = str(tmp_path / "recommender")
    for _ in range(2):
        run_shown("export", shop.prepared, shop.model, "--out", out)
    Recommender.load(out, verify=True)


# Mistakes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other(shop: Shop) -> str:
    """The same log, prepared with another codebook."""
    return prepared_again(shop, "other", "--assignment", "random")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "nowhere", "MODEL", "--out", "x"], "nowhere: not a saved prepared log"),
        (["export", "PREPARED", "nowhere", "--out", "x"], f"nowhere/{MODEL}: no such file"),
        (["export", "MODEL", "PREPARED", "--out", "x"], "model: not a saved prepared log"),
        (["export", "OTHER", "MODEL", "--out", "x"], "was trained on another prepared log"),
        (["export", "PREPARED", "MODEL", "--out", "PREPARED"], "is a saved prepared log"),
        (["export", "PREPARED", "MODEL", "--out", "MODEL"], "already exists and is something else"),
        (["evaluate", "nowhere", "MODEL"], "nowhere: not a saved prepared log"),
        (["evaluate", "PREPARED", "nowhere"], f"nowhere/{MODEL}: no such file"),
        (["evaluate", "OTHER", "MODEL"], f"model/{MODEL}: was trained on another prepared log"),
        (["evaluate", "PREPARED", "MODEL", "-k", "0"], "-k is 0"),
        (["evaluate", "PREPARED", "-k", "1000000000"], "k is 1000000000, expected 1 to 65596"),
        (["evaluate", "PREPARED", "MODEL", "--threads", "0"], "threads is 0"),
        (["evaluate", "PREPARED", "MODEL", "--seed", "-1"], "seed is -1"),
        (["evaluate", "PREPARED", "MODEL", "--users", "-5"], "--users is -5"),
        (["evaluate", "PREPARED", "MODEL", "--users", "0"], "--users is 0"),
        (["evaluate", "PREPARED", "MODEL", "--json", "no/such/x"], "no/such"),
        (["recommend", "nowhere", "--history", ""], "nowhere: not a saved recommender"),
        (["recommend", "PREPARED", "--history", ""], "holds a saved prepared log, not a recommen"),
        (["recommend", "RECOMMENDER", "--histories", "nowhere.txt"], "nowhere.txt: no such file"),
        (["recommend", "RECOMMENDER", "--histories", "."], ".: is a folder, expected a file"),
        (["histories", "LOG", "--out", "LOG"], "log.csv: is the log itself"),
        (
            ["export", "PREPARED", "MODEL", "--out", "LOG/x"],
            "x: cannot be written: a file is in the way",
        ),
        (["recommend", "LOG", "--history", ""], "log.csv: not a saved recommender: it is a file"),
        (["recommend", "RECOMMENDER", "--history", "tea5", "-k", "-1"], "k is -1"),
        (["recommend", "RECOMMENDER", "--history", "", "-k", "-1"], "k is -1"),
        (["recommend", "RECOMMENDER", "--history", "tea5", "--method", "fast"], "method is 'fast'"),
        (["recommend", "RECOMMENDER", "--history", "", "--method", "fast"], "method is 'fast'"),
        (["recommend", "RECOMMENDER", "--history", "tea5", "--threads", "0"], "threads is 0"),
    ],
)
def test_mistakes_end_with_a_message_and_leave_nothing(
    shop: Shop,
    other: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    places = {
        "PREPARED": shop.prepared,
        "MODEL": shop.model,
        "RECOMMENDER": shop.recommender,
        "OTHER": other,
        "LOG": str(shop.folder / "log.csv"),
        "LOG/x": str(shop.folder / "log.csv" / "x"),
    }
    monkeypatch.chdir(tmp_path)
    assert main([places.get(word, word) for word in words]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"recprune {words[0]}: ")
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == "" or "no/such/x" in words
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "prepared", "model"], "--out"),
        (["recommend", "folder"], "--history --histories --user is required"),
        (["recommend", "folder", "--history", "a", "--histories", "b"], "not allowed with"),
        (["recommend", "folder", "--history", "a", "-k", "many"], "invalid int value: 'many'"),
        (["recommend", "folder", "--history", "a", "--include-all"], "--include-all"),
        (["evaluate"], "PREPARED"),
    ],
)
def test_wrong_words_show_the_usage_of_the_command(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert f"usage: recprune {words[0]}" in shown
    assert message in shown


# All of a log ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(shop: Shop) -> str:
    """The same log, with nothing held out."""
    return prepared_again(shop, "whole", "--holdout", "none")


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(words) == 2
    return capsys.readouterr().err


def test_a_model_says_what_it_was_trained_with(shop: Shop, tmp_path: Path) -> None:
    file = Path(shop.model, "settings.json")
    settings = json.loads(file.read_text())
    assert settings["model"]["width"] == 16
    assert settings["training"]["max_epochs"] == 2
    assert settings == {
        part: Recommender.load(shop.recommender).settings[part] for part in ("model", "training")
    }
    same = tmp_path / "same"
    words = ["train", shop.prepared, "--device", "cpu", "--settings", str(file)]
    run_shown(*words, "--out", str(same))
    for name in ("settings.json", "model.safetensors"):
        assert (same / name).read_bytes() == Path(shop.model, name).read_bytes()


def test_a_model_of_all_of_a_log(
    shop: Shop, whole: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    epochs = [
        json.loads(line) for line in Path(shop.model, "epochs.jsonl").read_text().splitlines()
    ]
    best = max(epochs, key=lambda entry: float(entry["ndcg"]))["epoch"]
    no_epochs = [word for word in SETTINGS if not word.startswith("max_epochs")][:-1]
    words = ["train", whole, "--device", "cpu", *no_epochs]
    out = str(tmp_path / "model")
    message = complaint(capsys, *words, "--out", out)
    assert "has no validation users to say when to stop" in message
    assert "--epochs-of FOLDER" in message
    assert "--set max_epochs=N" in message
    assert not Path(out).exists()
    shown = run_shown(*words, "--out", out, "--epochs-of", shop.model)
    assert "NDCG" not in shown
    assert f"trained for {best} epochs" in shown
    assert len(Path(out, "epochs.jsonl").read_text().splitlines()) == best
    # What a file says is a limit, not a number that anybody has judged.
    file = tmp_path / "settings.json"
    file.write_text('{"training": {"max_epochs": 9}}')
    limit = ["--settings", str(file), "--out", str(tmp_path / "by file")]
    assert "no validation users to say when to stop" in complaint(capsys, *words, *limit)
    shown = run_shown(*words, *limit, "--epochs-of", shop.model)
    assert f"trained for {best} epochs" in shown
    other = str(tmp_path / "other")
    run_shown(*words, "--out", other, "--set", f"max_epochs={best}")
    assert (
        Path(out, "model.safetensors").read_bytes() == Path(other, "model.safetensors").read_bytes()
    )
    run_shown("export", whole, out, "--out", str(tmp_path / "recommender"))
    recommender = Recommender.load(tmp_path / "recommender")
    assert recommender.popularity.sum() == 40 * 20
    assert "nobody to evaluate on: it was prepared with --holdout none" in complaint(
        capsys, "evaluate", whole, out
    )
    # What was trained without validation users says nothing about epochs.
    third = [*words, "--out", str(tmp_path / "third"), "--epochs-of"]
    assert "no epoch found anything for validation users" in complaint(capsys, *third, out)
    assert "epochs.jsonl: cannot be read: No such file" in complaint(capsys, *third, whole)
    both = [*third, shop.model, "--set", "max_epochs=3"]
    assert "--epochs-of says how long to train, and so does max_epochs" in complaint(capsys, *both)
    Path(other, "epochs.jsonl").write_text("no JSON\n")
    assert "epochs.jsonl: not the epochs of a training" in complaint(capsys, *third, other)
