"""The recommender: histories of external item ids in, the best items out. One folder on disk.

It holds an encoder, an index, the ids of the items and their popularity, and needs neither torch
nor the log that it was trained on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from recprune.attributes.attributes import Attributes
from recprune.attributes.bitmaps import packed
from recprune.attributes.diversity import Limit, search_at_most
from recprune.data.identifiers import ExternalId, ExternalIds, IntegerIds, coerce_ids
from recprune.live.item_names import as_objects
from recprune.live.live_index import LiveIndex
from recprune.live.snapshot import LiveSnapshot
from recprune.models.activity import Activity
from recprune.models.boost_heads import BoostHeads, LearntBoosts
from recprune.models.continuation import Continuation
from recprune.models.foreign_encoder import ForeignEncoder, PadSide
from recprune.models.inference import Encoder, ExportedEncoder, ItemVectors
from recprune.models.repeats import ItemScores
from recprune.models.settings import DEFAULT_PRESET, ModelSettings, Settings
from recprune.models.timelines import checked_timelines
from recprune.models.transitions import SuccessorTable
from recprune.preparation.prepared import Prepared
from recprune.recommender.answer_frame import answer_frame
from recprune.recommender.assortment import Assortment, Assortments, fingerprint
from recprune.recommender.request import (
    allowed_items,
    boosted_items,
    combined_boosts,
    find_known,
    left_out_items,
    look_up,
)
from recprune.recommender.similar import SimilarItems, similar_items
from recprune.search.checks import checked_k, checked_threads
from recprune.search.index import Index
from recprune.search.methods import Default, Method, check_can_stop, find_method, stopped_at
from recprune.search.question import ItemBits, Searchable
from recprune.search.reference import score_items
from recprune.search.top_k import SearchStats, TopK
from recprune.types import (
    Float32Array,
    InputError,
    Int32Array,
    Int64Array,
    Json,
    StorageError,
    Timeline,
    frozen,
    needs_extra,
)

if TYPE_CHECKING:
    import polars as pl

    from recprune.data.content import Content
    from recprune.data.frames import LogSource
    from recprune.data.interactions import Interactions
    from recprune.evaluation.evaluation import Evaluation
    from recprune.models.architectures import SequenceModel
    from recprune.models.onnx_export import EncoderPrecision
    from recprune.training.loop import EpochReport
    from recprune.vectors.vector_index import VectorIndex

EncoderKind = Literal["auto", "onnx", "torch"]

_USERS_AT_ONCE = 1024  # of a log, that are answered together


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
    sequence_embeddings: Float32Array  # [histories that had, d], as the index takes them
    excluded: list[Int64Array]  # internal ids that each answer had to leave out
    learnt: LearntBoosts  # what the model adds to some scores by itself, for those that had
    top: TopK | None  # the answer of the index itself, for the histories that had

    def to_frame(self, users: Sequence[ExternalId] | None = None) -> pl.DataFrame:
        """Return a row for each item: user, rank from 1 on, item_id and score.

        `users` says whose the histories were; without it, they are their places, from 0 on.
        """
        if users is None:
            users = range(len(self.items))
        if len(users) != len(self.items):
            raise InputError(f"{len(users)} users, but {len(self.items)} histories")
        return answer_frame("user_id", users, self.items, self.scores)


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
        """Use `fit`, `from_training`, `from_encoder` or `load`."""
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
        self.weights = weights  # of the model, by name
        model_settings = self._model_settings
        scores_of = index.score
        if model_settings.own_scores != 1.0:
            # A compact index would put all codes together in every request.
            scores_of = partial(_item_scores, index, index.item_codes())
        self.heads = BoostHeads(weights, model_settings, successors, scores_of, activity)
        self.export = export  # the encoder as it is saved
        self.live = live  # where items come and go
        self._assortments = Assortments(index, item_ids, popularity, attributes)

    def __repr__(self) -> str:
        if not self.trained_here:
            return f"Recommender(an encoder from elsewhere, {len(self.item_ids):,} items)"
        model = self.settings["model"]
        form = "full table" if model["embedding"] == "full" else f"{model['codes']} codes"
        # What `fit` compared; a model of chosen form has nothing to say.
        said = self.settings.get("kept")
        kept = f"; kept {said}" if isinstance(said, str) and said.isprintable() else ""
        form += ", int8 encoder" if self.settings.get("encoder_precision") == "int8" else ""
        return f"Recommender({model['architecture']}, {form}, {len(self.item_ids):,} items{kept})"

    # Making one ----------------------------------------------------------------------------------

    @classmethod
    def fit(
        cls,
        log: Interactions | LogSource,
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
        progress: bool = True,
        max_minutes: float = math.inf,
        on_epoch: Callable[[EpochReport], None] | None = None,
        **values: Any,
    ) -> Recommender:
        """Train a model of a log and return its recommender.

        The log is one that was read, or a path or table that `read_interactions` reads. Further
        arguments are settings of the model and of its training, by name. What comes after
        `train_fraction` of the log is held out, for an honest evaluation, and not learnt from. With
        1.0 all of the log is, validation users included; how many epochs that takes is then said by
        `max_epochs`, or by `epochs_of`, the `out` of an earlier fit that had validation users.
        `content`, from `read_content`, gives items that are not learnt from a place in the model.
        `out` keeps what training leaves on disk, so that `resume` can go on after an interruption.
        A line on standard error tells of every epoch and of the time that is left; `progress=False`
        silences it, and an `on_epoch` of your own, which is given what a line tells, replaces it.
        After `max_minutes` no new epoch is begun, and the best model so far is taken.
        For long runs, and for other machines, the commands `prepare`, `train` and `export` do the
        same in three steps.
        """
        from recprune.recommender import making

        return making.fit(
            log,
            preset,
            num_splits=num_splits,
            num_sub_items=num_sub_items,
            train_fraction=train_fraction,
            content=content,
            epochs_of=epochs_of,
            device=device,
            out=out,
            resume=resume,
            progress=progress,
            max_minutes=max_minutes,
            on_epoch=on_epoch,
            values=values,
        )

    @classmethod
    def from_training(
        cls,
        prepared: Prepared,
        folder: str | Path,
        *,
        encoder_precision: EncoderPrecision = "float32",
    ) -> Recommender:
        """Put the best model of a training together with the catalogue that it was trained on.

        `encoder_precision` is that of the encoder's weights in the folder that is saved: with int8,
        ONNX Runtime is faster, and sequence embeddings move a little. The search stays exact.
        """
        from recprune.recommender import making

        return making.from_training(prepared, folder, encoder_precision)

    @classmethod
    def from_model(
        cls, prepared: Prepared, model: SequenceModel, settings: Settings
    ) -> Recommender:
        """Put a model together with the catalogue that it was trained on.

        Asked at a moment of the log's past, as in an evaluation, it knows what was known then.
        """
        from recprune.recommender import making

        return making.from_model(prepared, model, settings)

    @classmethod
    def from_encoder(
        cls,
        encoder: str | Path | bytes | Callable[[Int64Array], Any],
        index: Index | VectorIndex,
        item_ids: Any = None,
        *,
        length: int,
        first_item: int = 0,
        padding: int = -1,
        pad_side: PadSide = "left",
        popularity: Any = None,
        threads: int = 1,
    ) -> Recommender:
        """Put an encoder from elsewhere together with the index of its items.

        It is an ONNX model, as a path or bytes, or a Python function. It takes integers
        [histories, length], the last items of each history, filled up at `pad_side` with the number
        `padding`, and returns floats [histories, d]: float32 from a model, which has one input,
        int32 or int64, and one output, and its weights inside. `item_ids`, integers or strings, are
        those of the index's items, in its order, and the encoder knows the same items as
        `first_item`, `first_item` + 1, and so on. Many models begin with 1 and pad with 0.
        A `VectorIndex` has ids of its own, and these sorted: the encoder knows the items in that
        order, or in the order of the same `item_ids`, if they are given. Its codes answer, and its
        rotation is kept: the encoder returns vectors such as those that it was built from.
        Internal ids follow the order of the external ones, as in every recommender, so the index
        inside has its items in that order. `popularity` are interactions of every item, for
        histories of which nothing is known; without it these get items by internal id.

        A function may be called by several threads at a time, and its recommender is not saved. An
        ONNX model runs on so many `threads`, and its recommender is saved and served as any.
        Neither is refreshed: that needs the training.
        """
        from recprune.recommender import making

        return making.from_encoder(
            encoder,
            index,
            item_ids,
            length=length,
            first_item=first_item,
            padding=padding,
            pad_side=pad_side,
            popularity=popularity,
            threads=threads,
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

    def make_live(
        self, folder: str | Path, *, origin: str | None = None, threads: int = 1
    ) -> LiveIndex:
        """Make a live index of the items, in a folder that is new or empty.

        Items have their internal ids as numbers, and their external ids; this recommender, and its
        folder, stay as they are. `origin` is as in `LiveIndex.create`.
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
            origin=origin,
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
            self.weights,
            self.export,
            heads.transitions.table if heads.transitions is not None else None,
            heads.repeats.activity if heads.repeats is not None else None,
            attributes,
            live,
        )

    def save(self, folder: str | Path) -> None:
        """Write the recommender as a folder, in place of an older one if there is one."""
        from recprune.recommender.saving import save

        save(self, folder)

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
        threads, or with torch; `auto` prefers the former, and one from elsewhere has no other.
        """
        from recprune.recommender.saving import load

        return load(folder, encoder=encoder, threads=threads, verify=verify)

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
        now: float | Sequence[float] | None = None,
        method: str | Method = "auto",
        deadline: float | None = None,
        threads: int = 1,
        index: Searchable | None = None,
        encoder: Encoder | None = None,
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
        asked for, all of them or each; without it, at the last event: a repeat head and the encoder
        `timed` look at how long ago things were.
        A search that is not done at `deadline`, by `time.monotonic()`, returns the best found so
        far, and its statistics say whether that is exact. `index` is another one of the same items,
        such as a `ShardedIndex`; where the catalogue changes, a snapshot of it, instead of the one
        that is taken when this is called. `encoder` is another one of the same model, such as one
        that continues what it has kept of a user.
        """
        clock = _Clock()
        offered = self._assortment(index)
        k = checked_k(k, offered.num_items)
        chosen = find_method(method)
        checked_threads(threads)
        if deadline is not None:
            check_can_stop(chosen)
        found = look_up(self.item_ids, histories)
        timelines = checked_timelines(times, now, found.kept)
        leave_out_seen = exclude_seen or (exclude_seen is None and not self.repeats)
        excluded = left_out_items(offered, found, exclude, seen=leave_out_seen)
        allowed = allowed_items(offered, allow)
        boosted = boosted_items(offered, boosts)
        limit = self._limit(offered, at_most)
        clock.lap("look up")
        if where is not None:
            allowed = self._true_of(offered, where, allowed)
            clock.lap("filter")
        answered = np.array([len(items) > 0 for items in found.known], np.bool_)
        embeddings, top = np.empty((0, self.index.width), np.float32), None
        learnt = LearntBoosts(None, None)
        if answered.any():
            encoded = [items for items in found.known if len(items)]
            dated = list(compress(timelines, answered))
            embeddings = (encoder or self.encoder).encode(encoded, dated)
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
                boosts=combined_boosts(learnt.total(), boosted, len(embeddings)),
                threads=threads,
            )
            clock.lap("search")
            if not isinstance(chosen, Default):  # which computes none of its own
                clock.divide("search", "sub-item scores", _share_of_scoring(top.stats))
        ids, scores = _completed(top, answered, k)
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
            unknown=found.unknown,
            by_popularity=~answered,
            stats=top.stats if top is not None else None,
            milliseconds=clock.laps,
            sequence_embeddings=embeddings,
            excluded=excluded,
            learnt=learnt,
            top=top,
        )

    def recommend_users(
        self,
        log: Interactions | LogSource,
        k: int = 10,
        *,
        exclude_seen: bool | None = None,
        where: str | None = None,
        at_most: tuple[str, int] | None = None,
        now: float | None = None,
        threads: int = 1,
    ) -> pl.DataFrame:
        """Return the best k items for every user of a log: user, rank from 1 on, item_id and score.

        The log is one that was read, or a path or table that `read_interactions` reads; histories
        are as it has them, with their times, asked at `now` or when each ended. Over a live index,
        all are answered as it is at one moment. Arguments are those of `recommend`. For more users
        than memory holds the answers of, `recprune batch` writes them in parts.
        """
        from recprune.data.interactions import Interactions, read_interactions

        if not isinstance(log, Interactions):
            log = read_interactions(log, min_interactions=1)
        with needs_extra("data"):
            import polars as pl
        index = None if self.live is None else self.live.snapshot()
        frames = []
        for first in range(0, max(1, log.num_users), _USERS_AT_ONCE):  # once, for no users
            users = range(first, min(first + _USERS_AT_ONCE, log.num_users))
            rows = [slice(*log.offsets[user : user + 2]) for user in users]
            found = self.recommend(
                [coerce_ids(self.item_ids, log.item_ids.take(log.items[row])) for row in rows],
                k,
                exclude_seen=exclude_seen,
                where=where,
                at_most=at_most,
                times=[(log.times[row] / 1e6).tolist() for row in rows],
                now=now,
                threads=threads,
                index=index,
            )
            frames.append(found.to_frame(log.user_ids.take(users)))
        return pl.concat(frames, how="vertical_relaxed")

    def similar(
        self,
        items: Sequence[ExternalId],
        k: int = 10,
        *,
        exclude: Sequence[ExternalId] = (),
        allow: Sequence[ExternalId] | NDArray[np.bool_] | ItemBits | None = None,
        where: str | None = None,
        threads: int = 1,
        index: LiveSnapshot | None = None,
    ) -> SimilarItems:
        """Return, for each item, the k others whose vectors have the greatest cosine with its own.

        An item's vector is that of its sub-items, one after the other, or its row in a full table;
        ties go to the lower internal id. The answer is exact, and includes items without training,
        whose vectors are what content, or chance, gave them; which of the items that are asked
        about are such is said. `exclude`, `allow` and `where` are as in `recommend`. Over a live
        index, items are those that are there, as they are now or in the snapshot `index`.
        """
        offered = self._assortment(index)
        allowed = allowed_items(offered, allow)
        if where is not None:
            allowed = self._true_of(offered, where, allowed)
        excluded = find_known(offered, exclude)
        return similar_items(offered, self.index, items, k, excluded, allowed, threads)

    def evaluate(
        self,
        log: Interactions | LogSource,
        k: int = 10,
        *,
        exclude_seen: bool | None = None,
        since: float | None = None,
        users: int | None = None,
        seed: int = 0,
        threads: int = 1,
        name: str = "recommender",
    ) -> Evaluation:
        """Say how good the answers are to the users of a log: every metric @k, with intervals.

        Every user's last interaction is the target, and what stands before it is the history, asked
        about when the target came; users with less than two interactions are left out. **A log that
        it was trained on, targets included, flatters it: give it newer events**, or a whole log and
        the moment that training ended as `since`, in seconds since 1970: then users count whose
        last interaction is of that moment or later. The log is one that was read, or a path or
        table that `read_interactions` reads.

        Answers are those of `recommend`, over the full catalogue, with its default of
        `exclude_seen`: where what was seen is left out, a target that is in its own history is
        missed; `recprune evaluate` leaves it in. A target that the catalogue does not have is
        missed too, and `unknown_targets` counts these. `users` draws so many of them, by `seed`,
        which intervals follow as well.
        """
        from recprune.recommender import judging

        return judging.evaluate(
            self,
            log,
            k,
            exclude_seen=exclude_seen,
            since=since,
            users=users,
            seed=seed,
            threads=threads,
            name=name,
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

    @cached_property
    def continuation(self) -> Continuation | None:
        """What continues the encoder, item by item, where that can be.

        Not where the encoder is saved with weights of 8 bits: continued are those of the model, and
        a history would have another answer than the user who has it.
        """
        settings = self._model_settings
        is_rounded = self.settings.get("encoder_precision", "float32") != "float32"
        if settings.architecture != "continued" or is_rounded:
            return None
        return Continuation(self.weights, settings, item_vectors(self.index, settings))

    @property
    def trained_here(self) -> bool:
        """Whether the encoder is one of ours: else it came through `from_encoder`."""
        return "encoder" not in self.settings

    @property
    def rotation(self) -> Float32Array | None:
        """What sequence embeddings are turned by before they are searched, None: by nothing."""
        return self.encoder.rotation if isinstance(self.encoder, ForeignEncoder) else None

    def trained_settings(self, what: str) -> Settings:
        """Return the settings of the model and its training, which `what` goes by."""
        if not self.trained_here:
            raise InputError(
                f"{what} needs a model that recprune trained: this recommender has an encoder from "
                "elsewhere"
            )
        return Settings.from_json({part: self.settings[part] for part in ("model", "training")})

    @property
    def _model_settings(self) -> ModelSettings:
        """Of an encoder from elsewhere, those of a model without any head."""
        if not self.trained_here:
            return ModelSettings()
        return Settings.from_json({"model": self.settings["model"]}).model

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
        words = self.attributes_for("where", offered.snapshot).where(where).words
        if allowed is None:
            return words
        return words & (packed(allowed) if allowed.dtype == np.bool_ else allowed)

    def _limit(self, offered: Assortment, at_most: tuple[str, int] | None) -> Limit | None:
        if at_most is None:
            return None
        if not isinstance(at_most, tuple | list) or len(at_most) != 2:
            raise InputError(f"at_most is {at_most!r}, expected the name of a column and a number")
        column, count = at_most
        attributes = self.attributes_for("at_most", offered.snapshot)
        return Limit(attributes.limited(column, count), int(count))

    def attributes_for(self, name: str, snapshot: LiveSnapshot | None) -> Attributes:
        """Return the attributes of the items, which what is called `name` asks for.

        At a moment of a live index, they have what its notes say of items in place of their values.
        """
        attributes = self._assortments.trained.attributes.of(snapshot)
        if attributes is None:
            raise InputError(
                f"{name}: this recommender has no attributes of its items: `with_attributes` or "
                "`recprune attributes` adds them"
            )
        return attributes


def item_vectors(index: Index, settings: ModelSettings) -> ItemVectors:
    """Return the vectors of items as an encoder takes them."""
    embeddings = index.sub_item_embeddings()
    if settings.embedding == "full":
        return ItemVectors.from_table(np.ascontiguousarray(embeddings[0, : index.num_items]))
    return ItemVectors.from_codes(index.item_codes(), embeddings)


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


def _completed(
    top: TopK | None, answered: NDArray[np.bool_], k: int
) -> tuple[Int64Array, Float32Array]:
    """Return answers with an empty one in the place of each history that was not asked for."""
    if top is not None and answered.all():
        return top.ids, top.scores
    ids = np.full((len(answered), k), -1, np.int64)
    scores = np.full((len(answered), k), -np.inf, np.float32)
    if top is not None:
        ids[answered], scores[answered] = top.ids, top.scores
    return ids, scores


def _share_of_scoring(stats: SearchStats) -> float:
    """Return which share of the time of searches went into sub-item scores."""
    records = stats.records
    whole = int(records["nanoseconds"].sum())
    return int(records["sub_item_score_nanoseconds"].sum()) / whole if whole else 0.0


def _item_scores(
    index: Index, codes: NDArray[Any], sequence_embedding: Float32Array, items: Int64Array
) -> Float32Array:
    """Return the scores of a few items, for a repeat head that takes a part of them away."""
    bias = index.item_bias
    table = index.sub_item_scores(sequence_embedding)
    return score_items(table, codes[items], bias[items] if bias is not None else None)
