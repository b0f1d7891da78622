"""The recommender: histories of external item ids in, the best items out. One folder on disk.

It holds an encoder, an index, the ids of the items and their popularity, and needs neither torch
nor the log that it was trained on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from recprune.assortment import Assortment, Assortments, fingerprint
from recprune.attributes.attributes import Attributes
from recprune.attributes.bitmaps import packed
from recprune.attributes.diversity import Limit, search_at_most
from recprune.data.identifiers import ExternalId, ExternalIds, IntegerIds, ids_from_arrays
from recprune.live.item_names import as_objects
from recprune.live.live_index import LiveIndex
from recprune.live.snapshot import LiveSnapshot
from recprune.models.activity import Activity
from recprune.models.boost_heads import BoostHeads, LearntBoosts, add_boosts, check_heads
from recprune.models.inference import (
    Encoder,
    ExportedEncoder,
    ItemVectors,
    OnnxEncoder,
    TorchEncoder,
)
from recprune.models.repeats import ItemScores
from recprune.models.settings import DEFAULT_PRESET, Settings, find_preset
from recprune.models.timelines import checked_timelines
from recprune.models.transitions import SuccessorTable
from recprune.preparation.prepared import Prepared, prepare
from recprune.search.checks import checked_k, checked_threads
from recprune.search.index import KIND as INDEX_KIND
from recprune.search.index import Index
from recprune.search.methods import Default, Method, check_can_stop, find_method, stopped_at
from recprune.search.question import ItemBits, Searchable
from recprune.search.reference import score_items
from recprune.search.top_k import SearchStats, TopK
from recprune.storage import Saved, load_folder, save_folder
from recprune.types import (
    MAX_SUB_ITEMS,
    Boosts,
    Float32Array,
    InputError,
    Int32Array,
    Int64Array,
    InterruptedWorkError,
    Json,
    MissingExtraError,
    StorageError,
    Timeline,
    frozen,
)

if TYPE_CHECKING:
    from recprune.data.content import Content
    from recprune.data.interactions import Interactions
    from recprune.models.architectures import SequenceModel
    from recprune.preparation.holdout import Holdout
    from recprune.training.loop import EpochReport

KIND = "recommender"
_VERSION = 6  # of the format
_WITHOUT_ATTRIBUTES = 5  # version in which one that has none is written, as it always was
_OLDEST = 3  # version that is still read

_TABLE = "encoder_table_"  # begins the names of what the encoder looks up

_LARGEST_BOOST = float(np.finfo(np.float32).max)

EncoderKind = Literal["auto", "onnx", "torch"]


@dataclass(slots=True, eq=False)
class Recommendations:
    """The best items for each history. Rows are padded with −1 and −∞ where there are fewer."""

    items: list[list[ExternalId]]  # external ids, not padded
    ids: Int64Array  # internal ids, [histories, k]
    scores: Float32Array  # for a history without known items: interactions, and boosts
    unknown: list[list[ExternalId]]  # ids in each history that the catalogue does not have
    by_popularity: NDArray[np.bool_]  # which histories had nothing to go by
    stats: SearchStats | None  # of the searches, for the histories that had
    milliseconds: dict[str, float]  # spent in each stage
    sequence_embeddings: Float32Array  # [histories that had, d]
    excluded: list[Int64Array]  # internal ids that each answer had to leave out
    learnt: LearntBoosts  # what the model adds to some scores by itself, for those that had
    top: TopK | None  # the answer of the index itself, for the histories that had


class Recommender:
    """Recommends the next items. Immutable, and safe to share between threads."""

    def __init__(
        self,
        index: Index,
        encoder: Encoder,
        item_ids: ExternalIds,
        popularity: Int64Array,
        settings: Json,
        weights: dict[str, NDArray[Any]],
        export: Callable[[], ExportedEncoder],
        successors: SuccessorTable | None = None,
        activity: Activity | None = None,
        attributes: Attributes | None = None,
        live: LiveIndex | None = None,
    ) -> None:
        """Use `fit`, `from_training` or `load`."""
        frozen(popularity)
        most = len(item_ids) if live is None else live.num_items
        if attributes is not None and not len(item_ids) <= attributes.num_items <= most:
            raise InputError(
                f"attributes are of {attributes.num_items} items, the catalogue has {most}"
            )
        self.index = index
        self.encoder = encoder
        self.item_ids = item_ids
        self.popularity = popularity  # training interactions of every item
        self.settings = settings  # of the model, its training and its data
        self.attributes = attributes  # of the items, for `where` and `at_most`
        self._weights = weights
        model_settings = Settings.from_json({"model": settings["model"]}).model
        scores_of = index.score
        if model_settings.own_scores != 1.0:
            # A compact index would put all codes together in every request.
            scores_of = partial(_item_scores, index, index.item_codes())
        self.heads = BoostHeads(weights, model_settings, successors, scores_of, activity)
        self._export = export  # the encoder as it is saved
        self.live = live  # where items come and go
        self._assortments = Assortments(index, item_ids, popularity, attributes)

    def __repr__(self) -> str:
        model = self.settings["model"]
        form = "full table" if model["embedding"] == "full" else f"{model['codes']} codes"
        # What `fit` compared; a model of chosen form has nothing to say.
        said = self.settings.get("kept")
        kept = f"; kept {said}" if isinstance(said, str) and said.isprintable() else ""
        return f"Recommender({model['architecture']}, {form}, {len(self.item_ids):,} items{kept})"

    # Making one ----------------------------------------------------------------------------------

    @classmethod
    def fit(
        cls,
        log: Interactions,
        preset: str = DEFAULT_PRESET,
        *,
        num_splits: int = 8,
        num_sub_items: int = 256,
        train_fraction: float = 0.9,
        content: Content | None = None,
        epochs_of: str | Path | None = None,
        device: str = "auto",
        out: str | Path | None = None,
        resume: bool = False,
        on_epoch: Callable[[EpochReport], None] = lambda _: None,
        **values: Any,
    ) -> Recommender:
        """Train a model of a log and return its recommender.

        Further arguments are settings of the model and of its training, by name. What comes after
        `train_fraction` of the log is held out, for an honest evaluation, and not learnt from. With
        1.0 all of the log is, validation users included; how many epochs that takes is then said by
        `max_epochs`, or by `epochs_of`, the `out` of an earlier fit that had validation users.
        `content`, from `read_content`, gives items that are not learnt from a place in the model.
        `out` keeps what training leaves on disk, so that `resume` can go on after an interruption.
        For long runs, and for other machines, the commands `prepare`, `train` and `export` do the
        same in three steps.
        """
        from recprune.preparation.codebook import assign_random, assign_svd
        from recprune.preparation.cold_items import find_cold_items
        from recprune.training.checkpoint import what_is_kept
        from recprune.training.loop import train

        whole = train_fraction == 1.0
        values |= _epochs(values, epochs_of, whole)
        settings = find_preset(preset).with_values(values)
        if settings.model.learns_codes:
            sizes = {"num_splits": num_splits, "num_sub_items": num_sub_items}
            settings = settings.with_values(sizes)
        if settings.model.embedding == "full":
            _check_full_size(log.num_items)  # before hours of training
        seed = settings.training.seed
        holdout = _hold_out(log, train_fraction, settings)
        if settings.model.learns_codes:  # then those of the prepared log are not looked at
            codebook = assign_random(log.num_items, num_splits=1, num_sub_items=2, seed=seed)
        else:
            codebook = assign_svd(
                holdout.train, num_splits=num_splits, num_sub_items=num_sub_items, seed=seed
            )
        kind = "none" if whole else "temporal"
        cold = None if content is None else find_cold_items(content, holdout.train)
        prepared = prepare(holdout, codebook, {"holdout": kind, "seed": seed}, cold)
        with TemporaryDirectory() as scratch:
            folder = Path(out) if out is not None else Path(scratch)
            try:
                train(prepared, settings, folder, device=device, resume=resume, on_epoch=on_epoch)
            except InterruptedWorkError:
                if out is not None:
                    raise
                raise InterruptedWorkError(
                    "interrupted, and nothing is kept without `out`"
                ) from None
            recommender = cls.from_training(prepared, folder)
            kept = what_is_kept(folder, settings, prepared)
        if kept is not None:
            recommender.settings["kept"] = kept
        return recommender

    @classmethod
    def from_training(cls, prepared: Prepared, folder: str | Path) -> Recommender:
        """Put the best model of a training together with the catalogue that it was trained on."""
        from recprune.training.checkpoint import load_model

        model, settings = load_model(folder, prepared)
        if model.activity is not None:
            model.activity = model.activity.latest()
        return cls.from_model(prepared, model, settings)

    @classmethod
    def from_model(
        cls, prepared: Prepared, model: SequenceModel, settings: Settings
    ) -> Recommender:
        """Put a model together with the catalogue that it was trained on.

        Asked at a moment of the log's past, as in an evaluation, it knows what was known then.
        """
        from recprune.preparation.codebook import code_dtype
        from recprune.training.checkpoint import CODES, SUB_ITEM_EMBEDDINGS, model_arrays

        weights = model_arrays(model)
        codes: NDArray[Any]
        if settings.model.embedding == "recjpq":
            embeddings = weights[SUB_ITEM_EMBEDDINGS]
            codes = weights[CODES].astype(code_dtype(embeddings.shape[1]))
        else:
            # One split in which every item is its own sub-item: the same scores, and no new case.
            codes, embeddings = _own_sub_items(weights["embedding.item_embeddings"])
        index = Index.build(codes, embeddings)
        return cls(
            index,
            TorchEncoder(model, settings.model.length),
            prepared.item_ids,
            prepared.training_counts(),
            settings.to_json() | {"preparation": prepared.settings},
            weights,
            lambda: _export(model),
            model.successors,
            model.activity,
        )

    def with_attributes(self, attributes: Attributes | None) -> Recommender:
        """Return the same recommender with other attributes of its items, or without any.

        Over a live index they may be those of its items too, by their numbers: what
        `Attributes.read` makes for `SnapshotIds(live.snapshot())`.
        """
        return self._with(attributes, self.live)

    def with_live(self, live: LiveIndex | None) -> Recommender:
        """Return the same recommender over a catalogue that changes, or over that of its training.

        It recommends the items that are there when it is asked. `live` is what `make_live` made of
        this recommender, or of another one with the same items and vectors. Histories are still
        those of items that the model was trained with: others count as unknown, though they are
        recommended, excluded, allowed and boosted as all are.
        """
        if live is not None:
            self._check_own(live)
        return self._with(self.attributes, live)

    def make_live(self, folder: str | Path, *, threads: int = 1) -> LiveIndex:
        """Make a live index of the items, in a folder that is new or empty.

        Items have their internal ids as numbers, and their external ids; this recommender, and its
        folder, stay as they are.
        """
        ids = self.item_ids
        return LiveIndex.create(
            folder,
            self.index.item_codes(),
            self.index.sub_item_embeddings(),
            item_bias=self.index.item_bias,
            item_ids=ids.numbers
            if isinstance(ids, IntegerIds)
            else as_objects(ids.take(range(len(ids)))),
            made_from=fingerprint(self.index, ids),
            layout=self.index.layout,
            threads=threads,
        )

    def _check_own(self, live: LiveIndex) -> None:
        """Refuse a live index of other items, or with other vectors."""
        if live.made_from != fingerprint(self.index, self.item_ids):
            raise StorageError(
                f"{live.folder}: the live index was not made from this recommender, or from one "
                "with the same items and vectors: `make_live` or `recprune index live` makes one"
            )

    def _with(self, attributes: Attributes | None, live: LiveIndex | None) -> Recommender:
        heads = self.heads
        return Recommender(
            self.index,
            self.encoder,
            self.item_ids,
            self.popularity,
            self.settings,
            self._weights,
            self._export,
            heads.transitions.table if heads.transitions is not None else None,
            heads.repeats.activity if heads.repeats is not None else None,
            attributes,
            live,
        )

    def save(self, folder: str | Path) -> None:
        """Write the recommender as a folder, in place of an older one if there is one."""
        exported = self._export()
        arrays: dict[str, NDArray[Any]] = {
            "popularity": self.popularity,
            "encoder_onnx": np.frombuffer(exported.onnx, np.uint8),
            **{f"{_TABLE}{name}": table for name, table in exported.tables.items()},
            **self.item_ids.to_arrays("item_ids"),
            # The vectors of the items are the index's already.
            **{
                f"weights_{name}": array
                for name, array in self._weights.items()
                if not name.startswith("embedding.")
            },
        }
        if self.heads.transitions is not None:
            arrays |= self.heads.transitions.table.to_arrays("successors")
        if self.heads.repeats is not None and self.heads.repeats.activity is not None:
            arrays["activity"] = self.heads.repeats.activity.buckets[-1]
        parts = {"index": self.index.parts()}
        version = _WITHOUT_ATTRIBUTES
        if self.attributes is not None:
            # Those of items that came later belong to the catalogue that has them.
            parts["attributes"] = self.attributes.shortened(len(self.item_ids)).parts()
            version = _VERSION
        save_folder(folder, Saved(KIND, version, self.settings, arrays, parts))

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        encoder: EncoderKind = "auto",
        threads: int = 1,
        verify: bool = True,
    ) -> Recommender:
        """Memory-map a saved recommender; `verify` compares every byte with its checksum first.

        What stands in the arrays is checked in any case, as if a stranger had made them; only the
        encoder's graph is for ONNX Runtime to judge. The encoder runs with that, on so many
        threads, or with torch; `auto` prefers the former.
        """
        if encoder not in get_args(EncoderKind):
            expected = ", ".join(get_args(EncoderKind))
            raise InputError(f"encoder is {encoder!r}, expected one of {expected}")
        checked_threads(threads)
        saved = load_folder(folder, kind=KIND, version=_VERSION, oldest=_OLDEST, verify=verify)
        try:
            if saved.version == 3:
                saved = _from_version_3(saved)
            index = Index.from_parts(saved.part("index", str(folder)), str(folder))
            attributes = None
            if "attributes" in saved.parts:
                attributes = Attributes.from_parts(saved.parts["attributes"], str(folder))
        except KeyError as error:
            raise StorageError(f"{folder}: the recommender has no {error.args[0]}") from None
        try:
            return cls._from_saved(saved, index, attributes, encoder, threads)
        except KeyError as error:
            raise StorageError(f"{folder}: the recommender has no {error.args[0]}") from None
        except (InputError, StorageError) as error:
            raise StorageError(f"{folder}: {error}") from None

    @classmethod
    def _from_saved(
        cls,
        saved: Saved,
        index: Index,
        attributes: Attributes | None,
        encoder: EncoderKind,
        threads: int,
    ) -> Recommender:
        """Put together what a folder has; refuse what does not fit the index, or one another."""
        own, arrays = saved.settings, saved.arrays
        item_ids = ids_from_arrays(arrays, "item_ids")
        if item_ids is None:
            raise KeyError("item_ids")
        if len(item_ids) != index.num_items:
            raise StorageError(f"{len(item_ids)} item_ids, the index has {index.num_items} items")
        popularity = arrays["popularity"]
        if popularity.dtype != np.int64 or popularity.shape != (index.num_items,):
            given = f"{popularity.dtype}{list(popularity.shape)}"
            raise StorageError(f"popularity is {given}, expected int64[{index.num_items}]")
        if popularity.min(initial=0) < 0:
            raise StorageError(f"popularity is {popularity.min()} somewhere, expected 0 or more")
        settings = Settings.from_json({part: own[part] for part in ("model", "training")})
        weights = _with_prefix(arrays, "weights_")
        check_heads(weights, settings.model)
        tables = _with_prefix(arrays, _TABLE)
        for prefix, group in (("weights_", weights), (_TABLE, tables)):
            for name, array in group.items():
                if array.dtype != np.float32 or not np.isfinite(array).all():
                    raise StorageError(f"{prefix}{name} is not all finite numbers in float32")
        exported = ExportedEncoder(arrays["encoder_onnx"].tobytes(), tables)
        successors = activity = None
        if settings.model.transitions:
            successors = SuccessorTable.from_arrays(arrays, "successors", index.num_items)
        if settings.model.knows_activity:
            activity = Activity.from_array(arrays["activity"], index.num_items)
        if index.width != settings.model.width:
            raise StorageError(
                f"width is {settings.model.width}, the index has vectors of {index.width}"
            )
        chosen = _encoder(encoder, index, settings, weights, exported, threads)
        return cls(
            index,
            chosen,
            item_ids,
            popularity,
            own,
            weights,
            lambda: exported,
            successors,
            activity,
            attributes,
        )

    # Asking it -----------------------------------------------------------------------------------

    def recommend(
        self,
        histories: Sequence[Sequence[ExternalId]],
        k: int = 10,
        *,
        exclude_seen: bool | None = None,
        exclude: Sequence[ExternalId] = (),
        allow: Sequence[ExternalId] | NDArray[np.bool_] | ItemBits | None = None,
        where: str | None = None,
        at_most: tuple[str, int] | None = None,
        boosts: Mapping[ExternalId, float] | None = None,
        times: Sequence[Sequence[float] | None] | None = None,
        now: float | None = None,
        method: str | Method = "auto",
        deadline: float | None = None,
        threads: int = 1,
        index: Searchable | None = None,
    ) -> Recommendations:
        """Return the best k items for each history of external ids, oldest first.

        Items that the catalogue does not have are left out and reported. A history of which nothing
        is left gets the most popular items. `exclude_seen` leaves out what is in the history; by
        default that is so unless the model has learnt what is taken again. `exclude` leaves out
        further items, whether or not the catalogue has them; `allow` restricts the answer to some
        items, given by id, as a mask over the catalogue, or as `ItemBits`. `where` is a condition
        on the attributes of items, which then has to be true as well: see `Attributes.where`.
        `at_most`, such as ("brand", 2), limits how many items of an answer have the same value in
        a column: those that a walk down the exact ranking would take. `boosts` are added to the
        scores of some items, for all histories; where the most popular items are the answer, to
        their numbers of interactions. `times` says for each history when its events were, in
        seconds since 1970, or None where that is not known, and `now` when the recommendation is
        asked for; without it, at the last event: a repeat head and the encoder `timed` look at how
        long ago things were.
        A search that is not done at `deadline`, by `time.monotonic()`, returns the best found so
        far, and its statistics say whether that is exact. `index` is another one of the same items,
        such as a `ShardedIndex`; where the catalogue changes, a snapshot of it, instead of the one
        that is taken when this is called.
        """
        clock = _Clock()
        offered = self._assortment(index)
        k = checked_k(k, offered.num_items)
        chosen = find_method(method)
        checked_threads(threads)
        if deadline is not None:
            check_can_stop(chosen)
        events, known, unknown, kept = self._internal(histories)
        timelines = checked_timelines(times, now, kept)
        excluded = [_find_known(offered, exclude)] * len(known)
        leave_out_seen = exclude_seen or (exclude_seen is None and not self.repeats)
        if leave_out_seen:
            seen: Sequence[NDArray[Any]] = known
            if offered.snapshot is not None:
                seen = _seen(offered, events, kept)
            excluded = [np.concatenate(pair) for pair in zip(excluded, seen, strict=True)]
        allowed = _allowed(offered, allow)
        boosted = _boosted(offered, boosts)
        limit = self._limit(offered, at_most)
        clock.lap("look up")
        if where is not None:
            allowed = self._true_of(offered, where, allowed)
            clock.lap("filter")
        answered = np.array([len(items) > 0 for items in known], np.bool_)
        embeddings, top = np.empty((0, self.index.width), np.float32), None
        learnt = LearntBoosts(None, None)
        if answered.any():
            encoded = [items for items in known if len(items)]
            dated = list(compress(timelines, answered))
            embeddings = self.encoder.encode(encoded, dated)
            # What was seen and is left out needs no boosts.
            learnt = self.heads(
                embeddings,
                encoded,
                dated,
                repeats=not leave_out_seen,
                item_scores=_scores_at(offered.snapshot),
            )
            clock.lap("encode")
            left_out = list(compress(excluded, answered))
            top = search_at_most(
                offered.index,
                embeddings,
                k,
                limit,
                method=lambda: chosen if deadline is None else stopped_at(chosen, deadline),
                exclude=left_out if any(map(len, left_out)) else None,
                allow=allowed,
                boosts=_combined(learnt.total(), boosted, len(embeddings)),
                threads=threads,
            )
            clock.lap("search")
            if not isinstance(chosen, Default):  # which computes none of its own
                clock.divide("search", "sub-item scores", _share_of_scoring(top.stats))
        if top is not None and answered.all():
            ids, scores = top.ids, top.scores
        else:
            ids = np.full((len(known), k), -1, np.int64)
            scores = np.full((len(known), k), -np.inf, np.float32)
            if top is not None:
                ids[answered], scores[answered] = top.ids, top.scores
            for place in np.flatnonzero(~answered):
                best, popularity = offered.most_popular(k, excluded[place], allowed, boosted, limit)
                ids[place, : len(best)] = best
                scores[place, : len(best)] = popularity
        items = [offered.names(row[row >= 0]) for row in ids]
        clock.lap("answer")
        return Recommendations(
            items=items,
            ids=ids,
            scores=scores,
            unknown=unknown,
            by_popularity=~answered,
            stats=top.stats if top is not None else None,
            milliseconds=clock.laps,
            sequence_embeddings=embeddings,
            excluded=excluded,
            learnt=learnt,
            top=top,
        )

    def rank(
        self,
        histories: Sequence[Int32Array],
        k: int = 10,
        *,
        timelines: Sequence[Timeline | None] | None = None,
        exclude: Any = None,
        threads: int = 1,
    ) -> TopK:
        """Return the exact top k for histories of internal ids, none of them empty."""
        embeddings = self.encoder.encode(histories, timelines)
        boosts = self.heads(embeddings, histories, timelines).total()
        return self.index.search(embeddings, k, exclude=exclude, boosts=boosts, threads=threads)

    @property
    def repeats(self) -> bool:
        """Whether the model has learnt what is taken again, and boosts it."""
        return self.heads.repeats is not None

    def _assortment(self, index: Searchable | None) -> Assortment:
        """Return what can be recommended: now, or by an index that was given."""
        if self.live is not None and (index is None or index is self.live):
            index = self.live.snapshot()
        if isinstance(index, LiveSnapshot):
            if self.live is None:
                raise InputError("index is of a catalogue that changes: `with_live` takes one")
            return self._assortments.at(index)
        if self.live is not None:
            raise InputError("index is of the items that were trained with, and these have changed")
        return self._assortments.trained if index is None else self._assortments.over(index)

    def _true_of(
        self, offered: Assortment, where: str, allowed: NDArray[Any] | None
    ) -> NDArray[np.uint64]:
        """Return which of the allowed items a condition is true of, as bits."""
        words = self.attributes_for("where", offered.num_items).where(where).words
        if allowed is None:
            return words
        return words & (packed(allowed) if allowed.dtype == np.bool_ else allowed)

    def _limit(self, offered: Assortment, at_most: tuple[str, int] | None) -> Limit | None:
        if at_most is None:
            return None
        if not isinstance(at_most, tuple | list) or len(at_most) != 2:
            raise InputError(f"at_most is {at_most!r}, expected the name of a column and a number")
        column, count = at_most
        attributes = self.attributes_for("at_most", offered.num_items)
        return Limit(attributes.limited(column, count), int(count))

    def attributes_for(self, name: str, num_items: int) -> Attributes:
        """Return the attributes of so many items, which what is called `name` asks for.

        Items that the catalogue has had since the training have no values.
        """
        attributes = self._assortments.trained.attributes.of(num_items)
        if attributes is None:
            raise InputError(
                f"{name}: this recommender has no attributes of its items: `with_attributes` or "
                "`recprune attributes` adds them"
            )
        return attributes

    def _internal(
        self, histories: Sequence[Sequence[ExternalId]]
    ) -> tuple[list[ExternalId], list[Int32Array], list[list[ExternalId]], list[NDArray[np.bool_]]]:
        """Return the events of all histories, and of each: internal ids, unknown ids, and where."""
        if isinstance(histories, str | bytes) or not hasattr(histories, "__iter__"):
            raise InputError(f"histories is {histories!r}, expected a sequence of histories")
        whole: list[ExternalId] = []  # one history after the other
        ends = []
        for place, history in enumerate(histories):
            if isinstance(history, str | bytes) or not hasattr(history, "__iter__"):
                raise InputError(f"histories[{place}] is {history!r}, expected a sequence of ids")
            whole.extend(history)
            ends.append(len(whole))
        found = self.item_ids.find_all(whole)
        known: list[Int32Array] = []
        unknown: list[list[ExternalId]] = []
        kept: list[NDArray[np.bool_]] = []
        for start, end in pairwise([0, *ends]):
            items = found[start:end]
            is_known = items >= 0
            missing = [] if is_known.all() else np.flatnonzero(~is_known).tolist()
            kept.append(is_known)
            known.append((items[is_known] if missing else items).astype(np.int32))
            unknown.append([whole[start + place] for place in missing])
        return whole, known, unknown, kept


def _find_known(offered: Assortment, external_ids: Sequence[ExternalId]) -> Int64Array:
    if isinstance(external_ids, str | bytes) or not hasattr(external_ids, "__iter__"):
        raise InputError(f"exclude is {external_ids!r}, expected a sequence of item ids")
    given: list[Any] = list(external_ids)
    for place, value in enumerate(given):
        if isinstance(value, list | tuple | np.ndarray):  # one list is for all histories
            raise InputError(f"exclude[{place}] is {value!r}, expected an item id")
    found = offered.find(given)
    return found[found >= 0]


def _boosted(offered: Assortment, boosts: Mapping[ExternalId, float] | None) -> Boosts | None:
    """Return the internal ids of boosted items and their boosts."""
    if not boosts:
        return None
    if not isinstance(boosts, Mapping):
        raise InputError(f"boosts is {boosts!r}, expected a mapping from item ids to numbers")
    given = list(boosts)
    items = offered.find(given)
    if len(items) and items.min() < 0:
        raise InputError(f"boosts: {given[int((items < 0).argmax())]!r}: not in the catalogue")
    values = np.empty(len(given), np.float32)
    for place, (item, boost) in enumerate(boosts.items()):
        number = isinstance(boost, int | float | np.integer | np.floating)
        if not number or isinstance(boost, bool) or not abs(boost) <= _LARGEST_BOOST:
            raise InputError(f"boosts[{item!r}] is {boost!r}, expected a finite number")
        values[place] = boost
    return items, values


def _allowed(
    offered: Assortment, allow: Sequence[ExternalId] | NDArray[np.bool_] | ItemBits | None
) -> NDArray[Any] | None:
    """Return which items are allowed, as a mask or as bits."""
    if allow is None:
        return None
    if isinstance(allow, ItemBits):
        return offered.with_length(allow.words)
    if isinstance(allow, np.ndarray) and allow.dtype == np.bool_:
        return offered.with_length(allow)
    if isinstance(allow, str | bytes) or not hasattr(allow, "__iter__"):
        raise InputError(f"allow is {allow!r}, expected a sequence of item ids, or a mask")
    given = list(allow)
    items = offered.find(given)
    if len(items) and items.min() < 0:
        place = int((items < 0).argmax())
        raise InputError(f"allow[{place}] is {given[place]!r}: not in the catalogue")
    mask = np.zeros(offered.num_items, np.bool_)
    mask[items] = True
    return mask


def _seen(
    offered: Assortment, events: list[ExternalId], kept: list[NDArray[np.bool_]]
) -> list[Int64Array]:
    """Return the numbers of what is in histories and there, known to the encoder or not."""
    ends = np.cumsum([len(history) for history in kept])
    parts = np.split(offered.find(events), ends[:-1]) if kept else []
    return [numbers[numbers >= 0] for numbers in parts]


def _scores_at(snapshot: LiveSnapshot | None) -> ItemScores | None:
    """Return what scores items as they are at a moment; None: as they were trained.

    Items that have left score 0, and are not asked for: no boost brings them back.
    """
    if snapshot is None:
        return None

    def scores(sequence_embedding: Float32Array, items: Int64Array) -> Float32Array:
        found = np.zeros(len(items), np.float32)
        there = snapshot.are_there(items)
        found[there] = snapshot.score(sequence_embedding, items[there])
        return found

    return scores


class _Clock:
    """Milliseconds between one call and the next."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = 1000.0 * (now - self._last)
        self._last = now

    def divide(self, name: str, first: str, share: float) -> None:
        """Give a share of a lap to its first part, as a lap of its own."""
        whole = self.laps.pop(name)
        self.laps |= {first: share * whole, name: (1.0 - share) * whole}


