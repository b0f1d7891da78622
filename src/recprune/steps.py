"""One training step: from a batch to changed weights. On a GPU, recorded once and replayed."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from recprune.batches import Batch, padded_batch
from recprune.losses import agreement, bce, concentration, gbce, gbce_beta, sampled_softmax
from recprune.models.embedding import RecJPQEmbedding
from recprune.sequence_model import SequenceModel
from recprune.settings import Settings, TrainingSettings
from recprune.types import needs_extra

with needs_extra("train"):
    import torch
    from torch import Tensor

# A batch, its epoch and its number → its loss, which the next step may write over.
Step = Callable[[Batch, int, int], Tensor]

# A batch is padded to a multiple of these on a GPU, so that few different shapes come along.
_ROWS, _PREDICTIONS = 8, 1024


def make_step(
    model: SequenceModel,
    optimiser: torch.optim.Optimizer,
    settings: Settings,
    device: torch.device,
    compiled: bool,
) -> Step:
    """Return the function that takes one step with a batch and returns its loss."""
    compute = _batch_loss(model, settings.training, device)
    if compiled:
        compute = torch.compile(compute, dynamic=True)
    parameters = list(model.parameters())

    def step(*arrays: Tensor) -> Tensor:
        optimiser.zero_grad()
        loss = compute(*arrays)
        loss.backward()  # type: ignore[no-untyped-call]
        if settings.training.clip_norm:
            torch.nn.utils.clip_grad_norm_(parameters, settings.training.clip_norm)
        optimiser.step()
        return loss.detach()

    if device.type != "cuda":

        def on_processor(batch: Batch, epoch: int, number: int) -> Tensor:
            torch.default_generator.manual_seed(_seed_of(settings, epoch, number))
            return step(*(torch.from_numpy(array) for array in batch.arrays()))

        return on_processor
    replayed = _Replayed(step, device)

    def on_gpu(batch: Batch, epoch: int, number: int) -> Tensor:
        torch.cuda.manual_seed(_seed_of(settings, epoch, number))
        padded = padded_batch(batch, _ROWS, _PREDICTIONS)
        return replayed(*(torch.from_numpy(array) for array in padded.arrays()))

    return on_gpu


def _batch_loss(
    model: SequenceModel, training: TrainingSettings, device: torch.device
) -> Callable[..., Tensor]:
    num_items = model.embedding.num_items
    beta = gbce_beta(training.num_negatives, num_items, training.calibration)
    # What all scores have in common changes no ranking, but against hundreds of negatives a model
    # that knows nothing yet must push all of them far down. If it had to do that with its vectors,
    # they would all turn the same way and take long to part again; so it begins there.
    offset = math.log(beta / training.num_negatives)
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "bce": bce,
        "gbce": lambda positive, negatives: gbce(positive + offset, negatives + offset, beta),
        "softmax": sampled_softmax,
    }
    loss = losses[training.loss]

    def compute(
        items: Tensor, places: Tensor, segments: Tensor, positions: Tensor, targets: Tensor
    ) -> Tensor:
        # Uniform, and drawn where they are needed.
        negatives = torch.randint(num_items, (len(targets), training.num_negatives), device=device)
        wanted = targets.clamp(min=0)
        candidates = torch.cat([wanted.unsqueeze(1), negatives], dim=1)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            states = model.forward_packed(items, places, segments).flatten(0, 1)[positions]
            scores = model.embedding.scores(states, candidates).float()
        values = loss(scores[:, 0], scores[:, 1:])
        if training.pruning_weight and isinstance(model.embedding, RecJPQEmbedding):
            table = model.embedding.score_table(states)
            if training.pruning_loss == "agreement":
                extra = agreement(table, model.embedding.codes[wanted])
            else:
                extra = concentration(table)
            values = values + training.pruning_weight * extra
        real = targets >= 0
        return torch.where(real, values, 0.0).sum() / real.sum()

    return compute


def _seed_of(settings: Settings, epoch: int, number: int) -> int:
    sequence = np.random.SeedSequence([settings.training.seed, 3, epoch, number])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


class _Replayed:
    """Steps on a GPU: launching their kernels one by one takes longer than running them.

    The first step of a shape is taken in the ordinary way, which also lets libraries and optimiser
    set themselves up. The second is recorded, and from then on replayed with other contents.
    """

    def __init__(self, step: Callable[..., Tensor], device: torch.device) -> None:
        self._step = step
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()  # never two at once: they share their memory
        self._met: set[tuple[torch.Size, ...]] = set()
        self._recorded: dict[
            tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]
        ] = {}

    def __call__(self, *arrays: Tensor) -> Tensor:
        shape = tuple(array.shape for array in arrays)
        if shape not in self._met:
            self._met.add(shape)
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                loss = self._step(*(array.to(self._device) for array in arrays))
            torch.cuda.current_stream().wait_stream(self._stream)
            return loss
        if shape not in self._recorded:
            inputs = [array.to(self._device) for array in arrays]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                loss = self._step(*inputs)
            self._recorded[shape] = (graph, inputs, loss)
        graph, inputs, loss = self._recorded[shape]
        for place, array in zip(inputs, arrays, strict=True):
            place.copy_(array)
        graph.replay()
        return loss
