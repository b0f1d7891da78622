"""The rows of a large table move like the whole of it would."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from recprune.models.touched_rows import TouchedRows
from recprune.training.optimiser import Optimiser


def table_of(rows: int) -> nn.Parameter:
    return nn.Parameter(torch.arange(rows * 2, dtype=torch.float32).view(rows, 2))


def optimiser_of(table: nn.Parameter, *others: nn.Parameter, clip_norm: float = 0.0) -> Optimiser:
    parameters = [*(others or [nn.Parameter(torch.zeros(1))]), table]
    parameters[0].grad = torch.zeros(1)
    return Optimiser(parameters, 0.1, clip_norm, on_gpu=False, table=table)


def test_gradients_of_rows_are_those_of_the_whole_table() -> None:
    items = torch.tensor([[3, 1], [3, 0]])
    weights = torch.arange(8.0).view(2, 2, 2)
    plain, by_rows = table_of(5), table_of(5)
    (nn.functional.embedding(items, plain) * weights).sum().backward()  # type: ignore[no-untyped-call]
    touched = TouchedRows(by_rows)
    (touched.look_up(items) * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert by_rows.grad is not None
    assert plain.grad is not None
    assert torch.equal(by_rows.grad, plain.grad)
    assert sorted(touched.take().tolist()) == [0, 1, 3, 3]
    with torch.no_grad():
        touched.look_up(items)
    touched.look_up(torch.tensor([2]))
    assert touched.take().tolist() == [2]  # looking without learning touches nothing


def step(table: nn.Parameter, optimiser: Optimiser, rows: list[int], gradients: Tensor) -> None:
    table.grad = torch.zeros_like(table)
    table.grad.index_add_(0, torch.tensor(rows), gradients)
    optimiser.update(torch.tensor(rows))


def test_first_steps_by_hand() -> None:
    table = table_of(3)
    optimiser = optimiser_of(table)
    # v = 0.001 g², corrected to g²: a step of the learning rate, whatever the gradient.
    step(table, optimiser, [1], torch.tensor([[4.0, -0.5]]))
    assert table[1].tolist() == pytest.approx([1.9, 3.1])
    # v = 0.000999 · 16 + 0.001 · 4, over 1 − 0.999².
    step(table, optimiser, [1], torch.tensor([[2.0, 0.0]]))
    squares = (0.000999 * 16 + 0.001 * 4) / (1 - 0.999**2)
    assert table[1].tolist() == pytest.approx([1.9 - 0.1 * 2 / squares**0.5, 3.1])
    assert table[0].tolist() == [0.0, 1.0]
    assert table[2].tolist() == [4.0, 5.0]


def test_rows_that_stand_twice_move_once_and_all_rows_may_be_named() -> None:
    once, twice, everything = table_of(4), table_of(4), table_of(4)
    first, second, third = (
        optimiser_of(table, clip_norm=0.5) for table in (once, twice, everything)
    )
    for _ in range(3):
        step(once, first, [2, 0], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        halves = torch.tensor([[0.5, 1.0], [3.0, 4.0], [0.5, 1.0]])
        step(twice, second, [2, 0, 2], halves)
        everything.grad = torch.zeros_like(everything)
        everything.grad[2], everything.grad[0] = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
        third.update()
        assert not everything.grad.any()
    assert torch.allclose(twice, once)
    assert torch.allclose(everything, once)
    for optimiser, table in ((second, twice), (third, everything)):
        assert torch.allclose(optimiser.remembered(table)[0], first.remembered(once)[0])


def test_one_norm_is_clipped_for_table_and_others_together() -> None:
    table, other = table_of(2), nn.Parameter(torch.zeros(1))
    optimiser = optimiser_of(table, other, clip_norm=1.0)
    other.grad = torch.tensor([3.0])
    step(table, optimiser, [0, 0], torch.tensor([[2.0, 0.0], [2.0, 0.0]]))  # 4 in all: norm 5
    assert other.grad.tolist() == pytest.approx([0.6], rel=1e-5)
    squares = optimiser.remembered(table)[0]
    assert squares[0].tolist() == pytest.approx([0.001 * 0.8**2, 0.0], rel=1e-4)
