"""What a log file looks like: its container, its columns, its times.

A `Layout` is found from the format's name (gowalla, tmall, movielens) or from the file itself, and
says everything that `readers` needs to turn the file into columns.
"""

from __future__ import annotations

import csv
import difflib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa

from recprune.data.timestamps import IN_ORDER, TimeFormat
from recprune.types import Columns, InputError

LogFormat = Literal["auto", "gowalla", "tmall", "movielens"]
LOG_FORMATS: tuple[str, ...] = get_args(LogFormat)

_HEAD_BYTES = 1 << 16  # read at a time until the first line ends
_LONGEST_LINE = 1 << 28  # bytes after which a first line without end is cut off

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_PART_SUFFIXES = {
    ".csv", ".tsv", ".txt", ".dat", ".data", ".inter", ".json", ".jsonl", ".ndjson", ".parquet",
    ".pq",
}  # fmt: skip
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "Parquet",
    b"PK\x03\x04": "a zip archive",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}

# Column names that logs in the wild use, best first; compared without case, "_", "-" and blanks.
_USUAL_NAMES = {
    "user": ("userid", "user", "uid", "useid", "customerid", "householdid", "memberid", "accountid",
             "visitorid", "reviewerid", "clientid", "sessionid", "customer", "visitor",
             "session"),
    "item": ("itemid", "item", "iid", "iteid", "productid", "movieid", "locationid", "trackid",
             "songid", "bookid", "articleid", "contentid",
             "businessid", "asin", "sku", "product", "movie",
             "location", "track", "article"),
    "time": ("timestamp", "time", "ts", "unixtime", "unixreviewtime", "datetime", "eventtime",
             "eventts", "checkintime", "transactiontimestamp", "createdat", "date"),
    "rating": ("rating", "stars", "score", "overall"),
}  # fmt: skip

_NO_TIMES = (
    "; if there are no times, but rows stand in their order, say --time-format order "
    "(time_format='order')"
)


@dataclass(frozen=True)
class Source:
    """One file, with its compression taken off on the way in."""

    path: Path
    compression: str | None

    def open(self) -> Any:
        """Open the decompressed bytes as an Arrow input stream."""
        return pa.input_stream(str(self.path), compression=self.compression)

    def first_line(self) -> bytes:
        """Return the first line, decompressed, without its end."""
        line = b""
        with self.open() as stream:
            while len(line) < _LONGEST_LINE and (more := bytes(stream.read(_HEAD_BYTES))):
                line += more
                if b"\n" in more or b"\r" in more:
                    break
        return (line.removeprefix(b"\xef\xbb\xbf").splitlines() or [b""])[0]


@dataclass(frozen=True)
class Layout:
    """How the rows of a log are written, and which columns matter."""

    kind: Literal["delimited", "jsonl", "table"]  # tables have types: Parquet, or a frame
    user: str
    item: str
    time: str  # empty where the order of rows stands for times
    time_format: TimeFormat = "auto"
    delimiter: str = ","
    columns: tuple[str, ...] = ()  # of a delimited file, in file order
    header_lines: int = 0
    quoted: bool = True
    integer_ids: bool = False  # the format promises it, so anything else is a bad row
    double_colon: bool = False  # "::" stands between fields; read as tabs
    rating: str = ""  # empty where ratings do not matter

    @property
    def roles(self) -> dict[str, str]:
        """Return the columns that are read, by what they are."""
        given = {role: getattr(self, role) for role in ("user", "item", "time", "rating")}
        return {role: name for role, name in given.items() if name}


def find_sources(path: str | Path) -> list[Source]:
    """Return the file, or the parts of a folder in name order, each checked against its name."""
    root = Path(path)
    if not str(path) or not root.exists():
        raise InputError(f"{path}: no such file or folder")
    if not root.is_dir():
        return [_source(root)]
    if (root / "manifest.json").exists():
        raise InputError(f"{root}: this folder was saved by recprune; it is not a log")
    parts = sorted(part for part in root.rglob("*") if _is_part(part.relative_to(root), part))
    if not parts:
        raise InputError(f"{root}: no CSV, TSV, JSON lines or Parquet files in this folder")
    kinds = {kind_of(part) for part in parts}
    if len(kinds) > 1:
        raise InputError(f"{root}: holds files of several kinds ({', '.join(sorted(kinds))})")
    return [_source(part) for part in parts]


