from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recprune import InputError
from recprune.data.timestamps import parse_times

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def microseconds(time: datetime) -> int:
    return (time - EPOCH) // timedelta(microseconds=1)


def parsed(values: list[object], time_format: str = "auto") -> list[int | None]:
    times, _ = parse_times(pl.Series(values, strict=False), time_format)
    assert times.dtype == pl.Int64
    return times.to_list()


MOMENT = datetime(2010, 10, 19, 23, 55, 27, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2010-10-19T23:55:27Z", MOMENT),
        ("2010-10-19T23:55:27.25Z", MOMENT.replace(microsecond=250_000)),
        ("2010-10-19T23:55:27.123456", MOMENT.replace(microsecond=123_456)),
        ("2010-10-20T01:55:27+02:00", MOMENT),
        ("2010-10-19 21:55:27.5-0200", MOMENT.replace(microsecond=500_000)),
        ("2010-10-19 23:55:27", MOMENT),
        ("2010-10-20T01:55:27+02", MOMENT),
        ("20101019T235527Z", MOMENT),
        ("2010-10-19T23:55", MOMENT.replace(second=0)),
        ("2010-10-19 23:55", MOMENT.replace(second=0)),
        ("2010-10-19", MOMENT.replace(hour=0, minute=0, second=0)),
    ],
)
def test_iso_8601(text: str, expected: datetime) -> None:
    assert parsed([text]) == [microseconds(expected)]


def test_a_column_may_mix_shapes_of_iso_8601() -> None:
    texts = ["2010-10-19", "2010-10-19T23:55:27Z", "2010-10-19 23:55:27", "2010-13-19", "soon"]
    day, moment = microseconds(datetime(2010, 10, 19, tzinfo=UTC)), microseconds(MOMENT)
    assert parsed(list(texts)) == [day, moment, moment, None, None]


@given(st.datetimes(datetime(1970, 1, 1), datetime(2199, 12, 31), timezones=st.just(UTC)))
def test_every_unit_gives_the_same_moment(time: datetime) -> None:
    time = time.replace(microsecond=0)
    seconds = microseconds(time) // 1_000_000
    expected = [microseconds(time)]
    assert parsed([seconds], "seconds") == expected
    assert parsed([str(seconds)], "seconds") == expected
    assert parsed([time.isoformat()]) == expected
    assert parsed([time.astimezone(timezone(timedelta(hours=-7))).isoformat()]) == expected
    assert parsed([time.replace(tzinfo=None)]) == expected
    if seconds >= 10**8:
        for factor in (10**3, 10**6, 10**9):
            assert parsed([seconds * factor]) == expected


def test_unix_times_with_fractions() -> None:
    assert parsed([978300760.25]) == [978300760250000]
    assert parsed(["978300760", "978300761.5"]) == [978300760000000, 978300761500000]


def test_days() -> None:
    day = microseconds(datetime(2015, 11, 11, tzinfo=UTC))
    assert parsed([20151111, 20151111]) == [day, day]
    assert parsed(["20151111"]) == [day]
    assert parsed([date(2015, 11, 11)]) == [day]


def test_a_wrong_day_among_days_is_impossible_and_not_read_as_seconds() -> None:
    day = microseconds(datetime(2015, 11, 11, tzinfo=UTC))
    assert parsed([20151111, 20151132, 20151111, 7]) == [day, None, day, None]


def test_a_few_seconds_among_milliseconds_are_impossible() -> None:
    assert parsed([1287532527123, 1287532527124, 1287532527]) == [
        1287532527123000,
        1287532527124000,
        None,
    ]


@pytest.mark.parametrize("impossible", [-1, 10**10, "1960-01-01", "2200-01-01", float("nan"), None])
def test_impossible_times_become_null(impossible: object) -> None:
    good = "2010-10-19" if isinstance(impossible, str) else 1287532527
    assert parsed([good, good, impossible])[2] is None


def test_time_zones_of_a_datetime_column_count() -> None:
    column = pl.Series([datetime(2010, 10, 19, 23, 55, 27)]).dt.replace_time_zone("Etc/GMT-2")
    assert parse_times(column)[0].to_list() == [microseconds(MOMENT) - 7_200_000_000]


def test_what_cannot_be_a_time_column_is_refused() -> None:
    with pytest.raises(InputError, match="type Boolean"):
        parse_times(pl.Series([True]))
    with pytest.raises(InputError, match="expected one of auto, seconds"):
        parse_times(pl.Series([1]), "sconds")
    with pytest.raises(InputError, match="ISO-8601 times cannot be read"):
        parse_times(pl.Series([1]), "iso8601")
