from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recprune import InputError, IntegerIds, StorageError, StringIds
from recprune.data.identifiers import (
    coerce_ids,
    find_rows,
    ids_from_arrays,
    integers_or_texts,
    number_ids,
    too_large_for_integers,
    united,
)

INTEGERS = st.one_of(
    st.integers(-5, 20),  # close together: numbered by table
    st.integers(-(2**63), 2**63 - 1),  # anywhere: numbered by hashing
)


@given(
    st.lists(INTEGERS, min_size=1)
    | st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1)
)
def test_numbering_is_sorted_distinct_and_reversible(values: list[int] | list[str]) -> None:
    ids, places = number_ids(
        pl.Series(values, dtype=pl.Int64 if isinstance(values[0], int) else pl.String)
    )
    assert [ids[place] for place in places.tolist()] == values
    external = [ids[k] for k in range(len(ids))]
    assert len(set(external)) == len(external)
    assert external == sorted(
        external, key=lambda value: value if isinstance(value, int) else value.encode()
    )
    assert [ids.find(value) for value in external] == list(range(len(ids)))
    reread = ids_from_arrays(ids.to_arrays("x"), "x")
    assert reread is not None
    assert [reread[k] for k in range(len(reread))] == external


@given(st.lists(st.sampled_from(["", "a", "ab", "é", "日本"]), min_size=1), st.data())
def test_select_numbers_the_kept_ids_anew(values: list[str], data: st.DataObject) -> None:
    ids, _ = number_ids(pl.Series(values))
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))), bool)
    kept = ids.select(keep)
    assert [kept[k] for k in range(len(kept))] == [ids[k] for k in np.flatnonzero(keep).tolist()]


@pytest.mark.parametrize("unknown", [5, "x", 2**70, -(2**70), None, 1.0, True, b"a"])
def test_unknown_ids_are_not_found(unknown: object) -> None:
    assert IntegerIds(np.array([1, 7])).find(unknown) == -1
    strings, _ = number_ids(pl.Series(["a", "b"]))
    assert isinstance(strings, StringIds)
    assert strings.find(unknown) == -1


TEXTS = st.sampled_from(["", "a", "ab", "abc", "b", "é", "日本", "\ud800", "a\0"]) | st.text()
ANYTHING = st.one_of(
    INTEGERS,
    TEXTS,
    st.sampled_from([None, True, False, 1.0, b"a", 2**63, -(2**63) - 1, 2**70, ()]),
    st.sampled_from(
        [np.int64(3), np.uint64(2**64 - 1), np.bool_(True), np.float32(1), np.str_("a")]
    ),
)


@given(
    st.lists(INTEGERS)
    | st.lists(st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(["a", "ab"])),
    st.lists(ANYTHING),
    st.data(),
)
def test_many_are_found_as_each_is(
    values: list[int] | list[str], others: list[object], data: st.DataObject
) -> None:
    kind = pl.Int64 if values and isinstance(values[0], int) else pl.String
    ids, _ = number_ids(pl.Series(values, dtype=kind))
    wanted = data.draw(st.permutations([*values, *values, *others]))
    found = ids.find_all(wanted)
    assert found.dtype == np.int64
    assert found.tolist() == [ids.find(value) for value in wanted]
    external = [ids[k] for k in range(len(ids))]

    def place(value: object) -> int:
        fits = str if kind == pl.String else int | np.integer
        if isinstance(value, bool) or not isinstance(value, fits):
            return -1
        return external.index(value) if value in external else -1

    assert found.tolist() == list(map(place, wanted))


@given(first=INTEGERS, count=st.integers(1, 20), others=st.lists(ANYTHING))
def test_numbers_without_gaps_are_found_as_each_is(
    first: int, count: int, others: list[object]
) -> None:
    ids = IntegerIds(
        np.arange(min(first, 2**63 - 1 - count), min(first, 2**63 - 1 - count) + count)
    )
    wanted = [*ids.numbers.tolist(), *others, -(2**63), 2**63 - 1]
    assert ids.find_all(wanted).tolist() == [ids.find(value) for value in wanted]
    integers = [value for value in wanted if type(value) is int and abs(value) < 2**63]
    assert ids.find_all(integers).tolist() == [ids.find(value) for value in integers]


def test_several_are_taken_as_each_is() -> None:
    ids = IntegerIds(np.array([3, 5, 9]))
    assert ids.take([2, 0, 0]) == [9, 3, 3]
    assert ids.take([]) == []
    for outside in (-1, 3):
        with pytest.raises(IndexError, match=f"internal id {outside}, expected 0 to 2"):
            ids.take([0, outside])


def test_negative_internal_ids_are_refused() -> None:
    with pytest.raises(IndexError, match="internal id -1, expected 0 to 1"):
        IntegerIds(np.array([1, 7]))[-1]


def test_nothing_saved_is_nothing_loaded() -> None:
    assert ids_from_arrays({}, "x") is None


# Bytes in every place where eight of them meet the next eight, and ids that begin like others.
CLOSE = st.lists(st.sampled_from(["a", "b", "\0", "é", "\x7f", "abcdefgh"]), max_size=6).map(
    "".join
)


