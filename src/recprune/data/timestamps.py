"""Times of a log, in whatever shape they come, as int64 microseconds since 1970 (UTC).

Microseconds because they order everything that real logs tell apart: seconds, milliseconds and
ISO-8601 fractions of six digits.
"""

from __future__ import annotations

from typing import Literal, get_args

import polars as pl

from recprune.data.identifiers import number_integers
from recprune.types import InputError

TimeFormat = Literal[
    "auto", "seconds", "milliseconds", "microseconds", "nanoseconds", "iso8601", "yyyymmdd", "order"
]
IN_ORDER: TimeFormat = "order"  # no times at all: rows stand in the order of theirs
TIME_FORMATS: tuple[str, ...] = get_args(TimeFormat)

# A log from before 1970 or after 2199 is a log with a broken clock, or of another unit.
EARLIEST = 0
LATEST = 7_258_118_400_000_000  # 2200-01-01T00:00:00Z
_POSSIBLE_YEARS = "1970 to 2199"

# Each unit with the smallest number that is read as such: 10¹¹ seconds is the year 5138, but 10¹¹
# milliseconds is 1973, so the magnitude tells.
_UNIX_UNITS = {"seconds": 0, "milliseconds": 10**11, "microseconds": 10**14, "nanoseconds": 10**17}
_PER_SECOND = {"seconds": 1, "milliseconds": 10**3, "microseconds": 10**6, "nanoseconds": 10**9}
# Eight digits from 19000101 on: as seconds they would all lie in 1970.
_YYYYMMDD = (19_000_101, 22_001_231)

_EIGHT_DIGITS = (10_000_000, 99_999_999)

# Tried in turn on what is still unread; the first also takes a zone (Z, +02:00).
_ISO_FORMATS = (
    ("%+", True),
    ("%Y-%m-%d %H:%M:%S%.f", False),
    ("%Y-%m-%dT%H:%M:%S%.f", False),
    ("%Y-%m-%d", False),
    ("%Y-%m-%d %H:%M:%S%.f%#z", True),
    ("%Y-%m-%dT%H:%M:%S%.f%#z", True),
    ("%Y%m%dT%H%M%S%#z", True),
    ("%Y-%m-%d %H:%M%#z", True),
    ("%Y-%m-%dT%H:%M%#z", True),
    ("%Y-%m-%d %H:%M", False),
    ("%Y-%m-%dT%H:%M", False),
)


def parse_times(column: pl.Series, time_format: str = "auto") -> tuple[pl.Series, str]:
    """Return the column as Int64 microseconds, null where a time is missing or impossible.

    The second value says what was expected, for messages. The column may hold strings, integers,
    floats, dates or datetimes; `time_format` applies to the first three.
    """
    if time_format not in TIME_FORMATS:
        raise InputError(
            f"time_format is {time_format!r}, expected one of {', '.join(TIME_FORMATS)}"
        )
    if column.dtype in (pl.Null, pl.Categorical, pl.Enum):
        column = column.cast(pl.String)
    if column.dtype == pl.Decimal:
        column = column.cast(pl.Float64)
    if column.dtype in (pl.Date, pl.Datetime):
        return _possible(column.dt.epoch("us")), f"a time in {_POSSIBLE_YEARS}"
    if not (column.dtype.is_numeric() or column.dtype == pl.String):
        raise InputError(f"times cannot be read from a column of type {column.dtype}")
    if time_format == "auto":
        time_format = _detect(column)
    if time_format == "iso8601":
        if column.dtype != pl.String:
            raise InputError(f"ISO-8601 times cannot be read from a column of type {column.dtype}")
        return _possible(_parse_iso(column)), f"an ISO-8601 time in {_POSSIBLE_YEARS}"
    if time_format == "yyyymmdd":
        return _possible(_parse_yyyymmdd(column)), f"a date yyyymmdd in {_POSSIBLE_YEARS}"
    return _possible(_parse_unix(column, time_format)), f"unix {time_format} in {_POSSIBLE_YEARS}"


def _detect(column: pl.Series) -> str:
    """Choose the format that most values have; the rest will then be impossible, not misread."""
    values = column.drop_nulls()
    if values.dtype == pl.String:
        values = values.filter(values != "")
    values = values.gather_every(max(1, len(values) // 100_000))
    numbers = values.cast(pl.Float64, strict=False).drop_nulls()
    if 2 * len(numbers) < len(values):
        return "iso8601"
    if 2 * numbers.is_between(*_YYYYMMDD).sum() > len(numbers):
        return "yyyymmdd"
    fitting = [
        unit for unit, low in _UNIX_UNITS.items() if 2 * (numbers >= low).sum() > len(numbers)
    ]
    return fitting[-1] if fitting else "seconds"


def _parse_unix(column: pl.Series, unit: str) -> pl.Series:
    numbers = column.cast(pl.Int64, strict=False)
    if column.dtype.is_float() or numbers.null_count() > column.null_count():
        # Fractions of a second, as in RecBole's files or from Python's time.time().
        numbers = column.cast(pl.Float64, strict=False)
    number = pl.col("number")
    # A column of milliseconds may not hold a few seconds: they would sort before everything else.
    inside = number.is_between(_UNIX_UNITS[unit], LATEST // 1_000_000 * _PER_SECOND[unit])
    if unit == "nanoseconds":
        microseconds = number // 1_000
    else:
        microseconds = (number * (1_000_000 // _PER_SECOND[unit])).round()
    frame = numbers.alias("number").to_frame()
    return frame.select(pl.when(inside).then(microseconds).cast(pl.Int64)).to_series()


def _parse_yyyymmdd(column: pl.Series) -> pl.Series:
    # A log has few distinct days: parse each once.
    numbers = column.cast(pl.Int64, strict=False)
    if column.dtype.is_float():
        numbers = numbers.set(numbers != column, None)
    # polars would read 2015115 as 5 November, but the format promises eight digits.
    numbers = numbers.set(~numbers.is_between(*_EIGHT_DIGITS), None).fill_null(0)
    distinct, day_of_row = number_integers(numbers)
    dates = pl.Series(distinct.numbers).cast(pl.String).str.to_date("%Y%m%d", strict=False)
    return dates.dt.epoch("us").gather(day_of_row)


def _parse_iso(column: pl.Series) -> pl.Series:
    times = pl.repeat(None, len(column), dtype=pl.Int64, eager=True)
    for pattern, zoned in _ISO_FORMATS:
        unread = times.is_null() & column.is_not_null()
        if not unread.any():
            break
        texts = column.filter(unread) if not unread.all() else column
        parsed = texts.str.to_datetime(
            pattern, strict=False, time_unit="us", time_zone="UTC" if zoned else None
        ).to_physical()
        if unread.all():
            times = parsed
        elif parsed.null_count() < len(parsed):
            times = times.scatter(unread.arg_true(), parsed)
    return times


def _possible(times: pl.Series) -> pl.Series:
    frame = times.alias("time").to_frame()
    inside = pl.col("time").is_between(EARLIEST, LATEST - 1)
    return frame.select(pl.when(inside).then("time")).to_series()
