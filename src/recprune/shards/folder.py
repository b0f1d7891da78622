"""A sharded index on disk: one folder, in it a folder for every shard, each an ordinary index.

A shard is a range of items, [first, first + n). `first` is a multiple of 64, so that bits which say
what is allowed are cut between words. The folder's own manifest is written last; until then, the
same call goes on where an interrupted one stopped.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from recprune.preparation.codebook import Codebook
from recprune.recommender.recommender import Recommender
from recprune.recommender.saving import KIND as RECOMMENDER_KIND
from recprune.search.checks import (
    MAX_ITEMS,
    checked_bias,
    checked_codes,
    checked_count,
    checked_threads,
)
from recprune.search.index import KIND as INDEX_KIND
from recprune.search.index import VERSION as INDEX_VERSION
from recprune.search.index import Index
from recprune.search.index_arrays import Layout, bias_extremes
from recprune.storage import (
    MANIFEST,
    Saved,
    check_target,
    load_folder,
    manifest_file_checksum,
    read_manifest,
    read_npy,
    save_folder,
    saved_kind,
    writing_file,
)
from recprune.types import (
    CodeArray,
    Float32Array,
    InputError,
    Json,
    Progress,
    RecpruneError,
    StorageError,
    no_progress,
)

KIND = "sharded index"
_VERSION = 2
_MAX_SHARDS = 10_000
_UNFINISHED = "unfinished"  # marks a folder that is being written as ours, by its text:
_MARK = "A sharded index of recprune is being written here; the same command goes on.\n"
# What is ours to remove: shards, notes on them, and both under the names that they are written as.
_SHARD_NAME = re.compile(r"shard-\d{5}")
_NOTE_NAME = re.compile(r"shard-\d{5}\.json")
_OLD_VECTORS_NAME = "transposed_embeddings.npy"  # of format version 1
_TEMPORARY_NAME = re.compile(r"\.shard-\d{5}(\.json)?\.[a-z0-9_]{8}(\.old)?")


class ShardLostError(RecpruneError):
    """A shard of which no replica answers; the message names it, its items and the reason."""


class PastMomentError(ShardLostError):
    """A moment of a live index that no replica of a shard knows any more."""


class ShardBusyError(RecpruneError):
    """So many searches wait for a shard that there is no room for another one."""


@dataclass(frozen=True)
class Shard:
    """One shard of an index: which items it has, and which folder is the right one."""

    number: int
    first: int
    num_items: int
    manifest_sha256: str
    highest_bias: float
    largest_bias: float  # in magnitude

    @property
    def stop(self) -> int:
        """The id after its last item."""
        return self.first + self.num_items

    def __str__(self) -> str:
        return f"shard {self.number} ({_items(self.first, self.num_items)})"


@dataclass(frozen=True)
class ShardedFolder:
    """What a saved sharded index says of itself."""

    path: Path
    manifest_sha256: str
    num_items: int
    shards: tuple[Shard, ...]
    vectors: Index  # of no items: it has the sub-item embeddings, and makes sub-item scores

    moment: None = None  # it stays as it is

    def share_of(self, shards: Iterable[Shard]) -> float:
        """Return which share of the items is in these shards."""
        return sum(shard.num_items for shard in shards) / self.num_items

    def highest_bias(self, shards: Iterable[Shard]) -> float:
        """Return the highest bias of an item in these shards."""
        return max(shard.highest_bias for shard in shards)

    def largest_bias(self) -> float:
        """Return the largest bias of all items in magnitude."""
        return max(shard.largest_bias for shard in self.shards)

    def stored_bytes(self) -> int:
        """Return what the shards take on disk, and nearly so in memory."""
        folders = (shard_folder(self.path, shard.number) for shard in self.shards)
        return sum(file.stat().st_size for folder in folders for file in folder.glob("*.npy"))

    def describe(self) -> Json:
        """Say what it holds; its shards are not looked at."""
        return {
            "items": self.num_items,
            "splits": self.vectors.num_splits,
            "sub_items": self.vectors.num_sub_items,
            "width": self.vectors.width,
            "shards": len(self.shards),
            "largest_shard": max(shard.num_items for shard in self.shards),
        }


@dataclass(frozen=True)
class ShardInputs:
    """Where the items to be sharded lie: codes and vectors in files, or both in a saved index."""

    codes: str  # .npy, a saved codebook, a saved index, or a saved recommender
    sub_item_embeddings: str | None = None  # .npy; None: the index has them
    item_bias: str | None = None  # .npy

    def read(self) -> tuple[CodeArray, Float32Array, Float32Array | None, Layout]:
        """Memory-map codes, sub-item embeddings and biases; say in which layout they come."""
        if self.sub_item_embeddings is None:
            if self.item_bias is not None:
                raise InputError("item biases go with codes and embeddings; an index has its own")
            is_recommender = saved_kind(self.codes) == RECOMMENDER_KIND
            index = Recommender.load(self.codes).index if is_recommender else Index.load(self.codes)
            return index.item_codes(), index.sub_item_embeddings(), index.item_bias, index.layout
        is_folder = Path(self.codes).is_dir()
        codes = Codebook.load(self.codes).codes if is_folder else read_npy(self.codes)
        bias = read_npy(self.item_bias) if self.item_bias is not None else None
        return codes, read_npy(self.sub_item_embeddings), bias, "auto"


def shard_ranges(num_items: int, num_shards: int) -> list[tuple[int, int]]:
    """Divide items into shards, as evenly as multiples of 64 allow: (first, number of items).

    Only the shards have to hold fewer items than an index can: all together may have more.
    """
    if not 1 <= checked_count(num_shards, "num_shards") <= _MAX_SHARDS:
        raise InputError(f"num_shards is {num_shards}, expected 1 to {_MAX_SHARDS}")
    blocks = -(-num_items // 64)
    cuts = [min(64 * (blocks * cut // num_shards), num_items) for cut in range(num_shards + 1)]
    ranges = [(first, stop - first) for first, stop in itertools.pairwise(cuts)]
    largest = max(count for _, count in ranges)
    if largest >= MAX_ITEMS:
        raise InputError(
            f"{largest} items in a shard, which holds fewer than {MAX_ITEMS}: use more"
        )
    return ranges


# Writing -----------------------------------------------------------------------------------------


def write_shards(
    codes: CodeArray,
    sub_item_embeddings: Float32Array,
    folder: str | Path,
    num_shards: int,
    *,
    item_bias: Float32Array | None = None,
    layout: Layout = "auto",
    threads: int = 1,
    progress: Progress = no_progress,
) -> None:
    """Write an index in shards, one after the other. The codes may be a memory-mapped file."""
    check_inputs(codes, sub_item_embeddings, item_bias, layout)
    checked_threads(threads)
    ranges = shard_ranges(len(codes), num_shards)
    claim_folder(folder)
    shards = []
    for number, (first, num_items) in enumerate(ranges):
        progress(f"shard {number + 1} of {num_shards}")
        arrays = (codes, sub_item_embeddings, item_bias)
        shards.append(write_shard(folder, number, first, num_items, arrays, layout, threads))
    finish_folder(folder, shards, sub_item_embeddings)


def check_inputs(
    codes: CodeArray, embeddings: Float32Array, item_bias: Float32Array | None, layout: str
) -> None:
    """Refuse what no shard could be made of. Values are looked at when their shard is built."""
    if layout not in get_args(Layout):
        raise InputError(f"layout is {layout!r}, expected one of {', '.join(get_args(Layout))}")
    checked_codes(codes[:0] if isinstance(codes, np.ndarray) and codes.ndim else codes, embeddings)
    if item_bias is not None and np.shape(item_bias) != (len(codes),):
        checked_bias(item_bias, len(codes))


def claim_folder(folder: str | Path) -> None:
    """Make the folder that shards are written to; refuse one that holds anything else."""
    path = Path(os.path.realpath(folder))
    mark = path / _UNFINISHED
    try:
        if os.path.lexists(mark):
            if not _is_marked(path):
                raise StorageError(f"{mark}: already exists and is something else; not overwritten")
            return
        # A mark that a kill left half written is no reason to refuse.
        if not path.is_dir() or any(not _is_half_a_mark(entry) for entry in path.iterdir()):
            check_target(path, kind=KIND)
        path.mkdir(parents=True, exist_ok=True)
        with writing_file(mark) as temporary:
            temporary.write_text(_MARK, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from None


def _is_marked(path: Path) -> bool:
    """Whether a folder is one that we have begun to write."""
    try:
        return (path / _UNFINISHED).read_text(encoding="utf-8") == _MARK
    except (OSError, UnicodeDecodeError):
        return False


def _is_half_a_mark(entry: Path) -> bool:
    return entry.name.startswith(f".{_UNFINISHED}.")


def write_shard(
    folder: str | Path,
    number: int,
    first: int,
    num_items: int,
    arrays: tuple[CodeArray, Float32Array, Float32Array | None],
    layout: Layout,
    threads: int,
) -> Shard:
    """Build one shard of whole arrays, unless it is there already; reads only its own range."""
    path = Path(os.path.realpath(folder))
    items = slice(first, first + num_items)
    codes, embeddings, bias = arrays[0][items], arrays[1], arrays[2]
    bias = bias[items] if bias is not None else None
    source = _fingerprint(codes, embeddings, bias, layout)
    place, note = shard_folder(path, number), path / f"{_name(number)}.json"
    finished = _finished(note, place, source)
    if finished is not None:
        return finished
    try:
        index = Index.build(codes, embeddings, item_bias=bias, layout=layout, threads=threads)
    except InputError as error:
        raise InputError(f"shard {number} ({_items(first, num_items)}): {error}") from None
    try:
        # From here on, the folder's manifest is no longer true.
        (path / MANIFEST).unlink(missing_ok=True)
        index.save(place)
        shard = Shard(
            number,
            first,
            num_items,
            read_manifest(place)["sha256"],
            *bias_extremes(bias),
        )
        with writing_file(note) as temporary:
            text = json.dumps({"source": source, "shard": asdict(shard)})
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{place}: cannot be written: {error.strerror or error}") from None
    return shard


def finish_folder(folder: str | Path, shards: list[Shard], embeddings: Float32Array) -> None:
    """Write the manifest, which makes a sharded index of the folder; sweep what is left over."""
    path = Path(os.path.realpath(folder))
    settings: Json = {
        "num_items": sum(shard.num_items for shard in shards),
        "num_sub_items": embeddings.shape[1],
        "shards": [asdict(shard) for shard in shards],
    }
    vectors = Index.of_no_items(embeddings)
    try:
        with tempfile.TemporaryDirectory(prefix=".manifest.", dir=path) as temporary:
            whole = Path(temporary) / "whole"
            save_folder(whole, Saved(KIND, _VERSION, settings, {}, {"vectors": vectors.parts()}))
            for file in whole.glob("*.npy"):
                file.replace(path / file.name)
            (whole / MANIFEST).replace(path / MANIFEST)  # the last
        (path / _UNFINISHED).unlink()
        kept = {_name(shard.number) for shard in shards}
        for entry in list(path.iterdir()):
            if entry.stem not in kept and _is_ours_to_remove(entry):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from None


def _is_ours_to_remove(entry: Path) -> bool:
    """Whether this is a file or folder that we wrote, and nothing else has been put into it."""
    is_temporary = _TEMPORARY_NAME.fullmatch(entry.name) is not None
    if entry.is_symlink() or not entry.is_dir():
        return (
            is_temporary
            or entry.name == _OLD_VECTORS_NAME
            or (_NOTE_NAME.fullmatch(entry.name) is not None and _noted(entry) is not None)
        )
    is_shard = _SHARD_NAME.fullmatch(entry.name) and saved_kind(entry) == INDEX_KIND
    return bool(is_shard or is_temporary) and all(
        file.is_file() and (file.suffix == ".npy" or file.name == MANIFEST)
        for file in entry.iterdir()
    )


# Reading -----------------------------------------------------------------------------------------


def is_sharded(folder: str | Path) -> bool:
    """Say whether a folder holds a sharded index, by the kind that its manifest names."""
    return saved_kind(folder) == KIND


def read_folder(folder: str | Path) -> ShardedFolder:
    """Return what a saved sharded index says of itself; its shards are not looked at."""
    path = Path(os.path.realpath(folder))
    if _is_marked(path) and not (path / MANIFEST).exists():
        raise StorageError(f"{path}: writing it was never finished; the same command goes on")
    saved = load_folder(path, kind=KIND, version=_VERSION, oldest=1)
    checksum = read_manifest(path)["sha256"]
    try:
        shards = tuple(Shard(**entry) for entry in saved.settings["shards"])
        num_items = saved.settings["num_items"]
        if saved.version == 1:
            vectors = _vectors_of_version_1(saved, str(path))
        else:
            vectors = Index.from_parts(saved.part("vectors", str(path)), str(path))
    except (KeyError, TypeError) as error:
        raise StorageError(f"{path}: an incomplete sharded index: {error}") from None
    _check_shards(path, shards, num_items)
    if vectors.num_items:
        raise StorageError(f"{path}: vectors has {vectors.num_items} items, expected none")
    return ShardedFolder(path, checksum, num_items, shards, vectors)


def _vectors_of_version_1(saved: Saved, source: str) -> Index:
    vectors = saved.arrays["transposed_embeddings"]
    num_sub_items = vectors.shape[-1] if vectors.ndim else 0
    settings: Json = {"num_items": 0, "num_sub_items": num_sub_items, "layout": "full"}
    arrays = {"transposed_embeddings": vectors}
    return Index.from_parts(Saved(INDEX_KIND, INDEX_VERSION, settings, arrays), source)


def _check_shards(path: Path, shards: tuple[Shard, ...], num_items: object) -> None:
    """Refuse shards that are not ranges of items, one after the other, of all items."""
    if not 1 <= len(shards) <= _MAX_SHARDS:
        raise StorageError(f"{path}: {len(shards)} shards, expected 1 to {_MAX_SHARDS}")
    first = 0
    for number, shard in enumerate(shards):
        counts = (shard.number, shard.first, shard.num_items)
        biases = (shard.highest_bias, shard.largest_bias)
        if (
            any(type(count) is not int for count in counts)
            or any(type(bias) is not float or not math.isfinite(bias) for bias in biases)
            or type(shard.manifest_sha256) is not str
            or (shard.number, shard.first) != (number, first)
            or (shard.num_items and first % 64)
            or not 0 <= shard.num_items < MAX_ITEMS
        ):
            raise StorageError(f"{path}: shard {number} is not what comes after the one before it")
        first = shard.stop
    if type(num_items) is not int or num_items != first:
        raise StorageError(f"{path}: num_items is {num_items!r}, its shards have {first}")


def shard_folder(folder: str | Path, number: int) -> Path:
    return Path(folder) / _name(number)


def load_shard(folder: str | Path, shard: Shard, *, verify: bool = True) -> Index:
    """Memory-map a shard, and refuse one that is not the one that the whole was written with.

    With `verify`, every byte of it is read and compared with its checksum.
    """
    index = Index.load(folder, verify=verify)
    expected = shard.manifest_sha256
    # Version 1 of the whole knew its shards by the files of their manifests.
    if expected != read_manifest(folder)["sha256"] and expected != manifest_file_checksum(folder):
        raise StorageError(f"{folder}: holds another {INDEX_KIND} than the one that belongs here")
    said = (shard.num_items, shard.highest_bias, shard.largest_bias)
    if said != (index.num_items, *bias_extremes(index.item_bias)):
        raise StorageError(f"{folder}: other items or biases than the sharded index says")
    return index


def _finished(note: Path, place: Path, source: str) -> Shard | None:
    """Return the shard that an earlier call made of the same input, if it is still there."""
    noted = _noted(note)
    if noted is None or noted[0] != source:
        return None
    try:
        load_shard(place, noted[1])
    except StorageError:
        return None  # then it is built again
    return noted[1]


def _noted(note: Path) -> tuple[str, Shard] | None:
    """Return of what a shard was made, and which one it is, if this is a note that says so."""
    try:
        noted = json.loads(note.read_text(encoding="utf-8"))
        return str(noted["source"]), Shard(**noted["shard"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _fingerprint(
    codes: CodeArray, embeddings: Float32Array, bias: Float32Array | None, layout: str
) -> str:
    digest = hashlib.sha256(f"{layout} {codes.dtype} {codes.shape} {embeddings.shape}".encode())
    for array in (codes, embeddings, bias if bias is not None else np.empty(0, np.float32)):
        digest.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    return digest.hexdigest()


def _name(number: int) -> str:
    return f"shard-{number:05}"


def _items(first: int, num_items: int) -> str:
    return f"items {first} to {first + num_items - 1}" if num_items else "no items"
