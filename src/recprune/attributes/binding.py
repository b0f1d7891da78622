"""A condition held against the columns that there are: types checked, values turned into codes.

What is unknown is handled as in SQL: a test of an item without a value is neither true nor false,
`not` leaves it so, and an item is chosen where the whole is true. Negations are moved down to the
tests (not (a and b) is not a or not b), where each is a test of its own: the items whose value is
there and does not pass. So one bit for each item is enough, although there are three outcomes.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

import numpy as np

from recprune.attributes.column import NO_VALUE, AttributeColumn, Value
from recprune.attributes.grammar import (
    AllOf,
    AnyOf,
    ColumnName,
    Compared,
    Condition,
    ConditionError,
    Constant,
    Contains,
    IsNull,
    IsTrue,
    Negated,
    OneOf,
    Operator,
    Single,
)
from recprune.types import InputError

_NEIGHBOURS = 3  # columns that a message names, of those with similar names
_LONGEST_NAME = 200  # characters of a name that others are held against: more is no misspelling
_LISTED = 8  # and of all, where none is similar
_LONGEST_VALUE = 40  # characters of a value in a message
_FEW_VALUES = 255  # of a column: their codes are bytes, and the bits of all of them kept
_FEW_CONSTANTS = 12  # beyond these, postings are faster
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_KIND_OF_VALUE = {str: "text", bool: "true or false", int: "a number", float: "a number"}
_EXPECTED = {
    "text": "text in quotes",
    "integer": "a number",
    "number": "a number",
    "boolean": "true or false",
    "time": "a time in quotes, such as '2026-01-31' or '2026-01-31T18:30:00Z'",
}

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Codes from the first up to the second of each pair, without it."""


@dataclass(frozen=True)
class CodeTest:
    """The items whose code is in one of some ranges; or, the other way round, all others.

    Of a column of lists: the items of which some element is.
    """

    column: str
    ranges: Ranges
    inverse: bool
    key: str  # the same for tests that ask the same, whatever the codes are just now


@dataclass(frozen=True)
class Group:
    """Several of these, all of which have to be true, or one at least."""

    all_of: bool
    parts: tuple[Bound, ...]
    key: str


Bound: TypeAlias = CodeTest | Group


def bind(condition: Condition, columns: Mapping[str, AttributeColumn]) -> Bound:
    """Return a condition in the codes of some columns; refuse what does not fit them."""
    return _bound(condition, columns, negated=False)


def column_named(
    name: str, columns: Mapping[str, AttributeColumn], refuse: Callable[[str], InputError]
) -> AttributeColumn:
    """Return a column by its name; where there is none, `refuse` is told what there is instead."""
    found = columns.get(name)
    if found is not None:
        return found
    close = difflib.get_close_matches(name[:_LONGEST_NAME], columns, _NEIGHBOURS)
    shown = close or list(columns)[:_LISTED]
    listed = ", ".join(f"{one!r} ({columns[one].described})" for one in shown)
    if close:
        raise refuse(f"no column is called {name!r:.80}; similar: {listed}")
    rest = len(columns) - len(shown)
    more = f" and {rest} more" if rest else ""
    raise refuse(f"no column is called {name!r:.80}; there are {listed or 'none'}{more}")


def _bound(condition: Condition, columns: Mapping[str, AttributeColumn], *, negated: bool) -> Bound:
    while isinstance(condition, Negated):
        condition, negated = condition.part, not negated
    if isinstance(condition, OneOf) and _is_apart(condition, columns):
        parts_of = (Compared(condition.column, "=", one) for one in condition.constants)
        condition = AnyOf(tuple(parts_of))
    if isinstance(condition, AllOf | AnyOf):
        all_of = isinstance(condition, AllOf) != negated
        parts: dict[str, Bound] = {}
        for part in condition.parts:
            bound = _bound(part, columns, negated=negated)
            # What has the same word between its parts needs no parentheses.
            inner = bound.parts if isinstance(bound, Group) and bound.all_of == all_of else (bound,)
            parts |= {one.key: one for one in inner}
        ordered = tuple(parts[key] for key in sorted(parts))
        if len(ordered) == 1:
            return ordered[0]
        word = " and " if all_of else " or "
        return Group(all_of, ordered, f"({word.join(one.key for one in ordered)})")
    return _test(condition, columns, negated=negated)


def _is_apart(condition: OneOf, columns: Mapping[str, AttributeColumn]) -> bool:
    """Say whether each value is a test of its own: of few, all will soon be among those kept."""
    column = columns.get(condition.column.name)
    few = column is not None and len(column.values) <= _FEW_VALUES
    return few and len(condition.constants) <= _FEW_CONSTANTS