def _share_of_scoring(stats: SearchStats) -> float:
    """Return which share of the time of searches went into sub-item scores."""
    records = stats.records
    whole = int(records["nanoseconds"].sum())
    return int(records["sub_item_score_nanoseconds"].sum()) / whole if whole else 0.0


def _from_version_3(saved: Saved) -> Saved:
    """Return a recommender of an older format, whose index had no version of its own, as a new one.

    That index was of version 4.
    """
    arrays = {name: array for name, array in saved.arrays.items() if not name.startswith("index_")}
    index_arrays = _with_prefix(saved.arrays, "index_")
    index = Saved(INDEX_KIND, 4, saved.settings["index"], index_arrays)
    return Saved(KIND, _VERSION, saved.settings["recommender"], arrays, {"index": index})


def _item_scores(
    index: Index, codes: NDArray[Any], sequence_embedding: Float32Array, items: Int64Array
) -> Float32Array:
    """Return the scores of a few items, for a repeat head that takes a part of them away."""
    bias = index.item_bias
    table = index.sub_item_scores(sequence_embedding)
    return score_items(table, codes[items], bias[items] if bias is not None else None)


def _epochs(values: Mapping[str, Any], epochs_of: str | Path | None, whole: bool) -> Json:
    """Return how many epochs to train, where an earlier training says so.

    Refuse to guess where all of the log trains, and no validation users say when to stop.
    """
    if epochs_of is not None:
        from recprune.training.checkpoint import epochs_until_best

        if "max_epochs" in values:
            raise InputError("epochs_of says how long to train, and so does max_epochs: take one")
        return {**epochs_until_best(epochs_of)}
    if whole and "max_epochs" not in values:
        raise InputError(
            "train_fraction is 1.0, which leaves no validation users to say when to stop: give "
            "max_epochs, or epochs_of with the folder of an earlier fit"
        )
    return {}


