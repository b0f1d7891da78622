"""How good a recommender is: its answers to the users of a log, against what each had last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recprune.data.identifiers import coerce_ids
from recprune.data.interactions import Interactions, read_interactions
from recprune.evaluation.evaluation import Evaluation, evaluate_by_counts
from recprune.evaluation.metrics import RankedUsers
from recprune.live.snapshot_ids import ids_at
from recprune.recommender.recommender import Recommender
from recprune.search.checks import checked_count
from recprune.types import InputError, Int64Array, random_generator

if TYPE_CHECKING:
    from recprune.data.frames import LogSource

_USERS_AT_ONCE = 1024  # that are answered together


def evaluate(
    recommender: Recommender,
    log: Interactions | LogSource,
    k: int,
    *,
    exclude_seen: bool | None,
    since: float | None,
    users: int | None,
    seed: int,
    threads: int,
    name: str,
) -> Evaluation:
    """Judge a recommender by the last interactions of users: see `Recommender.evaluate`."""
    if checked_count(k, "k") < 1:
        raise InputError(f"k is {k}, expected at least 1")
    if users is not None and checked_count(users, "users") < 1:
        raise InputError(f"users is {users}, expected at least 1")
    if not isinstance(log, Interactions):
        log = read_interactions(log, min_interactions=2)
    chosen = _chosen_users(log, since, users, seed)
    snapshot = None if recommender.live is None else recommender.live.snapshot()
    item_ids = ids_at(recommender.item_ids, snapshot)
    num_items = len(item_ids)
    names = coerce_ids(recommender.item_ids, log.item_ids.take(range(log.num_items)))
    numbers = item_ids.find_all(names)
    # What the catalogue does not have gets numbers of its own, which nothing is recommended by.
    numbers = np.where(numbers >= 0, numbers, num_items + np.arange(len(numbers)))
    ids = np.empty((len(chosen), k), np.int64)
    for first in range(0, len(chosen), _USERS_AT_ONCE):
        group = chosen[first : first + _USERS_AT_ONCE]
        rows = [slice(log.offsets[user], log.offsets[user + 1] - 1) for user in group]
        found = recommender.recommend(
            [[names[item] for item in log.items[row]] for row in rows],
            k,
            exclude_seen=exclude_seen,
            times=[(log.times[row] / 1e6).tolist() for row in rows],
            now=(log.times[log.offsets[group + 1] - 1] / 1e6).tolist(),
            threads=threads,
            index=snapshot,
        )
        ids[first : first + len(group)] = found.ids
    targets = numbers[log.items[log.offsets[chosen + 1] - 1]]
    counts = np.zeros(num_items, np.int64)
    counts[: len(recommender.popularity)] = recommender.popularity
    return evaluate_by_counts(
        RankedUsers.of_targets(ids, targets, users=chosen),
        counts,
        name=name,
        histories=[
            numbers[log.items[log.offsets[user] : log.offsets[user + 1] - 1]] for user in chosen
        ],
        cutoffs=(k,),
        seed=seed,
    )


def _chosen_users(
    log: Interactions, since: float | None, users: int | None, seed: int
) -> Int64Array:
    """Return the users with a history and a target, of `since` or later, or so many of them."""
    able = np.flatnonzero(np.diff(log.offsets) > 1)
    if not len(able):
        raise InputError("there is nobody to evaluate on: no user has two interactions or more")
    if since is not None:
        if not isinstance(since, int | float | np.integer | np.floating) or not np.isfinite(since):
            raise InputError(f"since is {since!r}, expected seconds since 1970")
        able = able[log.times[log.offsets[able + 1] - 1] >= 1e6 * since]
        if not len(able):
            raise InputError(
                f"there is nobody to evaluate on: no user's last interaction is of {since} or later"
            )
    if users is None:
        return able
    order = random_generator(seed).permutation(len(able))
    return able[np.sort(order[:users])]
