"""Seeded synthetic logs of any size, with the properties that matter to sequential recommenders.

Items live in clusters of Zipf popularity. A user has a few home clusters and drifts between them
and the rest of the catalogue; inside a cluster a visit walks along neighbouring items, so the next
item can be learnt; and now and then something recent is consumed again. Everything is drawn in
whole arrays: a log of 35 million rows takes seconds and no Python object per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.storage import writing_file
from recprune.types import (
    Float64Array,
    InputError,
    Int32Array,
    Int64Array,
    Progress,
    frozen,
    needs_extra,
    no_progress,
    random_generator,
)

_SHORTEST_HISTORY = 5  # interactions: shorter ones would not survive the paper's filter
_HOME_CLUSTERS = 3  # of every user
_ROWS_PER_GROUP = 1 << 20  # of the Parquet file


@dataclass(frozen=True)
class SyntheticSettings:
    """How large the log is and how its users behave."""

    num_users: int
    num_items: int
    num_interactions: int
    seed: int = 0
    items_per_cluster: int = 500
    length_spread: float = 1.2  # σ of the log-normal history lengths
    drift: float = 0.05  # chance that a step leaves the cluster
    jump: float = 0.3  # chance that a step inside the cluster does not go to the next item
    away: float = 0.3  # chance that a drift leads elsewhere than to a home cluster
    repeat: float = 0.25  # chance that a step consumes something again
    first_day: str = "2009-02-04"
    days: int = 626

    def __post_init__(self) -> None:
        for name in ("num_users", "num_items", "items_per_cluster", "days"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, expected at least 1")
        for name in ("drift", "jump", "away", "repeat"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InputError(f"{name} is {getattr(self, name)}, expected 0 to 1")
        fewest = max(_SHORTEST_HISTORY * self.num_users, self.num_items)
        if self.num_interactions < fewest:
            raise InputError(
                f"num_interactions is {self.num_interactions}, expected at least {fewest}: "
                f"{_SHORTEST_HISTORY} for every user and one for every item"
            )
        if max(self.num_users, self.num_items) > np.iinfo(np.int32).max:
            raise InputError("at most 2³¹ − 1 users and items are supported")


PRESETS = {
    "gowalla-like": SyntheticSettings(86_168, 1_271_638, 6_397_903),
    "tmall-like": SyntheticSettings(
        473_376, 2_194_464, 34_850_828, first_day="2015-05-01", days=214
    ),
}


@dataclass(frozen=True, eq=False)
class SyntheticLog:
    """Columns of a generated log, grouped by user, oldest first."""

    users: Int32Array
    items: Int32Array
    times: Int64Array  # unix seconds

    def __post_init__(self) -> None:
        for name in ("users", "items", "times"):
            frozen(getattr(self, name))


def synthetic_log(settings: SyntheticSettings, *, progress: Progress = no_progress) -> SyntheticLog:
    """Draw a log. Every item occurs at least once, every user at least five times."""
    rng = random_generator(settings.seed)
    progress("drawing history lengths")
    lengths = _apportion(
        rng.lognormal(0.0, settings.length_spread, settings.num_users),
        settings.num_interactions,
        _SHORTEST_HISTORY,
    )
    clusters = _Clusters.draw(settings, rng)
    starts = np.cumsum(lengths) - lengths
    first = np.zeros(settings.num_interactions, np.bool_)
    first[starts] = True

    progress("walking through the clusters")
    cluster = _draw_clusters(settings, clusters, lengths, first, rng)
    place = _walk(settings, clusters, cluster, first, rng)
    progress("consuming again")
    place = place[_repeat_sources(settings, lengths, starts, rng)]
    progress("visiting the rest of the catalogue")
    _visit_every_item(place, cluster, clusters)
    progress("drawing times")
    times = _draw_times(settings, lengths, starts, rng)

    # Shuffled, so that neither popularity nor cluster can be read from an item's id.
    item_of_place = rng.permutation(settings.num_items).astype(np.int32)
    users = np.repeat(np.arange(settings.num_users, dtype=np.int32), lengths)
    return SyntheticLog(users, item_of_place[place], times)


def write_synthetic_log(
    path: str | Path, settings: SyntheticSettings, *, progress: Progress = no_progress
) -> None:
    """Draw a log and write it as Parquet: user_id, item_id, timestamp (unix seconds)."""
    with needs_extra("data"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    target = Path(path)
    if target.suffix.lower() not in (".parquet", ".pq"):
        raise InputError(f"{target}: a Parquet file is written, so its name must end in .parquet")
    if target.is_dir():
        raise InputError(f"{target}: is a folder, expected the name of a file to write")
    if not target.parent.is_dir():
        raise InputError(f"{target}: the folder {target.parent} does not exist")
    log = synthetic_log(settings, progress=progress)
    columns: dict[str, NDArray[Any]] = {
        "user_id": log.users,
        "item_id": log.items,
        "timestamp": log.times,
    }
    schema = pa.schema({"user_id": pa.int32(), "item_id": pa.int32(), "timestamp": pa.int64()})
    with (
        writing_file(target) as temporary,
        pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
    ):
        for start in range(0, len(log.times), _ROWS_PER_GROUP):
            progress(f"writing row {start:,} of {len(log.times):,}")
            part = slice(start, start + _ROWS_PER_GROUP)
            writer.write_table(
                pa.table({name: column[part] for name, column in columns.items()}, schema)
            )


@dataclass(frozen=True, eq=False)
class _Clusters:
    """Clusters as stretches of places 0 … num_items − 1, the most popular place first in each."""

    starts: Int64Array
    sizes: Int64Array
    cumulative_popularity: Float64Array

    @classmethod
    def draw(cls, settings: SyntheticSettings, rng: np.random.Generator) -> _Clusters:
        # At most 2¹⁶, so that rows are sorted by cluster with a radix sort.
        wanted = settings.num_items // settings.items_per_cluster
        count = min(max(1, wanted), 1 << 16)
        sizes = _apportion(rng.lognormal(0.0, 0.8, count), settings.num_items, 1)
        # Zipf over clusters too, but flatter than over items: no cluster may swallow the log.
        popularity = sizes * np.arange(1, count + 1) ** -0.4
        cumulative = np.cumsum(popularity) / popularity.sum()
        return cls(np.cumsum(sizes) - sizes, sizes, cumulative)

    def sample(self, size: int | tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint16]:
        drawn = np.searchsorted(self.cumulative_popularity, rng.random(size), side="right")
        return np.minimum(drawn, len(self.sizes) - 1).astype(np.uint16)


def _draw_clusters(
    settings: SyntheticSettings,
    clusters: _Clusters,
    lengths: Int64Array,
    first: NDArray[np.bool_],
    rng: np.random.Generator,
) -> NDArray[np.uint16]:
    """Return the cluster of every row: constant until the user drifts."""
    homes = clusters.sample((settings.num_users, _HOME_CLUSTERS), rng)
    drifts = np.flatnonzero(first | (rng.random(len(first), np.float32) < settings.drift))
    user_of_drift = np.searchsorted(np.cumsum(lengths), drifts, side="right")
    chosen = homes[user_of_drift, rng.integers(0, _HOME_CLUSTERS, len(drifts))]
    away = rng.random(len(drifts)) < settings.away
    chosen[away] = clusters.sample(int(away.sum()), rng)
    return np.repeat(chosen, np.diff(drifts, append=len(first)))


def _walk(
    settings: SyntheticSettings,
    clusters: _Clusters,
    cluster: NDArray[np.uint16],
    first: NDArray[np.bool_],
    rng: np.random.Generator,
) -> Int32Array:
    """Return the place of every row: a Zipf draw in the cluster, then step by step along it."""
    jumps = first | (rng.random(len(first), np.float32) < settings.jump)
    jumps[1:] |= cluster[1:] != cluster[:-1]
    landings = np.flatnonzero(jumps)
    sizes = clusters.sizes[cluster[landings]]
    # Log-uniform ranks are Zipf with exponent 1.
    ranks = np.minimum(np.floor(sizes ** rng.random(len(landings))).astype(np.int64) - 1, sizes - 1)
    run_lengths = np.diff(landings, append=len(first))
    steps = np.arange(len(first)) - np.repeat(landings, run_lengths)
    steps += np.repeat(ranks, run_lengths)
    steps %= np.repeat(sizes, run_lengths)
    steps += np.repeat(clusters.starts[cluster[landings]], run_lengths)
    return steps.astype(np.int32)


def _repeat_sources(
    settings: SyntheticSettings, lengths: Int64Array, starts: Int64Array, rng: np.random.Generator
) -> Int64Array:
    """Return for every row the row whose item it consumes: itself, or a recent one of the user."""
    rows = np.arange(settings.num_interactions)
    repeats = np.flatnonzero(rng.random(len(rows), np.float32) < settings.repeat)
    steps_so_far = repeats - np.repeat(starts, lengths)[repeats]
    lags = np.minimum(rng.geometric(0.15, len(repeats)), steps_so_far)
    rows[repeats] -= lags
    # A source may itself be a repeat: follow the pointers, doubling the distance each time.
    while True:
        further = rows[rows]
        if np.array_equal(further, rows):
            return rows
        rows = further


def _visit_every_item(place: Int32Array, cluster: NDArray[np.uint16], clusters: _Clusters) -> None:
    """Overwrite some rows in place, so that every item occurs: this makes the long tail's end.

    Only rows whose item also occurs earlier are taken, evenly over the users, and as far as there
    are enough in the item's own cluster.
    """
    num_places = int(clusters.sizes.sum())
    missing = np.flatnonzero(np.bincount(place, minlength=num_places) == 0)
    earliest = np.empty(num_places, np.int64)
    earliest[place[::-1]] = np.arange(len(place))[::-1]
    spare = np.flatnonzero(earliest[place] != np.arange(len(place)))
    spare = spare[np.argsort(cluster[spare], kind="stable")]

    cluster_ids = np.arange(len(clusters.sizes))
    cluster_of_missing = np.searchsorted(clusters.starts, missing, side="right") - 1
    needed = np.bincount(cluster_of_missing, minlength=len(cluster_ids))
    offered = np.bincount(cluster[spare], minlength=len(cluster_ids))
    taken = np.minimum(needed, offered)
    # Within a cluster, the j-th of `taken` goes to the spare row j · offered / taken.
    turn = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
    share = np.repeat(offered / np.maximum(taken, 1), taken)
    chosen = np.repeat(np.cumsum(offered) - offered, taken) + (turn * share).astype(np.int64)
    turn_of_missing = np.arange(len(missing)) - np.repeat(np.cumsum(needed) - needed, needed)
    at_home = turn_of_missing < taken[cluster_of_missing]
    place[spare[chosen]] = missing[at_home]

    elsewhere = missing[~at_home]
    rest = np.delete(spare, chosen)
    evenly = np.arange(len(elsewhere)) * (len(rest) / max(len(elsewhere), 1))
    place[rest[evenly.astype(np.int64)]] = elsewhere


def _draw_times(
    settings: SyntheticSettings, lengths: Int64Array, starts: Int64Array, rng: np.random.Generator
) -> Int64Array:
    """Return unix seconds: each user has a stretch of the period, with bursts and long gaps."""
    total_seconds = settings.days * 86_400
    begins = rng.random(settings.num_users) * 0.9
    ends = begins + (1.0 - begins) * rng.beta(1.0, 0.7, settings.num_users)
    clock = np.cumsum(rng.lognormal(0.0, 2.0, settings.num_interactions))
    elapsed = clock - np.repeat(clock[starts], lengths)
    span = np.repeat((ends - begins) / elapsed[starts + lengths - 1], lengths)
    elapsed *= span
    elapsed += np.repeat(begins, lengths)
    elapsed *= total_seconds
    origin = np.datetime64(settings.first_day, "s").astype(np.int64)
    return elapsed.astype(np.int64) + int(origin)


def _apportion(weights: Float64Array, total: int, least: int) -> Int64Array:
    """Return integers of at least `least` that add up to `total`, in proportion to the weights."""
    shares = weights / weights.sum() * (total - least * len(weights))
    counts: Int64Array = least + np.floor(shares).astype(np.int64)
    largest_remainders = np.argsort(np.floor(shares) - shares, kind="stable")
    counts[largest_remainders[: total - int(counts.sum())]] += 1
    return counts
