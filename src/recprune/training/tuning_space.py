"""What `recprune tune` tries: for each setting some choices, or a range.

A space is written in JSON: `{"width": [64, 128], "dropout": {"from": 0.0, "to": 0.6}}`, with
`"log": true` in a range whose orders of magnitude count alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

from recprune.models.settings import ModelSettings, Settings, TrainingSettings
from recprune.types import InputError, needs_extra

with needs_extra("tune"):
    from optuna.distributions import (
        BaseDistribution,
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

# What decides most about quality, in the ranges where the published models and ours were best. The
# rest stays as the preset has it.
DEFAULT_SPACE: dict[str, Any] = {
    "width": [64, 128, 256, 512],
    "num_blocks": [1, 2, 3],
    "dropout": {"from": 0.0, "to": 0.6},
    "learning_rate": {"from": 0.0003, "to": 0.003, "log": True},
    "loss": ["gbce", "softmax"],
    "num_negatives": {"from": 32, "to": 1024, "log": True},
    "windows": ["last", "random"],
}
_BOUNDS = {"from", "to"}


def default_space(settings: Settings) -> dict[str, Any]:
    """Return what is tried beside given settings: the logQ correction is for softmax alone."""
    return {
        name: entry
        for name, entry in DEFAULT_SPACE.items()
        if name != "loss" or not settings.training.logq
    }


def read_space(space: Mapping[str, Any]) -> dict[str, BaseDistribution]:
    """Return what Optuna draws each setting from."""
    if not space:
        raise InputError("the space to try is empty: nothing is left to choose")
    kinds = get_type_hints(ModelSettings) | get_type_hints(TrainingSettings)
    Settings().with_values({name: None for name in space if name not in kinds})  # complains
    return {name: _distribution(name, entry, kinds[name]) for name, entry in space.items()}


def _distribution(name: str, entry: Any, kind: Any) -> BaseDistribution:
    if isinstance(entry, list) and entry:
        if not all(isinstance(value, bool | int | float | str) for value in entry):
            raise InputError(f"space: {name} has choices that are no plain values: {entry}")
        return CategoricalDistribution(entry)
    if not isinstance(entry, dict) or not _BOUNDS <= set(entry) <= _BOUNDS | {"log"}:
        raise InputError(
            f"space: {name} is {entry!r}, expected a list of choices, or a range from … to …"
        )
    if kind not in (int, float):
        raise InputError(f"space: {name} has no range, give a list of choices")
    low, high, log = entry["from"], entry["to"], entry.get("log", False)
    allowed = (int,) if kind is int else (int, float)
    if not all(isinstance(end, allowed) and not isinstance(end, bool) for end in (low, high)):
        raise InputError(f"space: {name} goes from {low!r} to {high!r}, expected {kind.__name__}s")
    try:
        return (IntDistribution if kind is int else FloatDistribution)(low, high, log=bool(log))
    except ValueError as error:
        raise InputError(f"space: {name}: {error}") from None
