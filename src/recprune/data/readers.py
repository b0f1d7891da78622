"""Logs, in files or in memory, into three clean columns: user, item, time.

A text file is first read the fast way: typed, on all cores, with no thought for errors. Only if
anything at all is wrong is it read again the careful way, as bytes; then the first bad row is named
with its line and text, or the bad rows are left out and counted.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from recprune.data.formats import (
    Layout,
    Source,
    find_layout,
    find_sources,
    movielens_file,
    table_layout,
)
from recprune.data.frames import LogSource, column_names, columns_of, is_table
from recprune.data.identifiers import integers_or_texts
from recprune.data.interactions import BadRows
from recprune.data.timestamps import IN_ORDER, TimeFormat, parse_times
from recprune.types import Columns, InputError, Int64Array, Progress, no_progress

OnBadRows = Literal["error", "skip"]

_BLOCK_BYTES = 4 << 20  # that Arrow parses at a time, on one core
_LARGEST_BLOCK_BYTES = 1 << 28  # up to which blocks grow, for lines that are longer than one
_LONGEST_EXCERPT = 120  # characters of a bad row in a message
# Never part of a line of JSON, so that a whole line is read as one field.
_NO_DELIMITER = "\x1f"
_RAGGED = "wrong number of fields"


@dataclass(frozen=True)
class LogColumns:
    """The rows of a log in input order."""

    users: pl.Series  # Int64 or String
    items: pl.Series  # Int64 or String
    times: Int64Array  # microseconds since 1970
    bad_rows: tuple[BadRows, ...]
    low_ratings: int = 0  # rows that were left out for theirs


def read_columns(
    log: LogSource,
    *,
    log_format: str = "auto",
    columns: Columns | None = None,
    time_format: TimeFormat = "auto",
    delimiter: str | None = None,
    header: bool = True,
    on_bad_rows: OnBadRows = "error",
    min_rating: float | None = None,
    progress: Progress = no_progress,
) -> LogColumns:
    """Read a log file, the parts of a folder, or a table in memory into columns."""
    if on_bad_rows not in ("error", "skip"):
        raise InputError(f"on_bad_rows is {on_bad_rows!r}, expected 'error' or 'skip'")
    columns = columns or Columns()
    rated = min_rating is not None
    parts: list[pl.DataFrame] = []
    bad_rows: list[BadRows] = []
    if is_table(log):
        if log_format != "auto" or delimiter is not None or not header:
            raise InputError("log_format, delimiter and header are of files, not of tables")
        place = "the log"
        layout = table_layout(Path(place), column_names(log), columns, time_format, rated)
        frame = columns_of(log, list(layout.roles.values()))
        part, bad_rows = _settle_table(place, frame, layout, on_bad_rows)
        parts.append(part)
    else:
        place = str(log)
        try:
            sources = find_sources(movielens_file(log) if log_format == "movielens" else log)
        except OSError as error:
            raise InputError(f"{log}: cannot be read: {error.strerror}") from None
        for number, source in enumerate(sources, 1):
            part_of = f" ({number} of {len(sources)})" if len(sources) > 1 else ""
            progress(f"reading {source.path.name}{part_of}")
            try:
                layout = find_layout(
                    source,
                    log_format,
                    columns,
                    time_format=time_format,
                    delimiter=delimiter,
                    header=header,
                    rated=rated,
                )
                read = _read_parquet if layout.kind == "table" else _read_text
                part, bad = read(source, layout, on_bad_rows)
            except InputError as error:
                named = str(error).startswith(str(source.path))
                raise InputError(str(error) if named else f"{source.path}: {error}") from None
            except UnicodeEncodeError:
                raise InputError(f"{str(source.path)!a}: the file's name is not UTF-8") from None
            except (OSError, pa.ArrowException, pl.exceptions.PolarsError) as error:
                raise InputError(f"{source.path}: cannot be read: {error}") from None
            parts.append(part)
            bad_rows += bad
    users, items = (_concatenate_ids([part[role] for part in parts]) for role in ("user", "item"))
    if time_format == IN_ORDER:
        times = np.arange(len(users), dtype=np.int64)
    else:
        times = pl.concat([part["time"] for part in parts], rechunk=True).to_numpy()
    low_ratings = 0
    if rated:
        high = pl.concat([part["rating"] for part in parts], rechunk=True) >= min_rating
        low_ratings = len(high) - int(high.sum())
        users, items, times = users.filter(high), items.filter(high), times[high.to_numpy()]
    if len(times) == 0:
        left_out = [f"{sum(bad.count for bad in bad_rows)} bad ones"] if bad_rows else []
        left_out += [f"{low_ratings} rated below {min_rating:g}"] if low_ratings else []
        raise InputError(": ".join([place, ", ".join(["no usable row", *left_out])]))
    return LogColumns(users, items, times, _merge(bad_rows), low_ratings)


def _read_text(
    source: Source, layout: Layout, on_bad_rows: OnBadRows
) -> tuple[pl.DataFrame, list[BadRows]]:
    try:
        clean, faults = _check(_read_fast(source, layout), layout)
        if not faults:
            return clean, []
    except (pa.ArrowInvalid, pl.exceptions.ComputeError):
        pass  # ragged rows, ids of a wrong type, broken UTF-8: the careful reading tells which
    rows, num_ragged = _read_carefully(source, layout)
    clean, faults = _check(rows, layout)
    bad_rows = _describe_text_faults(source, layout, faults, num_ragged)
    return _settle(clean, faults, bad_rows, on_bad_rows)


def _read_parquet(
    source: Source, layout: Layout, on_bad_rows: OnBadRows
) -> tuple[pl.DataFrame, list[BadRows]]:
    with source.path.open("rb") as file:
        table = pq.ParquetFile(file).read(columns=sorted(set(layout.roles.values())))
    frame = pl.DataFrame(pl.from_arrow(table))
    return _settle_table(str(source.path), frame, layout, on_bad_rows)


def _settle_table(
    name: str, frame: pl.DataFrame, layout: Layout, on_bad_rows: OnBadRows
) -> tuple[pl.DataFrame, list[BadRows]]:
    rows = pl.DataFrame({role: frame[column] for role, column in layout.roles.items()})
    clean, faults = _check(rows, layout)
    bad_rows = []
    for fault in sorted(faults, key=lambda fault: fault.first_row):
        place = f"{name}: row {fault.first_row + 1}: {fault.reason}"
        bad_rows.append(BadRows(fault.reason, fault.count, f"{place}: {rows.row(fault.first_row)}"))
    return _settle(clean, faults, bad_rows, on_bad_rows)


def _settle(
    rows: pl.DataFrame, faults: list[_Fault], bad_rows: list[BadRows], on_bad_rows: OnBadRows
) -> tuple[pl.DataFrame, list[BadRows]]:
    """Refuse the first bad row, or leave all of them out."""
    if bad_rows and on_bad_rows == "error":
        raise InputError(bad_rows[0].first)
    if faults:
        rows = rows.filter(~pl.any_horizontal(fault.rows for fault in faults))
    return rows, bad_rows


# Reading -----------------------------------------------------------------------------------------


def _read_fast(source: Source, layout: Layout) -> pl.DataFrame:
    """Read with the types that the layout promises; raises if a row does not have them."""
    if layout.kind == "jsonl":
        lines = _read_arrow(source, layout, {"line": pa.string()})
        return _json_columns(pl.DataFrame(pl.from_arrow(lines)), layout)
    id_type = pa.int64() if layout.integer_ids else pa.string()
    fast_times = {
        "seconds": pa.int64(),
        "yyyymmdd": pa.int64(),
        "iso8601": pa.timestamp("us", "UTC"),
    }
    time_type = fast_times[layout.time_format] if layout.integer_ids else pa.string()
    by_role = {"user": id_type, "item": id_type, "time": time_type, "rating": pa.string()}
    types = {name: by_role[role] for role, name in layout.roles.items()}
    return _roles(_read_arrow(source, layout, types), layout)


def _read_carefully(source: Source, layout: Layout) -> tuple[pl.DataFrame, int]:
    """Read as text; the second value counts rows of a wrong width, which are left out."""
    ragged: list[int] = []
    names = ["line"] if layout.kind == "jsonl" else list(layout.roles.values())
    table = _read_arrow(source, layout, dict.fromkeys(names, pa.string()), ragged)
    if layout.kind == "jsonl":
        frame = pl.DataFrame(pl.from_arrow(table))
        readable = frame["line"].str.json_path_match("$").is_not_null()
        readable &= frame["line"].str.contains(r"^\s*\{")
        return _json_columns(frame, layout).with_columns(readable.alias("readable")), len(ragged)
    return _roles(table, layout), len(ragged)


def _read_arrow(
    source: Source, layout: Layout, types: dict[str, Any], ragged: list[int] | None = None
) -> Any:
    """Read the named columns in blocks that are large enough for the longest line."""
    block_bytes = _BLOCK_BYTES
    while True:
        try:
            return _read_blocks(source, layout, types, ragged, block_bytes)
        except pa.ArrowInvalid as error:
            if "straddling" not in str(error) or block_bytes > _LARGEST_BLOCK_BYTES:
                raise
            block_bytes *= 8
            if ragged is not None:
                ragged.clear()


def _read_blocks(
    source: Source,
    layout: Layout,
    types: dict[str, Any],
    ragged: list[int] | None,
    block_bytes: int,
) -> Any:
    """Read the named columns; rows of a wrong width raise, or go to `ragged` if that is given.

    With `ragged`, bytes that are not UTF-8 are read as U+FFFD instead of raising.
    """
    stream: Any
    set_aside = None
    if ragged is not None:

        def set_aside(row: Any) -> str:
            ragged.append(row.actual_columns)
            return "skip"

        stream = pa.PythonFile(_TextStream(source.open(), layout.double_colon), mode="r")
    elif layout.double_colon:
        stream = pa.PythonFile(_TextStream(source.open(), True), mode="r")
    elif source.compression:
        stream = source.open()
    else:  # given a path, Arrow reads ahead in parallel
        stream = nullcontext(str(source.path))
    json_lines = layout.kind == "jsonl"
    with stream as opened:
        return pa_csv.read_csv(
            opened,
            read_options=pa_csv.ReadOptions(
                column_names=["line"] if json_lines else list(layout.columns),
                skip_rows=layout.header_lines,
                block_size=block_bytes,
            ),
            parse_options=pa_csv.ParseOptions(
                delimiter=_NO_DELIMITER if json_lines else layout.delimiter,
                quote_char='"' if layout.quoted and not json_lines else False,
                newlines_in_values=layout.quoted and not json_lines,
                invalid_row_handler=set_aside,
            ),
            convert_options=pa_csv.ConvertOptions(
                include_columns=list(types), column_types=types, strings_can_be_null=False
            ),
        )


class _TextStream(io.RawIOBase):
    """Bytes that Arrow can take: "::" as a tab if asked for, U+FFFD for what is not UTF-8."""

    def __init__(self, stream: Any, double_colon: bool) -> None:
        self._stream = stream
        self._double_colon = double_colon
        self._held_back = b""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        text = self._held_back + self._decode(data, final=not data).encode()
        self._held_back = b""
        if self._double_colon:
            if data and text.endswith(b":") and not text.endswith(b"::"):
                self._held_back, text = b":", text[:-1]
            text = text.replace(b"::", b"\t")
        # Empty bytes would mean the end: read on after half a character.
        return text if text or not data else self.read(size)

    def close(self) -> None:
        self._stream.close()
        super().close()


def _roles(table: Any, layout: Layout) -> pl.DataFrame:
    frame = pl.DataFrame(pl.from_arrow(table))
    return pl.DataFrame({role: frame[name] for role, name in layout.roles.items()})


def _json_columns(frame: pl.DataFrame, layout: Layout) -> pl.DataFrame:
    return frame.select(
        pl.col("line").str.json_path_match(_json_path(name)).alias(role)
        for role, name in layout.roles.items()
    )


def _json_path(key: str) -> str:
    return f"$[{json.dumps(key, ensure_ascii=False)}]"


# Checking ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fault:
    """What is wrong with some rows, and a mask of them. Faults of one file do not overlap."""

    reason: str
    rows: pl.Series

    @property
    def count(self) -> int:
        return int(self.rows.sum())

    @property
    def first_row(self) -> int:
        return int(self.rows.arg_true()[0])


def _check(rows: pl.DataFrame, layout: Layout) -> tuple[pl.DataFrame, list[_Fault]]:
    """Return the rows with their final types, and what is wrong with some of them."""
    faults: list[_Fault] = []

    def add_fault(reason: str, mask: pl.Series) -> None:
        for earlier in faults:
            mask = mask & ~earlier.rows
        if mask.any():
            faults.append(_Fault(reason, mask))

    if "readable" in rows.columns:
        add_fault("not a JSON object", ~rows["readable"])
    if layout.kind == "delimited":
        rows = rows.with_columns(_trimmed(rows[role]) for role in layout.roles)
    for role in layout.roles:
        values = rows[role]
        add_fault(f"the {role} is missing", values.is_null())
        if values.dtype == pl.String:
            add_fault(f"the {role} is missing", values == "")
            add_fault(f"the {role} is not UTF-8 text", _holds(values, "\ufffd"))
    final: list[pl.Series] = []
    if layout.time:
        times, expected = parse_times(rows["time"], layout.time_format)
        add_fault(f"impossible time, expected {expected}", times.is_null())
        final.append(times.alias("time"))
    if layout.rating:
        ratings = rows["rating"].cast(pl.Float64, strict=False).fill_nan(None)
        add_fault("the rating is not a number", ratings.is_null())
        final.append(ratings)
    for role in ("user", "item"):
        if rows[role].dtype == pl.String:
            # A quote that is never closed swallows the lines that follow.
            add_fault(f"the {role} holds a line break: a stray quote?", _holds(rows[role], "\n"))
            if layout.kind == "jsonl":
                nested = rows[role].str.contains(r"^[\[{].*[\]}]$")
                add_fault(f"the {role} is not a number or a string", nested)
                huge = rows[role].str.contains(r"^-?\d\.\d+e\+\d+$")
                add_fault(f"the {role} is a number beyond 64 bits; write it as a string", huge)
    # The type of the ids is decided by the rows that stay.
    good = ~pl.any_horizontal(fault.rows for fault in faults) if faults else None
    for role in ("user", "item"):
        kept = rows[role] if good is None else rows.select(role).filter(good).to_series()
        ids = _as_ids(rows[role], kept, role, layout.integer_ids)
        add_fault(f"the {role} id is not an integer", ids.is_null())
        rows = rows.with_columns(ids.alias(role))
    return rows.select("user", "item", *final), faults


def _trimmed(values: pl.Series) -> pl.Series:
    """Take off the blanks that some writers put behind a delimiter."""
    if values.dtype != pl.String:
        return values
    sample = values.head(1000)
    return values.str.strip_chars(" ") if (sample != sample.str.strip_chars(" ")).any() else values


def _holds(values: pl.Series, text: str) -> pl.Series:
    return values.str.contains(text, literal=True).fill_null(False)


def _as_ids(ids: pl.Series, kept: pl.Series, role: str, integer_ids: bool) -> pl.Series:
    """Return ids as Int64 or String, by what the kept ones are; null where that fails."""
    if ids.dtype in (pl.Categorical, pl.Enum, pl.Null):
        ids, kept = ids.cast(pl.String), kept.cast(pl.String)
    if ids.dtype == pl.String:
        if _are_whole_floats(kept):  # as pandas writes integers of a column with gaps
            ids, kept = (texts.str.strip_suffix(".0") for texts in (ids, kept))
        integers = integer_ids or _are_canonical_integers(kept)
        return ids.cast(pl.Int64, strict=False) if integers else ids
    if not ids.dtype.is_numeric():
        raise InputError(f"{role} ids are of type {ids.dtype}, expected integers or strings")
    if ids.dtype.is_integer():
        return integers_or_texts(ids, kept)
    whole = ids.cast(pl.Int64, strict=False)
    return whole.set(whole != ids, None)  # 1.5 would be cut to 1


def _are_canonical_integers(texts: pl.Series) -> bool:
    """Say whether texts and integers correspond one to one: "7" does, "07" and "+7" do not."""
    for sample in (texts.head(1000), texts):
        if sample.cast(pl.Int64, strict=False).null_count() > 0:
            return False
    padded = texts.str.starts_with("0") & (texts.str.len_bytes() > 1)
    return not (padded | texts.str.starts_with("-0") | texts.str.starts_with("+")).any()


def _are_whole_floats(texts: pl.Series) -> bool:
    """Say whether all texts are integers that end with ".0"."""
    return all(
        bool(sample.str.contains(r"^-?\d+\.0$").fill_null(False).all()) and len(sample) > 0
        for sample in (texts.head(1000), texts)
    )


def _concatenate_ids(parts: list[pl.Series]) -> pl.Series:
    if len({part.dtype for part in parts}) > 1:
        parts = [part.cast(pl.String) for part in parts]
    return pl.concat(parts, rechunk=True)


# Reporting ---------------------------------------------------------------------------------------


def _describe_text_faults(
    source: Source, layout: Layout, faults: list[_Fault], num_ragged: int
) -> list[BadRows]:
    """Count the bad rows by reason, in the order in which the file shows the first of each."""
    wanted = {fault.first_row: fault for fault in faults}
    ragged = _RAGGED if num_ragged else None
    bad_rows: list[BadRows] = []
    expected = len(layout.columns) if layout.kind == "delimited" else 1
    row = 0
    for line, text, width in _records(source, layout):
        if not wanted and not ragged:
            break
        place = f"{source.path}: line {line}"
        if width != expected:
            if ragged:
                detail = f"{'too few' if width < expected else 'too many'} fields"
                detail = f"{detail} ({width}, expected {expected})"
                bad_rows.append(BadRows(ragged, num_ragged, f"{place}: {detail}: {text}"))
                ragged = None
            continue
        if row in wanted:
            fault = wanted.pop(row)
            bad_rows.append(BadRows(fault.reason, fault.count, f"{place}: {fault.reason}: {text}"))
        row += 1
    # The two readers can disagree on where a broken quote ends; the counts still stand.
    bad_rows += [
        BadRows(fault.reason, fault.count, f"{source.path}: {fault.reason}")
        for fault in wanted.values()
    ]
    if ragged:
        bad_rows.append(BadRows(ragged, num_ragged, f"{source.path}: {ragged}"))
    return bad_rows


def _records(source: Source, layout: Layout) -> Iterator[tuple[int, str, int]]:
    """Yield line number, quoted excerpt and number of fields of every row that is not blank."""
    seen: list[str] = []

    def lines() -> Iterator[str]:
        stream = source.open()
        with io.TextIOWrapper(stream, "utf-8-sig", errors="backslashreplace", newline="") as file:
            for line in file:
                seen.append(line)
                yield line.replace("::", "\t") if layout.double_colon else line

    if layout.kind == "jsonl":
        for number, line in enumerate(lines(), 1):
            if line.strip("\r\n"):
                yield number, _excerpt(line), 1
        return
    reader = csv.reader(
        lines(),
        delimiter=layout.delimiter,
        quoting=csv.QUOTE_MINIMAL if layout.quoted else csv.QUOTE_NONE,
    )
    csv.field_size_limit(sys.maxsize)  # by default a field of 128 KB is an error
    while True:
        seen.clear()
        first_line = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error:  # a field without end; nothing after it can be told apart
            return
        if fields is None:
            return
        if fields and first_line > layout.header_lines:
            yield first_line, _excerpt("".join(seen)), len(fields)


def _excerpt(text: str) -> str:
    text = text.rstrip("\r\n")
    return repr(text if len(text) <= _LONGEST_EXCERPT else text[: _LONGEST_EXCERPT - 1] + "…")


def _merge(bad_rows: list[BadRows]) -> tuple[BadRows, ...]:
    """Add up the reasons over the parts of a log."""
    merged: dict[str, BadRows] = {}
    for bad in bad_rows:
        before = merged.get(bad.reason)
        merged[bad.reason] = (
            bad if before is None else BadRows(bad.reason, before.count + bad.count, before.first)
        )
    return tuple(merged.values())
