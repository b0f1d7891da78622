"""One training step: from a minibatch to changed weights. On a GPU, recorded once and replayed.

Several workers take a step together: each its part of the minibatch, and all the same in the end.
"""

from __future__ import annotations

from collections.abc import Callable

from recprune.models.architectures import SequenceModel
from recprune.models.embedding import FullEmbedding, ItemEmbedding, RecJPQEmbedding
from recprune.models.learnt_codes import LearntEmbedding
from recprune.models.losses import agreement, concentration, digits, find_loss
from recprune.models.settings import Settings, TrainingSettings
from recprune.preparation.prepared import Prepared
from recprune.training.distributed import Workers
from recprune.training.minibatches import Minibatch, minibatch_part, padded_minibatch
from recprune.training.negatives import Negatives
from recprune.training.optimiser import Optimiser
from recprune.training.own_items import OwnItems
from recprune.training.random_streams import Stream, torch_seed
from recprune.training.sparse_scores import SparseScores, merged
from recprune.training.successors import Successors
from recprune.types import needs_extra

with needs_extra("train"):
    import torch
    from torch import Tensor

# A minibatch, its epoch and its number → its loss, which the next step may overwrite.
Step = Callable[[Minibatch, int, int], Tensor]

# A minibatch is padded to a multiple of these on a GPU, so that few different shapes come along.
_ROWS, _PREDICTIONS = 8, 1024
_TARGETS = 4  # their place among the arrays of a minibatch


class SingleStep:
    """A step that one worker takes alone; on a GPU recorded, and replayed."""

    def __init__(
        self,
        model: SequenceModel,
        optimiser: Optimiser,
        settings: Settings,
        prepared: Prepared,
        device: torch.device,
        compiled: bool,
    ) -> None:
        self._optimiser = optimiser
        self._settings = settings.training
        self._device = device
        self._embedding = model.embedding
        self._negatives = Negatives(model, settings.training, prepared, device)
        self._loss_sum = _loss_sum(model, settings, self._negatives, device)
        self._loss = torch.compile(self._mean_loss, dynamic=True) if compiled else self._mean_loss
        self._take = _Replayed(self._update, device) if device.type == "cuda" else self._update

    def __call__(self, minibatch: Minibatch, epoch: int, number: int) -> Tensor:
        """Take one step, and return the loss of the minibatch."""
        seed = torch_seed(self._settings.seed, Stream.STEP, epoch, number)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)
            minibatch = padded_minibatch(minibatch, _ROWS, _PREDICTIONS)
        else:
            torch.default_generator.manual_seed(seed)
        return self._take(*(torch.from_numpy(array) for array in minibatch.arrays()))

    def _update(self, *arrays: Tensor) -> Tensor:
        targets = arrays[_TARGETS]
        negatives = self._negatives.draw(targets, len(targets))
        self._optimiser.zero_grad()
        loss = self._loss(negatives, *arrays)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimiser.update(_touched(self._embedding))
        self._negatives.follow(targets, negatives)
        return loss.detach()

    def _mean_loss(self, negatives: Tensor, *arrays: Tensor) -> Tensor:
        targets = arrays[_TARGETS]
        return self._loss_sum(negatives, *arrays) / (targets >= 0).sum()


