"""Values of single items as JSON has them, checked against the columns that they are for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recprune.attributes.binding import microseconds, time_text
from recprune.attributes.column import NO_VALUE, AttributeColumn, Value, code_type
from recprune.data.identifiers import StringIds
from recprune.types import InputError, with_article

ItemValue: TypeAlias = Value | list[Value] | None
"""What a column says of one item, in the column's own type; None where it says nothing."""

_SHOWN = 40  # characters of a value in a message
_EXPECTED = {
    "text": "text",
    "integer": "an integer of 64 bits",
    "number": "a number",
    "boolean": "true or false",
    "time": "a time as text, such as '2026-01-31' or '2026-01-31T18:30:00Z'",
}


def checked_value(name: str, value: object, column: AttributeColumn) -> ItemValue:
    """Return a value that was given for a column of this name; refuse one that it cannot have."""
    if value is None:
        return None
    try:
        if not column.is_list:
            return _own(value, column)
        if isinstance(value, list):
            return [_own(element, column) for element in value]
    except (ValueError, OverflowError):  # half a character is one too
        pass
    kind = column.described if column.described == "text" else with_article(column.described)
    expected = f"{'a list, each ' if column.is_list else ''}{_EXPECTED[column.kind]}"
    raise InputError(
        f"attributes: {value!r:.{_SHOWN}} is given for {name!r}, which is {kind}: expected "
        f"{expected}"
    )


def _own(value: object, column: AttributeColumn) -> Value:
    """Return one value in the type of a column; raise a ValueError where that cannot be."""
    kind = column.kind
    if kind == "boolean" and isinstance(value, bool):
        return value
    if kind == "text" and isinstance(value, str):
        value.encode()
        return value
    if kind == "time" and isinstance(value, str):
        return microseconds(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if kind == "integer" and isinstance(value, int) and -(2**63) <= value < 2**63:
            return value
        if kind == "number":
            with np.errstate(over="ignore"):
                number = float(np.asarray(column.values).dtype.type(float(value)))
            if math.isfinite(number):
                return number
    raise ValueError(value)


def shown_value(value: ItemValue, column: AttributeColumn) -> ItemValue:
    """Return a value of a column as JSON has it, and as `checked_value` takes it."""
    if isinstance(value, list):
        return [shown for one in value if (shown := _shown(one, column)) is not None]
    return None if value is None else _shown(value, column)


def _shown(value: Value, column: AttributeColumn) -> Value:
    if column.kind == "time":
        return time_text(int(value))
    if column.kind == "number" and np.asarray(column.values).dtype == np.float32:
        return float(str(np.float32(value)))  # 19.9, and not the double that is nearest to it
    return value


def column_of_values(values: Sequence[ItemValue], like: AttributeColumn) -> AttributeColumn:
    """Return a column with one of these values for each row, of the type of another one."""
    rows = [value if isinstance(value, list) else [value] for value in values]
    elements = [element for row in rows for element in row]
    distinct = sorted({element for element in elements if element is not None}, key=_order)
    place_of: dict[Value | None, int]
    place_of = {element: place for place, element in enumerate(distinct, 1)}
    place_of[None] = NO_VALUE
    made: StringIds | NDArray[Any]
    if like.kind == "boolean":
        made, place_of = like.values, {None: NO_VALUE, False: 1, True: 2}
    elif like.kind == "text":
        encoded = [str(text).encode() for text in distinct]
        offsets = np.cumsum([0, *map(len, encoded)]).astype(np.int64)
        made = StringIds(offsets, np.frombuffer(b"".join(encoded), np.uint8))
    else:
        made = np.array(distinct, np.asarray(like.values).dtype)
    codes = np.array([place_of[element] for element in elements], code_type(len(made)))
    if not like.is_list:
        return AttributeColumn(like.kind, made, codes)
    ends = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    return AttributeColumn(like.kind, made, codes, ends)


def _order(value: Value) -> bytes | float:
    return value.encode() if isinstance(value, str) else value
