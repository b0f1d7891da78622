"""Recommendations, as typed: what `recprune recommend` reads and prints."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from recprune import Attributes, SnapshotIds
from recprune.cli import main
from recprune.commands.answer_options import parse_boosts
from recprune.recommender.recommender import Recommender
from tests.support.shops import COMMAND, ONE_THREAD, Shop, lines_of, named


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
    left_out = "items of the history are left out: --include-seen lets them come again"
    assert left_out in shown.err.splitlines()
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
from recprune import Attributes, SnapshotIds
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


def test_no_places_are_refused(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    for k in ("0", "-3"):
        assert main(["recommend", shop.recommender, "--history", "tea5", "-k", k]) == 2
        assert f"-k is {k}, expected at least 1" in capsys.readouterr().err


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
from recprune import Attributes, SnapshotIds
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


# Files of histories ------------------------------------------------------------------------------


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


def test_ids_may_hold_commas(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["recommend", shop.recommender, "--json", "-k", "2", "--history"]
    answers = []
    for history in (
        "tea5,tea6",
        '["tea5", "tea6"]',
        '"tea5", tea6',
        '{"history": ["tea5", "tea6"]}',
    ):
        assert main([*arguments, history]) == 0
        answers.append(capsys.readouterr().out)
    assert len(set(answers)) == 1
    assert main([*arguments, '["a,b"]']) == 0
    assert lines_of(capsys.readouterr().out)[0]["unknown"] == ["a,b"]
    assert main([*arguments, '"a,b",tea5']) == 0
    assert lines_of(capsys.readouterr().out)[0]["unknown"] == ["a,b"]
    for broken, why in (('["a', "not readable as JSON"), ('"a', "not readable as ids with commas")):
        assert main([*arguments, broken]) == 2
        assert f"--history: {why}" in capsys.readouterr().err


def test_names_are_shown_beside_ids(
    shop: Shop, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["recommend", shop.recommender, "--history", "tea5", "-k", "3"]
    expected = Recommender.load(shop.recommender).recommend([["tea5"]], 3).items[0]
    file = tmp_path / "names.csv"
    file.write_text(f'item_id,name\n{expected[0]},"Green, loose"\nnosuch,x\n{expected[2]},\n')
    assert main([*arguments, "--names", str(file)]) == 0
    lines = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == [f"{expected[0]}  Green, loose", expected[1], expected[2]]
    assert main([*arguments, "--names", str(file), "--json"]) == 0
    assert lines_of(capsys.readouterr().out)[0]["names"] == ["Green, loose", None, None]
    assert main([*arguments, "--names", str(tmp_path / "none.csv")]) == 2
    assert "none.csv: cannot be read" in capsys.readouterr().err


def test_the_history_of_a_user_in_a_log(
    shop: Shop, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = tmp_path / "log.csv"
    log.write_text("user,item,time\nanna,tea6,20\nbob,tea1,15\nanna,tea5,10\n")
    arguments = ["recommend", shop.recommender, "--json", "-k", "3"]
    assert main([*arguments, "--user", "anna", "--log", str(log)]) == 0
    found = capsys.readouterr().out
    assert main([*arguments, "--history", "tea5,tea6", "--times", "10,20"]) == 0
    assert capsys.readouterr().out == found
    assert main([*arguments, "--user", "carl", "--log", str(log)]) == 2
    assert "log.csv: has no user 'carl'" in capsys.readouterr().err
    assert main([*arguments, "--user", "anna"]) == 2
    assert "--user and --log go together" in capsys.readouterr().err


def test_a_users_log_is_read_as_it_was_prepared(
    shop: Shop, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = tmp_path / "log.txt"
    rows = ["anna;tea6;1970-01-01T00:00:20;5", "anna;tea9;1970-01-01T00:00:15;1"]
    rows += ["anna;tea5;1970-01-01T00:00:10;4"] * 2 + ["anna;tea5;never;4"]
    log.write_text("\n".join(["who;what;at;stars", *rows]) + "\n")
    arguments = ["recommend", shop.recommender, "--json", "-k", "3"]
    reading = ["--delimiter", ";", "--user-column", "who", "--item-column", "what"]
    reading += ["--time-column", "at", "--time-format", "iso8601", "--min-rating", "3"]
    reading += ["--rating-column", "stars", "--deduplicate", "--on-bad-rows", "skip"]
    assert main([*arguments, "--user", "anna", "--log", str(log), *reading]) == 0
    found = capsys.readouterr()
    assert "left out 1 row: " in found.err
    assert "left out 1 rows rated below 3" in found.err
    assert "left out 1 rows that say again what another one says" in found.err
    assert main([*arguments, "--history", "tea5,tea6", "--times", "10,20"]) == 0
    assert capsys.readouterr().out == found.out
    for option in (["--min-rating", "3"], ["--deduplicate"], ["--format", "gowalla"]):
        assert main([*arguments, "--history", "tea5", *option]) == 2
        said = f"{option[0]} says how to read a log: give --log LOG, with --user"
        assert said in capsys.readouterr().err


def test_what_is_there_now_is_recommended(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recommender = Recommender.load(shop.recommender)
    history = [*recommender.item_ids.take([3, 5])]
    (best,) = recommender.recommend([history], 1).items
    with recommender.make_live(tmp_path / "catalogue") as live:
        number = live.find(best)
        code = live.snapshot().item_codes(number)
        live.put(["hat"], code)
        live.remove(number)
        snapshot = live.snapshot()
        names = snapshot.external_ids(snapshot.numbers())
        table = {"item": names, "price": [int(name == "hat") for name in names]}
        Attributes.from_table(table, SnapshotIds(snapshot)).save(tmp_path / "prices")
    given = ["recommend", str(shop.recommender), "--live", str(tmp_path / "catalogue")]
    words = [*given, "--history", json.dumps(history), "--json", "-k"]
    assert main([*words, "1"]) == 0
    assert json.loads(capsys.readouterr().out)["items"] == ["hat"]
    assert main([*words, "1000000"]) == 0
    everything = json.loads(capsys.readouterr().out)["items"]
    assert {*everything} == {*names} - {*history}
    prices = ["--attributes", str(tmp_path / "prices")]
    assert main([*words, "9", *prices, "--where", "price = 1"]) == 0
    assert json.loads(capsys.readouterr().out)["items"] == ["hat"]
    assert main(["recommend", str(shop.recommender), "--history", "", *prices]) == 2
    assert "--attributes goes with --live" in capsys.readouterr().err
