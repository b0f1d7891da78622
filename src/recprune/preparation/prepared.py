"""Everything that training reads, as one folder of plain arrays.

Preparing needs the whole data path; training needs only this folder, NumPy and torch. So a log can
be prepared on one machine and trained on another that has a GPU and little else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recprune.data.identifiers import ExternalIds, ids_from_arrays
from recprune.preparation.codebook import Codebook, check_codes
from recprune.preparation.cold_items import ColdItems
from recprune.preparation.holdout import Holdout, Targets
from recprune.storage import Saved, load_folder, save_folder
from recprune.types import (
    CodeArray,
    InputError,
    Int32Array,
    Int64Array,
    Json,
    StorageError,
    Timeline,
    frozen,
)

if TYPE_CHECKING:
    from recprune.data.interactions import Interactions

KIND = "prepared log"
_VERSION = 2  # version 1 had no times
MICROSECONDS = 1_000_000  # of a second


@dataclass(frozen=True, eq=False)
class Prepared:
    """A hold-out and a codebook, ready to train on.

    The history of user u is `items[offsets[u]:offsets[u + 1]]`, and a model may learn from
    `items[offsets[u]:train_ends[u]]` of it.
    """

    offsets: Int64Array  # [num_users + 1]
    items: Int32Array  # [num_interactions]
    train_ends: Int64Array  # [num_users]
    validation: Targets
    test: Targets
    codes: CodeArray  # [num_items, num_splits]
    num_sub_items: int
    user_ids: ExternalIds
    item_ids: ExternalIds
    settings: Json  # how the log was held out and the codes assigned
    times: Int64Array | None = None  # [num_interactions], microseconds; None: not kept
    cold: ColdItems | None = None  # untrained items whose place content tells, where it was given

    def __post_init__(self) -> None:
        for array in (self.offsets, self.items, self.train_ends, self.codes, self.times):
            if array is not None:
                frozen(array)

    @property
    def num_items(self) -> int:
        """Catalogue size |I|."""
        return len(self.codes)

    @property
    def num_users(self) -> int:
        """Number of users, those without training history included."""
        return len(self.train_ends)

    def history(self, targets: Targets, target: int) -> Int32Array:
        """Return what is known of the user when this target is to be predicted."""
        return self.items[targets.starts[target] : targets.ends[target]]

    def timeline(self, targets: Targets, target: int) -> Timeline | None:
        """Return the times of that history, and of the target; None where times are not kept."""
        if self.times is None:
            return None
        start, end = targets.starts[target], targets.ends[target]
        return Timeline(self.times[start:end] // MICROSECONDS, int(self.times[end] // MICROSECONDS))

    def is_temporal(self) -> bool:
        """Whether all test targets lie after all of training; not known where times are not."""
        if self.times is None or not len(self.test):
            return False
        last = self.times[self.in_training()].max(initial=-1)
        return bool(self.times[self.test.ends].min() > last)

    def training_counts(self) -> Int64Array:
        """Return how many training interactions every item has."""
        return np.bincount(self.items[self.in_training()], minlength=self.num_items)

    def train_log(self) -> Interactions:
        """Return what a model may learn from as a log; times that are not kept are all zero."""
        from recprune.data.interactions import Interactions

        offsets = np.concatenate([[0], np.cumsum(self.train_ends - self.offsets[:-1])])
        rows = self.in_training()
        times = np.zeros(offsets[-1], np.int64) if self.times is None else self.times[rows]
        return Interactions(offsets, self.items[rows], times, self.user_ids, self.item_ids)

    def in_training(self) -> NDArray[np.bool_]:
        """Return which interactions a model may learn from."""
        ends = np.repeat(self.train_ends, np.diff(self.offsets))
        return np.arange(len(self.items)) < ends

    def checksum(self, *, with_times: bool = False, with_cold: bool = True) -> str:
        """Return a checksum of everything: a model is of one prepared log and of no other.

        Times are left out for models that do not look at them, cold items for those that were
        trained without content.
        So models of a log that was prepared without them, by an earlier version, stay valid.
        """
        total = hashlib.sha256()
        for name, array in sorted(self._arrays().items()):
            if (name == "times" and not with_times) or (name in _COLD_ARRAYS and not with_cold):
                continue
            total.update(name.encode())
            total.update(np.ascontiguousarray(array).data)
        return total.hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write everything as a folder, in place of an older one if there is one."""
        settings = {"num_sub_items": self.num_sub_items, "preparation": self.settings}
        save_folder(folder, Saved(KIND, _VERSION, settings, self._arrays()))

    def _arrays(self) -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {
            "offsets": self.offsets,
            "items": self.items,
            "train_ends": self.train_ends,
            "codes": self.codes,
            **self.user_ids.to_arrays("user_ids"),
            **self.item_ids.to_arrays("item_ids"),
        }
        if self.times is not None:
            arrays["times"] = self.times
        if self.cold is not None:
            arrays |= {name: getattr(self.cold, part) for name, part in _COLD_ARRAYS.items()}
        for name, targets in (("validation", self.validation), ("test", self.test)):
            for part in _TARGET_PARTS:
                arrays[f"{name}_{part}"] = getattr(targets, part)
        return arrays

    @classmethod
    def load(cls, folder: str | Path, *, verify: bool = True) -> Prepared:
        """Memory-map a saved folder; `verify` compares every byte with its checksum first."""
        saved = load_folder(folder, kind=KIND, version=_VERSION, oldest=1, verify=verify)
        settings, arrays = saved.settings, saved.arrays
        try:
            user_ids, item_ids = (
                ids_from_arrays(arrays, name) for name in ("user_ids", "item_ids")
            )
            if user_ids is None or item_ids is None:
                raise KeyError("user_ids" if user_ids is None else "item_ids")
            _check_log(arrays, settings["num_sub_items"], len(user_ids), len(item_ids))
            targets = {
                name: Targets(*(arrays[f"{name}_{part}"] for part in _TARGET_PARTS))
                for name in ("validation", "test")
            }
            return cls(
                arrays["offsets"],
                arrays["items"],
                arrays["train_ends"],
                targets["validation"],
                targets["test"],
                arrays["codes"],
                settings["num_sub_items"],
                user_ids,
                item_ids,
                settings["preparation"],
                arrays.get("times"),
                _cold_items(arrays, len(arrays["codes"])),
            )
        except (InputError, StorageError) as error:
            raise StorageError(f"{folder}: {error}") from None
        except KeyError as error:
            raise StorageError(f"{folder}: the prepared log has no {error.args[0]}") from None


