"""A trained model as search sees it: codes, sub-item embeddings, and real users' embeddings."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from recprune.evaluation.metrics import RankedUsers, user_values
from recprune.preparation.prepared import Prepared
from recprune.search.checks import checked_codes, checked_queries, refuse_infinite
from recprune.search.index import Index
from recprune.storage import Saved, load_folder, read_npy, save_folder
from recprune.types import (
    CodeArray,
    Float32Array,
    InputError,
    Int32Array,
    Int64Array,
    Json,
    StorageError,
    frozen,
    random_generator,
)

_KIND = "workload"
_VERSION = 1
_MODEL_ARRAYS = ("codes", "sub_item_embeddings", "sequence_embeddings")
_ARRAYS = (*_MODEL_ARRAYS, "targets")
GIVEN = "given"  # in place of the name of a model that was not trained here


@dataclass(frozen=True, eq=False)
class Workload:
    """What a search is measured on."""

    log: str  # gitlog
    model: str  # gsasrecjpq
    codes: CodeArray
    sub_item_embeddings: Float32Array
    sequence_embeddings: Float32Array  # [users, d], of test users in a random order
    targets: Int32Array  # [users], the item that each of them took next; empty: not known
    settings: Json  # of the model and its training

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            frozen(getattr(self, name))

    @property
    def name(self) -> str:
        return f"{self.log}-{self.model}"

    @cached_property
    def index(self) -> Index:
        """Its index, built on first use."""
        return Index.build(self.codes, self.sub_item_embeddings, threads=2)

    def describe(self) -> Json:
        """Return the figures that every experiment with its searches records."""
        return {
            "log": self.log,
            "model": self.model,
            "items": self.index.num_items,
            "instruction_set": self.index.describe()["instruction_set"],
        }

    def checksum(self) -> str:
        """Return a checksum of all that is searched."""
        total = hashlib.sha256()
        for name in _ARRAYS:
            total.update(np.ascontiguousarray(getattr(self, name)).data)
        return total.hexdigest()[:16]

    def ndcg(self, ids: Int64Array, users: Int64Array | None = None) -> float | None:
        """Return the mean NDCG@10, given the best ten items of users, or of the first ones.

        None where it is not known what users took next.
        """
        if not len(self.targets):
            return None
        targets = self.targets[: len(ids)] if users is None else self.targets[users]
        ranked = RankedUsers.of_targets(ids[:, :10], targets)
        return float(user_values(ranked, ["NDCG@10"])["NDCG@10"].mean())

    def in_small(self, num_items: int, num_users: int) -> Workload:
        """Return the first users and so many items: what these users took, and others by chance."""
        targets = self.targets[:num_users]
        taken = np.unique(targets)
        enough = min(len(self.codes), num_items + len(taken))
        drawn = random_generator(0).choice(len(self.codes), enough, replace=False)
        others = drawn[~np.isin(drawn, taken)][: max(0, num_items - len(taken))]
        kept = np.sort(np.concatenate([taken, others]))
        return replace(
            self,
            codes=self.codes[kept],
            sequence_embeddings=self.sequence_embeddings[:num_users],
            targets=np.searchsorted(kept, targets).astype(np.int32),
        )

    def save(self, folder: str | Path) -> None:
        settings = {"log": self.log, "model": self.model, "training": self.settings}
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        save_folder(folder, Saved(_KIND, _VERSION, settings, arrays))

    @classmethod
    def load(cls, folder: str | Path) -> Workload:
        """Memory-map a saved folder."""
        saved = load_folder(folder, kind=_KIND, version=_VERSION)
        settings, arrays = saved.settings, saved.arrays
        try:
            return cls(
                settings["log"],
                settings["model"],
                arrays["codes"],
                arrays["sub_item_embeddings"],
                arrays["sequence_embeddings"],
                arrays["targets"],
                settings["training"],
            )
        except KeyError as error:
            raise StorageError(f"{folder}: the workload has no {error.args[0]}") from None

    @classmethod
    def from_files(cls, name: str, folder: Path) -> Workload:
        """Map a trained model that came as arrays, one in each file.

        `codes.npy`, `sub_item_embeddings.npy`, `sequence_embeddings.npy`, and `targets.npy` where
        it is known what the users took next.
        """
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder")
        arrays = (read_npy(str(folder / f"{name}.npy")) for name in _MODEL_ARRAYS)
        codes, embeddings, sequences = arrays
        try:
            codes, embeddings = checked_codes(codes, embeddings)
            num_splits, _, dimensions = embeddings.shape
            sequences, _ = checked_queries(
                np.atleast_2d(sequences), "sequence_embeddings", (num_splits * dimensions,)
            )
            refuse_infinite(sequences, "sequence_embeddings")
        except InputError as error:
            raise InputError(f"{folder}: {error}") from None
        if not len(sequences):
            raise InputError(f"{folder}: sequence_embeddings has no rows")
        path = folder / "targets.npy"
        targets = np.zeros(0, np.int32)
        if path.exists():
            targets = _given_targets(path, len(sequences), len(codes))
        return cls(name, GIVEN, codes, embeddings, sequences, targets, {})

    @classmethod
    def from_training(
        cls, log: str, model: str, prepared: Prepared, folder: Path, users: int
    ) -> Workload:
        """Encode the histories of test users with a trained model of RecJPQ."""
        from recprune.recommender.recommender import Recommender

        trained = Recommender.from_training(prepared, folder)
        if trained.settings["model"]["embedding"] != "recjpq":
            raise InputError(f"{folder}: a model without sub-items is no workload")
        chosen = test_users(prepared, users)
        histories = [prepared.history(prepared.test, int(target)) for target in chosen]
        timelines = [prepared.timeline(prepared.test, int(target)) for target in chosen]
        return cls(
            log,
            model,
            trained.index.item_codes(),
            trained.index.sub_item_embeddings(),
            trained.encoder.encode(histories, timelines),
            prepared.test.items[chosen],
            trained.settings,
        )


def _given_targets(path: Path, num_users: int, num_items: int) -> Int32Array:
    targets = read_npy(str(path))
    if targets.dtype.kind not in "iu" or targets.shape != (num_users,):
        raise InputError(
            f"{path}: {targets.dtype}{list(targets.shape)}, expected integers [{num_users}], "
            "one for each sequence embedding"
        )
    if outside := np.flatnonzero((targets < 0) | (targets >= num_items)).tolist():
        raise InputError(
            f"{path}: targets[{outside[0]}] is {targets[outside[0]]}, expected an item, "
            f"0 to {num_items - 1}"
        )
    return targets.astype(np.int32)


def test_users(prepared: Prepared, users: int) -> Int64Array:
    """Return which test users are looked at: the first of a random order, the same every time."""
    if not len(prepared.test):
        raise InputError("there are no test users")
    return random_generator(0).permutation(len(prepared.test))[:users]