def _test(condition: Single, columns: Mapping[str, AttributeColumn], *, negated: bool) -> CodeTest:
    name = condition.column
    column = column_named(name.name, columns, lambda said: ConditionError(name.place, said))
    if isinstance(condition, Compared) and condition.operator == "!=":
        # By its contrary, so that the two have one form.
        equal = Compared(name, "=", condition.constant)
        return _test(equal, columns, negated=not negated)
    if isinstance(condition, IsNull):
        ranges: Ranges = ((NO_VALUE, NO_VALUE + 1),)
        key = f"{name.name!r} is null"
    else:
        ranges, key = _ranges(condition, name, column)
        if negated:  # an item without a value passes neither a test nor its contrary
            ranges = ((NO_VALUE, NO_VALUE + 1), *ranges)
    return CodeTest(name.name, ranges, negated, f"not {key}" if negated else key)


def _ranges(
    condition: Compared | OneOf | Contains | IsTrue, name: ColumnName, column: AttributeColumn
) -> tuple[Ranges, str]:
    """Return the codes that pass a test, and what it is known by."""
    if isinstance(condition, Contains):
        if not column.is_list:
            raise ConditionError(
                name.place, f"{_is(name, column)}, expected a list: compare it by =, or by in (…)"
            )
        value = _value(condition.constant, name, column)
        return _only(column, value), f"{name.name!r} contains {value!r}"
    if column.is_list:
        raise ConditionError(name.place, f"{_is(name, column)}: say … in {_quoted(name.name)}")
    if isinstance(condition, IsTrue):
        if column.kind != "boolean":
            raise ConditionError(
                name.place, f"{_is(name, column)}, expected a comparison with a value after it"
            )
        return _only(column, True), f"{name.name!r} in [True]"
    if isinstance(condition, OneOf):
        values = {_value(constant, name, column) for constant in condition.constants}
        ordered = sorted(values)
        return _only(column, *ordered), f"{name.name!r} in {ordered!r}"
    value = _value(condition.constant, name, column)
    if condition.operator == "=":
        return _only(column, value), f"{name.name!r} in {[value]!r}"
    if column.kind == "boolean":
        raise ConditionError(name.place, f"{_is(name, column)}, which is compared by = and != only")
    low, high = _between(column, condition.operator, value)
    return ((low, high),), f"{name.name!r} {condition.operator} {value!r}"


def _only(column: AttributeColumn, *values: Value) -> Ranges:
    return tuple((code, code + 1) for code in column.codes_of(values) if code != NO_VALUE)


def _between(column: AttributeColumn, operator: Operator, value: Value) -> tuple[int, int]:
    first, end = NO_VALUE + 1, column.num_codes
    if operator == "<":
        return first, column.code_from(value)
    if operator == "<=":
        return first, column.code_after(value)
    if operator == ">":
        return column.code_after(value), end
    return column.code_from(value), end


def _value(constant: Constant, name: ColumnName, column: AttributeColumn) -> Value:
    """Return a literal in the type of a column."""
    value = constant.value
    if column.kind == "text" and isinstance(value, str):
        return value
    if column.kind == "boolean" and isinstance(value, bool):
        return value
    if column.kind == "time" and isinstance(value, str):
        return _microseconds(constant.place, value, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if column.kind in ("integer", "number") and is_number:
        # Numbers of 32 bits are compared with the nearest of their kind: 0.1 means theirs.
        narrow = isinstance(column.values, np.ndarray) and column.values.dtype == np.float32
        if narrow:
            with np.errstate(over="ignore"):
                nearest = float(np.float32(value))
            # Beyond all of them, it is compared as it is: it is not their infinity.
            return nearest if math.isfinite(nearest) else float(np.float64(value))
        return value
    given = f"{value!r:.{_LONGEST_VALUE}} is {_KIND_OF_VALUE[type(value)]}"
    raise ConditionError(
        constant.place, f"{given}, and {_is(name, column)}: expected {_EXPECTED[column.kind]}"
    )


def _microseconds(place: int, text: str, name: ColumnName) -> int:
    try:
        return microseconds(text)
    except ValueError:
        shown = f"{text!r:.{_LONGEST_VALUE}}"
        raise ConditionError(
            place, f"{shown} is no time, and {name.name!r} is: expected {_EXPECTED['time']}"
        ) from None


def microseconds(text: str) -> int:
    """Return the time that a text says, as columns have it; a ValueError where it says none."""
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return (moment - _EPOCH) // timedelta(microseconds=1)
    except OverflowError as error:
        raise ValueError(text) from error


def time_text(moment: int) -> str:
    """Return a time, in microseconds, as `microseconds` reads it."""
    unit = "us" if moment % 1_000_000 else "s"
    return f"{np.datetime64(moment, 'us').astype(f'datetime64[{unit}]')}Z"


def _is(name: ColumnName, column: AttributeColumn) -> str:
    article = "an" if column.described[0] in "aeiou" else "a"
    kind = column.described if column.described == "text" else f"{article} {column.described}"
    return f"{name.name!r} is {kind}"


def _quoted(name: str) -> str:
    return name if name.isidentifier() else f"`{name.replace('`', '``')}`"