@given(st.sets(CLOSE, max_size=60), st.lists(CLOSE | st.none() | st.just(7), max_size=40))
def test_by_the_hundred_strings_are_found_as_each_is(known: set[str], others: list[object]) -> None:
    ids, _ = number_ids(pl.Series(sorted(known), dtype=pl.String))
    external = {ids[place]: place for place in range(len(ids))}
    wanted = [*known, *others, *(["zzz", 5, None] * 100)]
    expected = [external.get(value, -1) if isinstance(value, str) else -1 for value in wanted]
    assert ids.find_all(wanted).tolist() == expected


def test_rows_are_found_as_integer_ids_are() -> None:
    given = [0, 4, 5, -1, 2**63, "1", True, None, np.int64(2), 1.0]
    numbers = IntegerIds(np.arange(5))
    assert find_rows(5, given).tolist() == numbers.find_all(given).tolist()
    assert find_rows(5, [3, 0, 9]).tolist() == [3, 0, -1]
    assert find_rows(5, []).tolist() == []


def test_endless_integers_are_refused_and_not_written_out() -> None:
    strings, _ = number_ids(pl.Series(["a", "b"]))
    for ids in (IntegerIds(np.array([1, 7])), strings):
        for endless in (10**4000, -(10**5000)):
            with pytest.raises(InputError, match="an integer of more than 40 digits"):
                ids.find_all([1, endless])
            with pytest.raises(InputError, match="an integer of more than 40 digits"):
                ids.find_all(coerce_ids(ids, [endless]))
        assert ids.find_all([10**39]).tolist() == [-1]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x_numbers": np.array([1, 3, 3])}, r"x_numbers\[2\] is 3, expected more"),
        ({"x_numbers": np.array([1, 3, 2])}, r"x_numbers\[2\] is 2, expected more"),
        ({"x_numbers": np.array([1.0])}, r"x_numbers is float64\[1\], expected int64"),
        ({"x_numbers": np.array([[1]])}, r"x_numbers is int64\[1, 1\]"),
        ({"x_offsets": np.array([0, 1, 2]), "x_pool": b"ba"}, "id 1 is 'a', out of order"),
        ({"x_offsets": np.array([0, 1, 2]), "x_pool": b"aa"}, "id 1 is 'a', out of order or rep"),
        ({"x_offsets": np.array([0, 9, 18]), "x_pool": b"abcdefghjabcdefghi"}, "out of order"),
        ({"x_offsets": np.array([0, 5, 2]), "x_pool": b"ab"}, r"x_offsets\[2\] is 2, expected no l"),
        ({"x_offsets": np.array([0, 1]), "x_pool": b"ab"}, "does not go from 0 to 2"),
        ({"x_offsets": np.array([1, 2]), "x_pool": b"ab"}, "does not go from 0 to 2"),
        ({"x_offsets": np.array([], np.int64), "x_pool": b""}, "does not go from 0 to 0"),
        ({"x_offsets": np.array([0, 1], np.int32), "x_pool": b"a"}, "x_offsets is int32"),
        ({"x_offsets": np.array([0, 1]), "x_pool": b"\xff"}, "x_pool is not text in UTF-8"),
        ({"x_offsets": np.array([0, 1]), "x_pool": b"\xc3"}, "x_pool is not text in UTF-8"),
        ({"x_offsets": np.array([0, 1, 2]), "x_pool": "é".encode()}, "begins inside a character"),
    ],
)  # fmt: skip
def test_ids_that_no_lookup_could_rely_on_are_refused(arrays: dict[str, Any], message: str) -> None:
    given = {
        name: np.frombuffer(array, np.uint8) if isinstance(array, bytes) else array
        for name, array in arrays.items()
    }
    with pytest.raises(StorageError, match=message):
        ids_from_arrays(given, "x")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([2**63 - 1, -(2**63), 0], None),
        ([2**63, 5, 2**63 - 1], str(2**63)),
        ([-(2**63) - 1, 5], str(-(2**63) - 1)),
        (["9" * 19, "x"], None),  # strings all the same
        (["12345678901234567890-1", "7"], None),
        (["0" * 20 + "7", "8"], None),
        (["7", "007"], None),
        (["9" * 20, "007"], "9" * 20),
        ([], None),
    ],
)
def test_integers_that_made_strings_of_all_are_named(values: list[Any], said: str | None) -> None:
    series = pl.Series(values, dtype=pl.String, strict=False)
    if values and all(isinstance(value, int) for value in values):
        series = integers_or_texts(pl.Series(values, dtype=pl.Int128))
    assert too_large_for_integers(number_ids(series)[0]) == said


def test_united_ids_are_all_of_both_in_order() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        drawn = [rng.integers(-50, 50, rng.integers(0, 30)).tolist() for _ in range(2)]
        first, second = (IntegerIds(np.unique(np.array(ids, np.int64))) for ids in drawn)
        assert united(first, second).take(range(len(united(first, second)))) == sorted(
            {*drawn[0], *drawn[1]}
        )
        texts = [sorted({f"é{number}" * (number % 3) for number in ids}) for ids in drawn]
        strings = [number_ids(pl.Series(some, dtype=pl.String))[0] for some in texts]
        both = united(*strings)
        expected = sorted({*texts[0], *texts[1]}, key=str.encode)
        assert both.take(range(len(both))) == expected
        assert both.find_all(expected).tolist() == [*range(len(expected))]
    with pytest.raises(InputError, match="ids are integers in one and strings in the other"):
        united(first, both)
