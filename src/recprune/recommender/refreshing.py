"""Keeping a recommender fresh: its model is trained on with newer events, judged, and put in place.

What was known stays: external ids, codes, weights. The model that is served and the one that has
learnt more answer the same users, about events that neither has seen, and the new one takes the
place of the old one only if it is not worse.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recprune.evaluation.comparison import Comparison, compare
from recprune.evaluation.metrics import RankedUsers, user_values
from recprune.live.file_lock import held_alone
from recprune.live.live_index import LiveIndex
from recprune.models.settings import ModelSettings, Settings
from recprune.recommender.beginning import Beginning
from recprune.recommender.recommender import Recommender
from recprune.recommender.saving import KIND
from recprune.recommender.swapping import Succession
from recprune.storage import check_target
from recprune.types import (
    InputError,
    Int32Array,
    Int64Array,
    InterruptedWorkError,
    Progress,
    Timeline,
    no_progress,
)

if TYPE_CHECKING:
    from recprune.data.content import Content
    from recprune.data.interactions import Interactions
    from recprune.training.loop import EpochReport

DEFAULT_EPOCHS = 10
DEFAULT_HELD_OUT = 0.2  # of the new events, the newest: what both models are judged by
DEFAULT_MARGIN = 0.05  # of the old NDCG@10, by which the new one is surely not lower
DEFAULT_REPLAY = 1.0  # users without new events that are shown for each one that has some
METRIC = "NDCG@10"
_K = 10
_PATIENCE = 3  # epochs without a better validation, unless the caller says otherwise


@dataclass(frozen=True)
class Refreshed:
    """What came of a refresh."""

    swapped: bool
    comparison: Comparison  # of the new model with the old one
    margin: float  # by which the new one may be lower, of the old one's figure
    new_targets: int  # users whose target the old model does not know
    by_target: Mapping[str, tuple[float, float]]  # known, new: figures, the new model's first
    num_users: int
    num_events: int  # newer than the old model, held out or not
    known_items: int
    changed_codes: int  # of known items, as they were replaced in the live index
    new_items: Mapping[str, int]  # by where their codes came from
    epochs: int
    begin_ndcg: float  # of the validation users, before the first epoch
    best_ndcg: float
    kept_moments: bool  # whether the optimiser went on with what it remembered
    seconds: float

    @property
    def least(self) -> float:
        """The least difference that is not worse."""
        return -self.margin * self.comparison.second


def refresh(
    recommender: str | Path,
    log: Interactions,
    *,
    out: str | Path | None = None,
    live: str | Path | None = None,
    attributes: str | Path | None = None,
    add_new: bool = False,
    content: Content | None = None,
    since: str | None = None,
    held_out: float = DEFAULT_HELD_OUT,
    margin: float = DEFAULT_MARGIN,
    epochs: int = DEFAULT_EPOCHS,
    replay: float = DEFAULT_REPLAY,
    max_seconds: float = math.inf,
    values: Mapping[str, Any] | None = None,
    work: str | Path | None = None,
    checkpoint: str | Path | None = None,
    device: str = "auto",
    threads: int = 1,
    on_epoch: Callable[[EpochReport], None] = lambda _: None,
    progress: Progress = no_progress,
) -> Refreshed:
    """Train the model of a saved recommender on, and put the new one in its place if not worse.

    `log` has the newer events, and the older ones too: histories begin there. Newer is what came
    after the events that the model was trained with, which it knows, or after `since`, in ISO-8601.
    Of these events the newest share `held_out` is for judging, and not learnt from. All external
    ids that the old model knows stay, with their codes; new items get codes from `content`, which
    `read_content` reads for `log.item_ids`, else from the items that stand beside them in
    histories, else by chance.

    For each user with new events, `replay` others are shown as well. `values` are settings of
    training by name. The training stands in `work`, beside `out` by default, which is the place of
    the recommender by default; interrupted or killed, the same call goes on there. From
    `checkpoint`, the folder of the training that the recommender was made of, the optimiser takes
    what it remembers; without it, from the last refresh in `work`.

    With `live`, a live index of the recommender, one of the new recommender takes its place, with
    the same items, those that were added since included, and their codes; items that only the log
    has join them with `add_new`, also those that were withdrawn. `attributes` are the folder of its
    items' attributes, if there is one: their numbers change.
    """
    begun = time.monotonic()
    _check_shares(held_out, margin, replay)
    folder = Path(recommender)
    target = folder if out is None else Path(out)
    if live is not None and target.resolve() != folder.resolve():
        raise InputError("with a live index, the new recommender takes the place of the old one")
    check_target(target, kind=KIND)
    place = target.with_name(f"{target.name}.refresh") if work is None else Path(work)
    place.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        lock = place.with_name(f".{place.name}.lock")
        stack.enter_context(held_alone(lock, f"{place}: another refresh is at work there"))
        old = Recommender.load(folder, threads=threads)
        earlier = old.trained_settings("refresh")
        if old.index.item_bias is not None:
            raise InputError(f"{folder}: its items have biases, which no training knows")
        opened = None
        if live is not None:
            opened = stack.enter_context(LiveIndex.open(live))
            if Succession(target, opened, attributes, add_new).finish_earlier(old):
                opened = stack.enter_context(LiveIndex.open(live))
            old.with_live(opened)  # which refuses that of another one
        settings = _settings(earlier, epochs, values or {})
        snapshot = None if opened is None else opened.snapshot()
        start = Beginning.of(old, log, content, settings, since, held_out, snapshot)
        kept_moments, begin_ndcg = start.write(place, checkpoint, device)
        progress("training")
        try:
            state = start.train(place, replay, device, max_seconds, on_epoch)
        except InterruptedWorkError:
            raise InterruptedWorkError(
                f"interrupted; all is saved in {place}: the same command goes on"
            ) from None
        progress("comparing")
        model, chosen = start.best_model(place)
        comparison, groups = _judged(
            start, old, Recommender.from_model(start.prepared, model, chosen)
        )
        swapped = comparison.difference.low >= -margin * comparison.second
        if swapped:
            progress("putting in place")
            precision = old.settings.get("encoder_precision", "float32")
            new = start.finished(model, chosen, precision)
            Succession(target, opened, attributes, add_new).swap(old, new)
        else:
            shutil.rmtree(place)
        return Refreshed(
            swapped=swapped,
            comparison=comparison,
            margin=margin,
            new_targets=int((start.old_places[start.targets.items] < 0).sum()),
            by_target=groups,
            num_users=len(start.targets.items),
            num_events=start.num_events,
            known_items=int((start.old_places >= 0).sum()),
            changed_codes=start.changed_codes,
            new_items=start.sources,
            epochs=state.epoch,
            begin_ndcg=begin_ndcg,
            best_ndcg=state.best_ndcg,
            kept_moments=kept_moments,
            seconds=time.monotonic() - begun,
        )


def _check_shares(held_out: float, margin: float, replay: float) -> None:
    if not 0.0 < held_out < 1.0:
        raise InputError(f"held_out is {held_out}, expected between 0 and 1")
    if not 0.0 <= margin < 1.0:
        raise InputError(f"margin is {margin}, expected 0 to below 1")
    if not 0.0 <= replay < math.inf:
        raise InputError(f"replay is {replay}, expected 0 or more")


def _settings(earlier: Settings, epochs: int, values: Mapping[str, Any]) -> Settings:
    """Return the settings of the model, which stay, and those of its further training."""
    for name in values:
        if name in ModelSettings.__dataclass_fields__:
            raise InputError(f"{name} is of the model, which stays as it is: train another one")
    # Codes are as prepared: those of the old model.
    model = replace(earlier.model, codes="svd")
    usual = {"max_epochs": epochs, "patience": min(_PATIENCE, epochs)}
    return Settings(model, earlier.training).with_values({**usual, **values})


def _judged(
    start: Beginning, old: Recommender, new: Recommender
) -> tuple[Comparison, dict[str, tuple[float, float]]]:
    """Compare two recommenders on held-out targets; the old one has no score for new items."""
    prepared, targets = start.prepared, start.targets
    histories = [prepared.history(targets, target) for target in range(len(targets))]
    timelines = [prepared.timeline(targets, target) for target in range(len(targets))]
    exclude_seen = start.settings.training.exclude_seen
    ids = new.rank(
        histories, _K, timelines=timelines, exclude=histories if exclude_seen else None
    ).ids
    ranked = [
        RankedUsers.of_targets(found, targets.items)
        for found in (ids, _ranked_by(old, start.old_places, histories, timelines, exclude_seen))
    ]
    comparison = compare(ranked[0], ranked[1], METRIC)
    values = [user_values(one, [METRIC])[METRIC] for one in ranked]
    is_known = start.old_places[targets.items] >= 0
    groups = {
        name: (float(values[0][users].mean()), float(values[1][users].mean()))
        for name, users in (("known", is_known), ("new", ~is_known))
        if users.any()
    }
    return comparison, groups


def _ranked_by(
    old: Recommender,
    old_places: Int64Array,
    histories: list[Int32Array],
    timelines: list[Timeline | None],
    exclude_seen: bool,
) -> Int64Array:
    """Return the best items by the old model, as ids of the new catalogue."""
    new_places = np.flatnonzero(old_places >= 0)  # of old ids: both are sorted by external id
    given: list[Int32Array] = []
    dated: list[Timeline | None] = []
    for history, timeline in zip(histories, timelines, strict=True):
        places = old_places[history]
        known = places >= 0
        given.append(places[known].astype(np.int32))
        dated.append(None if timeline is None else Timeline(timeline.times[known], timeline.now))
    asked = np.array([len(history) > 0 for history in given])
    found = np.full((len(given), _K), -1, np.int64)
    # As the service answers where nothing of a history is known.
    popular = np.argsort(-old.popularity, kind="stable")[:_K]
    found[~asked, : len(popular)] = popular
    if asked.any():
        chosen = np.flatnonzero(asked)
        some = [given[at] for at in chosen]
        found[asked] = old.rank(
            some,
            _K,
            timelines=[dated[at] for at in chosen],
            exclude=some if exclude_seen else None,
        ).ids
    return np.where(found >= 0, new_places[found], -1)
