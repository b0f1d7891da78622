"""Two recommenders of the same items that answer differently, and what each has to answer.

What is right is said by the oracle, exhaustive scoring in NumPy, before any service is asked. Of the
recommender itself only the encoder is used, which turns a history into a vector.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from recprune import Recommender, assign_random, interactions_from_columns, no_holdout, prepare
from recprune.models.architectures import build_model
from recprune.models.settings import Settings
from recprune.search import reference
from recprune.serve.engine.backend import kind_and_version
from recprune.types import Float32Array, Json

Answer = tuple[tuple[int, float], ...]  # items and scores of all answers, one after the other
_SPLITS, _SUB_ITEMS = 8, 256
_LENGTH = 50  # items of a history that the encoder sees


def save_two(place: Path, num_items: int) -> tuple[Path, Path]:
    """Save two recommenders of the same items."""
    folders = place / "first", place / "second"
    for seed, folder in enumerate(folders):
        save_untrained(folder, num_items, seed)
    return folders


def save_untrained(folder: Path, num_items: int, seed: int, *, named: bool = False) -> None:
    """Save the recommender of a model that was never trained: it answers like any other.

    Items are called by their numbers, or `item 17`.
    """
    import torch

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    steps = 25
    users = np.repeat(np.arange(num_items // 10), steps)
    items = np.concatenate([rng.permutation(num_items), rng.integers(0, num_items, len(users))])
    times = 1_500_000_000 + np.arange(len(users)) % steps
    chosen = items[: len(users)]
    names = [f"item {item}" for item in chosen] if named else chosen
    log = interactions_from_columns(users, names, times, time_format="seconds")
    settings = Settings().with_values(
        {"width": 64, "length": _LENGTH, "num_blocks": 1, "num_heads": 1}
    )
    torch.manual_seed(seed)
    codebook = assign_random(log.num_items, num_splits=_SPLITS, num_sub_items=_SUB_ITEMS, seed=seed)
    prepared = prepare(no_holdout(log), codebook, {"holdout": "none", "seed": seed})
    model = build_model(settings.model, prepared.codes, codebook.num_sub_items)
    Recommender.from_model(prepared, model, settings).save(folder)


@dataclass(frozen=True)
class Question:
    """A request whose answer is known."""

    kind: str  # of traffic: which row of the report it belongs to
    path: str
    body: Json

    def history(self) -> list[int]:
        return list(self.body.get("history", []))


class Oracle:
    """What a recommender has to answer, by scoring everything. Safe to use from threads."""

    def __init__(self, folder: Path) -> None:
        self.version = kind_and_version(folder)[1]
        self._recommender = Recommender.load(folder)
        index = self._recommender.index
        self.items = [int(item) for item in self._recommender.item_ids.take(range(index.num_items))]
        self._places = {item: place for place, item in enumerate(self.items)}
        self._codes, self._embeddings = index.item_codes(), index.sub_item_embeddings()
        self._lock = threading.Lock()
        self.of_history = lru_cache(4096)(self._of_history)

    @property
    def width(self) -> int:
        return int(self._recommender.index.width)

    def answer(self, body: Json, history: Sequence[int] = ()) -> Answer:
        """Return the answer to a body of /recommend or /search; `history` is that of its user."""
        if "batch" in body:
            rest = {name: value for name, value in body.items() if name != "batch"}
            return tuple(pair for one in body["batch"] for pair in self.answer({**rest, **one}))
        given = body.get("history", list(history))
        if "sequence_embedding" in body:
            embedding = np.array(body["sequence_embedding"], np.float32)
        else:
            with self._lock:
                found = self._recommender.recommend([given], 1)
            embedding = found.sequence_embeddings[0]
        return self._best(embedding, body, given)

    def _of_history(self, history: tuple[int, ...], k: int) -> Answer:
        return self.answer({"history": list(history), "k": k})

    def _best(self, embedding: Float32Array, body: Json, history: Sequence[int]) -> Answer:
        eligible = np.ones(len(self.items), np.bool_)
        if "allow" in body:
            eligible[:] = False
            eligible[[self._places[item] for item in body["allow"]]] = True
        for item in [*history, *body.get("exclude", [])]:
            eligible[self._places[item]] = False
        boosts = None
        if "boosts" in body:
            places = np.array([self._places[entry["item"]] for entry in body["boosts"]])
            boosts = places, np.array([entry["boost"] for entry in body["boosts"]], np.float32)
        scores = reference.sub_item_scores(embedding, self._embeddings)
        ids, best = reference.exhaustive(
            scores, self._codes, body.get("k", 10), eligible=eligible, boosts=boosts
        )
        return tuple(
            (self.items[place], float(score)) for place, score in zip(ids, best, strict=True)
        )


def make_questions(oracle: Oracle, count: int, seed: int = 0) -> list[Question]:
    """Return so many questions of each kind whose answer follows from the question alone."""
    rng = np.random.default_rng(seed)

    def some(most: int) -> list[int]:
        return [oracle.items[place] for place in rng.choice(len(oracle.items), most, replace=False)]

    questions = []
    for _ in range(count):
        history = some(int(rng.integers(1, 40)))
        questions.append(Question("history", "/recommend", {"history": history, "k": 10}))
        filtered: Json = {"history": some(10), "k": 10, "exclude": some(20)}
        filtered["boosts"] = [
            {"item": item, "boost": round(float(rng.normal()), 3)} for item in some(3)
        ]
        if rng.random() < 0.5:
            filtered["allow"] = some(300)
        questions.append(Question("filters", "/recommend", filtered))
        batch = [{"history": some(5)} for _ in range(3)]
        questions.append(Question("batch", "/recommend", {"batch": batch, "k": 10}))
        embedding = [float(value) for value in rng.normal(size=oracle.width).astype(np.float32)]
        questions.append(Question("search", "/search", {"sequence_embedding": embedding, "k": 10}))
    return questions


def answer_of(body: Json) -> Answer:
    """Return what the service has answered, in the form of the oracle's answers."""
    return tuple(
        (entry["item"], float(np.float32(entry["score"])))
        for answer in body["answers"]
        for entry in answer["items"]
    )
