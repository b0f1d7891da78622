"""What a refresh goes on from: an old model over a larger catalogue, and a log cut anew in time."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recprune.data.identifiers import ExternalIds, united
from recprune.live.snapshot import LiveSnapshot
from recprune.models.settings import Settings
from recprune.preparation.codebook import Codebook, assign_random, code_dtype
from recprune.preparation.cold_items import ColdItems, like_by_company, like_by_content
from recprune.preparation.holdout import Holdout, Targets, temporal_holdout
from recprune.preparation.prepared import Prepared, prepare
from recprune.recommender.making import from_model
from recprune.recommender.recommender import Recommender
from recprune.storage import writing_file, writing_folder
from recprune.types import MAX_SUB_ITEMS, InputError, Int64Array, StorageError, random_generator

if TYPE_CHECKING:
    from recprune.data.content import Content
    from recprune.data.interactions import Interactions
    from recprune.models.architectures import SequenceModel
    from recprune.models.onnx_export import EncoderPrecision
    from recprune.training.checkpoint import State
    from recprune.training.loop import EpochReport

_MOST_USERS = 10_000  # that both models are judged by
_VALIDATED_SHARE = 0.2  # of the users with new events, who say when training ends
_LEAST_VALIDATED = 20
_SECONDS = 1_000_000  # microseconds
FROM_LIVE = "the live index"  # where new items have their codes from, in `Refreshed.new_items`
_NOTE = "refresh.json"  # in the folder of a training: what it began with


def _trained_until(old: Recommender, since: str | None) -> int:
    """Return up to when the old model knows events, in microseconds."""
    preparation = old.settings.get("preparation", {})
    # Recommenders of before this was kept know the cut of a temporal hold-out.
    text = since or preparation.get("trained_until") or preparation.get("cut_time")
    if text is None:
        raise InputError(
            "the recommender does not say up to when it was trained: say it with since, in ISO-8601"
        )
    try:
        moment = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise InputError(f"since is {text!r}, expected a time in ISO-8601") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * _SECONDS)


@dataclass(eq=False)
class Beginning:
    """What the training goes on from: the old model over the new catalogue."""

    prepared: Prepared
    settings: Settings
    holdout: Holdout
    old_places: Int64Array  # [num_items]: the internal id that an item had; −1: it is new
    weights: dict[str, NDArray[Any]]  # of the model, by name
    sources: dict[str, int]  # of the codes of new items
    changed_codes: int
    num_events: int
    has_new: NDArray[np.bool_]  # [num_users]: events of training that the old model does not know
    by_chance: NDArray[np.bool_]  # [num_items]: new items of which the training log tells nothing
    targets: Targets  # that both models are judged by

    @classmethod
    def of(
        cls,
        old: Recommender,
        log: Interactions,
        content: Content | None,
        settings: Settings,
        since: str | None,
        held_out: float,
        snapshot: LiveSnapshot | None,
    ) -> Beginning:
        ids = united(old.item_ids, log.item_ids)
        if content is not None:
            places = ids.find_all(log.item_ids.take(range(log.num_items)))
            content = replace(content, items=places[content.items])
        log = log.with_catalogue(ids)
        until = _trained_until(old, since)
        holdout = _hold_out(log, until, held_out, settings)
        old_places = old.item_ids.find_all(ids.take(range(len(ids))))
        known, among = old_places >= 0, np.zeros(len(ids), np.bool_)
        among[known] = old.popularity[old_places[known]] > 0
        model, from_live, changed = _old_model_over(ids, old, old_places, settings, snapshot)
        asked = ~known & ~from_live
        sources = {FROM_LIVE: int((~known & from_live).sum())}
        cold = None
        scale = settings.training.cold_scale
        if content is not None:
            alike = like_by_content(content, asked, among)
            _place(model, alike, scale)
            asked[alike.items] = False
            sources["content"] = len(alike)
            counts = np.bincount(holdout.train.items, minlength=len(ids))
            cold = _some(alike, counts[alike.items] == 0)
        company = like_by_company(holdout.train, asked, among)
        _place(model, company, scale)
        asked[company.items] = False
        sources |= {"their company": len(company), "chance": int(asked.sum())}
        from recprune.training.checkpoint import model_arrays

        weights = model_arrays(model)
        preparation = {
            "holdout": "temporal",
            "validation": "temporal",
            "seed": settings.training.seed,
            "refreshed": {"known_items": int(known.sum()), "new_items": sources},
        }
        prepared = prepare(holdout, _codebook(model), preparation, cold)
        news = np.concatenate([[0], np.cumsum((log.times > until) & prepared.in_training())])
        test = prepared.test
        if len(test) > _MOST_USERS:
            rng = random_generator(settings.training.seed)
            test = _some_targets(test, np.sort(rng.permutation(len(test))[:_MOST_USERS]))
        return cls(
            prepared,
            settings,
            holdout,
            old_places,
            weights,
            sources,
            changed,
            int((log.times > until).sum()),
            np.diff(news[log.offsets]) > 0,
            asked,
            test,
        )

    def write(self, place: Path, checkpoint: str | Path | None, device: str) -> tuple[bool, float]:
        """Begin the training, or find the same one begun already.

        Return whether the optimiser remembers anything, and the validation NDCG@10 of the start.
        """
        from recprune.training.checkpoint import CHECKPOINT, MODEL
        from recprune.training.loop import begin_with
        from recprune.training.tensors import load_tensors

        beginning = place / _NOTE
        training = place if checkpoint is None else Path(checkpoint)
        source = training / CHECKPOINT
        same = {
            "settings": self.settings.to_json(),
            "prepared": self.prepared.checksum(with_times=True),
            "weights": _checksum(self.weights),
        }
        if beginning.exists():
            noted = _noted(beginning)
            if {name: noted.get(name) for name in same} == same:
                return bool(noted["kept_moments"]), float(noted["ndcg"])
        if checkpoint is not None and not source.exists():
            raise InputError(f"{checkpoint}: no folder of a training: it has no {CHECKPOINT}")
        moments: dict[str, NDArray[Any]] = {}
        if source.exists() and self._came_of(training / MODEL):
            moments = self._moments(load_tensors(source)[0])
        _empty(place)
        ndcg = begin_with(self.prepared, self.settings, place, self.weights, moments, device=device)
        noted = same | {"kept_moments": bool(moments), "ndcg": ndcg}
        # Last: without it, all of the above is done again.
        with writing_file(beginning) as temporary:
            temporary.write_text(json.dumps(noted), encoding="utf-8")
        return bool(moments), ndcg

    def _came_of(self, trained: Path) -> bool:
        """Whether the old model is the one that a training left in a file.

        Its items may have moved since, or have other codes: the encoder is compared.
        """
        from recprune.training.tensors import load_tensors

        if not trained.exists():
            return False
        found, _ = load_tensors(trained)
        return all(
            name in found and np.array_equal(found[name], array)
            for name, array in self.weights.items()
            if not name.startswith("embedding.")
        )

    def _moments(self, tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return what an optimiser remembered, over the new catalogue; empty if it does not fit."""
        moments: dict[str, NDArray[Any]] = {}
        num_known = int((self.old_places >= 0).sum())
        for name, array in tensors.items():
            moment, _, parameter = name.partition(".")
            if moment == "model" or parameter not in self.weights:
                continue
            if parameter == "embedding.item_embeddings" and array.ndim:
                if len(array) != num_known:
                    return {}
                rows = np.zeros((len(self.old_places), *array.shape[1:]), array.dtype)
                rows[self.old_places >= 0] = array[self.old_places[self.old_places >= 0]]
                array = rows
            if array.shape not in ((), self.weights[parameter].shape):
                return {}
            moments[name] = array
        return moments

    def train(
        self,
        place: Path,
        replay: float,
        device: str,
        max_seconds: float,
        on_epoch: Callable[[EpochReport], None],
    ) -> State:
        from recprune.training.loop import train

        return train(
            self.prepared,
            self.settings,
            place,
            device=device,
            resume=True,
            max_seconds=max_seconds,
            users_of=partial(self._users_of, replay),
            on_epoch=on_epoch,
        )

    def _users_of(self, replay: float, epoch: int) -> Int64Array:
        """Return the users of an epoch: those with new events, and some of the others."""
        from recprune.training.random_streams import Stream, stream_generator

        prepared, training = self.prepared, self.settings.training
        able = prepared.train_ends - prepared.offsets[:-1] >= 2
        new, others = np.flatnonzero(able & self.has_new), np.flatnonzero(able & ~self.has_new)
        if not len(new):
            raise InputError("no user with new events has two training interactions")
        rng = stream_generator(training.seed, Stream.EPOCH_ORDER, epoch)
        some = rng.permutation(others)[: math.ceil(replay * len(new))]
        shuffled = rng.permutation(np.concatenate([new, some]))
        return shuffled[: training.batches_per_epoch * training.batch_size]

    def best_model(self, place: Path) -> tuple[SequenceModel, Settings]:
        from recprune.training.checkpoint import load_model

        return load_model(place, self.prepared)

    def finished(
        self, model: SequenceModel, settings: Settings, precision: EncoderPrecision
    ) -> Recommender:
        """Return the recommender, once it is judged: held-out events say where new items stand."""
        late = like_by_company(self.holdout.log, self.by_chance, ~self.by_chance)
        _place(model, late, settings.training.cold_scale)
        self.sources["their company"] += len(late)
        self.sources["chance"] -= len(late)
        if model.activity is not None:
            model.activity = model.activity.latest()
        return from_model(self.prepared, model, settings, precision)


