"""A generation: which segments a catalogue has, and what had left them when a log began.

The file CURRENT names the generation that counts. It is replaced in one step, after all that it
names is on disk; so whoever reads it finds a whole catalogue, whatever happened in between.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from recprune.live.change_log import HEAD_BYTES, Tip
from recprune.live.division import WHOLE, Division
from recprune.live.item_names import IdKind, no_names
from recprune.live.notes import NO_NOTES, Notes, SavedNotes
from recprune.live.present_bits import checked_bits
from recprune.live.segment import Items, Segment, load_segment
from recprune.live.snapshot import LiveSnapshot, Moment, PresentSegment
from recprune.search.checks import MAX_ITEMS
from recprune.storage import Saved, json_checksum, load_folder, save_folder, writing_file
from recprune.types import Json, StorageError

CURRENT = "CURRENT"
_KIND = "live generation"
# Of one with notes; one in shards is of version 2, others are of version 1, which older programs
# read.
_VERSION = 3
_MOST_SEGMENTS = 10_000
_SAVED_NAME = re.compile(r"\d{8}")
_LOG_NAME = re.compile(r"(\d{8})\.log")
_TEMPORARY_NAME = re.compile(r"\.(\d{8}|\d{8}\.log|CURRENT)\.[a-z0-9_]{8}(\.old)?")

SegmentKey: TypeAlias = tuple[int, str]  # name and checksum: the one may be used again


@dataclass(frozen=True, eq=False)
class Generation:
    """A catalogue as it was when a log began, and that log."""

    number: int
    identity: str  # of the catalogue, 32 hexadecimal digits
    made_from: str | None  # what tells the items and vectors that it began with; None: nothing said
    # The identity of the first of the catalogues that took everything along, each from the one
    # before; its own where it is the first.
    origin: str
    snapshot: LiveSnapshot  # with an empty tail
    tip: Tip  # where the log begins

    def segments(self) -> dict[SegmentKey, Segment]:
        """Return its segments by name and checksum."""
        segments = (at.segment for at in self.snapshot.segments)
        return {(segment.name, segment.sha256): segment for segment in segments}


def segment_folder(folder: Path, name: int) -> Path:
    return folder / "segments" / f"{name:08}"


def generation_folder(folder: Path, number: int) -> Path:
    return folder / "generations" / f"{number:08}"


def empty_tail(like: Segment, id_kind: IdKind) -> Items:
    """Return no items, with the arrays that the items of a segment have."""
    index = like.index
    dtype = np.uint8 if index.num_sub_items <= 256 else np.uint16
    return Items(
        np.empty(0, np.uint32),
        np.empty((0, index.num_splits), dtype),
        None if index.item_bias is None else np.empty(0, np.float32),
        no_names(id_kind),
    )


# Writing -----------------------------------------------------------------------------------------


def write_generation(folder: Path, generation: Generation) -> None:
    """Save a generation, whose segments are saved; the one that counts stays what it was."""
    snapshot = generation.snapshot
    settings: Json = {
        "identity": generation.identity,
        "num_items": snapshot.num_items,
        "sequence": snapshot.sequence,
        "chain": generation.tip.chain,
        "log": generation.tip.log,
        "id_kind": snapshot.id_kind,
        "made_from": generation.made_from,
        "origin": generation.origin,
        "segments": [[at.segment.name, at.segment.sha256] for at in snapshot.segments],
    }
    is_divided = snapshot.division.num_shards > 1
    if is_divided:
        settings["cuts"] = list(snapshot.division.cuts)
        settings["shards"] = [at.shard for at in snapshot.segments]
    arrays: dict[str, NDArray[Any]] = {
        f"present_{place}": at.present
        for place, at in enumerate(snapshot.segments)
        if at.present is not None
    }
    version = 2 if is_divided else 1
    if snapshot.notes:
        arrays |= snapshot.notes.saved().to_arrays()
        version = _VERSION
    save_folder(
        generation_folder(folder, generation.number), Saved(_KIND, version, settings, arrays)
    )


def name_current(folder: Path, number: int) -> None:
    """Make a saved generation the one that counts."""
    content: Json = {"generation": number}
    content["sha256"] = json_checksum(content)
    path = folder / CURRENT
    with writing_file(path) as temporary:
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")


def sweep(folder: Path, kept: list[Generation]) -> None:
    """Remove what none of these generations names, and nothing that is not ours.

    Pre: the caller alone makes generations, and all of these were made. What cannot be removed now
    is removed later.
    """
    generations = {generation.number for generation in kept}
    segments = {name for generation in kept for name, _ in generation.segments()}
    oldest_log = min(generation.tip.log for generation in kept)
    for place in _entries(folder / "generations"):
        if _SAVED_NAME.fullmatch(place.name) and int(place.name) not in generations:
            _remove(place)
    for place in _entries(folder / "segments"):
        if _SAVED_NAME.fullmatch(place.name) and int(place.name) not in segments:
            _remove(place)
    # The oldest first: a reader whose log is there finds the next one too.
    for place in sorted(_entries(folder / "logs")):
        name = _LOG_NAME.fullmatch(place.name)
        if name and int(name[1]) < oldest_log and not _remove(place):
            break
    for room in (folder, folder / "generations", folder / "segments", folder / "logs"):
        for place in _entries(room):
            if _TEMPORARY_NAME.fullmatch(place.name):
                _remove(place)


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _remove(place: Path) -> bool:
    """Remove a file or folder; say whether it is gone."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)
    else:
        with suppress(OSError):
            place.unlink(missing_ok=True)
    return not os.path.lexists(place)