def _hold_out(log: Interactions, train_fraction: float, settings: Settings) -> Holdout:
    from recprune.preparation.holdout import no_holdout, temporal_holdout

    if train_fraction == 1.0:
        return no_holdout(log)
    return temporal_holdout(
        log,
        train_fraction=train_fraction,
        validation_users=settings.training.validation_users,
        seed=settings.training.seed,
    )


def _combined(
    own: list[Boosts] | None, given: Boosts | None, count: int
) -> list[Boosts | None] | None:
    """Return what the model adds and what the caller adds, for each query."""
    if own is None:
        return None if given is None else [given] * count
    return [add_boosts(boosts, given) for boosts in own]


def _export(model: SequenceModel) -> ExportedEncoder:
    from recprune.models.onnx_export import export_encoder

    return export_encoder(model)


def _check_full_size(num_items: int) -> None:
    if num_items > MAX_SUB_ITEMS:
        raise InputError(
            f"{num_items:,} items with a full table; a recommender serves up to {MAX_SUB_ITEMS:,} "
            "of these: use the recjpq embedding"
        )


def _own_sub_items(item_embeddings: Float32Array) -> tuple[NDArray[np.uint16], Float32Array]:
    num_items = len(item_embeddings)
    _check_full_size(num_items)
    # Two rows at least, for an index has no less; a code of its own for every item.
    table = np.zeros((1, max(2, num_items), item_embeddings.shape[1]), np.float32)
    table[0, :num_items] = item_embeddings
    return np.arange(num_items, dtype=np.uint16)[:, None], table


