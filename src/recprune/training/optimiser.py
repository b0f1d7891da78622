"""Adam, and what takes its place for the rows of a large table."""

from __future__ import annotations

from collections.abc import Iterable

from recprune.types import needs_extra

with needs_extra("train"):
    import torch
    from torch import Tensor, nn

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # Adam's
_FORGETTING = 0.999  # of squared gradients, and so is Adam's
_SMALLEST = 1e-8  # that anything is divided by, likewise


class Optimiser(torch.optim.Adam):
    """Adam, with the gradient clipped to a norm, and for a table RMSprop on touched rows.

    Adam moves every number in every step, because it remembers the mean gradient. For a table of a
    billion numbers that takes longer than all the rest of a step. Without that memory (Hinton's
    RMSprop), only rows that have a gradient move, each as far as Adam would take it in the end.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: float,
        clip_norm: float,
        *,
        on_gpu: bool,
        table: nn.Parameter | None = None,
    ) -> None:
        """Take what is trained; without a clip norm (0), gradients stay as they are."""
        self._dense = [parameter for parameter in parameters if parameter is not table]
        self._step_device = self._dense[0].device if on_gpu else torch.device("cpu")
        super().__init__(self._dense, learning_rate, fused=on_gpu, capturable=on_gpu)
        self._learning_rate = learning_rate
        self._clip_norm = clip_norm
        self._table = table
        self._num_rows = len(table) if table is not None else 0
        if table is not None:
            self.remembered(table)

    def moments(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """Return the names of what is remembered of a parameter from step to step."""
        return ("exp_avg_sq", "step") if parameter is self._table else _MOMENTS

    def remember(self, parameter: nn.Parameter, moments: dict[str, Tensor]) -> None:
        """Take over what an earlier run remembered of a parameter."""
        for moment, value in moments.items():
            moments[moment] = value.to(self._step_device if moment == "step" else parameter.device)
        self.state[parameter] = moments

    def remembered(self, parameter: nn.Parameter) -> list[Tensor]:
        """Return what is remembered of a parameter; where that is nothing, zeros to be filled."""
        if not self.state[parameter]:
            zeros = {name: torch.zeros_like(parameter) for name in self.moments(parameter)}
            self.remember(parameter, zeros | {"step": torch.zeros(())})
        return [self.state[parameter][moment] for moment in self.moments(parameter)]

    @torch.no_grad()
    def update(self, touched: Tensor | None = None) -> None:
        """Move everything by its gradient; of a table, rows that are touched, or all (None)."""
        if self._table is None:
            if self._clip_norm:
                nn.utils.clip_grad_norm_(self._dense, self._clip_norm)
            self.step()
            return
        table = self._table
        gradient = table.grad if table.grad is not None else torch.zeros_like(table)
        # Some stand there many times: then all rows are fewer.
        if touched is None or len(touched) >= len(table):
            touched = torch.arange(len(table), device=table.device)
        rows = touched
        gradients = gradient[rows]
        if self._clip_norm:
            gradients = gradients * self._clip(rows, gradients)
        self.step()
        self._move(table, rows, gradients)
        gradient.index_fill_(0, rows, 0.0)

    def _clip(self, rows: Tensor, gradients: Tensor) -> Tensor:
        """Scale all gradients but those of rows; return by how much."""
        dense = [parameter.grad for parameter in self._dense if parameter.grad is not None]
        times = gradients.new_zeros(self._num_rows)  # that a row stands there
        times.index_add_(0, rows, torch.ones_like(gradients[:, 0]))
        squares = torch.stack(torch._foreach_norm(dense)).square().sum()
        squares = squares + (gradients.square().sum(1) / times[rows]).sum()
        scale = (self._clip_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(dense, scale)
        return scale

    def _move(self, table: nn.Parameter, rows: Tensor, gradients: Tensor) -> None:
        """Move rows, of which some stand there twice: what is written is then the same."""
        state = self.state[table]
        state["step"] += 1
        has_one = gradients.any(1, keepdim=True)
        squares = state["exp_avg_sq"][rows]
        squares = torch.where(has_one, squares.lerp(gradients.square(), 1 - _FORGETTING), squares)
        state["exp_avg_sq"].index_copy_(0, rows, squares)
        known = 1 - _FORGETTING ** state["step"]  # Adam's correction of the first steps
        moved = gradients / ((squares / known).sqrt() + _SMALLEST)
        table.index_copy_(0, rows, table[rows] - self._learning_rate * moved)