def _is_part(name: Path, path: Path) -> bool:
    """Say whether a file in a folder is a part of the log: by its suffix, and not empty."""
    if any(piece.startswith((".", "_")) for piece in name.parts) or not path.is_file():
        return False
    plain = name.with_suffix("") if name.suffix.lower() in _COMPRESSIONS else name
    return plain.suffix.lower() in _PART_SUFFIXES and path.stat().st_size > 0


def find_layout(
    source: Source,
    log_format: str,
    columns: Columns,
    *,
    time_format: TimeFormat,
    delimiter: str | None,
    header: bool,
    rated: bool = False,
) -> Layout:
    """Return the layout of a file: the named format's, or the one its head shows.

    `rated` asks for a column of ratings as well.
    """
    if log_format not in LOG_FORMATS:
        raise InputError(
            f"format is {log_format!r}, expected one of {', '.join(LOG_FORMATS)}; "
            "auto tells CSV, TSV, JSON lines and Parquet by the file's name"
        )
    if log_format != "auto":
        if columns != Columns() or time_format != "auto" or delimiter is not None or not header:
            raise InputError(
                f"the format {log_format} fixes columns, times, delimiter and header: "
                "leave those options out, or the format"
            )
        if kind_of(source.path) != "delimited":
            raise InputError(f"{source.path}: not a text file of the {log_format} format")
    if log_format == "movielens":
        return replace(_movielens(source), rating="rating" if rated else "")
    if log_format in ("gowalla", "tmall"):
        if rated:
            raise InputError(f"the format {log_format} has no ratings")
        return _GOWALLA if log_format == "gowalla" else _tmall(source)
    kind = kind_of(source.path)
    if kind == "parquet":
        return table_layout(source.path, _parquet_names(source.path), columns, time_format, rated)
    if kind == "jsonl":
        names = _json_names(source)
        base = Layout("jsonl", "", "", "", time_format)
        return _with_roles(source.path, names, columns, base, rated)
    delimiter, names = delimited_head(source, delimiter, header)
    base = Layout(
        "delimited",
        user="",
        item="",
        time="",
        time_format=time_format,
        delimiter=delimiter,
        columns=tuple(names),
        header_lines=int(header),
        quoted=delimiter != "\t",  # tab-separated files have no quoting, by custom
    )
    return _with_roles(source.path, names, columns, base, rated)


def table_layout(
    place: Path, names: list[str], columns: Columns, time_format: TimeFormat, rated: bool
) -> Layout:
    """Return which columns of a table matter; `place` is what messages call it."""
    return _with_roles(place, names, columns, Layout("table", "", "", "", time_format), rated)


# The named formats -------------------------------------------------------------------------------

# SNAP: loc-gowalla_totalCheckins.txt, e.g. "0	2010-10-19T23:55:27Z	30.23	-97.79	22847".
_GOWALLA = Layout(
    "delimited",
    user="user",
    item="item",
    time="time",
    time_format="iso8601",
    delimiter="\t",
    columns=("user", "time", "latitude", "longitude", "item"),
    quoted=False,
    integer_ids=True,
)


def _tmall(source: Source) -> Layout:
    """IJCAI-16: ijcai2016_taobao.csv with its header, dates as yyyymmdd."""
    expected = ("use_ID", "sel_ID", "ite_ID", "cat_ID", "act_ID", "time_stamp")
    header = tuple(_first_line(source).split(","))
    if header != expected:
        raise InputError(
            f"{source.path}: line 1: not the tmall format: expected the header "
            f"{','.join(expected)!r}, found {','.join(header)[:120]!r}"
        )
    return Layout(
        "delimited",
        user="use_ID",
        item="ite_ID",
        time="time_stamp",
        time_format="yyyymmdd",
        columns=expected,
        header_lines=1,
        quoted=False,
        integer_ids=True,
    )


