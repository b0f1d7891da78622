"""The attributes of a catalogue's items, and which items a condition on them is true of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.attributes.binding import Bound, bind, column_named
from recprune.attributes.bitmaps import BitmapCache, words_of
from recprune.attributes.column import AttributeColumn, column_from_arrays
from recprune.attributes.given_values import ItemValue, column_of_values
from recprune.attributes.grammar import parse_condition
from recprune.data.identifiers import ExternalIds, FoundIds
from recprune.search.question import ItemBits
from recprune.storage import Saved, load_folder, save_folder
from recprune.types import InputError, Int64Array, Json, StorageError, with_article

KIND = "attributes"
_VERSION = 1  # of the format
# Of bits that are kept: five hundred conditions on a million items.
_CACHE_BYTES = 64 << 20
# Conditions that are not read again, and their longest text: some megabytes at most.
_KEPT_TEXTS = 512
_SHORT_TEXT = 256  # characters
_MOST_COLUMNS = 1_000


class Attributes:
    """Columns of what items are like. Immutable, and safe to share between threads."""

    def __init__(
        self,
        columns: Mapping[str, AttributeColumn],
        num_items: int,
        *,
        unknown: int = 0,
        cache: BitmapCache | None = None,
    ) -> None:
        """Use `from_table`, `read` or `load`."""
        for name, column in columns.items():
            if column.num_items != num_items:
                raise InputError(
                    f"the column {name!r} has {column.num_items} items, expected {num_items}"
                )
        self.columns = MappingProxyType(dict(columns))
        self.num_items = num_items
        self.unknown = unknown  # rows that were given of items that the catalogue does not have
        self._cache = cache or BitmapCache(_CACHE_BYTES)
        # Over the columns and not over this object: a cycle would keep all columns of every version
        # until the collector comes by.
        self._bind = partial(_bound_to, self.columns)
        self._kept_bound = lru_cache(_KEPT_TEXTS)(self._bind)

    def __repr__(self) -> str:
        return f"Attributes({', '.join(self.columns)}; {self.num_items:,} items)"

    @property
    def kinds(self) -> dict[str, str]:
        """The type of every column: text, integer, number, boolean, time, or a list of these."""
        return {name: column.described for name, column in self.columns.items()}

    # Making one ----------------------------------------------------------------------------------

    @classmethod
    def from_table(
        cls,
        table: Any,
        item_ids: FoundIds,
        *,
        item_column: str | None = None,
        columns: Sequence[str] | None = None,
        source: str = "attributes",
    ) -> Attributes:
        """Take the attributes of a catalogue's items from an Arrow table, a row an item.

        Anything that hands itself over as Arrow will do, such as a Polars frame, or a mapping from
        names to columns. Which column has the external ids is told by its usual names, or by
        `item_column`; `columns` are those to take, all by default. Items without a row have no
        values; rows of unknown items are counted in `unknown`; an item may have one row only.
        """
        from recprune.attributes.arrow_columns import column_of, for_all_items, item_rows

        rows = item_rows(table, item_ids, item_column, columns, source)
        if not 1 <= rows.table.num_columns <= _MOST_COLUMNS:
            raise InputError(
                f"{source}: {rows.table.num_columns} columns beside the ids, expected 1 to "
                f"{_MOST_COLUMNS}"
            )
        count = len(item_ids)
        made = {
            name: for_all_items(column_of(rows, name), rows.items, count)
            for name in rows.table.column_names
        }
        return cls(made, count, unknown=rows.unknown)

    @classmethod
    def read(
        cls,
        path: str | Path,
        item_ids: FoundIds,
        *,
        item_column: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> Attributes:
        """Do as `from_table` does, with a file: Parquet, Arrow, CSV, TSV or JSON lines.

        Text may end in `.gz` or `.zst`. A column of CSV or TSV is of the type that all of its
        fields have, an empty one is no value, and none is a list.
        """
        from recprune.attributes.arrow_columns import read_table

        table = read_table(path, item_column)
        return cls.from_table(
            table, item_ids, item_column=item_column, columns=columns, source=str(path)
        )

    def updated(
        self, table: Any, item_ids: FoundIds, *, item_column: str | None = None
    ) -> Attributes:
        """Return the attributes after some rows have changed; this object stays as it is.

        `table` is as in `from_table`; columns that it does not have stay as they are, in all items.
        `item_ids` may have grown at its end: further items have no values until a row says so. What
        was kept of conditions is asked again of the changed items alone.
        """
        from recprune.attributes.arrow_columns import column_of, item_rows

        if len(item_ids) < self.num_items:
            raise InputError(f"{len(item_ids)} items, expected the {self.num_items} of before")
        rows = item_rows(table, item_ids, item_column)
        for name in rows.table.column_names:
            column_named(name, self.columns, _no_column)
        changed = {
            name: column.with_items(rows.items, column_of(rows, name, column), len(item_ids))
            if name in rows.table.column_names
            else _extended(column, len(item_ids))
            for name, column in self.columns.items()
        }
        added = np.arange(self.num_items, len(item_ids))
        cache = self._cache.after(np.union1d(rows.items, added))
        return Attributes(changed, len(item_ids), unknown=rows.unknown, cache=cache)

    def with_values(self, values: Mapping[str, Mapping[int, ItemValue]]) -> Attributes:
        """Return the attributes after some items have other values, by column and item.

        Values are in the type of their column, as `checked_value` returns them. What was kept of
        conditions is asked again of these items alone.
        """
        changed = dict(self.columns)
        touched = [np.empty(0, np.int64)]
        for name, by_item in values.items():
            items = np.array(sorted(by_item), np.int64)
            rows = column_of_values([by_item[item] for item in items.tolist()], changed[name])
            changed[name] = changed[name].with_items(items, rows, self.num_items)
            touched.append(items)
        cache = self._cache.after(np.unique(np.concatenate(touched)))
        return Attributes(changed, self.num_items, unknown=self.unknown, cache=cache)

    def extended(self, num_items: int) -> Attributes:
        """Return the attributes with further items at the end, which have no values.

        What was kept of conditions is asked again of these alone.
        """
        if num_items < self.num_items:
            raise InputError(f"{num_items} items, expected the {self.num_items} of before")
        if num_items == self.num_items:
            return self
        columns = {name: _extended(column, num_items) for name, column in self.columns.items()}
        cache = self._cache.after(np.arange(self.num_items, num_items))
        return Attributes(columns, num_items, unknown=self.unknown, cache=cache)

    def shortened(self, num_items: int) -> Attributes:
        """Return the attributes of the first items alone."""
        if not 0 <= num_items <= self.num_items:
            raise InputError(f"{num_items} items, expected {self.num_items} at most")
        if num_items == self.num_items:
            return self
        first = np.arange(num_items)
        columns = {name: column.take(first) for name, column in self.columns.items()}
        return Attributes(columns, num_items)

    def taken(self, places: Int64Array) -> Attributes:
        """Return the attributes of items in other places; where that is −1, there are no values."""
        beyond = self.extended(self.num_items + 1)
        chosen = np.where(places < 0, self.num_items, places)
        columns = {name: column.take(chosen) for name, column in beyond.columns.items()}
        return Attributes(columns, len(places))

    def carried_over(self, item_ids: ExternalIds, to: ExternalIds) -> Attributes:
        """Return the attributes of a catalogue that takes the place of the one with `item_ids`.

        Items are the same where external ids are; those that are new have no values.
        """
        return self.taken(item_ids.find_all(to.take(range(len(to)))))

    def save(self, folder: str | Path) -> None:
        """Write the attributes as a folder, in place of an older one if there is one."""
        save_folder(folder, self.parts())

    def parts(self) -> Saved:
        """Return what makes up the attributes, to be saved as a folder or as a part of one."""
        named = [{"name": name, "kind": column.kind} for name, column in self.columns.items()]
        settings: Json = {"num_items": self.num_items, "columns": named}
        arrays: dict[str, NDArray[Any]] = {}
        for number, column in enumerate(self.columns.values()):
            arrays |= column.to_arrays(f"column_{number}")
        return Saved(KIND, _VERSION, settings, arrays)

    @classmethod
    def load(cls, folder: str | Path, *, verify: bool = True) -> Attributes:
        """Memory-map saved attributes; `verify` compares every byte with its checksum first."""
        parts = load_folder(folder, kind=KIND, version=_VERSION, verify=verify)
        return cls.from_parts(parts, str(folder))

    @classmethod
    def from_parts(cls, parts: Saved, source: str) -> Attributes:
        """Return the attributes that were saved so; `source` says in an error where they were."""
        parts.check(kind=KIND, version=_VERSION, source=source)
        try:
            count, named = _checked_settings(parts.settings)
            columns = {
                name: column_from_arrays(parts.arrays, f"column_{number}", kind, count)
                for number, (name, kind) in enumerate(named.items())
            }
        except KeyError as error:
            raise StorageError(f"{source}: the attributes have no {error.args[0]}") from None
        except StorageError as error:
            raise StorageError(f"{source}: {error}") from None
        return cls(columns, count)

    # Asking it -----------------------------------------------------------------------------------

    def where(self, condition: str) -> ItemBits:
        """Return the items that a condition is true of, as `allow` takes them.

        Such as `category in ('shoes', 'socks') and price < 50 and in_stock`; docs/filters.md has
        all of it. What is unknown of an item is not true: `price < 50` leaves out items without a
        price, and so does `not price < 50`; `price is null` finds them. What was asked lately is
        kept, by what it means and not by how it is written.
        """
        short = isinstance(condition, str) and len(condition) <= _SHORT_TEXT
        bound = self._kept_bound(condition) if short else self._bind(condition)
        return ItemBits(words_of(bound, self.columns, self._cache))

    def limited(self, column: str, count: int) -> AttributeColumn:
        """Return the column of which at most `count` items may have the same value.

        Refuse what cannot be counted so: no column of one value an item, or no number.
        """
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
            raise InputError(f"at_most: the number is {count!r}, expected an integer from 1 on")
        if not isinstance(column, str):
            raise InputError(f"at_most: {column!r} is no name of a column")
        found = column_named(column, self.columns, _no_limit)
        if found.is_list:
            raise InputError(
                f"at_most: {column!r} is {with_article(found.described)}, expected one value for "
                "each item"
            )
        return found


def _bound_to(columns: Mapping[str, AttributeColumn], condition: str) -> Bound:
    return bind(parse_condition(condition), columns)


def _extended(column: AttributeColumn, num_items: int) -> AttributeColumn:
    """Return a column with further items, which have no value."""
    if num_items == column.num_items:
        return column
    nothing = np.empty(0, np.int64)
    return column.with_items(nothing, column.take(nothing), num_items)


def _no_column(message: str) -> InputError:
    return InputError(f"attributes: {message}")


def _no_limit(message: str) -> InputError:
    return InputError(f"at_most: {message}")


def _checked_settings(settings: Json) -> tuple[int, dict[str, str]]:
    """Return the number of items and the kinds of columns by their names."""
    count, columns = settings["num_items"], settings["columns"]
    if type(count) is not int or count < 0:
        raise StorageError(f"num_items is {count!r:.80}, expected a number of items")
    if not isinstance(columns, list) or len(columns) > _MOST_COLUMNS:
        raise StorageError(f"columns is no list of up to {_MOST_COLUMNS}")
    named: dict[str, str] = {}
    for column in columns:
        if not isinstance(column, dict) or {type(column[key]) for key in ("name", "kind")} != {str}:
            raise StorageError("columns: one of them is not a name and a kind")
        if column["name"] in named:
            raise StorageError(f"columns: {column['name']!r:.80} is there twice")
        named[column["name"]] = column["kind"]
    return count, named
