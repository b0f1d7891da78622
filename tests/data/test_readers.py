"""Every format from a file in exactly that format, and every way a file can be broken."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recprune import Columns, InputError, assign_random, read_interactions
from recprune.data.readers import LogColumns, read_columns

Row = tuple[object, object, int]
ROWS: list[Row] = [(7, 30, 1287532527), (7, 10, 1287532528), (3, 30, 1287440263)]


def compress(data: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(data, mtime=0)
    if suffix == ".zst":
        return bytes(pa.compress(data, codec="zstd", asbytes=True))
    return data


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(compress(data, path.suffix))
    return path


def rows_of(log: LogColumns) -> list[Row]:
    times = (log.times // 1_000_000).tolist()
    return list(zip(log.users.to_list(), log.items.to_list(), times, strict=True))


# Formats -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "user_id,item_id,timestamp\n7,30,1287532527\n7,10,1287532528\n3,30,1287440263\n"),
        ("a.tsv", "userId\titemId\tts\n7\t30\t1287532527\n7\t10\t1287532528\n3\t30\t1287440263"),
        (
            "a.csv",
            "date;User;rating;Item\n1287532527;7;5;30\r\n1287532528;7;4;10\r\n1287440263;3;1;30",
        ),
        (
            "a.csv",
            '\ufeffuser,item,time\n"7","30",1287532527\n"7",10,1287532528\n\n3,30,1287440263\n',
        ),
        (
            "a.inter",
            "user_id:token\titem_id:token\ttimestamp:float\n"
            "7\t30\t1287532527\n7\t10\t1287532528\n3\t30\t1287440263\n",
        ),
        (
            "a.jsonl",
            '{"user": 7, "item": 30, "time": 1287532527, "x": {"user": 1}}\n\n'
            '{"time": 1287532528, "item": 10, "user": 7}\n{"user":3,"item":30,"time":1287440263}\n',
        ),
    ],
)
def test_text_formats(tmp_path: Path, name: str, text: str, suffix: str) -> None:
    assert rows_of(read_columns(write(tmp_path, name + suffix, text))) == ROWS


def test_gowalla(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "loc-gowalla_totalCheckins.txt.gz",
        "0\t2010-10-19T23:55:27Z\t30.2359091167\t-97.7951395833\t22847\n"
        "0\t2010-10-18T22:17:43Z\t30.2691029532\t-97.7493953705\t420315\n",
    )
    assert rows_of(read_columns(path, log_format="gowalla")) == [
        (0, 22847, 1287532527),
        (0, 420315, 1287440263),
    ]


def test_tmall(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "ijcai2016_taobao.csv",
        "use_ID,sel_ID,ite_ID,cat_ID,act_ID,time_stamp\n1980536,9666,1835946,3,0,20151105\n",
    )
    assert rows_of(read_columns(path, log_format="tmall")) == [(1980536, 1835946, 1446681600)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ratings.dat", "1::1193::5::978300760\n1::661::3::978302109\n"),
        (
            "ratings.csv",
            "userId,movieId,rating,timestamp\n1,1193,5.0,978300760\n1,661,3.5,978302109\n",
        ),
        ("u.data", "1\t1193\t5\t978300760\n1\t661\t3\t978302109\n"),
    ],
)
@pytest.mark.parametrize("give_the_folder", [True, False])
def test_movielens(tmp_path: Path, name: str, text: str, give_the_folder: bool) -> None:
    path = write(tmp_path, name, text)
    log = read_columns(tmp_path if give_the_folder else path, log_format="movielens")
    assert rows_of(log) == [(1, 1193, 978300760), (1, 661, 978302109)]


@pytest.mark.parametrize(
    "times",
    [
        pl.Series([1287532527, 1287532528, 1287440263]),
        pl.Series([1287532527, 1287532528, 1287440263]).cast(pl.Float64),
        pl.from_epoch(pl.Series([1287532527, 1287532528, 1287440263])),
        pl.from_epoch(pl.Series([1287532527, 1287532528, 1287440263])).dt.strftime("%FT%TZ"),
    ],
)
def test_parquet(tmp_path: Path, times: pl.Series) -> None:
    users = pl.Series([7, 7, 3], dtype=pl.UInt16)
    items = pl.Series(["30", "10", "30"], dtype=pl.Categorical)
    frame = pl.DataFrame(
        {"user_id": users, "x": [1, 2, 3], "product_id": items, "timestamp": times}
    )
    frame.write_parquet(tmp_path / "log.parquet")
    assert rows_of(read_columns(tmp_path / "log.parquet")) == ROWS


def test_a_folder_of_parts_is_read_in_name_order(tmp_path: Path) -> None:
    for number, (user, item, time) in enumerate(ROWS):
        part = pl.DataFrame({"user": [user], "item": [item], "time": [time]})
        part.write_parquet(tmp_path / f"part-{number}.parquet")
    write(tmp_path, "_SUCCESS", "")
    write(tmp_path, "README.md", "not a part")
    write(tmp_path, "part-9.parquet", "")
    assert rows_of(read_columns(tmp_path)) == ROWS


def test_folders_inside_the_folder_are_read_too(tmp_path: Path) -> None:
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        write(tmp_path / f"day={day}", "part-0.csv", f"user,item,time\n1,{day},3\n")
    assert read_columns(tmp_path).items.to_list() == [1, 2]


def test_a_saved_folder_is_not_taken_for_a_log(tmp_path: Path) -> None:
    assign_random(10, num_splits=1).save(tmp_path / "codebook")
    with pytest.raises(InputError, match="saved by recprune; it is not a log"):
        read_columns(tmp_path / "codebook")


def test_parts_with_integers_and_strings_become_strings(tmp_path: Path) -> None:
    write(tmp_path, "part-0.csv", "user,item,time\n1,2,3\n")
    write(tmp_path, "part-1.csv", "user,item,time\n1,b,3\n")
    log = read_columns(tmp_path)
    assert log.users.to_list() == [1, 1]
    assert log.items.to_list() == ["2", "b"]


def test_column_names_delimiter_and_missing_header_can_be_given(tmp_path: Path) -> None:
    path = write(tmp_path, "log.txt", "30 7 x 1287532527\n10 7 x 1287532528\n30 3 x 1287440263\n")
    columns = Columns(user="1", item="0", time="3")
    assert rows_of(read_columns(path, columns=columns, delimiter=" ", header=False)) == ROWS
    path = write(tmp_path, "log.csv", "who,what,when\n7,30,1287532527\n")
    columns = Columns(user="who", item="what", time="when")
    assert rows_of(read_columns(path, columns=columns)) == ROWS[:1]


# Not U+FFFD, which stands for bytes that are not UTF-8; no blanks at the ends, which are taken off;
# nothing that JSON Path returns for an object, a list or a float.
TEXTS = (
    st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffd"))
    .map(lambda text: text.strip(" "))
    .filter(lambda text: text and text[0] not in "[{" and not re.match(r"-?\d\.\d+e\+", text))
)


@given(
    st.lists(
        st.tuples(
            TEXTS,
            st.sampled_from(["7", "07", "+7", "-0", "0", "12", "a", "NA", "null", '"', ",", "[x"]),
            st.integers(0, 2**31),
        ),
        min_size=1,
    )
)
def test_strings_survive_csv_and_json(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row]
) -> None:
    folder = tmp_path_factory.mktemp("strings")
    frame = pl.DataFrame(rows, schema=["user", "item", "time"], orient="row")
    frame.write_csv(folder / "log.csv")
    frame.write_ndjson(folder / "log.jsonl")
    for name in ("log.csv", "log.jsonl"):
        log = read_columns(folder / name, time_format="seconds")
        assert [(str(user), str(item), time) for user, item, time in rows_of(log)] == rows


# Broken files ------------------------------------------------------------------------------------

GOOD = "user,item,time\n1,2,1287532527\n"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("log.csv", "", "log.csv: the file is empty"),
        ("log.csv", "user,item,time\n", "log.csv: no usable row"),
        ("log.csv", "user,item\n1,2\n", "which column is the time\\? None of user, item has"),
        ("log.csv", "\n1,2,3\n", "line 1: is empty, expected a row or a header"),
        ("log.csv", "user\n1\n", "line 1: no tab, comma, semicolon or bar separates"),
        ("log.csv", GOOD + "3,4\n", "line 3: too few fields \\(2, expected 3\\): '3,4'"),
        ("log.csv", GOOD + "3,4,5,6\n", "line 3: too many fields \\(4, expected 3\\): '3,4,5,6'"),
        ("log.csv", GOOD + "\n,4,5\n", "line 4: the user is missing: ',4,5'"),
        ("log.csv", GOOD + "3,,5\n", "line 3: the item is missing: '3,,5'"),
        ("log.csv", GOOD + "3,4,\n", "line 3: the time is missing: '3,4,'"),
        ("log.csv", GOOD + "3,4,soon\n", "line 3: impossible time, expected unix seconds .*'3,4,soon'"),
        ("log.csv", GOOD + "3,4,-5\n", "line 3: impossible time"),
        ("log.csv", GOOD + '"a\nb",4,1\n5,6\n', "line 3: the user holds a line break: a stray quote\\?"),
        ("log.csv", 'user,item,time,text\n1,2,3,"a\nb"\n5,6\n', "line 4: too few fields"),
        ("log.csv", GOOD.encode() + b"3,caf\xe9\n", r"line 3: too few fields \(2, expected 3\): '3,caf\\\\xe9'"),
        ("log.jsonl", '{"user":{"id":1},"item":2,"time":3}', "line 1: the user is not a number or a string"),
        ("log.csv", GOOD.encode() + b"3,caf\xe9,5\n", r"line 3: the item is not UTF-8 text: '3,caf\\\\xe9,5'"),
        ("log.csv", b"us\xe9r,item,time\n1,2,3\n", "line 1: not UTF-8 text"),
        ("log.csv", GOOD.encode("utf-16"), "named as plain text, but looks like UTF-16 text"),
        ("log.csv", gzip.compress(GOOD.encode(), mtime=0), "named as plain text, but looks like gzip"),
        ("log.csv", b"user,item,time\n\0\0\0\n", "named as plain text, but holds zero bytes"),
        ("log.parquet", GOOD, "named as Parquet, but does not begin like it: b'user,item,time"),
        ("log.parquet", b"PAR1" + bytes(50), "log.parquet: not a readable Parquet file"),
        ("log.jsonl", '{"user":1,"item":2,"time":3}\n{"user":1,', "line 2: not a JSON object"),
        ("log.jsonl", '{"user":1,"item":2,"time":3}\n{"user":1,"time":3}', "line 2: the item is missing"),
        ("log.jsonl", '{"user":1,"item":12345678901234567890123,"time":3}', "the item is a number beyond 64 bits"),
        ("log.jsonl", '{"user":1,"item":2,"time":3}\n[1]\n', "line 2: not a JSON object"),
        ("log.jsonl", "[1, 2, 3]\n", "line 1: not a JSON object: '\\[1, 2, 3\\]'"),
        ("log.tmp/", "", "no CSV, TSV, JSON lines or Parquet files in this folder"),
    ],
)  # fmt: skip
def test_broken_files_are_named_with_line_and_text(
    tmp_path: Path, name: str, data: str | bytes, message: str
) -> None:
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    else:
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    with pytest.raises(InputError, match=message) as error:
        read_columns(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("log_format", "name", "text", "message"),
    [
        ("gowalla", "g.txt", "0\t2010-10-19T23:55:27Z\t1\t2\t3\n0\t2010-13-19T23:55:27Z\t1\t2\t3\n", "line 2: impossible time"),
        ("gowalla", "g.txt", "0\t2010-10-19T23:55:27Z\t1\t2\n", "line 1: too few fields \\(4, expected 5\\)"),
        ("gowalla", "g.txt", "bob\t2010-10-19T23:55:27Z\t1\t2\t3\n", "line 1: the user id is not an integer"),
        ("tmall", "t.csv", "user,item,time\n1,2,3\n", "line 1: not the tmall format: expected the header 'use_ID"),
        ("tmall", "t.csv", "use_ID,sel_ID,ite_ID,cat_ID,act_ID,time_stamp\n1,2,3,4,5,20151131\n", "line 2: impossible time, expected a date yyyymmdd"),
        ("movielens", "r.dat", "1::1193::5::978300760\n1::661::3\n", "line 2: too few fields \\(3, expected 4\\): '1::661::3'"),
        ("movielens", "r.dat", "1::1193::5::978300760\n1:661:3:978302109\n", "line 2: too few fields \\(1, expected 4\\)"),
        ("tmall", "t.csv", "use_ID,sel_ID,ite_ID,cat_ID,act_ID,time_stamp\n1,2,3,4,5,2015115\n", "line 2: impossible time"),
        ("movielens", "r.csv", "user,item\n", "line 1: not a movielens format"),
        ("movielens", "", "", "no ratings.dat, ratings.csv or u.data in this folder"),
        ("gowala", "g.txt", "x", "format is 'gowala', expected one of auto, gowalla, tmall, movielens"),
    ],
)  # fmt: skip
def test_files_that_are_not_what_their_format_says(
    tmp_path: Path, log_format: str, name: str, text: str, message: str
) -> None:
    path = write(tmp_path, name, text) if name else tmp_path
    with pytest.raises(InputError, match=message):
        read_columns(path, log_format=log_format)


def test_named_formats_take_no_other_options(tmp_path: Path) -> None:
    path = write(tmp_path, "g.txt", "0\t2010-10-19T23:55:27Z\t1\t2\t3\n")
    with pytest.raises(InputError, match="the format gowalla fixes columns"):
        read_columns(path, log_format="gowalla", delimiter=";")
    pl.DataFrame({"user": [1]}).write_parquet(tmp_path / "x.parquet")
    with pytest.raises(InputError, match="not a text file of the gowalla format"):
        read_columns(tmp_path / "x.parquet", log_format="gowalla")


def test_stray_quotes_do_not_swallow_rows_silently(tmp_path: Path) -> None:
    rows = [f"u{n % 3},i{n},{1287532527 + n}" for n in range(50)]
    rows[10] = f'u1,"i10,{1287532537}'
    rows[20] = f'u1,i20",{1287532547}'
    path = write(tmp_path, "log.csv", "user,item,time\n" + "\n".join(rows))
    with pytest.raises(InputError, match="line 12: the item holds a line break: a stray quote"):
        read_columns(path)
    # Tab-separated files have no quoting: there the quote is part of the name.
    path = write(tmp_path, "log.tsv", "user\titem\ttime\n" + "\n".join(rows).replace(",", "\t"))
    assert read_columns(path).items[10] == '"i10'


def test_ids_are_typed_by_the_rows_that_stay(tmp_path: Path) -> None:
    path = write(tmp_path, "log.csv", GOOD + "user,item,time\n10,3,1287532528\n")
    log = read_columns(path, on_bad_rows="skip")
    assert log.users.to_list() == [1, 10]


def test_missing_times_do_not_decide_the_format(tmp_path: Path) -> None:
    path = write(tmp_path, "log.csv", GOOD + "3,4,\n" * 6)
    assert rows_of(read_columns(path, on_bad_rows="skip")) == [(1, 2, 1287532527)]


def test_brackets_in_names_are_no_patterns(tmp_path: Path) -> None:
    for name, user in (("log[1].parquet", 1), ("log1.parquet", 2)):
        frame = pl.DataFrame({"user": [user], "item": [1], "time": [3]})
        with (tmp_path / name).open("wb") as file:
            frame.write_parquet(file)
    assert read_columns(tmp_path / "log[1].parquet").users.to_list() == [1]


def test_keys_and_ids_of_json_in_any_script(tmp_path: Path) -> None:
    line = json.dumps({"benutzé": "Zoë 😀", "a'b\"c": "x", "t": 3}, ensure_ascii=False)
    path = write(tmp_path, "log.jsonl", line)
    log = read_columns(path, columns=Columns(user="benutzé", item="a'b\"c", time="t"))
    assert (log.users.to_list(), log.items.to_list()) == (["Zoë 😀"], ["x"])


def test_lines_may_be_long(tmp_path: Path) -> None:
    long = "x" * 20_000_000
    path = write(tmp_path, "log.csv", f"user,item,time,text\n1,2,3,{long}\n1,2,4,y\n5\n")
    with pytest.raises(InputError, match="line 4: too few fields"):
        read_columns(path)
    path = write(tmp_path, "log.jsonl", json.dumps({"user": 1, "item": 2, "time": 3, "text": long}))
    assert rows_of(read_columns(path)) == [(1, 2, 3)]


def test_names_of_columns_that_stand_twice_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "log.csv", "user,item,user,time\n1,2,3,4\n")
    with pytest.raises(InputError, match="2 columns are called 'user'"):
        read_columns(path)


def test_decimal_ids_are_not_cut(tmp_path: Path) -> None:
    items = pl.Series(["1.5", "2"]).cast(pl.Decimal(5, 2))
    frame = pl.DataFrame({"user": [1, 2], "item": items, "time": [3, 4]})
    frame.write_parquet(tmp_path / "x.parquet")
    with pytest.raises(InputError, match="x.parquet: row 1: the item id is not an integer"):
        read_columns(tmp_path / "x.parquet")


def test_blanks_behind_the_delimiter_are_taken_off(tmp_path: Path) -> None:
    path = write(tmp_path, "log.csv", "user, item, time\n7, 30, 1287532527\n7, 10, 1287532528\n")
    assert rows_of(read_columns(path)) == ROWS[:2]


def test_ids_beyond_int64_are_kept_as_strings(tmp_path: Path) -> None:
    users = pl.Series([2**64 - 1, 5], dtype=pl.UInt64)
    frame = pl.DataFrame({"user": users, "item": [1, 2], "time": [3, 4]})
    frame.write_parquet(tmp_path / "x.parquet")
    assert read_columns(tmp_path / "x.parquet").users.to_list() == ["18446744073709551615", "5"]


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress((GOOD + "1,2,1287532527\n" * 50_000).encode())
    path = tmp_path / "log.csv.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="log.csv.gz: cannot be read: .*[Tt]runcated"):
        read_columns(path)


def test_missing_files_and_mixed_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        read_columns(tmp_path / "nowhere.csv")
    write(tmp_path, "a.csv", GOOD)
    write(tmp_path, "b.jsonl", "{}")
    with pytest.raises(InputError, match="several kinds \\(delimited, jsonl\\)"):
        read_columns(tmp_path)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "log.csv", GOOD)
    with pytest.raises(
        InputError,
        match="no column 'userr' \\(did you mean 'user'\\?\\); its columns are user, item, time",
    ):
        read_columns(path, columns=Columns(user="userr"))
    with pytest.raises(InputError, match="delimiter is '::'"):
        read_columns(path, delimiter="::")
    with pytest.raises(InputError, match="on_bad_rows is 'ignore'"):
        read_columns(path, on_bad_rows="ignore")  # type: ignore[arg-type]


def test_bad_rows_are_skipped_counted_and_shown_on_request(tmp_path: Path) -> None:
    bad = "5\n6,7,8,9\n,1,2\n3,4,soon\n3,4,later\n"
    path = write(tmp_path, "log.csv", GOOD + bad + "8,9,1287532528\n")
    log = read_columns(path, on_bad_rows="skip")
    assert rows_of(log) == [(1, 2, 1287532527), (8, 9, 1287532528)]
    assert {(rows.reason.split(",")[0], rows.count) for rows in log.bad_rows} == {
        ("wrong number of fields", 2),
        ("the user is missing", 1),
        ("impossible time", 2),
    }
    assert "line 3: too few fields (1, expected 3): '5'" in log.bad_rows[0].first


def test_bad_rows_of_parquet_are_skipped_and_counted_over_parts(tmp_path: Path) -> None:
    for part in ("a", "b"):
        frame = pl.DataFrame({"user": [1, None], "item": [1.0, 2.5], "time": [3, 4]})
        frame.write_parquet(tmp_path / f"{part}.parquet")
    with pytest.raises(InputError, match="a.parquet: row 2: the user is missing"):
        read_columns(tmp_path)
    log = read_columns(tmp_path, on_bad_rows="skip")
    assert rows_of(log) == [(1, 1, 3)] * 2
    assert [(rows.reason, rows.count) for rows in log.bad_rows] == [("the user is missing", 2)]


def test_ids_of_other_types_are_refused(tmp_path: Path) -> None:
    pl.DataFrame({"user": [True], "item": [1], "time": [3]}).write_parquet(tmp_path / "x.parquet")
    with pytest.raises(InputError, match="user ids are of type Boolean"):
        read_columns(tmp_path / "x.parquet")


def test_the_fast_and_the_careful_reading_agree(tmp_path: Path) -> None:
    lines = [
        json.dumps({"user": n % 7, "item": f"i{n}", "time": 1287532527 + n}) for n in range(5000)
    ]
    clean = read_columns(write(tmp_path, "clean.jsonl", "\n".join(lines)))
    lines.insert(2500, "broken")
    careful = read_columns(write(tmp_path, "broken.jsonl", "\n".join(lines)), on_bad_rows="skip")
    assert rows_of(clean) == rows_of(careful)
    assert careful.bad_rows[0].count == 1


def test_the_real_log(gitlog: Path) -> None:
    log = read_interactions(gitlog)
    assert (log.num_users, log.num_items, log.num_interactions) == (40_953, 930_528, 3_895_360)
