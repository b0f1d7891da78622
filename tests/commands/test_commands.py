"""From a log to recommendations, as typed: prepare, train, export, evaluate, recommend."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recprune.cli import main
from recprune.commands.answer_options import parse_boosts
from recprune.evaluation.evaluation import Evaluation
from recprune.preparation.prepared import Prepared
from recprune.recommender import Recommender
from recprune.training.checkpoint import MODEL
from tests.preparation.test_prepared import cycle

torch.set_num_threads(1)  # of tiny models, threads would only wait for each other

COMMAND = Path(sys.executable).with_name("recprune")
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
SIZES = ["--splits", "4", "--sub-items", "8", "--validation-users", "10"]
SETTINGS = [
    word
    for value in (
        "width=16", "length=8", "num_blocks=1", "num_negatives=4", "batch_size=10", "max_epochs=2"
    )
    for word in ("--set", value)
]  # fmt: skip


@dataclass
class Shop:
    """A log, and all that the commands made of it."""

    folder: Path
    shown: dict[str, str]  # by command

    @property
    def prepared(self) -> str:
        return str(self.folder / "prepared")

    @property
    def model(self) -> str:
        return str(self.folder / "model")

    @property
    def recommender(self) -> str:
        return str(self.folder / "recommender")


def run_shown(*words: str) -> str:
    """Run a command that succeeds and return all that it says."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        assert main(words) == 0, shown.getvalue()
    return shown.getvalue()


def make_shop(folder: Path, name_of: Callable[[int], str]) -> Shop:
    rng = np.random.default_rng(6)
    with (folder / "log.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user_id", "item_id", "timestamp"])
        for user in range(40):
            place = int(rng.integers(60))
            for step in range(20):
                place = int(rng.integers(60)) if rng.random() < 0.2 else (place + 1) % 60
                seconds = 1_500_000_000 + 10_000 * step + user  # over two days
                writer.writerow([f"user {user}", name_of(place), seconds])
    shop = Shop(folder, {})
    for command, words in (
        ("prepare", [str(folder / "log.csv"), "--out", shop.prepared, *SIZES]),
        ("train", [shop.prepared, "--out", shop.model, "--device", "cpu", *SETTINGS]),
        ("export", [shop.prepared, shop.model, "--out", shop.recommender]),
    ):
        shop.shown[command] = run_shown(command, *words)
    return shop


def named(item: int) -> str:
    return {0: "salt, fine", 1: "éclair", 2: "[red]"}.get(item, f"tea{item}")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return make_shop(tmp_path_factory.mktemp("shop"), named)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    """A shop whose items are numbers, −20 to 275."""
    return make_shop(tmp_path_factory.mktemp("numbered"), lambda item: str(5 * item - 20))


@pytest.fixture(scope="module")
def other(shop: Shop) -> str:
    """The same log, prepared with another codebook."""
    return prepared_again(shop, "other", "--assignment", "random")


def prepared_again(shop: Shop, name: str, *options: str) -> str:
    out = str(shop.folder / name)
    run_shown("prepare", str(shop.folder / "log.csv"), "--out", out, *options, *SIZES)
    return out


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_log_becomes_a_recommender_in_three_commands(shop: Shop) -> None:
    assert "60 items in 4 splits of 8 sub-items" in shop.shown["prepare"]
    assert "sasrec (recjpq) for 60 items" in shop.shown["train"]
    assert shop.shown["export"] == f"saved Recommender(sasrec, 60 items) to {shop.recommender}\n"
    prepared = Prepared.load(shop.prepared)
    trained = Recommender.from_training(prepared, shop.model)
    exported = Recommender.load(shop.recommender, verify=True)
    history = ["salt, fine", "éclair", "tea5"]
    assert exported.recommend([history], 10).items == trained.recommend([history], 10).items
    assert exported.settings["preparation"]["log"] == "log.csv"
    assert exported.settings["model"]["width"] == 16


# Export, and mistakes ----------------------------------------------------------------------------