_TARGET_PARTS = ("users", "items", "starts", "ends")
_COLD_ARRAYS = {f"cold_{part}": part for part in ("items", "neighbours", "weights")}


def _check_log(
    arrays: Mapping[str, NDArray[Any]], num_sub_items: int, num_users: int, num_items: int
) -> None:
    """Refuse arrays that are not those of a prepared log: training looks things up by them."""
    codes, items, offsets = arrays["codes"], arrays["items"], arrays["offsets"]
    check_codes(codes, num_sub_items)
    if len(codes) != num_items:
        raise StorageError(f"codes has {len(codes)} items, item_ids has {num_items}")
    forms: dict[str, tuple[Any, int]] = {
        "offsets": (np.int64, num_users + 1),
        "items": (np.int32, items.size),
        "train_ends": (np.int64, num_users),
    }
    if "times" in arrays:
        forms["times"] = (np.int64, items.size)
    for name, (dtype, size) in forms.items():
        _check_form(arrays[name], name, dtype, size)
    begins, ends = offsets[:-1], offsets[1:]
    if offsets[0] != 0 or offsets[-1] != len(items) or (ends < begins).any():
        raise StorageError(f"offsets does not ascend from 0 to the {len(items)} items")
    _check_range(items, "items", num_items)
    train_ends = arrays["train_ends"]
    if ((train_ends < begins) | (train_ends > ends)).any():
        raise StorageError("train_ends has one that is outside its history")
    if "times" in arrays:
        backwards = np.flatnonzero(arrays["times"][1:] < arrays["times"][:-1]) + 1
        if not np.isin(backwards, offsets).all():
            raise StorageError("times has a history that does not ascend")
    for name in ("validation", "test"):
        _check_targets(name, arrays, num_users)


def _check_targets(name: str, arrays: Mapping[str, NDArray[Any]], num_users: int) -> None:
    """Refuse targets that are not a user's own, or that training would know."""
    users, items, starts, ends = (arrays[f"{name}_{part}"] for part in _TARGET_PARTS)
    for part, dtype in zip(_TARGET_PARTS, (np.int32, np.int32, np.int64, np.int64), strict=True):
        _check_form(arrays[f"{name}_{part}"], f"{name}_{part}", dtype, users.size)
    _check_range(users, f"{name}_users", num_users)
    offsets = arrays["offsets"]
    if (starts != offsets[users]).any():
        raise StorageError(f"{name}_starts has one that is not the start of its history")
    if ((ends <= starts) | (ends >= offsets[users + 1])).any():
        raise StorageError(f"{name}_ends has one that is outside its history, or at its start")
    if (arrays["train_ends"][users] > ends).any():
        raise StorageError(f"{name}_ends has one that is part of training")
    if (items != arrays["items"][ends]).any():
        raise StorageError(f"{name}_items has one that is not the item at its place in the log")


def _check_form(array: NDArray[Any], name: str, dtype: Any, size: int) -> None:
    if array.dtype != dtype or array.shape != (size,):
        given = f"{array.dtype}{list(array.shape)}"
        raise StorageError(f"{name} is {given}, expected {np.dtype(dtype)}[{size}]")


def _check_range(array: NDArray[Any], name: str, count: int) -> None:
    wrong = (array < 0) | (array >= count)
    if wrong.any():
        place = int(wrong.argmax())
        raise StorageError(f"{name}[{place}] is {array[place]}, expected 0 to {count - 1}")


def _cold_items(arrays: Mapping[str, NDArray[Any]], num_items: int) -> ColdItems | None:
    if not arrays.keys() & _COLD_ARRAYS.keys():
        return None
    cold = ColdItems(*(arrays[name] for name in _COLD_ARRAYS))
    cold.check_items(num_items)
    return cold


def _until(holdout: Holdout) -> Json:
    """Say when training ends: what comes later is new to a model."""
    from recprune.data.statistics import iso_time

    if holdout.cut_time is None and not len(holdout.train.times):
        return {}
    last = int(holdout.train.times.max()) if holdout.cut_time is None else holdout.cut_time
    return {"trained_until": iso_time(last)}


def prepare(
    holdout: Holdout, codebook: Codebook, settings: Json, cold: ColdItems | None = None
) -> Prepared:
    """Put a hold-out, the codebook of its training part and its cold items together."""
    log = holdout.log
    if codebook.num_items != log.num_items:
        raise InputError(f"codebook has {codebook.num_items} items, the log has {log.num_items}")
    return Prepared(
        log.offsets,
        log.items,
        log.offsets[:-1] + holdout.train.lengths,
        holdout.validation,
        holdout.test,
        codebook.codes,
        codebook.num_sub_items,
        log.user_ids,
        log.item_ids,
        settings | {"codebook": codebook.settings} | _until(holdout),
        log.times,
        cold,
    )