def _movielens(source: Source) -> Layout:
    """ml-1m and ml-10m (ratings.dat, "::"), ml-20m and later (ratings.csv), ml-100k (u.data)."""
    first_line = _first_line(source)
    common = Layout("delimited", "user", "item", "time", "seconds", quoted=False, integer_ids=True)
    if "::" in first_line:
        names = ("user", "item", "rating", "time")
        return replace(common, delimiter="\t", double_colon=True, columns=names)
    if first_line.split(",") == ["userId", "movieId", "rating", "timestamp"]:
        return replace(common, columns=("user", "item", "rating", "time"), header_lines=1)
    if len(first_line.split("\t")) == 4:
        return replace(common, delimiter="\t", columns=("user", "item", "rating", "time"))
    raise InputError(
        f"{source.path}: line 1: not a movielens format: expected user::item::rating::time, or the "
        f"header userId,movieId,rating,timestamp, found {first_line[:120]!r}"
    )


def movielens_file(path: str | Path) -> Path:
    """Return the ratings file of an unpacked MovieLens folder, or the path itself."""
    root = Path(path)
    if root.is_dir():
        for name in ("ratings.dat", "ratings.csv", "u.data"):
            for candidate in (root / name, root / f"{name}.gz", root / f"{name}.zst"):
                if candidate.exists():
                    return candidate
        raise InputError(f"{root}: no ratings.dat, ratings.csv or u.data in this folder")
    return root


# Finding out -------------------------------------------------------------------------------------


def kind_of(path: Path) -> str:
    """Return what a file's name says that it is: parquet, jsonl or delimited."""
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    if last in (".parquet", ".pq"):
        return "parquet"
    return "jsonl" if last in (".jsonl", ".ndjson", ".json") else "delimited"


def _source(path: Path) -> Source:
    """Check a file's first bytes against its name before anything is parsed."""
    compression = _COMPRESSIONS.get(path.suffix.lower())
    if not path.is_file():  # a pipe can be read only once, and a broken log is read twice
        raise InputError(f"{path}: not a regular file")
    with path.open("rb") as file:
        start = file.read(4096)
    if not start:
        raise InputError(f"{path}: the file is empty")
    found = next((what for magic, what in _MAGIC.items() if start.startswith(magic)), None)
    expected = compression or ("Parquet" if kind_of(path) == "parquet" else None)
    if found != expected:
        named = f"named as {expected}" if expected else "named as plain text"
        looks = f"looks like {found}" if found else f"does not begin like it: {start[:16]!r}"
        raise InputError(f"{path}: {named}, but {looks}")
    if expected is None and b"\0" in start:
        raise InputError(f"{path}: named as plain text, but holds zero bytes")
    return Source(path, compression)


def _first_line(source: Source) -> str:
    line = source.first_line()
    if not line.strip():
        raise InputError(f"{source.path}: line 1: is empty, expected a row or a header")
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise InputError(f"{source.path}: line 1: not UTF-8 text: {line[:120]!r}") from None


def delimited_head(source: Source, delimiter: str | None, header: bool) -> tuple[str, list[str]]:
    """Return the delimiter of a text file, as given or as its first line shows, and its columns."""
    delimiter = "\t" if delimiter == "\\t" else delimiter
    if delimiter is not None and not _is_delimiter(delimiter):
        raise InputError(
            f"delimiter is {delimiter!r}, expected one ASCII character, not a quote or newline"
        )
    first_line = _first_line(source)
    delimiter = delimiter or _sniff_delimiter(first_line, source.path)
    names = next(csv.reader([first_line], delimiter=delimiter), [])
    if header:
        # RecBole writes the type behind the name: "user_id:token".
        names = [_without_recbole_type(name.strip()) for name in names]
    else:
        names = [str(position) for position in range(len(names))]
    return delimiter, names


