"""What a model makes of histories: sequence embeddings, and rankings of the full catalogue."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recprune.models.architectures import SequenceModel
from recprune.models.bert4rec import MASK
from recprune.models.boost_heads import BoostHeads
from recprune.models.settings import ModelSettings
from recprune.models.timelines import event_times
from recprune.types import Boosts, Float32Array, Int32Array, Int64Array, Timeline, needs_extra

with needs_extra("train"):
    import torch
    from torch import Tensor


def pad_histories(histories: Sequence[Int32Array]) -> tuple[Int64Array, Int64Array]:
    """Return histories padded at the right with item 0, [batch, longest], and their lengths."""
    lengths = np.array([len(history) for history in histories], np.int64)
    padded = np.zeros((len(histories), int(lengths.max(initial=1))), np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.concatenate(
        [*histories, np.empty(0, np.int64)]
    )
    return padded, lengths


@torch.no_grad()
def encode_histories(
    model: SequenceModel,
    length: int,
    histories: Sequence[Int32Array],
    batch_size: int = 256,
    *,
    timelines: Sequence[Timeline | None] | None = None,
) -> Tensor:
    """Return the sequence embeddings of histories, of each its last `length` items, [users, d].

    No history may be empty: there is nothing to encode.
    """
    if timelines is None or not model.reads_times:
        timelines = [None] * len(histories)
    model.eval()
    device = model.norm.weight.device
    mask = [np.array([MASK], np.int32)] if model.fills_masks else []
    # Of similar length together, so that little is padding.
    order = np.argsort([min(len(history), length) for history in histories], kind="stable")
    found = torch.empty((len(histories), model.norm.weight.shape[0]), device=device)
    for first in range(0, len(histories), batch_size):
        chosen = order[first : first + batch_size]
        batch = [np.concatenate([histories[at][-length:], *mask]) for at in chosen]
        items, lengths = (torch.from_numpy(array).to(device) for array in pad_histories(batch))
        times = []
        if model.reads_times:
            # Where a history is cut, the longest of its batch is as long as that.
            known = torch.from_numpy(event_times([timelines[at] for at in chosen], items.shape[1]))
            times.append(known.to(device))
        states = model(items, lengths, *times)
        last = states[torch.arange(len(chosen), device=device), lengths - 1]
        found[torch.from_numpy(chosen).to(device)] = last.float()
    return found


@torch.no_grad()
def target_ranks(
    model: SequenceModel,
    sequence_embeddings: Tensor,
    targets: Int32Array,
    exclude: Sequence[Int32Array] | None = None,
    scores_at_once: int = 1 << 24,
    *,
    boosts: Sequence[Boosts] | None = None,
) -> Int64Array:
    """Return how many items are ranked above each user's target, over the full catalogue.

    The tie rule is that of the search. Items in `exclude` do not count, and a target among them is
    below all; `boosts` are added to the scores of their items.
    Scores are computed for a part of the catalogue at a time, twice: first the targets' own.
    """
    embedding = model.embedding
    device = sequence_embeddings.device
    num_users = len(targets)
    users = torch.arange(num_users, device=device)
    wanted = torch.from_numpy(np.array(targets, np.int64)).to(device)
    table = embedding.score_table(sequence_embeddings)
    chunk = max(1, scores_at_once // max(num_users, 1))
    ranges = [
        (first, min(first + chunk, embedding.num_items))
        for first in range(0, embedding.num_items, chunk)
    ]
    own = torch.empty(num_users, device=device)
    boosted = _Boosted(boosts or [], device)
    for first, last in ranges:
        scores = boosted.add_to(embedding.scores_of_range(table, first, last), first, last)
        inside = (wanted >= first) & (wanted < last)
        own = torch.where(inside, scores[users, (wanted - first).clamp(0, last - first - 1)], own)
    excluded_users, excluded_items = _flat_pairs(exclude or [], device)
    above = torch.zeros(num_users, dtype=torch.int64, device=device)
    for first, last in ranges:
        scores = boosted.add_to(embedding.scores_of_range(table, first, last), first, last)
        inside = (excluded_items >= first) & (excluded_items < last)
        scores[excluded_users[inside], excluded_items[inside] - first] = -torch.inf
        ids = torch.arange(first, last, device=device)
        # What is not certainly below counts as above: so a score that is not a number does.
        below = (scores < own[:, None]) | ((scores == own[:, None]) & (ids > wanted[:, None]))
        above += (~below & (ids != wanted[:, None])).sum(1)
    above[excluded_users[excluded_items == wanted[excluded_users]]] = embedding.num_items
    return above.cpu().numpy()


@torch.no_grad()
def top_items(
    model: SequenceModel,
    sequence_embeddings: Tensor,
    k: int,
    exclude: Sequence[Int32Array] | None = None,
    scores_at_once: int = 1 << 24,
    *,
    boosts: Sequence[Boosts] | None = None,
) -> Int64Array:
    """Return the best k items of each user by scoring the full catalogue, [users, k], −1-padded.

    For catalogues that no index holds: tables of full vectors of more items than an index has
    sub-items. The tie rule is that of the search.
    """
    embedding = model.embedding
    device = sequence_embeddings.device
    num_users = len(sequence_embeddings)
    table = embedding.score_table(sequence_embeddings)
    excluded_users, excluded_items = _flat_pairs(exclude or [], device)
    boosted = _Boosted(boosts or [], device)
    scores = torch.full((num_users, k), -torch.inf, device=device)
    ids = torch.full((num_users, k), -1, dtype=torch.int64, device=device)
    chunk = max(1, scores_at_once // max(num_users, 1))
    for first in range(0, embedding.num_items, chunk):
        last = min(first + chunk, embedding.num_items)
        part = boosted.add_to(embedding.scores_of_range(table, first, last), first, last)
        inside = (excluded_items >= first) & (excluded_items < last)
        part[excluded_users[inside], excluded_items[inside] - first] = -torch.inf
        # Stable, and the ids of the best so far are lower than those of this part: ties keep order.
        both = torch.cat([scores, part], dim=1)
        order = both.argsort(dim=1, descending=True, stable=True)[:, :k]
        part_ids = torch.arange(first, last, device=device).expand(num_users, -1)
        scores = both.gather(1, order)
        ids = torch.cat([ids, part_ids], dim=1).gather(1, order)
    return ids.masked_fill(scores == -torch.inf, -1).cpu().numpy()


def model_boosts(
    model: SequenceModel,
    settings: ModelSettings,
    sequence_embeddings: Tensor,
    histories: Sequence[Int32Array],
    timelines: Sequence[Timeline | None] | None = None,
    *,
    known_until: int | None = None,
) -> list[Boosts] | None:
    """Return what the heads of a model add to the scores of some items; None without any.

    What others did is known up to the moment of each request, or only to the one that is given.
    """
    arrays = {
        name: value.detach().cpu().numpy()
        for name, value in model.named_parameters()
        if name.startswith(("repeats.", "transitions."))
    }
    device = sequence_embeddings.device

    @torch.inference_mode()
    def item_scores(sequence_embedding: Float32Array, items: Int64Array) -> Float32Array:
        state = torch.from_numpy(sequence_embedding).to(device).unsqueeze(0)
        chosen = torch.from_numpy(items).to(device).unsqueeze(0)
        scores: Float32Array = model.embedding.scores(state, chosen)[0].float().cpu().numpy()
        return scores

    activity = model.activity
    if activity is not None and known_until is not None:
        activity = activity.until(known_until)
    boosts = BoostHeads(arrays, settings, model.successors, item_scores, activity)
    return boosts(sequence_embeddings.cpu().numpy(), histories, timelines).total()


class _Boosted:
    """Boosts of all users, flat: one entry for every item that is boosted for a user."""

    def __init__(self, boosts: Sequence[Boosts], device: torch.device) -> None:
        self._users, self._items = _flat_pairs([items for items, _ in boosts], device)
        values = np.concatenate([*(values for _, values in boosts), np.empty(0, np.float32)])
        self._values = torch.from_numpy(values.astype(np.float32)).to(device)

    def add_to(self, scores: Tensor, first: int, last: int) -> Tensor:
        """Return the scores of items first … last − 1 with boosts, added in place."""
        inside = (self._items >= first) & (self._items < last)
        if inside.any():
            scores[self._users[inside], self._items[inside] - first] += self._values[inside]
        return scores


def _flat_pairs(
    exclude: Sequence[Int32Array] | Sequence[Int64Array], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return users and items, one pair for every item that is excluded for a user."""
    lengths = [len(items) for items in exclude]
    users = np.repeat(np.arange(len(exclude)), lengths)
    items = np.concatenate([*exclude, np.empty(0, np.int64)]).astype(np.int64)
    return torch.from_numpy(users).to(device), torch.from_numpy(items).to(device)