def _item_vectors(index: Index, settings: Settings) -> ItemVectors:
    embeddings = index.sub_item_embeddings()
    if settings.model.embedding == "full":
        return ItemVectors.from_table(np.ascontiguousarray(embeddings[0, : index.num_items]))
    return ItemVectors.from_codes(index.item_codes(), embeddings)


def _encoder(
    kind: EncoderKind,
    index: Index,
    settings: Settings,
    weights: dict[str, NDArray[Any]],
    exported: ExportedEncoder,
    threads: int,
) -> Encoder:
    if kind != "torch":
        try:
            return OnnxEncoder(
                exported.onnx,
                _item_vectors(index, settings),
                settings.model.length,
                tables=exported.tables,
                threads=threads,
            )
        except MissingExtraError:
            if kind == "onnx":
                raise
    return _torch_encoder(index, settings, weights)


def _torch_encoder(
    index: Index, settings: Settings, weights: dict[str, NDArray[Any]]
) -> TorchEncoder:
    from recprune.training.checkpoint import model_from_arrays

    embeddings = np.array(index.sub_item_embeddings())
    if settings.model.embedding == "full":
        embedding = {"embedding.item_embeddings": embeddings[0, : index.num_items]}
    else:
        embedding = {"embedding.sub_item_embeddings": embeddings}
    model = model_from_arrays(
        settings, index.item_codes(), index.num_sub_items, weights | embedding
    )
    return TorchEncoder(model, settings.model.length)


def _with_prefix(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