class SharedStep:
    """A step that several workers take together, with the mathematics of one worker alone.

    Each adds up the loss of its part of the minibatch, over the count of the whole. So the sum of
    their gradients is the gradient of the minibatch; it travels in one buffer, together with the
    loss and whether any worker was asked to stop. Negatives are those of one worker: each draws all
    of them and keeps its own. Nothing is recorded on a GPU.
    """

    def __init__(
        self,
        model: SequenceModel,
        optimiser: Optimiser,
        settings: Settings,
        prepared: Prepared,
        device: torch.device,
        compiled: bool,
        workers: Workers,
        asked_to_stop: Callable[[], bool],
    ) -> None:
        self._optimiser = optimiser
        self._settings = settings
        self._device = device
        self._workers = workers
        self._asked_to_stop = asked_to_stop
        self._embedding = model.embedding
        self._negatives = Negatives(model, settings.training, prepared, device)
        loss_sum = _loss_sum(model, settings, self._negatives, device)
        self._loss_sum = torch.compile(loss_sum, dynamic=True) if compiled else loss_sum
        self._parameters = list(model.parameters())
        sizes = [parameter.numel() for parameter in self._parameters]
        self._buffer = torch.zeros(sum(sizes) + 2, device=device)
        *gradients, self._loss, self._asked = torch.split(self._buffer, [*sizes, 1, 1])
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient.view_as(parameter)
        self._stop_asked = False

    def __call__(self, minibatch: Minibatch, epoch: int, number: int) -> Tensor:
        """Take one step, and return the loss of the whole minibatch."""
        self._buffer.zero_()
        targets = torch.from_numpy(minibatch.targets).to(self._device)
        negatives = self._draw(targets, epoch, number)
        self._add_part(minibatch, negatives, epoch, number)
        self._asked.fill_(self._asked_to_stop())
        self._workers.all_reduce(self._buffer)
        self._stop_asked = bool(self._asked > 0)
        _touched(self._embedding)  # not those of the others,
        self._optimiser.update()  # so all rows of a table are looked through
        # Every worker for itself: all know the whole minibatch, and have the same vectors.
        self._negatives.follow(targets, negatives)
        if self._device.type == "cuda" and isinstance(self._embedding, LearntEmbedding):
            self._workers.broadcast(self._embedding.buffers())  # GPUs add in no fixed order
        return self._loss[0]

    def stop_asked(self) -> bool:
        """Return whether any worker had been asked to stop before the last step."""
        return self._stop_asked

    def _draw(self, targets: Tensor, epoch: int, number: int) -> Tensor:
        """Return the negatives of the whole minibatch: those that one worker would draw."""
        count = len(targets)
        # On a GPU the numbers depend on how many are drawn, and `SingleStep` draws for padding too.
        draws = count + (-count % _PREDICTIONS if self._device.type == "cuda" else 0)
        generator = torch.Generator(self._device)
        seed = self._settings.training.seed
        generator.manual_seed(torch_seed(seed, Stream.STEP, epoch, number))
        return self._negatives.draw(targets, draws, generator)

    def _add_part(self, minibatch: Minibatch, negatives: Tensor, epoch: int, number: int) -> None:
        part, kept = minibatch_part(minibatch, self._workers.rank, self._workers.count)
        if not len(kept):
            return
        # Dropout is each worker's own: with one seed, all parts would get the same masks.
        seed = self._settings.training.seed
        torch.manual_seed(torch_seed(seed, Stream.STEP, epoch, number, self._workers.rank))
        arrays = [torch.from_numpy(array).to(self._device) for array in part.arrays()]
        if negatives.dim() == 2:  # of each position
            negatives = negatives[torch.from_numpy(kept).to(self._device)]
        loss = self._loss_sum(negatives, *arrays) / len(minibatch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._loss += loss.detach()


def _loss_sum(
    model: SequenceModel, settings: Settings, candidates: Negatives, device: torch.device
) -> Callable[..., Tensor]:
    training = settings.training
    compare = _comparison(model, training, candidates)
    reads_times = int(model.reads_times)  # how many arrays that takes
    own_items = _own_items(model, settings, device)
    successors = _successors(model, settings, device)

    def loss_sum(
        negatives: Tensor,
        items: Tensor,
        places: Tensor,
        segments: Tensor,
        positions: Tensor,
        targets: Tensor,
        *others: Tensor,
    ) -> Tensor:
        times, own_events = others[:reads_times], others[reads_times:]
        wanted = targets.clamp(min=0)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            states = model.forward_packed(items, places, segments, *times).flatten(0, 1)[positions]
            boosted = [own_items(states, *own_events)] if own_items is not None else []
            if successors is not None:
                boosted += successors(states, items, segments, positions, wanted)
            own = merged(boosted) if boosted else None
            values = compare(states, wanted, negatives, own)
        if isinstance(model.embedding, LearntEmbedding) and model.embedding.quantises:
            values = values + training.commitment * model.embedding.distortion(wanted)
        if training.pruning_weight and isinstance(model.embedding, RecJPQEmbedding):
            table = model.embedding.score_table(states)
            if training.pruning_loss == "agreement":
                extra = agreement(table, model.embedding.codes[wanted])
            else:
                extra = concentration(table)
            values = values + training.pruning_weight * extra
        return torch.where(targets >= 0, values, 0.0).sum()

    return loss_sum


def _comparison(
    model: SequenceModel, training: TrainingSettings, candidates: Negatives
) -> Callable[[Tensor, Tensor, Tensor, SparseScores | None], Tensor]:
    """Return what makes the loss of each position from its state, target and negatives."""
    embedding = model.embedding
    if training.loss == "digits" and isinstance(embedding, RecJPQEmbedding):
        return lambda states, wanted, *_: digits(
            embedding.score_table(states), embedding.codes[wanted]
        )
    loss = find_loss(training, candidates.num_items)
    return lambda *given: loss(*candidates.scores(*given))


def _own_items(model: SequenceModel, settings: Settings, device: torch.device) -> OwnItems | None:
    if model.repeats is None:
        return None
    looks_back = settings.model.repeats
    return OwnItems(
        model.embedding,
        model.repeats,
        model.longest_history,
        looks_back,
        settings.model.own_scores,
        model.activity,
        device,
    )


def _successors(
    model: SequenceModel, settings: Settings, device: torch.device
) -> Successors | None:
    if model.transitions is None or model.successors is None:
        return None
    looks_back = settings.model.transitions
    return Successors(model.embedding, model.transitions, looks_back, model.successors, device)


def _touched(embedding: ItemEmbedding) -> Tensor | None:
    """Return the rows of a table that were looked up in this step; None without such a table."""
    if not isinstance(embedding, FullEmbedding | LearntEmbedding) or embedding.touched is None:
        return None
    return embedding.touched.take()


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