def _without_recbole_type(name: str) -> str:
    plain, _, kind = name.partition(":")
    return plain if kind in ("token", "float", "token_seq", "float_seq") else name


def _is_delimiter(text: str) -> bool:
    return len(text) == 1 and text.isascii() and text not in '"\r\n'


def _sniff_delimiter(line: str, path: Path) -> str:
    counts = {delimiter: line.count(delimiter) for delimiter in "\t,;|"}
    best = max(counts, key=lambda delimiter: counts[delimiter])
    if counts[best] == 0:
        raise InputError(
            f"{path}: line 1: no tab, comma, semicolon or bar separates its fields: {line[:120]!r}"
        )
    return best


def _parquet_names(path: Path) -> list[str]:
    import pyarrow.parquet as pq

    try:
        with path.open("rb") as file:
            return list(pq.ParquetFile(file).schema_arrow.names)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a readable Parquet file: {error}") from None


def _json_names(source: Source) -> list[str]:
    line = _first_line(source)
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        first = None
    if not isinstance(first, dict):
        raise InputError(f"{source.path}: line 1: not a JSON object: {line[:120]!r}")
    return list(first)


def _with_roles(
    path: Path, names: list[str], columns: Columns, layout: Layout, rated: bool
) -> Layout:
    """Fill in which column is the user, the item, the time: as given, else by its usual names."""
    in_order = layout.time_format == IN_ORDER
    if in_order and columns.time is not None:
        raise InputError(f"the order of rows, and the column {columns.time!r}: which has times?")
    if columns.rating is not None and not rated:
        raise InputError("a column of ratings goes with a lowest rating")
    found: dict[str, Any] = {}
    for role in ("user", "item", *(() if in_order else ("time",)), *(("rating",) if rated else ())):
        found[role] = find_column(path, names, role, getattr(columns, role))
        if layout.kind == "jsonl" and "\\" in found[role]:
            raise InputError(
                f"{path}: the key {found[role]!r} holds a backslash, which is not supported"
            )
    return replace(layout, **found)


def find_column(path: Path, names: list[str], role: str, given: str | None) -> str:
    """Return which column is the user, the item or the time: as given, else by its usual names."""
    if given is not None:
        return checked_column(path, names, given)
    plain = {_plain(name): name for name in reversed(names)}
    chosen = next((plain[name] for name in _USUAL_NAMES[role] if name in plain), None)
    if chosen is None:
        raise InputError(
            f"{path}: which column is the {role}? None of {', '.join(names)} has a usual name; "
            f"give it with --{role}-column (Columns({role}=...)), and a file without column "
            "names with --no-header (header=False)" + (_NO_TIMES if role == "time" else "")
        )
    return checked_column(path, names, chosen)


def find_id_column(path: Path, names: list[str], given: str | None, option: str) -> str:
    """Return which column of a table of items has their ids; `option` is what would say so.

    Beside what logs call an item, that is `id`: in a log, this may be the event's.
    """
    if given is not None:
        return checked_column(path, names, given)
    plain = {_plain(name): name for name in reversed(names)}
    usual = (*_USUAL_NAMES["item"], "id")
    chosen = next((plain[name] for name in usual if name in plain), None)
    if chosen is None:
        raise InputError(
            f"{path}: which column has the items' ids? None of {', '.join(names)} has a usual "
            f"name, such as item_id or id; give it with {option} (item_column=…)"
        )
    return checked_column(path, names, chosen)


def checked_column(path: Path, names: list[str], given: str) -> str:
    """Return the name of a column that must be there, once."""
    if given not in names:
        close = difflib.get_close_matches(str(given), names, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise InputError(f"{path}: no column {given!r}{hint}; its columns are {', '.join(names)}")
    if names.count(given) > 1:
        raise InputError(f"{path}: {names.count(given)} columns are called {given!r}")
    return given


def _plain(name: str) -> str:
    return name.lower().translate(str.maketrans("", "", "_- ."))
