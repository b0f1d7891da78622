"""Items with attributes, conditions on them as text, and what is true by a walk over the rows."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from recprune import Attributes
from recprune.data.identifiers import RowNumbers
from recprune.search.question import ItemBits, mask_of

Row: TypeAlias = dict[str, Any]
Twin: TypeAlias = Callable[[Row], bool | None]  # None: not known

TEXTS = ["shoes", "socks", "", "it's", 'a "b"', "é", "Z", "shoe", "\U0001f45f", "and"]
# The last two are one number as float64; nothing else may confuse them.
INTEGERS = [0, 1, -1, 7, 50, 2**62, -(2**63), 2**63 - 1, 2**53, 2**53 + 1]
NUMBERS = [0.0, -0.0, 1.5, -2.5, 19.99, 50.0, 1e300, 5e-324, float("inf"), float("-inf")]
NARROW = [0.1, 19.99, 1e-45, 3.0]
MOMENTS = [
    datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=number)
    for number in (0, 1, 10**15, 10**15 + 1, 17 * 10**14, -5)
]
COMPARISONS = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<>": operator.ne, "<": operator.lt,
    "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
SCHEMA = pa.schema(
    {
        "item_id": pa.int64(),
        "category": pa.string(),
        "stock": pa.int64(),
        "price": pa.float64(),
        "weight": pa.float32(),
        "in_stock": pa.bool_(),
        "added": pa.timestamp("us", "UTC"),
        "tags": pa.list_(pa.string()),
        "sizes": pa.large_list(pa.int64()),
        "odd `name": pa.string(),
    }
)
VALUES: dict[str, list[Any]] = {
    "category": TEXTS,
    "stock": INTEGERS,
    "price": NUMBERS,
    "weight": NARROW,
    "in_stock": [True, False],
    "added": MOMENTS,
    "tags": TEXTS,
    "sizes": INTEGERS,
    "odd `name": TEXTS[:3],
}
LISTS = ("tags", "sizes")


def some_rows(rng: random.Random, items: list[int], missing: float = 0.2) -> list[Row]:
    """Return a row for each of some items."""

    def value(name: str) -> Any:
        if rng.random() < missing:
            return None
        if name in LISTS:
            return [rng.choice([*VALUES[name], None]) for _ in range(rng.randrange(4))]
        return rng.choice(VALUES[name])

    return [{"item_id": item} | {name: value(name) for name in VALUES} for item in items]


def attributes_of(rows: list[Row], num_items: int) -> Attributes:
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    return Attributes.from_table(table, RowNumbers(num_items))


def by_item(rows: list[Row], num_items: int) -> list[Row]:
    """Return what is known of every item; of those without a row, nothing."""
    found = [dict.fromkeys(VALUES) for _ in range(num_items)]
    for row in rows:
        found[row["item_id"]] = {name: row[name] for name in VALUES}
    return found


def true_of(bits: ItemBits, num_items: int) -> list[bool]:
    mask: list[bool] = mask_of(bits.words, num_items).tolist()
    if num_items % 64:  # what is beyond the items is 0
        assert int(bits.words[-1]) >> (num_items % 64) == 0
    return mask


# Conditions --------------------------------------------------------------------------------------


def condition(rng: random.Random, depth: int = 3) -> tuple[str, Twin]:
    """Return a condition and the same as a function of a row."""
    way = rng.random()
    if depth and way < 0.5:
        parts = [condition(rng, depth - 1) for _ in range(rng.randrange(2, 4))]
        word = rng.choice(["and", "or", "AND", "Or"])
        text = f" {word} ".join(f"({part})" for part, _ in parts)
        return text, _joined([twin for _, twin in parts], word.lower() == "and")
    if depth and way < 0.65:
        text, twin = condition(rng, depth - 1)
        return f"not ({text})", _negated(twin)
    return _test(rng)


def _test(rng: random.Random) -> tuple[str, Twin]:
    name = rng.choice([*VALUES])
    column = name if name.isidentifier() and rng.random() < 0.8 else _quoted(name)
    if rng.random() < 0.15:
        negated = rng.random() < 0.5
        text = f"{column} is {'not ' if negated else ''}null"
        return text, lambda row: (_value(row, name) is None) != negated
    values = [rng.choice(VALUES[name]) for _ in range(rng.choice([1, 2, 3, 20]))]
    values = [value for value in values if value not in (float("inf"), float("-inf"))] or [
        VALUES[name][0]
    ]
    first = values[0]
    negated = rng.random() < 0.3
    word = "not " if negated else ""
    if name in LISTS:
        text = (
            f"{literal(rng, first)} {word}in {column}"
            if rng.random() < 0.5
            else f"{column} {word}contains {literal(rng, first)}"
        )
        test: Twin = lambda row: None if row[name] is None else first in row[name]  # noqa: E731
        return text, _negated(test) if negated else test
    if name == "in_stock" and rng.random() < 0.5:
        return f"{word}{column}", _negated(_flag) if negated else _flag
    if rng.random() < 0.3:
        listed = ", ".join(literal(rng, value) for value in values)
        test = _one_of(name, values)
        return f"{column} {word}in ({listed})", _negated(test) if negated else test
    sign = rng.choice([sign for sign in COMPARISONS if name != "in_stock" or sign in ("=", "!=")])
    if rng.random() < 0.3:
        turned = sign.translate(str.maketrans("<>", "><")) if sign != "<>" else sign
        return f"{literal(rng, first)}{turned}{column}", _compared(name, sign, first)
    return f"{column} {sign} {literal(rng, first)}", _compared(name, sign, first)


def literal(rng: random.Random, value: Any) -> str:
    if isinstance(value, bool):
        return rng.choice([str(value), str(value).lower()])
    if isinstance(value, datetime):
        return f"'{value.isoformat()}'"
    if isinstance(value, str):
        quote = rng.choice("'\"")
        return quote + value.replace(quote, quote * 2) + quote
    return repr(value)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _value(row: Row, name: str) -> Any:
    value = row[name]
    return None if isinstance(value, float) and value != value else value


def _narrow(name: str, value: Any) -> Any:
    return float(np.float32(value)) if name == "weight" else value


def _flag(row: Row) -> bool | None:
    flag: bool | None = row["in_stock"]
    return flag


def _compared(name: str, sign: str, constant: Any) -> Twin:
    def test(row: Row) -> bool | None:
        value = _value(row, name)
        if value is None:
            return None
        return bool(COMPARISONS[sign](_narrow(name, value), _narrow(name, constant)))

    return test


def _one_of(name: str, constants: list[Any]) -> Twin:
    def test(row: Row) -> bool | None:
        value = _value(row, name)
        if value is None:
            return None
        return any(_narrow(name, value) == _narrow(name, one) for one in constants)

    return test


def _negated(twin: Twin) -> Twin:
    def negated(row: Row) -> bool | None:
        known = twin(row)
        return None if known is None else not known

    return negated


def _joined(twins: list[Twin], all_of: bool) -> Twin:
    def joined(row: Row) -> bool | None:
        known = [twin(row) for twin in twins]
        decides = not all_of  # one false decides an and, one true an or
        if decides in [one for one in known if one is not None]:
            return decides
        return None if None in known else not decides

    return joined
