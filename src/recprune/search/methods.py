"""The ways to find the top K, and what each of them can be told.

All are exact unless asked not to be. Three settings of the pruning methods are unsafe: `max_steps`
and `deadline_us` stop early, `over_inflation` raises the threshold by that share of the way up to
the best conceivable score. The statistics of a search then say whether the result is still exact,
and bound how far off it can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from recprune.types import InputError

_NO_LIMIT = 2**62


@dataclass(frozen=True)
class Default:
    """Transformer Default: the dense product with all item vectors.

    The vectors are built on first use; beyond `max_bytes` that is refused.
    """

    max_bytes: int = 4 << 30


@dataclass(frozen=True)
class PQTopK:
    """Score every item from the sub-item scores."""


@dataclass(frozen=True)
class _Stoppable:
    max_steps: int = _NO_LIMIT
    over_inflation: float = 0.0
    deadline_us: float = 0.0  # 0: none

    def __post_init__(self) -> None:
        if not isinstance(self.max_steps, int) or not 1 <= self.max_steps <= _NO_LIMIT:
            raise InputError(f"max_steps is {self.max_steps!r}, expected an integer of at least 1")
        if not 0.0 <= self.over_inflation < 1.0:
            raise InputError(f"over_inflation is {self.over_inflation}, expected 0 to below 1")
        if not 0.0 <= self.deadline_us < 1e12:
            raise InputError(f"deadline_us is {self.deadline_us}, expected 0 (none) or more")


@dataclass(frozen=True)
class RecJPQPrune(_Stoppable):
    """The paper's Algorithm 1. A step takes `sub_items_per_step` sub-item ids of one split."""

    sub_items_per_step: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        step = self.sub_items_per_step
        if not isinstance(step, int) or not 1 <= step <= _NO_LIMIT:
            raise InputError(f"sub_items_per_step is {step!r}, expected an integer of at least 1")


@dataclass(frozen=True)
class Scan(_Stoppable):
    """Exhaustive, with a filter of quantised deficits. A step is one list of the first split."""


@dataclass(frozen=True)
class Cells(_Stoppable):
    """Our pruning engine, by cells of two splits. A step is one list or one cell."""


@dataclass(frozen=True)
class Auto(_Stoppable):
    """Whatever is fastest for this index and query: cells where they pay, else a scan."""


Method: TypeAlias = Default | PQTopK | RecJPQPrune | Scan | Cells | Auto

METHODS: dict[str, Method] = {
    "auto": Auto(),
    "cells": Cells(),
    "scan": Scan(),
    "recjpqprune": RecJPQPrune(),
    "pqtopk": PQTopK(),
    "default": Default(),
}

# The numbers by which the native core knows them.
NATIVE_NUMBERS: dict[type[Method], int] = {
    PQTopK: 0,
    RecJPQPrune: 1,
    Scan: 2,
    Cells: 3,
    Auto: 4,
    Default: 5,
}
NativeSettings: TypeAlias = tuple[int, int, int, float, int]
NATIVE_NAMES = {0: "pqtopk", 1: "recjpqprune", 2: "scan", 3: "cells", 5: "default"}


def native_settings(method: Method) -> NativeSettings:
    """Return what the native core is told: its number, sub-items per step, and when to stop."""
    number = NATIVE_NUMBERS[type(method)]
    step = method.sub_items_per_step if isinstance(method, RecJPQPrune) else 1
    if not isinstance(method, _Stoppable):
        return number, step, _NO_LIMIT, 0.0, 0
    deadline_ns = max(1, int(1000 * method.deadline_us)) if method.deadline_us else 0
    return number, step, method.max_steps, method.over_inflation, deadline_ns


_NAMED = {name: (method, native_settings(method)) for name, method in METHODS.items()}


def find_method(method: str | Method) -> tuple[Method, NativeSettings]:
    """Return the method of that name, or the settings object itself, and its native settings."""
    if isinstance(method, str):
        if method not in _NAMED:
            raise InputError(f"method is {method!r}, expected one of {', '.join(METHODS)}")
        return _NAMED[method]
    if not isinstance(method, Method):
        raise InputError(f"method is {method!r}, expected a name or a method's settings")
    return method, native_settings(method)
