"""What the notes of a live index say of items: a name, and values in the columns of attributes.

`{"name": "Hat", "attributes": {"price": 19.9, "in_stock": null}}`: a value counts in place of the
one that the attributes have, null is no value, and a column that is not named stays as it is.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from recprune.attributes.attributes import Attributes
from recprune.attributes.binding import column_named
from recprune.attributes.given_values import ItemValue, checked_value
from recprune.live.notes import Notes
from recprune.types import InputError, Json

_NAME, _ATTRIBUTES = "name", "attributes"
_NOTHING: Json = {}


def has_name(note: Json) -> bool:
    """Whether a note says what an item is called, or that it has no name."""
    name = note.get(_NAME, _NOTHING)
    return name is None or isinstance(name, str)


def noted_name(note: Json) -> str | None:
    """Return the name that a note gives an item. Pre: it says something of it."""
    name: str | None = note[_NAME]
    return name


def amended(before: Json | None, changes: Json, columns: Container[str]) -> Json:
    """Return a note that says something else by some of its entries; of attributes, by columns.

    No value of a column that is not there (any more) is nothing to be said.
    """
    note = {**(before or _NOTHING), **changes}
    if _ATTRIBUTES in changes:
        said = {**_said(before or _NOTHING), **changes[_ATTRIBUTES]}
        note[_ATTRIBUTES] = {
            name: value for name, value in said.items() if value is not None or name in columns
        }
    return note


def check_attributes(
    values: Mapping[str, Any], attributes: Attributes, before: Json | None = None
) -> None:
    """Refuse values that no column has room for.

    What the note of before says of a column that is gone may be taken back.
    """
    said = _said(before or _NOTHING)
    for name, value in values.items():
        if value is None and name in said and name not in attributes.columns:
            continue
        checked_value(name, value, column_named(name, attributes.columns, _unknown))


def _unknown(message: str) -> InputError:
    return InputError(f"attributes: {message}")


def count_unfitting(notes: Notes, attributes: Attributes) -> int:
    """Return how many values are said that no column has room for: these are passed over."""
    count = 0
    for number in notes:
        said = _said(notes[number])
        count += len(said) - len(_fitting(said, said, attributes))
    return count


def following(
    latest: Attributes, before: Notes, after: Notes, given: Attributes, numbers: Iterable[int]
) -> Attributes:
    """Return the attributes that go with other notes than the latest ones do.

    `given` are those that notes lie over; `numbers` those of which the notes say something else.
    """
    values: dict[str, dict[int, ItemValue]] = {}
    for number in numbers:
        old, new = _said(before.get(number) or _NOTHING), _said(after.get(number) or _NOTHING)
        # By their text: 1 and true are equal.
        differing = [
            name
            for name in old.keys() | new.keys()
            if name in given.columns
            and (name not in old or name not in new or repr(old[name]) != repr(new[name]))
        ]
        fitting = _fitting(new, differing, given)
        for name in differing:
            column = given.columns[name]
            own = column.value_at(number) if number < given.num_items else None
            values.setdefault(name, {})[number] = fitting.get(name, own)
    return latest.with_values(values) if values else latest


def _said(note: Json) -> Json:
    said = note.get(_ATTRIBUTES)
    return said if isinstance(said, dict) else _NOTHING


def _fitting(said: Json, names: Iterable[str], attributes: Attributes) -> dict[str, ItemValue]:
    """Return the values of some columns, as these have them; without those that do not fit."""
    found: dict[str, ItemValue] = {}
    for name in names:
        column = attributes.columns.get(name)
        if column is None or name not in said:
            continue
        try:
            found[name] = checked_value(name, said[name], column)
        except InputError:
            continue
    return found