def test_exporting_again_replaces_the_recommender(shop: Shop, tmp_path: Path) -> None:
    out = str(tmp_path / "recommender")
    for _ in range(2):
        run_shown("export", shop.prepared, shop.model, "--out", out)
    Recommender.load(out, verify=True)


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
        (["evaluate", "PREPARED", "MODEL", "--threads", "0"], "threads is 0"),
        (["evaluate", "PREPARED", "MODEL", "--seed", "-1"], "seed is -1"),
        (["evaluate", "PREPARED", "MODEL", "--users", "-5"], "--users is -5"),
        (["evaluate", "PREPARED", "MODEL", "--users", "0"], "--users is 0"),
        (["evaluate", "PREPARED", "MODEL", "--json", "no/such/x"], "no/such"),
        (["recommend", "nowhere", "--history", ""], "nowhere: not a saved recommender"),
        (["recommend", "PREPARED", "--history", ""], "holds a saved prepared log, not a recommen"),
        (["recommend", "RECOMMENDER", "--histories", "nowhere.txt"], "nowhere.txt: no such file"),
        (["recommend", "RECOMMENDER", "--histories", "."], "Is a directory"),
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
        (["recommend", "folder"], "--history --histories is required"),
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


# All of a log -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(shop: Shop) -> str:
    """The same log, with nothing held out."""
    return prepared_again(shop, "whole", "--holdout", "none")


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(words) == 2
    return capsys.readouterr().err


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


# Evaluate ----------------------------------------------------------------------------------------

BASELINES = {"popularity", "recent items", "personal frequency"}  # there are more
FITTED = ("popularity, last [0-9]* ?days?", "personal frequency, τ = [0-9]+")


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("exclude_seen", [False, True])
def test_evaluate_shows_figures_beside_baselines_and_a_verdict(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str], exclude_seen: bool
) -> None:
    file = tmp_path / "figures.json"
    options = ["--exclude-seen"] if exclude_seen else []
    arguments = ["evaluate", shop.prepared, shop.model, "-k", "7", "--json", str(file), *options]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    prepared = Prepared.load(shop.prepared)
    num_users = len(prepared.test)
    assert f"{num_users} test users, 60 items, full catalogue" in shown.out
    for column in ("NDCG@7", "Recall@7", "Coverage@7", "Bias@7", "seconds"):
        assert column in shown.out
    for name in {"model", *BASELINES, *FITTED}:
        assert re.search(rf"│ {name} +│ \d\.\d{{4}} \[\d\.\d{{4}}, \d\.\d{{4}}\]", shown.out)
    verdict = shown.out.splitlines()[-1]
    assert re.fullmatch(r"model (beats|does not beat) every baseline on NDCG@7: .*\.", verdict)
    assert shown.err == f"figures written to {file}\n"

    content = json.loads(file.read_text())
    assert content["users"] == num_users
    evaluations = {entry["name"]: Evaluation.from_json(entry) for entry in content["evaluations"]}
    assert next(iter(evaluations)) == "model"
    assert set(evaluations) > BASELINES
    assert [entry.to_json() for entry in evaluations.values()] == content["evaluations"]
    # The figures are those of asking the recommender itself.
    recommender = Recommender.load(shop.recommender)
    gains = []
    for target in range(num_users):
        history = prepared.item_ids.take(prepared.history(prepared.test, target).tolist())
        found = recommender.recommend([history], 7, exclude_seen=exclude_seen).ids[0].tolist()
        wanted = int(prepared.test.items[target])
        gains.append(1.0 / np.log2(found.index(wanted) + 2) if wanted in found else 0.0)
    ndcg = evaluations["model"].metrics["NDCG@7"]
    assert ndcg.mean == pytest.approx(np.mean(gains))
    assert evaluations["model"].num_users == num_users
    assert f"{ndcg.mean:.4f} [{ndcg.low:.4f}, {ndcg.high:.4f}]" in shown.out
    assert f"{ndcg.mean:.4f} against" in verdict
    # Repeats apart: who had the target before.
    histories = [prepared.history(prepared.test, target) for target in range(num_users)]
    pairs = zip(histories, prepared.test.items.tolist(), strict=True)
    repeated = np.array([target in history.tolist() for history, target in pairs])
    assert 0 < repeated.sum() < num_users
    share = f"{repeated.sum()} users, {repeated.mean():.1%}"
    assert f"Where the target repeats the user's own history: {share}" in shown.out
    assert f"Where it is new to the user: {num_users - repeated.sum()} users" in shown.out
    assert content["repeat_share"] == repeated.mean()
    for group, users in (
        (evaluations["model"].repeats, repeated),
        (evaluations["model"].others, ~repeated),
    ):
        assert group is not None
        assert group.num_users == users.sum()
        estimate = group.metrics["NDCG@7"]
        assert estimate.mean == pytest.approx(np.array(gains)[users].mean())
        figures = f"{estimate.mean:.4f} [{estimate.low:.4f}, {estimate.high:.4f}]"
        assert re.search(rf"│ model +│ {re.escape(figures)}", shown.out)


