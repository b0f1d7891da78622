"""What the service is asked and what it answers, as JSON.

Bodies are read on the event loop, so what is wrong with them must be cheap to find out: every list
has a greatest length and ends at its first fault, as a list of faults can be far longer than what
was sent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from recprune.attributes.grammar import MOST_CHARACTERS
from recprune.data.identifiers import MOST_DIGITS
from recprune.search.checks import MAX_ITEMS, MAX_SPLITS
from recprune.search.methods import METHODS, STOPPABLE, named
from recprune.serve.configuration import CEILINGS, EVENTS_PER_QUESTION
from recprune.serve.engine.engine import Choice, ServedKind
from recprune.serve.engine.item_changes import NewItem
from recprune.types import MAX_SUB_ITEMS, Json, needs_extra

with needs_extra("serve"):
    from pydantic import (
        BaseModel,
        ConfigDict,
        Field,
        FiniteFloat,
        StrictInt,
        StrictStr,
        TypeAdapter,
    )
    from pydantic import model_validator as validator
    from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

_LONGEST_ID = 512  # characters
_MOST_FIELDS = 32  # of an object: more than any here has
_MOST_NUMBERS = 65_536  # of a sequence embedding: far more than any encoder returns
_BEYOND = 10**MOST_DIGITS  # of an integer: as long ones are no item's, and slow to read and write
_MOST_NEW_ITEMS = 1000  # of one change
_LONGEST_NAME = 1000  # characters
_MOST_COLUMNS = 1000  # as many as attributes have
_LAST_MOMENT = 7_258_118_400.0  # the year 2200, as everywhere in recprune

_IntegerId: TypeAlias = Annotated[StrictInt, Field(gt=-_BEYOND, lt=_BEYOND)]
ItemId: TypeAlias = _IntegerId | Annotated[StrictStr, Field(max_length=_LONGEST_ID)]
UserId: TypeAlias = _IntegerId | Annotated[StrictStr, Field(min_length=1, max_length=_LONGEST_ID)]
MethodName: TypeAlias = Literal[tuple(METHODS)]  # type: ignore[valid-type]


T = TypeVar("T")
# Lists by what their length is limited by.
_History: TypeAlias = Annotated[list[T], Field(max_length=CEILINGS["history"], fail_fast=True)]
_Items: TypeAlias = Annotated[list[T], Field(max_length=CEILINGS["item_ids"], fail_fast=True)]
_Batch: TypeAlias = Annotated[
    list[T], Field(min_length=1, max_length=CEILINGS["batch"], fail_fast=True)
]
_Numbers: TypeAlias = Annotated[list[FiniteFloat], Field(max_length=_MOST_NUMBERS, fail_fast=True)]
_Events: TypeAlias = Annotated[
    list[T],
    Field(min_length=1, max_length=EVENTS_PER_QUESTION * CEILINGS["batch"], fail_fast=True),
]


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @validator(mode="before")
    @classmethod
    def _few_fields(cls, given: Any) -> Any:
        """Refuse at once what would be one fault for each of its fields."""
        if isinstance(given, dict) and len(given) > _MOST_FIELDS:
            raise ValueError(f"{len(given)} fields, expected {_MOST_FIELDS} at most")
        return given


class BoostIn(_Asked):
    """What is added to the score of an item."""

    item: ItemId
    boost: FiniteFloat


class AtMostIn(_Asked):
    """How many items of an answer may have the same value in a column of the attributes."""

    column: Annotated[StrictStr, Field(max_length=_LONGEST_ID)]
    count: StrictInt = Field(ge=1, lt=MAX_ITEMS)


class _ItemsRequest(_Asked):
    """What every question about the best items has in common."""

    k: int = Field(10, ge=1, description="How many items to return at most.")
    exclude: _Items[ItemId] = Field(
        default_factory=list, description="Items not to return; unknown ones are ignored."
    )
    allow: _Items[ItemId] | Annotated[StrictStr, Field(max_length=_LONGEST_ID)] | None = Field(
        None, description="Return only these items: their ids, or the name of an item set."
    )
    where: Annotated[StrictStr, Field(max_length=MOST_CHARACTERS)] | None = Field(
        None,
        description="Return only items of whose attributes this is true; /readyz names them.",
        examples=["category in ('shoes', 'socks') and price < 50 and in_stock"],
    )
    at_most: AtMostIn | None = Field(
        None,
        description="Return so many items of one value at most: those that a walk down the exact "
        "ranking would take. Items without a value are not limited.",
        examples=[{"column": "brand", "count": 2}],
    )
    boosts: _Items[BoostIn] = Field(
        default_factory=list,
        description="What is added to the scores of some items, each named once; unknown ones are "
        "refused. The answer is exact with these scores, those of popular items included.",
    )
    method: MethodName = Field("auto", description="How to search. All are exact.")
    timeout_ms: FiniteFloat | None = Field(
        None,
        gt=0,
        le=60_000,
        description="Stop searching after so long and return the best found; `exact` says whether "
        f"that is the true answer. For methods {named(STOPPABLE)}.",
    )
    explain: bool = Field(False, description="Say what happened in the search; takes much longer.")

    def choice(self, begun: float) -> Choice:
        """Return what the engine is asked for; `begun` is when the request came."""
        return Choice(
            self.k,
            self.exclude,
            self.allow,
            self.method,
            None if self.timeout_ms is None else begun + self.timeout_ms / 1000.0,
            self.explain,
            [(entry.item, entry.boost) for entry in self.boosts],
            self.where,
            None if self.at_most is None else (self.at_most.column, self.at_most.count),
        )


_Moment = Annotated[FiniteFloat, Field(ge=0, lt=_LAST_MOMENT)]
_TIMES = "When the events of the history were, in seconds since 1970."


def _check_times(times: list[float] | None, history: list[ItemId] | None) -> None:
    if times is None:
        return
    if history is None:
        raise ValueError("times are those of a history")
    if len(times) != len(history):
        raise ValueError(f"{len(times)} times for a history of {len(history)}")


class Asker(_Asked):
    """What to recommend to: a history, oldest first, or a user whose history is kept here."""

    history: _History[ItemId] | None = None
    user: UserId | None = None
    times: _History[_Moment] | None = Field(None, description=_TIMES)

    @validator(mode="after")
    def _one_of_them(self) -> Asker:
        if (self.history is None) == (self.user is None):
            raise ValueError("give either a history or a user")
        _check_times(self.times, self.history)
        return self


class RecommendRequest(_ItemsRequest):
    """One history, one user, or a batch of them."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"history": [17, 4, 23], "k": 10},
                {"user": "anna", "k": 5, "exclude_seen": False, "timeout_ms": 20},
                {"batch": [{"history": [17]}, {"user": "anna"}], "allow": [1, 2, 3, 4]},
                {"history": [17], "boosts": [{"item": 4, "boost": 0.5}]},
                {"history": [17, 4], "times": [1700000000, 1700003600], "time": 1700090000},
            ]
        },
    )

    history: _History[ItemId] | None = Field(None, description="Item ids, oldest first.")
    user: UserId | None = Field(None, description="A user whose events were posted to /events.")
    batch: _Batch[Asker] | None = Field(None, description="Several of these at once.")
    times: _History[_Moment] | None = Field(None, description=_TIMES)
    time: _Moment | None = Field(
        None,
        description="When the recommendation is asked for, in seconds since 1970; where it is not "
        "given, at the last event.",
    )
    exclude_seen: bool | None = Field(
        None,
        description="Leave out what is in the history. By default so, unless the model has learnt "
        "what is taken again.",
    )

    @validator(mode="after")
    def _one_of_them(self) -> RecommendRequest:
        if [self.history, self.user, self.batch].count(None) != 2:
            raise ValueError("give one of history, user and batch")
        _check_times(self.times, self.history)
        return self

    def askers(self) -> list[Asker]:
        """Return the histories and users, whichever way they were given."""
        # What was checked is not checked again.
        own = Asker.model_construct(history=self.history, user=self.user, times=self.times)
        return self.batch or [own]


