"""Gradients of a large table: only of the rows that a step looks up.

The table of all item vectors may have a billion numbers, and a step looks up some thousand rows of
it. A gradient for each number, made anew in every step and in every lookup, would take most of the
step's time; here they are added to one buffer, and it is known which of its rows are not zero.
"""

from __future__ import annotations

from typing import Any

from recprune.types import needs_extra

with needs_extra("train"):
    import torch
    from torch import Tensor, nn


class TouchedRows:
    """Looks rows up, and remembers which."""

    def __init__(self, table: nn.Parameter) -> None:
        self._table = table
        self._looked_up: list[Tensor] = []
        table.grad = torch.zeros_like(table)

    def look_up(self, items: Tensor) -> Tensor:
        """Return the rows of items, [..., d]."""
        if torch.is_grad_enabled():
            self._looked_up.append(items.flatten())
        rows: Tensor = _LookUp.apply(self._table, items)  # type: ignore[no-untyped-call]
        return rows

    def look_up_all(self) -> Tensor:
        """Return all rows, for few items."""
        return self.look_up(torch.arange(len(self._table), device=self._table.device))

    def take(self) -> Tensor:
        """Return all items that were looked up since this was asked last, some of them twice."""
        touched = torch.cat(self._looked_up) if self._looked_up else torch.empty(0).long()
        self._looked_up.clear()
        return touched


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, table: Tensor, items: Tensor) -> Tensor:
        context.table = table
        context.save_for_backward(items)
        return nn.functional.embedding(items, table)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[None, None]:
        (items,) = context.saved_tensors
        context.table.grad.index_add_(0, items.flatten(), gradients[0].flatten(0, -2))
        return None, None
