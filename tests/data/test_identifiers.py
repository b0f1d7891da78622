from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recprune import IntegerIds, StringIds
from recprune.data.identifiers import ids_from_arrays, number_ids

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


def test_negative_internal_ids_are_refused() -> None:
    with pytest.raises(IndexError, match="internal id -1, expected 0 to 1"):
        IntegerIds(np.array([1, 7]))[-1]


def test_nothing_saved_is_nothing_loaded() -> None:
    assert ids_from_arrays({}, "x") is None