class SearchRequest(_ItemsRequest):
    """A sequence embedding from an encoder of your own, or a batch of them."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"sequence_embedding": [0.12, -0.5, 0.33, 1.0], "k": 10}]},
    )

    sequence_embedding: _Numbers | None = Field(
        None,
        description="As many numbers as the index is wide; of an index of vectors, a query as "
        "these are, which is turned here.",
    )
    batch: _Batch[_Numbers] | None = Field(None, description="Several sequence embeddings at once.")
    rerank: int = Field(
        0,
        ge=0,
        description="Of an index of vectors: rank so many of the best by their codes, at least k, "
        "by the vectors themselves; 0: none. /readyz says whether it can.",
    )

    @validator(mode="after")
    def _one_of_them(self) -> SearchRequest:
        if (self.sequence_embedding is None) == (self.batch is None):
            raise ValueError("give either sequence_embedding or batch")
        return self

    def choice(self, begun: float) -> Choice:
        """Return what the engine is asked for; `begun` is when the request came."""
        return replace(super().choice(begun), rerank=self.rerank)

    def sequence_embeddings(self) -> list[list[float]]:
        """Return the embeddings, whichever way they were given."""
        return self.batch or [self.sequence_embedding or []]


class EventIn(_Asked):
    """One interaction."""

    user: UserId
    item: ItemId
    timestamp: FiniteFloat | None = Field(
        None, ge=0, lt=_LAST_MOMENT, description="Seconds since 1970; now where it is not given."
    )
    key: Annotated[StrictStr, Field(min_length=1, max_length=_LONGEST_ID)] | None = Field(
        None, description="Idempotency key: of a user's events with one key, the first counts."
    )


class EventsRequest(_Asked):
    """Interactions to append to the histories of their users."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "events": [
                        {"user": "anna", "item": 17, "timestamp": 1700000000.5, "key": "order-1"},
                        {"user": "anna", "item": 4},
                    ]
                }
            ]
        },
    )

    events: _Events[EventIn]