@pytest.mark.usefixtures("wide")
def test_evaluate_of_some_users_without_baselines(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    means = []
    for seed in ("1", "1", "2"):
        file = tmp_path / "figures.json"
        options = ["--users", "9", "--no-baselines", "--seed", seed, "--json", str(file)]
        assert main(["evaluate", shop.prepared, shop.model, *options]) == 0
        shown = capsys.readouterr().out
        assert "9 test users" in shown
        assert "baseline" not in shown
        assert "popularity" not in shown
        (entry,) = json.loads(file.read_text())["evaluations"]
        evaluation = Evaluation.from_json(entry)
        assert evaluation.num_users == 9
        means.append(evaluation.metrics["Recall@10"].mean)
    assert means[0] == means[1]
    # More users than there are, and more places than items: all of them.
    everybody = len(Prepared.load(shop.prepared).test)
    options = ["--users", "100000", "-k", "100", "--no-baselines"]
    assert main(["evaluate", shop.prepared, shop.model, *options]) == 0
    shown = capsys.readouterr().out
    assert f"{everybody} test users" in shown
    assert "Recall@100" in shown
    assert "1.0000 [1.0000, 1.0000]" in shown  # whatever is wanted is among all items


@pytest.mark.usefixtures("wide")
def test_evaluate_without_a_model_shows_the_baselines(
    shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", shop.prepared]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in BASELINES)
    assert "baseline on" not in shown


@pytest.mark.usefixtures("wide")
def test_evaluate_says_what_a_log_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cycle().save(tmp_path / "no times")
    assert main(["evaluate", str(tmp_path / "no times")]) == 0
    shown = capsys.readouterr()
    assert "No target is in the user's own history" in shown.out
    assert "popularity of the last days is left out: the training log has no times" in shown.err
    assert "popularity, last" not in shown.out
    log = tmp_path / "positions.csv"
    rows = [f"{user},{7 * user % 5},{place}" for user in range(9) for place in range(8)]
    log.write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")
    prepared = str(tmp_path / "positions")
    options = ["--holdout", "leave-one-out", "--time-format", "seconds", *SIZES]
    run_shown("prepare", str(log), "--out", prepared, *options)
    assert main(["evaluate", prepared]) == 0
    shown = capsys.readouterr()
    assert "All targets are in the user's own history" in shown.out
    assert "left out: the training log lasts no longer than a day" in shown.err


@pytest.mark.usefixtures("wide")
def test_models_with_one_name_in_two_folders_are_both_evaluated(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    for place in ("first", "second"):
        shutil.copytree(shop.model, tmp_path / place / "model")
    models = [str(tmp_path / place / "model") for place in ("first", "second")]
    assert main(["evaluate", shop.prepared, *models, "--no-baselines", "--json", str(file)]) == 0
    names = [entry["name"] for entry in json.loads(file.read_text())["evaluations"]]
    assert len(set(names)) == 2
    shown = capsys.readouterr().out
    assert all(f"│ {name} " in shown for name in names)
    # One model twice: no difference, and no chance of one.
    compared = f"{names[0]} − {names[1]}: +0.0000 [+0.0000, +0.0000], p = 1.0000"
    assert compared in shown.splitlines()[-1]


@pytest.mark.usefixtures("wide")
def test_a_model_called_like_a_baseline_is_not_lost(shop: Shop, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    shutil.copytree(shop.model, tmp_path / "popularity")
    run_shown("evaluate", shop.prepared, str(tmp_path / "popularity"), "--json", str(file))
    alone = json.loads(file.read_text())["evaluations"]
    run_shown("evaluate", shop.prepared, shop.model, "--json", str(file))
    assert len(alone) == len(json.loads(file.read_text())["evaluations"])


@pytest.mark.usefixtures("wide")
def test_names_of_models_are_printed_as_they_are(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(shop.model, tmp_path / "run[red]")
    assert main(["evaluate", shop.prepared, str(tmp_path / "run[red]")]) == 0
    *table, verdict = capsys.readouterr().out.splitlines()
    assert any("│ run[red] " in line for line in table)
    assert verdict.startswith(("run[red] beats every", "run[red] does not beat every"))


# Recommend ---------------------------------------------------------------------------------------


def test_recommend_prints_scores_and_items(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["recommend", shop.recommender, "--history", "tea5, nosuch ,tea6,,none"]
    assert main([*arguments, "-k", "4"]) == 0
    shown = capsys.readouterr()
    expected = Recommender.load(shop.recommender).recommend([["tea5", "tea6"]], 4)
    assert shown.out.splitlines() == [
        f"{score:10.4f}  {item}"
        for item, score in zip(expected.items[0], expected.scores[0], strict=True)
    ]
    assert shown.err.splitlines()[0] == "not in the catalogue, left out: nosuch, none"
    assert "popular" not in shown.err
    for stage in ("look up", "encode", "search", "answer"):
        assert re.search(rf"^ +{stage} .* \d+\.\d{{3}} ms$", shown.err, re.MULTILINE)


@pytest.mark.parametrize("history", ["", " , ", "nosuch"])
def test_recommend_without_known_items_shows_what_is_popular(
    shop: Shop, capsys: pytest.CaptureFixture[str], history: str
) -> None:
    assert main(["recommend", shop.recommender, "--history", history, "-k", "3"]) == 0
    shown = capsys.readouterr()
    expected = Recommender.load(shop.recommender).recommend([[]], 3)
    assert [line.split(maxsplit=1)[1] for line in shown.out.splitlines()] == expected.items[0]
    assert "nothing to go by: these are the most popular items\n" in shown.err
    assert ("not in the catalogue, left out: nosuch\n" in shown.err) == (history == "nosuch")


def test_recommend_as_json(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["recommend", shop.recommender, "--json", "-k", "4"]
    assert main([*arguments, "--history", "tea5,nosuch,tea6"]) == 0
    shown = capsys.readouterr()
    expected = Recommender.load(shop.recommender).recommend([["tea5", "tea6"]], 4)
    assert lines_of(shown.out) == [
        {
            "items": expected.items[0],
            "scores": expected.scores[0].tolist(),
            "by_popularity": False,
            "unknown": ["nosuch"],
        }
    ]
    assert shown.err == ""
    assert main([*arguments, "--history", ""]) == 0
    (answer,) = lines_of(capsys.readouterr().out)
    assert answer["by_popularity"] is True
    assert len(answer["items"]) == len(answer["scores"]) == 4


def test_recommend_with_boosts(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    recommender = Recommender.load(shop.recommender)
    everything = [str(item) for item in recommender.recommend([["tea5"]], 1000).items[0]]
    best, last = everything[0], everything[-1]
    arguments = ["recommend", shop.recommender, "--json", "-k", "4", "--history", "tea5"]
    assert main([*arguments, "--boosts", f" {last} = 1e3,, {best}=-1e3 "]) == 0
    (answer,) = lines_of(capsys.readouterr().out)
    expected = recommender.recommend([["tea5"]], 4, boosts={last: 1e3, best: -1e3})
    assert answer["items"] == expected.items[0]
    assert answer["scores"] == expected.scores[0].tolist()
    assert answer["items"][0] == last
    assert main([*arguments, "--boosts", "nosuch=1"]) == 2
    assert "boosts: 'nosuch': not in the catalogue" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tea5", "'tea5' is not an id, = and a finite number"),
        ("=1", "'=1' is not an id"),
        ("tea5=", "'tea5=' is not an id"),
        ("tea5=much", "'tea5=much' is not an id"),
        ("tea5=nan", "'tea5=nan' is not an id"),
        ("tea5=1,tea5=2", "'tea5' is boosted twice"),
    ],
)
def test_boosts_that_cannot_be_read(
    shop: Shop, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        main(["recommend", shop.recommender, "--history", "tea5", "--boosts", text])
    assert message in capsys.readouterr().err


def test_the_last_equals_sign_is_followed_by_the_boost() -> None:
    assert parse_boosts("a=b=0.5, c = -1e-3") == (["a=b", "c"], [0.5, -1e-3])


def test_items_of_the_history_come_again_only_if_asked_for(
    shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["recommend", shop.recommender, "--history", "tea5,tea6", "--json", "-k", "60"]
    assert main(arguments) == 0
    (without,) = lines_of(capsys.readouterr().out)
    assert main([*arguments, "--include-seen"]) == 0
    (including,) = lines_of(capsys.readouterr().out)
    assert len(without["items"]) == 58
    assert len(including["items"]) == 60
    assert set(including["items"]) - set(without["items"]) == {"tea5", "tea6"}
    assert [item for item in including["items"] if item not in ("tea5", "tea6")] == without["items"]


@pytest.mark.parametrize("k", ["61", "100000"])
def test_a_k_beyond_the_catalogue_gives_all_there_are(
    shop: Shop, capsys: pytest.CaptureFixture[str], k: str
) -> None:
    assert main(["recommend", shop.recommender, "--history", "tea5", "-k", k, "--json"]) == 0
    (answer,) = lines_of(capsys.readouterr().out)
    assert len(answer["items"]) == len(answer["scores"]) == 59
    assert np.isfinite(answer["scores"]).all()


def test_a_k_far_beyond_the_catalogue_takes_no_memory_for_it(shop: Shop, tmp_path: Path) -> None:
    """Of 100 histories and 10 million places each, ids and scores alone would be 12 GB."""
    (tmp_path / "histories.txt").write_text("tea5,tea6\n" * 100)
    code = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
from recprune.cli import main
sys.exit(main(sys.argv[1:]))
"""
    words = ["recommend", shop.recommender, "--histories", str(tmp_path / "histories.txt")]
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "-k", "10000000"],
        capture_output=True, text=True, check=False, env=ONE_THREAD,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 100


def test_no_places_give_no_items(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recommend", shop.recommender, "--history", "tea5", "-k", "0"]) == 0
    assert capsys.readouterr().out == ""
    (tmp_path / "histories.txt").write_text("tea5\n\n")
    words = ["recommend", shop.recommender, "--histories", str(tmp_path / "histories.txt")]
    assert main([*words, "-k", "0", "--json"]) == 0
    answers = lines_of(capsys.readouterr().out)
    assert [answer["items"] for answer in answers] == [[], []]


FORMATS = """tea5,tea6
["salt, fine", "éclair"]
{"history": ["tea5", "nosuch"], "user": 7}

[]
  tea9 ,  tea10
"""
PARSED = [["tea5", "tea6"], ["salt, fine", "éclair"], ["tea5"], [], [], ["tea9", "tea10"]]


def test_recommend_reads_histories_in_three_formats(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "histories.txt"
    path.write_text(FORMATS, encoding="utf-8")
    expected = Recommender.load(shop.recommender).recommend(PARSED, 5)
    arguments = ["recommend", shop.recommender, "--histories", str(path), "-k", "5"]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [",".join(map(str, items)) for items in expected.items]
    assert shown.err.splitlines() == [
        "line 3: not in the catalogue, left out: nosuch",
        "line 4: nothing to go by: these are the most popular items",
        "line 5: nothing to go by: these are the most popular items",
    ]
    assert main([*arguments, "--json"]) == 0
    answers = lines_of(capsys.readouterr().out)
    assert [answer["items"] for answer in answers] == expected.items
    assert [answer["by_popularity"] for answer in answers] == expected.by_popularity.tolist()
    assert [answer["unknown"] for answer in answers] == [[], [], ["nosuch"], [], [], []]
    for answer, scores in zip(answers, expected.scores, strict=True):
        assert answer["scores"] == pytest.approx(scores.tolist(), abs=1e-5)


def test_recommend_reads_histories_from_standard_input(shop: Shop) -> None:
    words = ["recommend", shop.recommender, "--histories", "-", "-k", "5", "--json"]
    arguments = [str(COMMAND), *words]
    done = subprocess.run(
        arguments, input=FORMATS.encode(), capture_output=True, check=True, env=ONE_THREAD
    )
    expected = Recommender.load(shop.recommender).recommend(PARSED, 5)
    assert [answer["items"] for answer in lines_of(done.stdout.decode())] == expected.items
    wrong = subprocess.run(
        arguments, input=b"tea5\n[tea6\n", capture_output=True, check=False, env=ONE_THREAD
    )
    assert wrong.returncode == 2
    # What came before the bad line is answered.
    first = Recommender.load(shop.recommender).recommend([["tea5"]], 5)
    assert [answer["items"] for answer in lines_of(wrong.stdout.decode())] == first.items
    assert b"line 2: not readable as JSON" in wrong.stderr
    assert b"Traceback" not in wrong.stderr


def test_many_histories_are_answered_in_their_order(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More than are answered at once."""
    rng = np.random.default_rng(2)
    histories = [[named(item) for item in rng.integers(3, 60, 3)] for _ in range(1100)]
    path = tmp_path / "histories.txt"
    path.write_text("\n".join(",".join(history) for history in histories))  # no last newline
    assert main(["recommend", shop.recommender, "--histories", str(path), "-k", "2"]) == 0
    expected = Recommender.load(shop.recommender).recommend(histories, 2)
    shown = capsys.readouterr().out.splitlines()
    assert shown == [",".join(map(str, items)) for items in expected.items]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('["tea5"', "not readable as JSON"),
        ('{"histori": ["tea5"]}', "expected a list of item ids, or an object with a history"),
        ('{"history": "tea5"}', "expected a list of item ids, or an object with a history"),
        ("[" * 100_000, "not readable as JSON"),
    ],
)
def test_a_bad_line_is_named_by_its_number(
    shop: Shop,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    line: str,
    message: str,
) -> None:
    path = tmp_path / "histories.txt"
    path.write_text(f'tea5\n\n{line}\n["tea6"]\n')
    assert main(["recommend", shop.recommender, "--histories", str(path)]) == 2
    shown = capsys.readouterr()
    before = Recommender.load(shop.recommender).recommend([["tea5"], []], 10)
    assert shown.out.splitlines() == [",".join(map(str, items)) for items in before.items]
    popular, error = shown.err.splitlines()
    assert popular == "line 2: nothing to go by: these are the most popular items"
    assert error.startswith(f"recprune recommend: {path}, line 3: {message}")


def test_a_file_that_is_no_text_is_refused(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "histories.txt"
    path.write_bytes(b"tea5\n\xff\xfe\n")
    assert main(["recommend", shop.recommender, "--histories", str(path)]) == 2
    assert f"{path}: not a text in UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("escaped", ["\\ud800", "\\u0000"])
def test_odd_characters_are_just_unknown(shop: Shop, tmp_path: Path, escaped: str) -> None:
    path = tmp_path / "histories.txt"
    path.write_text(f'["{escaped}", "tea5"]\n')
    done = subprocess.run(
        [COMMAND, "recommend", shop.recommender, "--histories", path, "--json", "-k", "3"],
        capture_output=True, text=True, check=False, env=ONE_THREAD,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (answer,) = lines_of(done.stdout)
    expected = Recommender.load(shop.recommender).recommend([["tea5"]], 3)
    assert answer["items"] == expected.items[0]
    assert answer["unknown"] == [json.loads(f'"{escaped}"')]


def test_a_byte_order_mark_is_not_part_of_the_first_word(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "histories.txt"
    path.write_text("tea5,tea6\n", encoding="utf-8-sig")
    assert main(["recommend", shop.recommender, "--histories", str(path), "--json"]) == 0
    (answer,) = lines_of(capsys.readouterr().out)
    assert answer["unknown"] == []


def test_standard_input_stays_open_for_who_calls_the_command(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = io.StringIO("tea5,tea6\n")
    monkeypatch.setattr(sys, "stdin", given)
    assert main(["recommend", shop.recommender, "--histories", "-", "-k", "3"]) == 0
    assert capsys.readouterr().out.count(",") == 2
    assert not given.closed


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_items_are_shown_on_any_terminal(shop: Shop, options: list[str]) -> None:
    done = subprocess.run(
        [COMMAND, "recommend", shop.recommender, "--history", "tea5", "-k", "60", *options],
        capture_output=True, check=False, env=ONE_THREAD | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    assert b"clair" in done.stdout
    assert b"[red]" in done.stdout


def test_a_closed_pipe_is_no_error(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "histories.txt").write_text("tea5\n" * 3000)
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [COMMAND, "recommend", shop.recommender, "--histories", tmp_path / "histories.txt"],
        stdout=writing, stderr=subprocess.PIPE, text=True, check=False, env=ONE_THREAD,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_recommending_needs_neither_torch_nor_what_reads_logs(shop: Shop) -> None:
    code = """
import sys
for name in ("torch", "onnx", "polars", "rich", "scipy", "pyarrow", "matplotlib"):
    sys.modules[name] = None
from recprune.cli import main
sys.exit(main(sys.argv[1:]))
"""
    words = ["recommend", shop.recommender, "--history", "tea5,tea6", "-k", "3", "--json"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *words],
        capture_output=True, text=True, check=False, env=ONE_THREAD,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = Recommender.load(shop.recommender).recommend([["tea5", "tea6"]], 3)
    assert lines_of(done.stdout)[0]["items"] == expected.items[0]


# Where items are numbers -------------------------------------------------------------------------


def test_words_become_numbers_where_items_are_numbers(
    numbered: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = Recommender.load(numbered.recommender).recommend([[-20, 5, 100]], 4)
    assert all(isinstance(item, int) for item in expected.items[0])
    path = tmp_path / "histories.txt"
    path.write_text('-20, 5,0100\n[-20, "5", 100]\n{"history": ["-20", 5, "100"]}\n')
    assert (
        main(["recommend", numbered.recommender, "--histories", str(path), "-k", "4", "--json"])
        == 0
    )
    answers = lines_of(capsys.readouterr().out)
    assert [answer["items"] for answer in answers] == 3 * expected.items
    assert [answer["unknown"] for answer in answers] == [[], [], []]
    assert main(["recommend", numbered.recommender, "--history=-20,5,100", "-k", "4"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [int(line.split()[1]) for line in shown] == expected.items[0]


@pytest.mark.parametrize("word", ["6", "tea5", "5.0", "-", "--5", "5-", "²", "1e2", "9" * 5000])
def test_words_that_are_no_item_are_unknown_where_items_are_numbers(
    numbered: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    path = tmp_path / "histories.txt"
    path.write_text(f"{word},10\n", encoding="utf-8")
    words = ["recommend", numbered.recommender, "--histories", str(path), "-k", "4", "--json"]
    assert main(words) == 0
    (answer,) = lines_of(capsys.readouterr().out)
    expected = Recommender.load(numbered.recommender).recommend([[10]], 4)
    assert answer["items"] == expected.items[0]
    assert [str(unknown) for unknown in answer["unknown"]] == [word]
    assert answer["by_popularity"] is False


def test_all_of_it_works_where_items_are_numbers(
    numbered: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "60 items" in numbered.shown["export"]
    assert main(["evaluate", numbered.prepared, numbered.model]) == 0
    assert "every baseline on NDCG@10" in capsys.readouterr().out