def next_segment_name(folder: Path) -> int:
    """Return a name that no segment has, not even one that was given up half written."""
    taken = [int(at.name) for at in _entries(folder / "segments") if _SAVED_NAME.fullmatch(at.name)]
    return max(taken, default=-1) + 1


# Reading -----------------------------------------------------------------------------------------


def is_live(folder: str | Path) -> bool:
    """Say whether a folder holds a live index."""
    return (Path(folder) / CURRENT).is_file()


def current_stamp(folder: Path) -> tuple[int, int]:
    """Return what changes whenever another generation counts."""
    try:
        found = (folder / CURRENT).stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def current_number(folder: Path) -> int:
    """Return the number of the generation that counts."""
    path = folder / CURRENT
    try:
        with path.open("rb") as file:
            text = file.read(4096)
    except (FileNotFoundError, NotADirectoryError):
        raise StorageError(f"{folder}: not a live index: it has no file {CURRENT}") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        content = json.loads(text)
        checksum = content.pop("sha256")
        number = content["generation"]
        is_whole = checksum == json_checksum(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise StorageError(f"{path}: damaged, or not written by recprune") from None
    if not is_whole or type(number) is not int or not 0 <= number < 10**8:
        raise StorageError(f"{path}: damaged, or not written by recprune")
    return number


def load_current(
    folder: Path,
    known: Mapping[SegmentKey, Segment],
    *,
    shard: int | None = None,
    verify: bool = True,
) -> Generation:
    """Load the generation that counts; segments that are known already are taken as they are.

    With `shard`, only what belongs to that shard is loaded.
    """
    loaded = dict(known)
    while True:
        stamp = current_stamp(folder)
        try:
            return _load_generation(folder, current_number(folder), loaded, shard, verify)
        except StorageError:
            if current_stamp(folder) == stamp:
                raise
        # Another one counts by now, and what the old one named may be gone.


def _load_generation(
    folder: Path,
    number: int,
    loaded: dict[SegmentKey, Segment],
    shard: int | None,
    verify: bool,
) -> Generation:
    """Load a generation; what is loaded of it is there for the next one, if this one vanishes."""
    place = generation_folder(folder, number)
    saved = load_folder(place, kind=_KIND, version=_VERSION, oldest=1, verify=verify)
    try:
        settings = _checked_settings(saved.settings)
        division, shards = _division_of(settings)
        if shard is not None and not 0 <= shard < division.num_shards:
            raise StorageError(f"has no shard {shard}, but {division.num_shards} shards")
        segments = {}
        for at, (name, sha256) in enumerate(settings["segments"]):
            if shard is not None and shards[at] != shard:
                continue
            if (name, sha256) not in loaded:
                home = segment_folder(folder, name)
                loaded[name, sha256] = load_segment(
                    home, name, sha256, settings["id_kind"], verify=verify
                )
            division.check(loaded[name, sha256].runs, shards[at])
            segments[at] = loaded[name, sha256]
        snapshot = _snapshot_of(settings, segments, shards, saved.arrays, division, shard)
    except StorageError as error:
        raise StorageError(f"{place}: {error}") from None
    tip = Tip(settings["log"], HEAD_BYTES, settings["sequence"], settings["chain"])
    identity: str = settings["identity"]
    return Generation(
        number,
        identity,
        settings.get("made_from"),
        str(settings.get("origin", identity)),
        snapshot,
        tip,
    )


def _checked_settings(settings: Json) -> Json:
    """Return the settings of a generation, if they are such as we write."""
    limits = {"num_items": MAX_ITEMS, "sequence": 2**63, "chain": 2**32, "log": 10**8}
    for name, limit in limits.items():
        value = settings.get(name)
        if type(value) is not int or not 0 <= value < limit:
            raise StorageError(f"{name} is {value!r}, expected 0 to {limit - 1}")
    identity, id_kind, entries = (
        settings.get(name) for name in ("identity", "id_kind", "segments")
    )
    for name in ("identity", "origin"):
        if not is_identity(settings.get(name, identity)):
            raise StorageError(f"{name} is not of 32 hexadecimal digits")
    made_from = settings.get("made_from")
    if made_from is not None and not is_checksum(made_from):
        raise StorageError("made_from is not of 64 hexadecimal digits")
    if id_kind not in get_args(IdKind):
        raise StorageError(f"id_kind is {id_kind!r}, expected {', '.join(get_args(IdKind))}")
    if type(entries) is not list or not 1 <= len(entries) <= _MOST_SEGMENTS:
        raise StorageError(f"segments is not a list of 1 to {_MOST_SEGMENTS}")
    for entry in entries:
        if (
            type(entry) is not list
            or [type(value) for value in entry] != [int, str]
            or not 0 <= entry[0] < 10**8
        ):
            raise StorageError(f"segments has {entry!r}, expected a name and a checksum")
    return settings


def _division_of(settings: Json) -> tuple[Division, list[int]]:
    """Return how a generation is divided, and the shard of every segment."""
    count = len(settings["segments"])
    if "cuts" not in settings:
        return WHOLE, [0] * count
    division = Division.checked(settings["cuts"], settings["num_items"])
    shards = settings.get("shards")
    if (
        type(shards) is not list
        or len(shards) != count
        or any(type(shard) is not int for shard in shards)
        or set(shards) != set(range(division.num_shards))
    ):
        raise StorageError(f"shards does not name each of {division.num_shards} by its segments")
    return division, shards


def read_division(folder: Path) -> tuple[str, Division]:
    """Return the identity of a catalogue, and how it is divided; no segment is looked at."""
    while True:
        stamp = current_stamp(folder)
        try:
            place = generation_folder(folder, current_number(folder))
            saved = load_folder(place, kind=_KIND, version=_VERSION, oldest=1)
            settings = _checked_settings(saved.settings)
            return settings["identity"], _division_of(settings)[0]
        except StorageError:
            if current_stamp(folder) == stamp:
                raise


def _snapshot_of(
    settings: Json,
    segments: dict[int, Segment],
    shards: list[int],
    arrays: Mapping[str, NDArray[Any]],
    division: Division,
    shard: int | None,
) -> LiveSnapshot:
    """Return what a generation says, if its segments, by their places, fit each other and it."""
    like = next(iter(segments.values()))
    first = like.index
    found = []
    for place, segment in segments.items():
        index = segment.index
        vectors = (first.sub_item_embeddings(), index.sub_item_embeddings())
        if vectors[0].shape != vectors[1].shape or not np.array_equal(*vectors):
            raise StorageError(f"segment {segment.name} has other vectors than the first")
        if (index.item_bias is None) != (first.item_bias is None):
            raise StorageError(f"segment {segment.name} differs from the first in having biases")
        present = arrays.get(f"present_{place}")
        count = index.num_items
        if present is not None:
            count = checked_bits(present, index.num_items, f"present_{place}")
        found.append(PresentSegment(segment, present, count, shards[place]))
    snapshot = LiveSnapshot(
        tuple(found),
        empty_tail(like, settings["id_kind"]),
        settings["num_items"],
        Moment(settings["sequence"], settings["chain"]),
        settings["id_kind"],
        division,
        shard,
        Notes(SavedNotes.checked(arrays, settings["num_items"])) if shard is None else NO_NOTES,
    )
    snapshot.check()
    return snapshot


def is_checksum(value: object) -> bool:
    """Say whether something is a SHA-256 as it is written."""
    return type(value) is str and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def is_identity(value: object) -> bool:
    """Say whether something can be the identity of a catalogue."""
    return type(value) is str and re.fullmatch(r"[0-9a-f]{32}", value) is not None


def new_identity() -> str:
    """Return what tells one catalogue from all others."""
    return os.urandom(16).hex()