class EventsAnswer(BaseModel):
    """Everything received is on disk; `new` were not there before."""

    received: int
    new: int


_ItemName: TypeAlias = Annotated[StrictStr, Field(max_length=_LONGEST_NAME)]
_ItemAttributes: TypeAlias = Annotated[dict[StrictStr, Any], Field(max_length=_MOST_COLUMNS)]
_NAME = "What it is called; null: nothing."
_ATTRIBUTES = "Values by column, which /readyz names; null: none. Other columns stay as they are."


class ItemIn(_Asked):
    """An item that is added, or whose code is another one from now on."""

    id: UserId = Field(description="Its external id.")  # as of users: not empty, for it is in paths
    code: Annotated[
        list[Annotated[StrictInt, Field(ge=0, lt=MAX_SUB_ITEMS)]],
        Field(min_length=1, max_length=MAX_SPLITS, fail_fast=True),
    ] = Field(description="Its sub-item ids, one for each split.")
    bias: FiniteFloat | None = Field(
        None, description="What is added to its score, where items of the catalogue have biases."
    )
    name: _ItemName | None = Field(None, description=_NAME)
    attributes: _ItemAttributes = Field(default_factory=dict, description=_ATTRIBUTES)

    @validator(mode="after")
    def _is_named(self) -> ItemIn:
        return _named(self)


class AddItemsRequest(_Asked):
    """Items to add, all of them or none."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"items": [{"id": 1017, "code": [3, 1, 4, 1]}]}]},
    )

    items: Annotated[list[ItemIn], Field(min_length=1, max_length=_MOST_NEW_ITEMS, fail_fast=True)]
    replace: bool = Field(
        False, description="Give items that are there already other codes, instead of refusing."
    )

    def new_items(self) -> list[NewItem]:
        """Return what the catalogue is given."""
        return [NewItem(item.id, item.code, item.bias, _said(item)) for item in self.items]


class AmendItemRequest(_Asked):
    """What is said of an item from now on; what is left out stays as it is."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"attributes": {"in_stock": False, "price": 17.5}}]},
    )

    name: _ItemName | None = Field(None, description=_NAME)
    attributes: _ItemAttributes = Field(default_factory=dict, description=_ATTRIBUTES)

    @validator(mode="after")
    def _says_something(self) -> AmendItemRequest:
        if not _said(self):
            raise ValueError("give name or attributes")
        return _named(self)

    def said(self) -> Json:
        """Return what is given, as a note has it."""
        return _said(self)


_Said = TypeVar("_Said", ItemIn, AmendItemRequest)


def _named(given: _Said) -> _Said:
    if given.name is not None and not given.name.strip():
        raise ValueError("name is empty: null takes it away")
    return given


