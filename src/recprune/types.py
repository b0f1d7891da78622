"""Small types that every package shares: errors, array aliases, progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32Array: TypeAlias = NDArray[np.int32]
Int64Array: TypeAlias = NDArray[np.int64]
Float32Array: TypeAlias = NDArray[np.float32]
Float64Array: TypeAlias = NDArray[np.float64]
CodeArray: TypeAlias = NDArray[np.uint8] | NDArray[np.uint16]
# Of one query: item ids, each once, and what is added to their scores.
Boosts: TypeAlias = tuple[Int64Array, Float32Array]

try:
    VERSION = version("recprune")
except PackageNotFoundError:  # run from its sources
    VERSION = "0"


class Timeline(NamedTuple):
    """When the events of a history were, and when a recommendation is asked for."""

    times: Int64Array  # seconds, one for every event
    now: int  # seconds


MAX_SUB_ITEMS = 65_536  # as many as uint16 can tell apart

Json: TypeAlias = dict[str, Any]

Progress: TypeAlias = Callable[[str], None]
"""Called now and then by long work with a short sentence on where it stands."""


def with_article(noun: str) -> str:
    """Return "a codebook" or "an index"."""
    return f"an {noun}" if noun[0].lower() in "aeio" else f"a {noun}"  # a uint8


def type_in_words(value: object) -> str:
    """Return the type of what was given in place of something else: "an int", "a list"."""
    return with_article(type(value).__name__)


def no_progress(_: str) -> None:
    """Say nothing: the default of every `progress` argument."""


class RecpruneError(Exception):
    """Something the caller can mend; its message says what is wrong and where."""


class InputError(RecpruneError, ValueError):
    """An argument or an input file that cannot be used as it is."""


class StorageError(RecpruneError):
    """A saved folder that is damaged, foreign, incomplete or of another version."""


class InterruptedWorkError(RecpruneError):
    """Long work was asked to stop; its message says what is saved and how to go on."""


class MissingExtraError(RecpruneError, ImportError):
    """A feature was asked for whose optional dependencies are not installed."""


@dataclass(frozen=True)
class Columns:
    """Which columns hold user, item, time and rating; None means: detect."""

    user: str | None = None
    item: str | None = None
    time: str | None = None
    rating: str | None = None  # looked for only where ratings are asked for

    def __post_init__(self) -> None:
        for role in ("user", "item", "time", "rating"):
            name = getattr(self, role)
            if not isinstance(name, str | None):
                raise InputError(f"the {role} column is {name!r}, expected its name as a string")


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Turn a failed import of an optional dependency into advice on what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "recprune":
            raise
        raise MissingExtraError(
            f"this needs {error.name}, which is not installed: pip install 'recprune[{extra}]'"
        ) from None


def random_generator(seed: int, *more: int) -> np.random.Generator:
    """Return the generator that a seed stands for."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InputError(f"seed is {seed!r}, expected 0 or a positive integer")
    return np.random.default_rng([int(seed), *more] if more else int(seed))


def frozen(array: NDArray[Any]) -> None:
    """Make `array` itself read-only: a frozen dataclass takes over the arrays that it is given."""
    array.flags.writeable = False
