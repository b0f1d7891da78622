"""The ways to find the top K, and the settings of each.

All are exact unless asked not to be. Three settings of the pruning methods are unsafe: `max_steps`
and `deadline_us` stop early, `over_inflation` raises the threshold by that share of the way up to
the best conceivable score. The statistics of a search then say whether the result is still exact,
and bound how far off it can be.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, TypeAlias

from recprune import _native
from recprune.types import InputError

_NO_LIMIT = 2**62
_LONGEST_US = 1e11  # of a deadline: more than a day is as good as none


@dataclass(frozen=True)
class Default:
    """Transformer Default: the dense product with all item vectors.

    The vectors are built on first use; beyond `max_bytes` that is refused.
    """

    name: ClassVar = "default"
    max_bytes: int = 4 << 30


@dataclass(frozen=True)
class PQTopK:
    """Score every item from the sub-item scores."""

    name: ClassVar = "pqtopk"


@dataclass(frozen=True)
class Stoppable:
    """What all methods have that can stop early."""

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
class RecJPQPrune(Stoppable):
    """The paper's Algorithm 1. A step takes `sub_items_per_step` sub-item ids of one split."""

    name: ClassVar = "recjpqprune"
    sub_items_per_step: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        step = self.sub_items_per_step
        if not isinstance(step, int) or not 1 <= step <= _NO_LIMIT:
            raise InputError(f"sub_items_per_step is {step!r}, expected an integer of at least 1")


@dataclass(frozen=True)
class Scan(Stoppable):
    """Exhaustive, with a filter of quantised deficits. A step is one list of the first split."""

    name: ClassVar = "scan"


@dataclass(frozen=True)
class Cells(Stoppable):
    """Our pruning engine, by cells of two splits. A step is one list or one cell."""

    name: ClassVar = "cells"


@dataclass(frozen=True)
class Auto(Stoppable):
    """Whatever is fastest for this index and query: cells where they pay, else a scan."""

    name: ClassVar = "auto"


Method: TypeAlias = Default | PQTopK | RecJPQPrune | Scan | Cells | Auto

METHODS: dict[str, Method] = {
    method.name: method for method in (Auto(), Cells(), Scan(), RecJPQPrune(), PQTopK(), Default())
}


def find_method(method: str | Method) -> Method:
    """Return the method of that name, or the settings object itself."""
    if isinstance(method, str):
        if method not in METHODS:
            raise InputError(f"method is {method!r}, expected one of {', '.join(METHODS)}")
        return METHODS[method]
    if not isinstance(method, Method):
        raise InputError(f"method is {method!r}, expected a name or a method's settings")
    return method


STOPPABLE = tuple(name for name, method in METHODS.items() if isinstance(method, Stoppable))
"""The names of the methods that can stop early."""


def named(methods: Sequence[str]) -> str:
    """Return names as a sentence has them: "auto, cells and scan"."""
    return " and ".join(filter(None, [", ".join(methods[:-1]), methods[-1]]))


def check_can_stop(method: Method) -> None:
    """Refuse a method that cannot stop early."""
    if not isinstance(method, Stoppable):
        raise InputError(f"method {method.name} cannot stop early; {named(STOPPABLE)} can")


def stopped_at(method: Method, deadline: float) -> Method:
    """Return the method with what is left until a moment, by `time.monotonic()`, as its limit."""
    check_can_stop(method)
    assert isinstance(method, Stoppable)  # noqa: S101 # for the type checker
    if math.isnan(deadline):
        raise InputError("deadline is nan, expected a moment by time.monotonic()")
    left = 1e6 * (deadline - time.monotonic())
    return replace(method, deadline_us=min(max(left, 1.0), _LONGEST_US))


@lru_cache(maxsize=256)  # deadlines differ from one request to the next: not without a limit
def native_settings(method: Method) -> _native.MethodSettings:
    """Return a method as the native core is told it."""
    stoppable = method if isinstance(method, Stoppable) else Stoppable()
    return _native.MethodSettings(
        _native.Method[method.name],
        method.sub_items_per_step if isinstance(method, RecJPQPrune) else 1,
        stoppable.max_steps,
        stoppable.over_inflation,
        max(1, int(1000 * stoppable.deadline_us)) if stoppable.deadline_us else 0,
    )
