"""Tables in memory: frames of pandas and polars, tables of Arrow, mappings of columns."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import polars as pl
import pyarrow as pa

from recprune.types import InputError, type_in_words

# A path, or anything that `columns_of` takes.
LogSource: TypeAlias = Any


def is_table(given: Any) -> bool:
    """Say whether a log is given as it is, and not by a path."""
    return not isinstance(given, str | os.PathLike)


@contextmanager
def _being_read() -> Iterator[None]:
    """Have what a library says of a table that it cannot read be said of the log."""
    try:
        yield
    except (TypeError, ValueError, pa.ArrowException, pl.exceptions.PolarsError) as error:
        raise InputError(f"the log cannot be read: {error}") from None


def column_names(given: Any) -> list[str]:
    """Return the names of a table's columns; refuse what is no table."""
    if isinstance(given, pl.LazyFrame):
        with _being_read():
            return given.collect_schema().names()
    if isinstance(given, Mapping):
        return [str(name) for name in given]
    names = getattr(given, "column_names", None)  # Arrow's
    if names is None:
        names = getattr(given, "columns", None)
    if names is None or callable(names):
        raise InputError(
            f"the log is {type_in_words(given)}, expected a path, a frame of pandas or polars, a "
            "table of Arrow or a mapping of columns"
        )
    return [str(name) for name in names]


def columns_of(given: Any, names: Sequence[str]) -> pl.DataFrame:
    """Return some columns of a table, each named once in it."""
    wanted = list(dict.fromkeys(names))
    with _being_read():
        if isinstance(given, pl.LazyFrame):
            return given.select(wanted).collect()
        if isinstance(given, pl.DataFrame):
            return given.select(wanted)
        if isinstance(given, Mapping):
            return pl.DataFrame({str(name): given[name] for name in given if str(name) in wanted})
        if type(given).__module__.partition(".")[0] == "pandas":  # whose labels may be numbers
            labels = {str(label): label for label in given.columns}
            part = given[[labels[name] for name in wanted]]
            table = pa.Table.from_pandas(part, preserve_index=False).rename_columns(wanted)
        else:
            table = (given if isinstance(given, pa.Table) else pa.table(given)).select(wanted)
        return pl.DataFrame(pl.from_arrow(table))