def _checksum(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return the SHA-256 of named arrays."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _noted(path: Path) -> dict[str, Any]:
    """Return what a refresh has noted; nothing of one that was killed while it wrote."""
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError:
        return {}
    return noted if isinstance(noted, dict) else {}


def _empty(place: Path) -> None:
    """Make an empty folder for a training, in place of that of an earlier refresh.

    In one step each: killed at any moment, it leaves what the next refresh knows as one.
    """
    aside = place.with_name(f".{place.name}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    if place.exists():
        if not (place / _NOTE).exists() and (not place.is_dir() or any(place.iterdir())):
            raise InputError(f"{place}: holds something else than a refresh: take another folder")
        place.rename(aside)
        shutil.rmtree(aside)
    with writing_folder(place) as temporary:
        (temporary / _NOTE).write_text("{}", encoding="utf-8")  # from now on it is one


def _hold_out(log: Interactions, until: int, held_out: float, settings: Settings) -> Holdout:
    """Cut the new part of the log at one moment, before its newest share."""
    num_new = int((log.times > until).sum())
    moment = datetime.fromtimestamp(until / _SECONDS, UTC).isoformat()
    if not num_new:
        raise InputError(f"the log has no event after {moment}: there is nothing to learn")
    if num_new == log.num_interactions:
        raise InputError(
            f"the log has no event up to {moment}: histories begin in the older log, which has to "
            "be given too: a folder of parts is read as one log"
        )
    # Validation users' newest events are not learnt, so that few of few are taken.
    users = np.repeat(np.arange(log.num_users), log.lengths)
    num_users = len(np.unique(users[log.times > until]))
    most = max(_LEAST_VALIDATED, math.ceil(_VALIDATED_SHARE * num_users))
    holdout = temporal_holdout(
        log,
        train_fraction=1.0 - held_out * num_new / log.num_interactions,
        validation_users=min(settings.training.validation_users, most),
        validation="temporal",
        seed=settings.training.seed,
    )
    if not len(holdout.test):
        raise InputError(
            f"of the {num_new:,} new events, the newest {held_out:.0%} have no user with a history "
            "before them: there is nobody to judge by"
        )
    return holdout


def _old_model_over(
    ids: ExternalIds,
    old: Recommender,
    old_places: Int64Array,
    settings: Settings,
    snapshot: LiveSnapshot | None,
) -> tuple[SequenceModel, NDArray[np.bool_], int]:
    """Return the old model over a larger catalogue.

    What stands in a live index has its code there. Which items these are comes along, and how many
    old ones have another code there. All others that are new get a code by chance: in every split
    that of any item, so that sub-items are as frequent as they were.
    """
    from recprune.training.checkpoint import SUB_ITEM_EMBEDDINGS, model_from_arrays

    known = old_places >= 0
    codes = old.index.item_codes()
    rng = random_generator(settings.training.seed)
    drawn = rng.integers(0, len(codes), (len(ids), codes.shape[1]))
    over = codes[np.where(known[:, None], old_places[:, None], drawn), np.arange(codes.shape[1])]
    from_live, changed = np.zeros(len(ids), np.bool_), 0
    if snapshot is not None:
        numbers = snapshot.find(ids.take(range(len(ids))))
        from_live = numbers >= 0
        before = over.copy()
        over[from_live] = snapshot.item_codes(numbers[from_live])
        changed = int((known & (over != before).any(axis=1)).sum())
    embeddings = np.array(old.index.sub_item_embeddings())
    if settings.model.embedding == "full":
        if len(ids) > MAX_SUB_ITEMS:
            raise InputError(
                f"{len(ids):,} items with a full table; a recommender serves up to "
                f"{MAX_SUB_ITEMS:,} of these: train a model with codes"
            )
        # An item is its own sub-item there.
        arrays = {"embedding.item_embeddings": embeddings[0][over[:, 0]]}
    else:
        arrays = {SUB_ITEM_EMBEDDINGS: embeddings}
    model = model_from_arrays(settings, over, embeddings.shape[1], old.weights | arrays)
    return model, from_live, changed


def _codebook(model: SequenceModel) -> Codebook:
    from recprune.models.embedding import RecJPQEmbedding

    embedding, how = model.embedding, {"method": "kept"}
    if not isinstance(embedding, RecJPQEmbedding):  # then those of the log are not looked at
        codes = assign_random(embedding.num_items, num_splits=1, num_sub_items=2).codes
        return Codebook(codes, 2, None, how)
    codes = embedding.codes.numpy().astype(code_dtype(embedding.num_sub_items))
    return Codebook(codes, embedding.num_sub_items, None, how)


def _place(model: SequenceModel, items: ColdItems, scale: float) -> None:
    from recprune.training.placement import place_cold_items

    if len(items):
        place_cold_items(model.embedding, items, scale)


def _some(cold: ColdItems, chosen: NDArray[np.bool_]) -> ColdItems:
    return ColdItems(cold.items[chosen], cold.neighbours[chosen], cold.weights[chosen])


def _some_targets(targets: Targets, chosen: Int64Array) -> Targets:
    return Targets(
        targets.users[chosen], targets.items[chosen], targets.starts[chosen], targets.ends[chosen]
    )