def _said(given: ItemIn | AmendItemRequest) -> Json:
    """Return name and attributes as far as they are given."""
    said: Json = {}
    if "name" in given.model_fields_set:
        said["name"] = None if given.name is None else " ".join(given.name.split())
    if given.attributes:
        said["attributes"] = given.attributes
    return said


class AddedItems(BaseModel):
    """The change is on disk; this worker has it at once, others within a tenth of a second."""

    numbers: list[int] = Field(description="The number of each item, which it keeps for good.")
    items: int = Field(description="How many items are there now.")


class RemovedItem(BaseModel):
    """The item is gone, and that is on disk."""

    items: int = Field(description="How many items are there now.")


# Answers to questions are dictionaries: making a model of every item takes longer than writing it.


class ScoredItem(TypedDict):
    """An item of an answer."""

    item: int | str
    name: str | None
    score: float


class Answer(TypedDict):
    """The best items for one history or sequence embedding, and what finding them took."""

    items: list[ScoredItem]
    unknown: Annotated[list[int | str], Field(description="Ids of the history that are unknown.")]
    by_popularity: Annotated[
        bool,
        Field(
            description="Nothing in the history was known: these are the most popular items, and "
            "their scores are numbers of interactions, boosts added."
        ),
    ]
    method: Annotated[str | None, Field(description="The method that ran; null where none had to.")]
    exact: Annotated[
        bool,
        Field(
            description="Whether this is what scoring every item would return. Of an index of "
            "vectors, by their codes; where `reranked` is more than 0, of the candidates."
        ),
    ]
    items_scored: int
    gap: Annotated[
        float | None,
        Field(
            description="By how much an item that is missing may outscore the last one here, at "
            "most; null where there is no bound, as fewer than k were found, or as `reranked` is "
            "more than 0: nothing says what codes have left out."
        ),
    ]
    missing_share: Annotated[
        float,
        Field(
            description="The share of the catalogue that could not be searched, as its shards are "
            "lost; more than 0 only with --allow-partial. Then `exact` is false.",
        ),
    ]
    reranked: Annotated[
        int,
        Field(
            description="How many candidates, the best by their codes, were ranked by their "
            "vectors: exact among these, approximate with respect to all vectors. 0: none."
        ),
    ]
    milliseconds: Annotated[dict[str, float], Field(description="Time spent in each stage.")]
    explanation: dict[str, Any] | None


class Answers(TypedDict):
    """One answer for each history or sequence embedding, in their order."""

    answers: list[Answer]
    version: Annotated[
        str, Field(description="Of the recommender that answered; changes with a reload.")
    ]


ANSWERS = TypeAdapter(Answers)


class ItemAnswer(BaseModel):
    """What is known of an item."""

    item: int | str
    name: str | None
    popularity: int | None = Field(
        description="Interactions it was trained on; 0 for one that came later."
    )
    code: list[int] | None = Field(
        description="Its sub-item ids, one for each split; null where all items are in shards."
    )
    attributes: dict[str, Any] | None = Field(
        description="The value of each column, null where it has none; null without any columns."
    )


class SimilarAnswer(BaseModel):
    """The items most like one: scores are the cosines of their vectors with its own, exact."""

    item: int | str
    name: str | None
    items: list[ScoredItem]
    version: str = Field(description="Of the recommender that answered; changes with a reload.")


class FoundItem(BaseModel):
    """An item whose name or id has the words that were looked for."""

    item: int | str
    name: str | None


class FoundItems(BaseModel):
    """The most popular items that were found."""

    items: list[FoundItem]


class Health(BaseModel):
    """The process is there."""

    alive: bool


class Readiness(BaseModel):
    """The service can answer."""

    ready: bool
    kind: ServedKind
    version: str
    items: int = Field(description="How many are there now.")
    live: bool = Field(description="Whether items can be added and removed.")
    item_sets: list[str]
    attributes: dict[str, str] = Field(
        description="Columns that where and at_most may name, and their types."
    )
    has_names: bool
    reranks: bool = Field(description="Whether /search takes `rerank`.")
    repeats: bool  # whether the model has learnt what is taken again


class Reloaded(BaseModel):
    """All workers have swapped the new folder in."""

    version: str
    workers: int


class ErrorDetail(BaseModel):
    """What was wrong."""

    code: str
    message: str


class ErrorAnswer(BaseModel):
    """Every answer that is not 2xx looks like this."""

    error: ErrorDetail
