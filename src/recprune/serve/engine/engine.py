"""What is served: an index, with or without an encoder, and the names of its items.

An engine is immutable. A reload makes another one beside it, and so does a change of a catalogue
that changes; a request keeps the one that it began with, unless shards do not know its moment any
more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from recprune.attributes.attributes import Attributes
from recprune.attributes.diversity import Limit, allowed_with, search_at_most
from recprune.attributes.given_values import shown_value
from recprune.data.identifiers import CatalogueIds, ExternalId, RowNumbers
from recprune.live.live_index import LiveIndex
from recprune.live.snapshot import LiveSnapshot
from recprune.live.snapshot_ids import SnapshotIds
from recprune.recommender.cosine import CosineSearch
from recprune.recommender.item_notes import count_unfitting
from recprune.recommender.recommender import Recommendations, Recommender
from recprune.recommender.saving import KIND as RECOMMENDER
from recprune.search.checks import checked_k, refuse_infinite
from recprune.search.index import KIND as INDEX
from recprune.search.index import Index
from recprune.search.methods import METHODS, Method, check_can_stop, stopped_at
from recprune.search.question import ItemBits
from recprune.search.top_k import TopK
from recprune.serve.configuration import METHOD_BYTES, ServeSettings
from recprune.serve.engine.backend import (
    Searched,
    check_shards,
    kind_and_version,
    sharded_folder,
)
from recprune.serve.engine.catalogue import Catalogue
from recprune.serve.engine.explain import affordable, explain
from recprune.serve.engine.item_changes import NoLiveError
from recprune.serve.histories.user_states import UserStates
from recprune.serve.logs import log_problem
from recprune.shards.answers import ShardedTopK
from recprune.shards.sharded_index import ShardedIndex, at_a_known_moment
from recprune.storage import read_manifest
from recprune.types import (
    Boosts,
    Float32Array,
    InputError,
    Int64Array,
    Json,
    RecpruneError,
    StorageError,
)
from recprune.vectors.rotation import turned
from recprune.vectors.vector_index import KIND as VECTORS
from recprune.vectors.vector_index import VectorIndex

T = TypeVar("T")

ServedKind: TypeAlias = Literal["recommender", "index", "vector index"]
# Of a folder of shards; a live index is opened already, and in shards itself.
OpenShards: TypeAlias = Callable[[Path, LiveIndex | None], ShardedIndex]


class NoEncoderError(RecpruneError):
    """An index was asked to recommend: it has no encoder."""


@dataclass(frozen=True)
class Choice:
    """Which items are asked for, and how to find them."""

    k: int
    exclude: Sequence[ExternalId]
    allow: Sequence[ExternalId] | str | None  # ids, or the name of an item set
    method: str
    deadline: float | None  # by time.monotonic()
    explain: bool
    boosts: Sequence[tuple[ExternalId, float]] = ()
    where: str | None = None  # a condition on the attributes of items
    at_most: tuple[str, int] | None = None  # a column, and how many may have the same value in it
    rerank: int = 0  # of an index of vectors: so many of the best by codes are ranked by these


@dataclass(frozen=True)
class Found:
    """The best items for one question, and what finding them took."""

    items: list[int]  # internal
    scores: list[float]
    unknown: list[ExternalId]
    by_popularity: bool
    method: str | None
    exact: bool
    items_scored: int
    gap: float | None  # what may be missing scores at most so much more; None: no bound
    milliseconds: dict[str, float]
    explanation: Json | None
    missing_share: float = 0.0  # of the items: those in shards that were lost
    reranked: int = 0  # of the best by codes, so many were ranked by their vectors


class DatedHistory(NamedTuple):
    """External ids, oldest first, and when they were, in seconds, where that is known."""

    items: Sequence[ExternalId]
    times: Sequence[float] | None = None
    user: str | None = None  # whose it is, where it is one that is kept


@dataclass(frozen=True)
class Engine:
    """One version of everything that answers."""

    kind: ServedKind
    version: str
    index: Searched
    own_index: Index | None  # of the folder itself; None: it is in shards alone
    recommender: Recommender | None
    catalogue: Catalogue
    item_sets: dict[str, NDArray[np.uint64]]  # as bits over the items
    method_bytes: int = METHOD_BYTES  # that a method may make this process grow by
    attributes: Attributes | None = None  # of the items; those of the recommender, if there is one
    live: LiveIndex | None = None  # where items come and go
    vectors: VectorIndex | None = None  # what the index is of, if it is one of vectors
    moments: list[Engine] = field(default_factory=list)  # the latest that `now` has returned

    def ask(self, moment: Engine, question: Callable[[Engine], T]) -> T:
        """Ask a moment that `now` has returned, and the next if shards do not know it any more."""
        first = [moment]
        return at_a_known_moment(self.live, lambda: question(first.pop() if first else self.now()))

    def now(self) -> Engine:
        """Return the engine with the catalogue as it is now, which stays so for a request."""
        if self.live is None:
            return self
        snapshot = self.live.snapshot()
        index = self.index.at(snapshot) if isinstance(self.index, ShardedIndex) else snapshot
        if self.moments and self.moments[0].index is index:
            return self.moments[0]
        moment = replace(self, index=index, catalogue=self.catalogue.at(snapshot), moments=[])
        self.moments[:] = [moment]
        return moment

    def changing(self) -> LiveIndex:
        """Return what takes changes of the catalogue."""
        if self.live is None:
            raise NoLiveError(
                "this service has a catalogue that does not change: serve a recommender with "
                "--live and a folder made by `recprune index live`"
            )
        return self.live

    @property
    def num_present(self) -> int:
        """How many items are there."""
        return (
            self.index.num_present if isinstance(self.index, LiveSnapshot) else self.index.num_items
        )

    @property
    def rotation(self) -> Float32Array | None:
        """What sequence embeddings are turned by before they are searched, None: by nothing."""
        if self.vectors is not None:
            return self.vectors.rotation
        return None if self.recommender is None else self.recommender.rotation

    @property
    def width(self) -> int:
        """How wide sequence embeddings are that are searched for."""
        return self.index.width if self.rotation is None else int(self.rotation.shape[1])

    @property
    def reranks(self) -> bool:
        """Whether the best by codes can be ranked by their vectors."""
        return self.vectors is not None and self.vectors.vectors is not None

    def code_of(self, item: int) -> list[int] | None:
        """Return the code of an item, None where it is in shards alone."""
        if isinstance(self.index, LiveSnapshot):
            codes: list[int] = self.index.item_codes([item])[0].tolist()
            return codes
        return None if self.own_index is None else self.own_index.item_codes()[item].tolist()

    def attributes_of(self, item: int) -> Json | None:
        """Return the value of each attribute of an item, None where there are no attributes."""
        if self.attributes is None:
            return None
        columns = self._attributes("attributes").columns
        return {
            name: shown_value(column.value_at(item), column) for name, column in columns.items()
        }

    def recommend(
        self,
        histories: Sequence[DatedHistory],
        choice: Choice,
        *,
        exclude_seen: bool | None,
        now: float | None = None,
        states: UserStates | None = None,
    ) -> list[Found]:
        """Return the best items for histories of external ids, oldest first.

        Where the encoder can be continued, `states` are what is kept of users.
        """
        recommender = self._encoding()
        method = self._method(choice)
        allowed, limit, filtering = self._filtered(choice)
        excluded = self.catalogue.coerce(choice.exclude)
        boosted = self._boosted(choice)
        boosts = None
        if boosted is not None:
            named = self.catalogue.coerce(item for item, _ in choice.boosts)
            boosts = dict(zip(named, boosted[1].tolist(), strict=True))
        continuation = recommender.continuation
        found = []
        for history in histories:
            known_as = self.catalogue.coerce(history.items)
            encoder = None
            if history.user is not None and states is not None and continuation is not None:
                encoder = states.encoder(continuation, history.user)
            # One after the other: each is given the time that the ones before it left.
            best = recommender.recommend(
                [known_as],
                self._most(choice.k),
                exclude_seen=exclude_seen,
                exclude=excluded,
                allow=ItemBits(allowed) if allowed is not None else None,
                at_most=choice.at_most,
                boosts=boosts,
                times=[history.times],
                now=now,
                method=method,
                deadline=choice.deadline,
                index=self.index,
                encoder=encoder,
            )
            unknown: list[ExternalId] = []
            if missing := set(best.unknown[0]):
                pairs = zip(history.items, known_as, strict=True)
                unknown = [given for given, known in pairs if known in missing]
            one = self._found_by(best, choice, allowed, limit)
            spent = filtering | one.milliseconds
            found.append(replace(one, unknown=unknown, milliseconds=spent))
        return found

    def _found_by(
        self,
        best: Recommendations,
        choice: Choice,
        allowed: NDArray[np.uint64] | None,
        limit: Limit | None,
    ) -> Found:
        if best.top is None:
            return _popular(best)
        spent = best.milliseconds
        scoring = spent.get("sub-item scores", 0.0)
        times = {"encode": spent["encode"], "search": scoring + spent["search"]}
        explanation = None
        if choice.explain:
            embedding, excluded = best.sequence_embeddings[0], best.excluded[0]
            learnt = [None if part is None else part[0] for part in best.learnt]
            explanation, times["explain"] = self._explain(
                embedding, choice, excluded, _as_answered(limit, best.top, allowed), *learnt
            )
        return _found(best.top, times, explanation)

    def search(self, sequence_embeddings: Float32Array, choice: Choice) -> list[Found]:
        """Return the best items for sequence embeddings, [queries, d], as callers have them."""
        if choice.rerank:
            self._check_reranks(choice)
        method = self._method(choice)
        allowed, limit, filtering = self._filtered(choice)
        excluded = self.catalogue.find_all(choice.exclude)
        excluded = excluded[excluded >= 0]
        boosted = self._boosted(choice)
        found = (
            self._search(embedding, choice, method, excluded, allowed, limit, boosted)
            for embedding in sequence_embeddings
        )
        return [replace(one, milliseconds=filtering | one.milliseconds) for one in found]

    def similar(self, item: int, k: int, where: str | None) -> tuple[list[int], list[float]]:
        """Return the items most like one that is there, and their cosines."""
        ids = self.catalogue.ids
        index = ids.snapshot if isinstance(ids, SnapshotIds) else self.own_index
        if index is None:
            raise InputError(
                "similar: this service has its items in shards on other machines, and their codes "
                "are there; serve a recommender with --shards, or an index"
            )
        self._check_compact("similar items")
        allowed = None
        if where is not None:
            allowed = self._attributes("where").where(where).words
        none = np.empty(0, np.int64)
        best, cosines = CosineSearch(index).best(item, self._most(k), exclude=none, allow=allowed)
        return best.tolist(), cosines.tolist()

    def check_explains(self) -> None:
        """Refuse, where there is nothing to look into."""
        self._explained()

    def close(self) -> None:
        """Let go of what others share."""
        if isinstance(self.index, ShardedIndex):
            self.index.close()
        if self.live is not None:
            self.live.close()

    def check_recommends(self) -> None:
        """Refuse, where there is no encoder, before anything else is done."""
        self._encoding()

    def _encoding(self) -> Recommender:
        if self.recommender is None:
            raise NoEncoderError(
                "this service has an index only, without an encoder: post sequence embeddings to "
                "/search, or serve a folder made by `recprune export`"
            )
        return self.recommender

    def _check_reranks(self, choice: Choice) -> None:
        if not self.reranks:
            raise InputError(
                "rerank: this service has no vectors to rank by: serve an index of vectors that "
                "was built with them"
            )
        if choice.explain:
            raise InputError("explain: looks into the search by codes: ask for it without rerank")

    def _explained(self) -> Index:
        if self.live is not None:
            raise InputError(
                "explain: this service has a catalogue that changes, which is in several pieces, "
                "and what happens in these cannot be looked into"
            )
        if self.own_index is None:
            raise InputError(
                "explain: this service has its items in shards on other machines, and what happens "
                "there cannot be looked into; serve a recommender with --shards, or an index"
            )
        return self.own_index

    def _search(
        self,
        embedding: Float32Array,
        choice: Choice,
        method: Method,
        excluded: Int64Array,
        allowed: NDArray[np.uint64] | None,
        limit: Limit | None,
        boosted: Boosts | None,
    ) -> Found:
        deadline = choice.deadline
        begun = time.perf_counter()
        given, rotation = embedding[None], self.rotation
        if rotation is not None:
            embedding = turned(given, rotation, "sequence embeddings")[0]
        top = search_at_most(
            self.index,
            embedding[None],
            self._most(max(choice.k, choice.rerank)),
            limit,
            # One after the other: each query of a batch is given what the ones before it left.
            method=lambda: method if deadline is None else stopped_at(method, deadline),
            exclude=[excluded] if len(excluded) else None,
            allow=allowed,
            boosts=[boosted] if boosted is not None else None,
        )
        times = {"search": 1000.0 * (time.perf_counter() - begun)}
        if choice.rerank and self.vectors is not None:
            return self._reranked(given, top, choice, boosted, times)
        explanation = None
        if choice.explain:
            answered = _as_answered(limit, top, allowed)
            explanation, times["explain"] = self._explain(embedding, choice, excluded, answered)
        return _found(top, times, explanation)

    def _reranked(
        self,
        embeddings: Float32Array,
        by_codes: TopK,
        choice: Choice,
        boosted: Boosts | None,
        times: dict[str, float],
    ) -> Found:
        """Return the best of one answer by codes, by their vectors."""
        assert self.vectors is not None  # noqa: S101 # for the type checker
        begun = time.perf_counter()
        top = self.vectors.reranked(embeddings, by_codes, self._most(choice.k), boosts=[boosted])
        times["rerank"] = 1000.0 * (time.perf_counter() - begun)
        found = _found(top, times, None)
        # No bound: what codes have left out may have any product.
        return replace(found, gap=None, reranked=int((by_codes.ids >= 0).sum()))

    def _explain(
        self,
        embedding: Float32Array,
        choice: Choice,
        excluded: Int64Array,
        allowed: NDArray[np.uint64] | None,
        repeats: Boosts | None = None,
        transitions: Boosts | None = None,
    ) -> tuple[Json, float]:
        """Return what happened in a query, with the names of its items, and how long that took."""
        begun = time.perf_counter()
        explained = explain(
            self._explained(),
            embedding,
            self._most(choice.k),
            exclude=excluded,
            allow=allowed,
            boosts=self._boosted(choice),
            repeats=repeats,
            transitions=transitions,
            max_bytes=self.method_bytes,
        )
        return self._named(asdict(explained)), 1000.0 * (time.perf_counter() - begun)

    def _most(self, k: int) -> int:
        # More would only be padding; of a catalogue without items, one is.
        return min(checked_k(k, self.index.num_items), max(1, self.index.num_items))

    def _method(self, choice: Choice) -> Method:
        method = METHODS[choice.method]
        if choice.deadline is not None:
            try:
                check_can_stop(method)
            except InputError as error:
                raise InputError(f"timeout_ms: {error}") from None
        return affordable(method, self.index, self.method_bytes)

    def _filtered(
        self, choice: Choice
    ) -> tuple[NDArray[np.uint64] | None, Limit | None, dict[str, float]]:
        """Return which items are allowed, the limit of a value, and how long a condition took."""
        allowed, limit, spent = self._allowed(choice.allow), None, {}
        if choice.at_most is not None:
            column, count = choice.at_most
            limit = Limit(self._attributes("at_most").limited(column, count), count)
        if choice.where is not None:
            begun = time.perf_counter()
            words = self._attributes("where").where(choice.where).words
            allowed = words if allowed is None else words & allowed
            spent = {"filter": 1000.0 * (time.perf_counter() - begun)}
        return allowed, limit, spent

    def _attributes(self, name: str) -> Attributes:
        if self.attributes is None:
            raise InputError(f"{name}: this service has no attributes of its items")
        if self.recommender is None:
            return self.attributes
        snapshot = self.index if isinstance(self.index, LiveSnapshot) else None
        return self.recommender.attributes_for(name, snapshot)

    def _allowed(self, allow: Sequence[ExternalId] | str | None) -> NDArray[np.uint64] | None:
        if allow is None:
            return None
        if isinstance(allow, str):
            if allow not in self.item_sets:
                raise InputError(f"allow: no item set of the name {allow!r}")
            words = self.item_sets[allow]
            missing = -(-self.index.num_items // 64) - len(words)  # of items that came later
            return np.concatenate([words, np.zeros(missing, np.uint64)]) if missing else words
        items = self.catalogue.find_all(allow)
        if items.min(initial=0) < 0:
            place = int((items < 0).argmax())
            raise InputError(f"allow[{place}] is {allow[place]!r}: not in the catalogue")
        return self.catalogue.bits(items)

    def _boosted(self, choice: Choice) -> Boosts | None:
        """Return the internal ids of boosted items and their boosts, None where nothing is."""
        if not choice.boosts:
            return None
        self._check_compact("boosts")
        given, numbers = zip(*choice.boosts, strict=True)
        items = self.catalogue.find_all(given)
        for place, item in enumerate(items.tolist()):
            if item < 0:
                raise InputError(f"boosts[{place}] is {given[place]!r}: not in the catalogue")
        firsts = np.unique(items, return_index=True)[1]
        if len(firsts) < len(items):
            place = int(np.setdiff1d(np.arange(len(items)), firsts)[0])
            raise InputError(f"boosts[{place}] is {given[place]!r}: boosted before")
        with np.errstate(over="ignore"):
            values = np.array(numbers).astype(np.float32)
        refuse_infinite(values, "boosts")
        return items, values

    def _check_compact(self, name: str) -> None:
        """Refuse what needs the code of single items, where all would take too much memory."""
        own = self.own_index
        needed = own.num_items * own.num_splits if own and own.layout == "compact" else 0
        if needed > self.method_bytes:
            raise InputError(
                f"{name} need {needed:,} bytes in each worker, as the index is compact, and the "
                f"service allows {self.method_bytes:,}: --max-method-bytes"
            )

    def _named(self, explanation: Json) -> Json:
        """Say what the caller calls the items of an explanation."""
        for entry in (*explanation["top"], explanation["middle"], explanation["bottom"]):
            if entry is not None:
                entry["item"] = self.catalogue.external_id(entry["item_id"])
                entry["name"] = self.catalogue.name(entry["item_id"])
        return explanation


def _as_answered(
    limit: Limit | None, top: TopK, allowed: NDArray[np.uint64] | None
) -> NDArray[np.uint64] | None:
    """Return items of which the best are those of an answer, whether or not a limit held for it."""
    if limit is None:
        return allowed
    return allowed_with(limit, top.ids[0][top.ids[0] >= 0], allowed)


def _popular(best: Recommendations) -> Found:
    kept = best.ids[0] >= 0
    return Found(
        items=best.ids[0][kept].tolist(),
        scores=best.scores[0][kept].tolist(),
        unknown=[],
        by_popularity=True,
        method=None,
        exact=True,
        items_scored=0,
        gap=0.0,
        milliseconds={"popularity": sum(best.milliseconds.values())},
        explanation=None,
    )


def _found(top: TopK, times: dict[str, float], explanation: Json | None) -> Found:
    record = top.stats.records[0]
    exact = bool(record["exact"])
    gap = 0.0 if exact else float(record["upper_bound"] - record["threshold"])
    kept = top.ids[0] >= 0
    return Found(
        items=top.ids[0][kept].tolist(),
        scores=top.scores[0][kept].tolist(),
        unknown=[],
        by_popularity=False,
        method=top.stats.method[0],
        exact=exact,
        items_scored=int(record["items_scored"]),
        gap=gap if math.isfinite(gap) else None,
        milliseconds=times,
        explanation=explanation,
        missing_share=top.missing_share if isinstance(top, ShardedTopK) else 0.0,
    )


def load_engine(settings: ServeSettings, open_shards: OpenShards | None = None) -> Engine:
    """Load a saved recommender or index, compare every byte with its checksum, and try it out.

    The bytes of shards are compared where these are, and here what they answer; where the folder
    is in shards, `open_shards` is what opens them.
    """
    folder = settings.folder
    kind, version = kind_and_version(folder)
    shards_folder = sharded_folder(settings)
    recommender, vectors, own = None, None, None
    attributes = None
    if settings.attributes is not None:
        attributes = Attributes.load(settings.attributes)
    live = None
    if kind == RECOMMENDER:
        recommender = Recommender.load(folder)
        if settings.live is not None:
            live = LiveIndex.open(settings.live)
            recommender = recommender.with_live(live)
        if attributes is not None:
            most = None if live is None else live.num_items
            _check_attributes(attributes, recommender.index.num_items, settings, most)
            recommender = recommender.with_attributes(attributes)
        attributes = recommender.attributes
        own = recommender.index
        if live is not None and attributes is not None:
            _apply_notes(recommender, live.snapshot())
    elif kind == INDEX:
        own = Index.load(folder)
    elif kind == VECTORS:
        vectors = VectorIndex.load(folder)
        own = vectors.index
    shards = None
    if shards_folder is not None and open_shards is not None:
        shards = open_shards(shards_folder, live)
    if kind_and_version(folder) != (kind, version):
        raise StorageError(f"{folder}: was replaced while it was read: try again")
    if shards is not None and own is not None and shards_folder is not None:
        if live is None:
            check_shards(shards, own, shards_folder)
        else:
            now = live.snapshot()
            check_shards(shards.at(now), now, shards_folder)
        version = f"{version}-{shards.manifest_sha256[:12]}"
    if settings.attributes is not None:
        version = f"{version}-{read_manifest(settings.attributes)['sha256'][:12]}"
    if live is not None:
        version = f"{version}-{live.identity[:12]}"
    index = shards or own
    if index is None or not index.num_items:
        raise StorageError(f"{folder}: has no items to serve")
    if recommender is None:
        _check_attributes(attributes, index.num_items, settings)
    ids: CatalogueIds = RowNumbers(index.num_items)
    served: ServedKind = "index"
    if recommender is not None:
        ids, served = recommender.item_ids, "recommender"
    elif vectors is not None:
        ids, served = vectors.item_ids, "vector index"
    catalogue = Catalogue(
        ids,
        None if recommender is None else recommender.popularity,
        settings.names_file,
        version=version,
        scratch=settings.scratch,
    )
    item_sets = {}
    named = catalogue if live is None else catalogue.at(live.snapshot())
    for name, path in settings.item_sets.items():
        item_sets[name] = named.item_set(path)
        if not item_sets[name].any():
            raise InputError(f"{path}: item set {name!r} has no item of the catalogue")
    most = settings.limits.method_bytes
    engine = Engine(
        served,
        version,
        index,
        own,
        recommender,
        catalogue,
        item_sets,
        most,
        attributes,
        live,
        vectors,
    )
    _try_out(engine.now())
    return engine


def _apply_notes(recommender: Recommender, snapshot: LiveSnapshot) -> None:
    """Have what is said of items lie over their attributes before the first request asks for it."""
    attributes = recommender.attributes_for("where", snapshot)
    unfitting = count_unfitting(snapshot.notes, attributes)
    if unfitting:
        log_problem("values passed over", {"values": unfitting, "reason": "no column has room"})


def _check_attributes(
    attributes: Attributes | None,
    num_items: int,
    settings: ServeSettings,
    most: int | None = None,  # that a live index has, if those of its items may be there too
) -> None:
    last = num_items if most is None else most
    if attributes is not None and not num_items <= attributes.num_items <= last:
        raise InputError(
            f"{settings.attributes}: attributes of {attributes.num_items} items, expected those of "
            f"the {last} that are served"
        )


def _try_out(engine: Engine) -> None:
    """Answer once, so that what cannot answer is not swapped in."""
    choice = Choice(10, [], None, "auto", None, explain=False)
    engine.search(np.zeros((1, engine.width), np.float32), choice)
    if engine.recommender is not None:
        engine.recommender.continuation  # noqa: B018 # made once, and not by the first question
        history = DatedHistory([engine.recommender.item_ids[0]])
        engine.recommend([history], choice, exclude_seen=True)
