"""Models beside baselines, as typed: what `recprune evaluate` shows and writes."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recprune.cli import main
from recprune.commands.evaluate import _about_seen
from recprune.evaluation.comparison import compare
from recprune.evaluation.evaluation import Evaluation
from recprune.evaluation.metrics import RankedUsers
from recprune.evaluation.rankings import read_ranking
from recprune.preparation.prepared import Prepared
from recprune.recommender.recommender import Recommender
from tests.preparation.test_prepared import cycle
from tests.support.shops import SIZES, Shop, run_shown

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
    about_seen = (
        "Items of a user's history are left out."
        if exclude_seen
        else "Items of a user's history are not left out; `recprune recommend` leaves them out by "
        "default for model: judged so with --exclude-seen."
    )
    assert about_seen in shown.out.splitlines()
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
def test_the_file_of_figures_has_every_comparison(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, rankings = tmp_path / "figures.json", tmp_path / "rankings.parquet"
    shutil.copytree(shop.model, tmp_path / "again")
    models = [shop.model, str(tmp_path / "again")]
    options = ["--cutoffs", "3", "--json", str(file), "--write-rankings", str(rankings)]
    assert main(["evaluate", shop.prepared, *models, *options]) == 0
    shown = capsys.readouterr().out
    content = json.loads(file.read_text())
    assert (content["k"], content["items"], content["exclude_seen"]) == (10, 60, False)
    means = {
        (one["name"], metric): estimate["mean"]
        for one in content["evaluations"]
        for metric, estimate in one["metrics"].items()
    }
    names = [one["name"] for one in content["evaluations"]]
    assert list(content["seconds"]) == names
    baselines = names[2:]
    pairs = [["model", "again"], *(["model", name] for name in baselines)]
    pairs += [["again", name] for name in baselines]
    metrics = [f"{name}@{k}" for k in (3, 10) for name in ("NDCG", "Recall", "Hit", "MRR", "MAP")]
    found = {(*one["runs"], one["metric"]): one for one in content["comparisons"]}
    assert [*found] == [(*pair, metric) for pair in pairs for metric in metrics]
    for (first, second, metric), one in found.items():
        assert one["first"] == pytest.approx(means[first, metric])
        assert one["second"] == pytest.approx(means[second, metric])
        difference = one["difference"]
        assert difference["mean"] == pytest.approx(one["first"] - one["second"])
        assert difference["low"] <= difference["mean"] <= difference["high"]
        assert 0.0 < one["p_value"] <= 1.0
    # What is said of the best baseline, and what the library says of what was recommended.
    (said,) = re.findall(r"^model .* NDCG@10: .*\.$", shown, re.MULTILINE)
    best = next(name for name in sorted(baselines, key=len, reverse=True) if name in said)
    assert f"p = {found['model', best, 'NDCG@10']['p_value']:.2g})" in said
    prepared = Prepared.load(shop.prepared)

    def ranked(run: str) -> RankedUsers:
        users, ids = prepared.test.users, (prepared.user_ids, prepared.item_ids)
        ranking = read_ranking(rankings, 10, users, *ids, run=run)
        return RankedUsers.of_targets(ranking.ids, prepared.test.items)

    expected = asdict(compare(ranked("again"), ranked("popularity"), "MRR@3"))
    assert found["again", "popularity", "MRR@3"] == {"runs": ["again", "popularity"], **expected}


def test_evaluate_says_which_models_are_asked_otherwise() -> None:
    assert _about_seen(False, []) == "Items of a user's history are not left out."
    assert _about_seen(True, ["first", "second"]) == (
        "Items of a user's history are left out; `recprune recommend` has them come again by "
        "default for first, second: judged so without --exclude-seen."
    )


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
def test_baselines_that_take_minutes_are_asked_for(
    shop: Shop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recprune.evaluation.baselines.ease.QUICK_ITEMS", 59)
    assert main(["evaluate", shop.prepared]) == 0
    shown = capsys.readouterr()
    assert "EASE is left out: for 60 items, more than 59, it takes minutes: --slow" in shown.err
    assert "EASE" not in shown.out
    assert main(["evaluate", shop.prepared, "--slow-baselines"]) == 0
    shown = capsys.readouterr()
    assert "EASE" not in shown.err
    assert "│ EASE, λ = " in shown.out


@pytest.mark.usefixtures("wide")
def test_evaluate_says_what_a_log_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cycle().save(tmp_path / "no times")
    assert main(["evaluate", str(tmp_path / "no times")]) == 0
    shown = capsys.readouterr()
    assert "No target is in the user's own history" in shown.out
    assert "popularity of the last days is left out: the training log has no times, or" in shown.err
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
    assert "left out: the training log has no times, or all of them within a day" in shown.err


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


def test_all_of_it_works_where_items_are_numbers(
    numbered: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "60 items" in numbered.shown["export"]
    assert main(["evaluate", numbered.prepared, numbered.model]) == 0
    assert "every baseline on NDCG@10" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 200])
def test_no_interval_is_broken_over_lines(
    shop: Shop,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    file = tmp_path / "figures.json"
    name = "a model with a name that is longer than those of baselines"
    shutil.copytree(shop.model, tmp_path / name)
    models = [shop.model, str(tmp_path / name)]
    assert main(["evaluate", shop.prepared, *models, "--json", str(file)]) == 0
    tables = [line for line in capsys.readouterr().out.splitlines() if line[:1] in tuple("┏┃┡│└")]
    assert max(map(len, tables)) <= columns
    assert {"NDCG@10", "Recall@10", "Coverage@10", "Bias@10", "seconds"} <= {
        word.strip() for line in tables if line[0] == "┃" for word in line.split("┃")
    }
    assert all(line.count("[") == line.count("]") for line in tables)
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in tables if line[0] == "│"]
    for one in json.loads(file.read_text())["evaluations"]:
        for users in (one, one["repeats"], one["others"]):
            expected = [
                f"{mean:.4f} [{low:.4f}, {high:.4f}]"
                for mean, low, high in (
                    users["metrics"][metric].values() for metric in ("NDCG@10", "Recall@10")
                )
            ]
            if columns == 80:
                for whole, short in (("[0.", "[."), (", 0.", ", ."), (", 1.0000", ", 1.000")):
                    expected = [text.replace(whole, short) for text in expected]
            begins = one["name"] if one["name"] != name or columns == 200 else "a model with a na"
            assert any(row[1:3] == expected for row in cells if row[0].startswith(begins))


def test_all_metrics_and_more_cutoffs_fit_80_columns(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "figures.json"
    options = ["--all-metrics", "--cutoffs", "20,1,5", "--json", str(file)]
    assert main(["evaluate", shop.prepared, shop.model, *options]) == 0
    shown = capsys.readouterr().out
    evaluations = [Evaluation.from_json(one) for one in json.loads(file.read_text())["evaluations"]]
    assert set(evaluations[0].coverage) == {1, 5, 10, 20}
    for metric in ("NDCG", "Recall", "Hit", "MRR", "MAP"):
        table = shown.partition(f"\n{metric} at, means of all users")[2].split("└")[0]
        assert re.search(r"┃ +1 ┃ +5 ┃ +20 ┃", table)
        for one in evaluations:
            means = " │ ".join(f"{one.metrics[f'{metric}@{k}'].mean:.4f}" for k in (1, 5, 20))
            assert (
                f"│ {one.name:{len(max((e.name for e in evaluations), key=len))}} │ {means} │"
                in table
            )
    assert "Coverage at, means of all users" in shown
    assert "Bias at, means of all users" in shown
    # At one cutoff the metrics stand side by side, those that were asked for, in their order.
    assert main(["evaluate", shop.prepared, "--metrics", "mrr,NDCG,mrr,coverage"]) == 0
    table = capsys.readouterr().out.partition("At 10, means of all users")[2].split("└")[0]
    assert re.search(r"┃ +MRR ┃ +NDCG ┃ +Coverage ┃", table)
    tables = [line for line in shown.splitlines() if line.startswith(("┏", "┃", "│", "└"))]
    assert max(map(len, tables)) <= 80
    for option, wrong, said in (
        ("--metrics", "ndcg,f1", "'f1' is none of NDCG, Recall, Hit, MRR, MAP, Coverage, Bias"),
        ("--cutoffs", "5,0", "'0' is no cutoff: expected 1,5,10 or such"),
        ("--ranking", "file", "'file' is not a name, = and a file"),
    ):
        with pytest.raises(SystemExit):
            main(["evaluate", shop.prepared, option, wrong])
        assert said in capsys.readouterr().err


@pytest.mark.usefixtures("wide")
def test_what_was_written_is_judged_the_same(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, first, second = (tmp_path / name for name in ("r.parquet", "1.json", "2.json"))
    options = ["--cutoffs", "5,20"]
    written = [*options, "--write-rankings", str(file), "--json", str(first)]
    assert main(["evaluate", shop.prepared, shop.model, *written]) == 0
    assert f"rankings written to {file}" in capsys.readouterr().err
    before = json.loads(first.read_text())["evaluations"]
    rankings = [f"--ranking={one['name']}={file}" for one in before]
    judged = [*options, *rankings, "--no-baselines", "--json", str(second)]
    assert main(["evaluate", shop.prepared, *judged]) == 0
    assert json.loads(second.read_text())["evaluations"] == before
    capsys.readouterr()
    # Beside the model that it is of: no difference. It stands in the table, and is compared.
    frame = pl.read_parquet(file).filter(pl.col("run") == "model")
    frame.write_csv(tmp_path / "own.csv")
    own = f"--ranking=own={tmp_path / 'own.csv'}"
    assert main(["evaluate", shop.prepared, shop.model, own]) == 0
    shown = capsys.readouterr().out
    assert "model − own: +0.0000 [+0.0000, +0.0000], p = 1.0000" in shown
    assert re.search(r"own (beats|does not beat) every baseline", shown)
    assert re.search(r"│ own +│ .* │ +– │", shown)
    for given, said in (
        ([f"--ranking=none={file}"], "has no run 'none'; its runs are model, popularity"),
        ([own, own], "--ranking: two are called 'own'"),
        ([f"--ranking=popularity={file}"], "'popularity' is the name of a baseline"),
    ):
        assert main(["evaluate", shop.prepared, *given]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.usefixtures("wide")
def test_users_that_a_ranking_does_not_have_are_misses(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = Prepared.load(shop.prepared)
    users, items = prepared.test.users, prepared.test.items
    rows = [
        {
            "user_id": prepared.user_ids[int(user)],
            "item_id": prepared.item_ids[int(item)],
            "score": 1,
        }
        for user, item in zip(users[1:], items[1:], strict=True)
    ]
    file = tmp_path / "oracle.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = tmp_path / "figures.json"
    options = [f"--ranking=oracle={file}", "--no-baselines", "--json", str(figures)]
    assert main(["evaluate", shop.prepared, *options]) == 0
    said = capsys.readouterr().err
    count = len(users)
    first = prepared.user_ids[int(users[0])]
    assert f"oracle: nothing for 1 of {count} test users, such as {first!r}: they count as" in said
    assert f"oracle: fewer than 10 items for {count - 1} test users" in said
    (entry,) = json.loads(figures.read_text())["evaluations"]
    assert Evaluation.from_json(entry).metrics["NDCG@10"].mean == pytest.approx(1 - 1 / count)
    assert main(["evaluate", shop.prepared, "--users", "9", *options]) == 0
    assert "rows of users who are not judged are passed over" in capsys.readouterr().err
