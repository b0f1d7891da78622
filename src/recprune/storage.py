"""One saved thing is one folder: `manifest.json` and plain arrays that are memory-mapped.

The folder is written under a temporary name and put in place in one step, so a reader sees the old
one or the new one, whole. The manifest carries a format version, the caller's settings, and a
checksum for itself and for every array. What is saved inside something else (an index in a
recommender) is a part, with a kind and a format version of its own. Nothing is ever unpickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.system import available_cores, exchange, open_folder
from recprune.types import VERSION, InputError, Json, StorageError, with_article

MANIFEST = "manifest.json"
# What else lies about, by a file in it, and what is to be done with that.
_TELLTALES = {
    "model.safetensors": "a trained model: recprune export makes a recommender of it",
    "checkpoint.safetensors": "a training that is to go on: recprune train --resume",
    "CURRENT": "a live index, which is named with --live beside its recommender",
}
_ATTEMPTS = 100  # to load a folder that others keep replacing
_MOST_READING_THREADS = 8  # more hash no faster: the largest array of an index is a third of it
_MAGIC = b"\x93NUMPY\x01\x00"  # of an .npy file, version 1.0
_ALIGNMENT = 16  # bytes: where the numbers of an array may begin, for any type; NumPy's are 64
_ARRAY_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]*")  # a file inside the folder, and no path
# How np.save begins a file of numbers: its parser takes any Python literal, and warns of some.
_HEADER = re.compile(
    rb"\{'descr': '([<|][biuf][1248])', 'fortran_order': False, 'shape': \(([0-9, ]*)\), \} *\n"
)


@dataclass(frozen=True)
class Saved:
    """What a folder holds, or a part of it: settings, arrays, and further parts by name."""

    kind: str
    version: int  # of the format
    settings: Json
    arrays: Mapping[str, NDArray[Any]]
    parts: Mapping[str, Saved] = field(default_factory=dict)

    def part(self, name: str, source: str) -> Saved:
        """Return a part by its name; `source` says in an error where the whole came from."""
        if name not in self.parts:
            raise StorageError(f"{source}: the {self.kind} has no {name}")
        return self.parts[name]

    def check(self, *, kind: str, version: int, oldest: int | None = None, source: str) -> None:
        """Refuse anything but this kind, in this format version or one from `oldest` on."""
        if self.kind != kind:
            raise StorageError(f"{source}: holds a saved {self.kind}, not {_one(kind)}")
        known = range(version if oldest is None else oldest, version + 1)
        if type(self.version) is not int or self.version not in known:
            raise StorageError(
                f"{source}: {kind} format version {self.version}, this recprune reads "
                + " to ".join(dict.fromkeys([str(known[0]), str(known[-1])]))
            )


def save_folder(folder: str | Path, saved: Saved) -> None:
    """Write everything as a folder of its kind.

    An existing folder of the same kind is replaced; anything else in the way is left alone and
    refused, so that a mistyped path destroys no files.
    """
    target = Path(os.path.realpath(folder))  # a link stays, what it points to is replaced
    with writing_to(target):
        check_target(target, kind=saved.kind)
        _write_folder(target, saved)


def _write_folder(target: Path, saved: Saved) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        temporary.chmod(0o777 & ~_umask())  # mkdtemp's 0700 would lock out the service's own user
        manifest = _write_part(temporary, saved, "") | {"written_by": f"recprune {VERSION}"}
        manifest["sha256"] = json_checksum(manifest)
        with (temporary / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=2, ensure_ascii=False)
            file.write("\n")
            _flush_to_disk(file.fileno())
        _flush_folder(temporary)
        put_in_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_folder(
    folder: str | Path, *, kind: str, version: int, oldest: int | None = None, verify: bool = True
) -> Saved:
    """Return what a folder holds, with read-only, memory-mapped arrays.

    It must be in this format version, or in one from `oldest` on. `verify=False` skips the arrays'
    checksums (which read every byte, several files at a time) but still compares each file's size,
    type and shape with the manifest. Checksums tell damage, not intent: what stands in the arrays
    is for each kind to check.
    """
    source = Path(folder)
    for attempt in range(_ATTEMPTS):
        opened = _open_folder(source, kind)
        try:
            # Everything is opened relative to this one folder: if a save swaps another one in
            # meanwhile, we still see a single one whole.
            manifest = _read_manifest(source, opened, kind)
            claimed = Saved(manifest["kind"], manifest["version"], {}, {})
            claimed.check(kind=kind, version=version, oldest=oldest, source=str(source))
            _check_manifest(source, manifest)
            entries = _array_entries(source, manifest, "")
            return _part(manifest, "", _read_arrays(source, opened, entries, verify))
        except _VanishedError as error:
            # A save has swapped our folder out and removed it: begin again with the new one.
            if attempt == _ATTEMPTS - 1 or _is_same_folder(source, opened):
                raise StorageError(str(error)) from None
        finally:
            os.close(opened)
    raise AssertionError("unreachable")


class _VanishedError(Exception):
    """A file that should be in the folder is not there."""


def _is_same_folder(source: Path, opened: int) -> bool:
    try:
        return os.path.samestat(source.stat(), os.fstat(opened))
    except OSError:
        return False


def _open_folder(source: Path, kind: str) -> int:
    try:
        return open_folder(source)
    except (FileNotFoundError, NotADirectoryError):
        why = "it is a file" if source.is_file() else "no such folder"
        raise StorageError(f"{source}: not a saved {kind}: {why}") from None
    except OSError as error:
        raise StorageError(f"{source}: cannot be read: {_reason(error)}") from None


def _open_inside(opened: int, name: str) -> Any:
    def open_file(path: str, flags: int) -> int:
        # Without waiting for the other end of a pipe, which is then refused.
        descriptor = os.open(path, flags | os.O_NONBLOCK, dir_fd=opened)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a plain file", path)
        return descriptor

    return open(name, "rb", opener=open_file)


def saved_kind(folder: str | Path) -> str | None:
    """Return what kind of thing a folder says that it holds; None if it says nothing.

    Damage is not looked for: a folder that is to be replaced need not be whole.
    """
    try:
        return str(_manifest_of(Path(folder), "folder")["kind"])
    except StorageError:
        return None


def looks_like(folder: Path) -> str:
    """Say what a folder without a manifest may be, to follow a message; nothing if none knows."""
    for name, what in _TELLTALES.items():
        if (folder / name).exists():
            return f"; it looks like {what}"
    return ""


def read_manifest(folder: str | Path, kind: str = "folder") -> Json:
    """Return the manifest of a saved folder of any kind; `kind` is what a message calls it.

    Its "sha256" covers the whole of it, and with it the checksums of all arrays.
    """
    manifest = _manifest_of(Path(folder), kind)
    _check_manifest(Path(folder), manifest)
    return manifest


def _manifest_of(source: Path, kind: str) -> Json:
    for attempt in range(_ATTEMPTS):
        opened = _open_folder(source, kind)
        try:
            return _read_manifest(source, opened, kind)
        except _VanishedError as error:  # as in `load_folder`
            if attempt == _ATTEMPTS - 1 or _is_same_folder(source, opened):
                raise StorageError(str(error)) from None
        finally:
            os.close(opened)
    raise AssertionError("unreachable")


def manifest_file_checksum(folder: str | Path) -> str:
    """Return the SHA-256 of a manifest's file: by this, older formats and records know a folder."""
    path = Path(folder) / MANIFEST
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {_reason(error)}") from None


def _read_manifest(source: Path, opened: int, kind: str) -> Json:
    path = source / MANIFEST
    try:
        with _open_inside(opened, MANIFEST) as file:
            text = file.read().decode()
    except FileNotFoundError:
        hint = looks_like(source)
        raise _VanishedError(f"{source}: not a saved {kind}: it has no {MANIFEST}{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{path}: cannot be read: {error}") from None
    try:
        manifest: Json = json.loads(text)
        _ = manifest["kind"], manifest["version"], manifest["sha256"]
        _ = json_checksum(manifest)  # of half a character, for one, there is none
    except (ValueError, KeyError, TypeError, RecursionError):
        raise StorageError(f"{path}: not a recprune manifest, or a truncated one") from None
    return manifest


def _check_manifest(source: Path, manifest: Json) -> None:
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    if manifest["sha256"] != json_checksum(content):
        raise StorageError(
            f"{source / MANIFEST}: checksum does not match: the manifest was changed or damaged"
        )


def _write_part(folder: Path, saved: Saved, prefix: str) -> Json:
    """Write the arrays of a part and of its own parts, and return its entry in the manifest."""
    entry: Json = {
        "kind": saved.kind,
        "version": saved.version,
        "settings": saved.settings,
        "arrays": {
            name: _write_array(folder, f"{prefix}{name}", array)
            for name, array in saved.arrays.items()
        },
    }
    if saved.parts:
        entry["parts"] = {
            name: _write_part(folder, part, f"{prefix}{name}_")
            for name, part in saved.parts.items()
        }
    return entry


def _array_entries(source: Path, entry: Json, prefix: str) -> dict[str, Json]:
    """Return the entries of all arrays of a part and of its own parts, by the names of files."""
    what = f"part {prefix[:-1]!r}" if prefix else "manifest"
    incomplete = StorageError(f"{source / MANIFEST}: an incomplete {what}")
    if not isinstance(entry, dict) or not entry.keys() >= {"kind", "version", "settings", "arrays"}:
        raise incomplete
    arrays, parts = entry["arrays"], entry.get("parts", {})
    if any(not isinstance(part, dict) for part in (entry["settings"], arrays, parts)):
        raise incomplete
    for name in (*arrays, *parts):
        if not _ARRAY_NAME.fullmatch(name):
            raise StorageError(f"{source / MANIFEST}: {name!r} is no name of an array or a part")
    entries = {f"{prefix}{name}": array for name, array in arrays.items()}
    for name, array in entries.items():
        if not isinstance(array, dict) or not array.keys() >= {"dtype", "shape", "bytes", "sha256"}:
            raise StorageError(f"{source / MANIFEST}: an incomplete array {name!r}")
    for name, part in parts.items():
        entries |= _array_entries(source, part, f"{prefix}{name}_")
    return entries


def _part(entry: Json, prefix: str, arrays: Mapping[str, NDArray[Any]]) -> Saved:
    return Saved(
        entry["kind"],
        entry["version"],
        entry["settings"],
        {name: arrays[f"{prefix}{name}"] for name in entry["arrays"]},
        {
            name: _part(part, f"{prefix}{name}_", arrays)
            for name, part in entry.get("parts", {}).items()
        },
    )


def reading_threads() -> int:
    """Return on how many threads a folder is compared with its checksums, and looked through."""
    return min(available_cores(), _MOST_READING_THREADS)


def _read_arrays(
    source: Path, opened: int, entries: Mapping[str, Json], verify: bool
) -> dict[str, NDArray[Any]]:
    def read(name: str) -> NDArray[Any]:
        return _read_array(source, opened, name, entries[name], verify)

    if not verify:
        return {name: read(name) for name in entries}
    # The largest first: the others fit beside it.
    order = sorted(entries, key=lambda name: -_bytes_of(entries[name]))
    with ThreadPoolExecutor(reading_threads()) as pool:
        return dict(zip(order, pool.map(read, order), strict=True))


def _bytes_of(entry: Json) -> int:
    return entry["bytes"] if isinstance(entry["bytes"], int) else 0


def _read_array(source: Path, opened: int, name: str, entry: Json, verify: bool) -> NDArray[Any]:
    path = source / f"{name}.npy"
    try:
        with _open_inside(opened, path.name) as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry["bytes"]:
                raise StorageError(f"{path}: {size} bytes, expected {entry['bytes']}: truncated?")
            if verify and hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                raise StorageError(f"{path}: checksum does not match: changed or damaged")
            file.seek(0)
            return _map_array(file, size, path, entry)
    except FileNotFoundError:
        raise _VanishedError(f"{path}: missing") from None
    except (OSError, ValueError, OverflowError) as error:
        raise StorageError(f"{path}: cannot be read: {error}") from None


def _map_array(file: Any, size: int, path: Path, entry: Json) -> NDArray[Any]:
    """Memory-map the array of an open .npy file; `np.load` would open it a second time."""
    start = file.read(len(_MAGIC) + 2)
    length = int.from_bytes(start[len(_MAGIC) :], "little")
    header = _HEADER.fullmatch(file.read(length))
    begin = len(start) + length
    if not start.startswith(_MAGIC) or header is None or begin % _ALIGNMENT:
        raise ValueError("not an array that recprune wrote")
    dtype = np.dtype(header[1].decode())
    shape = tuple(int(size) for size in header[2].replace(b",", b" ").split())
    if dtype.str != entry["dtype"] or list(shape) != entry["shape"]:
        raise StorageError(
            f"{path}: holds {dtype.str}{list(shape)}, expected {entry['dtype']}{entry['shape']}"
        )
    # Before it is mapped: reading what a file does not have would end the process.
    if begin + math.prod(shape) * dtype.itemsize != size:
        raise StorageError(f"{path}: {size} bytes, too few or too many for {list(shape)}")
    if 0 in shape:  # a memory map of nothing is refused by the system
        return np.empty(shape, dtype)
    return _mapped(file, size)[begin:].view(dtype).reshape(shape)


def _mapped(file: Any, size: int) -> NDArray[np.uint8]:
    """Return the bytes of an open file, mapped."""
    try:
        from recprune._native import map_file
    except ImportError:  # where models are trained there need be nothing compiled
        return np.memmap(file, np.uint8, "r", shape=(size,))  # which keeps a descriptor
    return map_file(file.fileno(), size)


def sha256_of(path: Path) -> str:
    """Return the checksum of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_array(folder: Path, name: str, array: NDArray[Any]) -> Json:
    path = folder / f"{name}.npy"
    # Little-endian on disk whatever the machine, so that a folder can be moved.
    stored = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    with path.open("wb") as file:
        np.save(file, stored, allow_pickle=False)
        _flush_to_disk(file.fileno())
    return {
        "dtype": stored.dtype.str,
        "shape": list(stored.shape),
        "bytes": path.stat().st_size,
        "sha256": sha256_of(path),
    }


def read_npy(path: str) -> NDArray[Any]:
    """Map the array of an .npy file from outside."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {_reason(error)}") from None
    except (ValueError, EOFError) as error:
        # NumPy takes whatever begins otherwise for a pickle, and says how to load that.
        why = "it does not begin like one" if "pickle" in str(error) else str(error)
        raise InputError(f"{path}: not a readable .npy file: {why}") from None
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path}: holds several arrays, expected one .npy")
    return array


def check_target(folder: str | Path, *, kind: str) -> None:
    """Refuse a place where `save_folder` could not write, before the work for it is done."""
    target = Path(folder)
    existing = next(place for place in (target, *target.absolute().parents) if place.exists())
    if not os.access(existing if existing != target else target.absolute().parent, os.W_OK):
        raise StorageError(f"{target}: cannot be written: Permission denied")
    if not target.exists() and not target.is_symlink():
        return
    if target.is_dir() and not any(target.iterdir()):
        return
    found = saved_kind(target)
    if found != kind:
        what = f"a saved {found}" if found is not None else "something else"
        raise StorageError(
            f"{target}: already exists and is {what}, not {_one(kind)}; not overwritten"
        )


@contextmanager
def writing_to(path: str | Path) -> Iterator[None]:
    """Have whatever cannot be written end in an error that names `path`.

    The system names no file where a disk is full, and a temporary one elsewhere.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {_reason(error)}") from None


@contextmanager
def writing_file(path: str | Path) -> Iterator[Path]:
    """Give a temporary path to write to; on success it becomes `path`, else it is removed."""
    target = Path(path)
    with writing_to(target):
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        temporary = Path(name)
        try:
            temporary.chmod(0o666 & ~_umask())
            yield temporary
            _flush_to_disk(descriptor)
            temporary.replace(target)
            _flush_folder(target.parent)
        finally:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)


@contextmanager
def writing_folder(folder: str | Path) -> Iterator[Path]:
    """Give a temporary folder to fill; on success it becomes `folder`, which is new or empty.

    For what changes later: anything else is a saved folder, and written by `save_folder`.
    """
    target = Path(os.path.realpath(folder))
    with writing_to(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            temporary.chmod(0o777 & ~_umask())
            yield temporary
            _flush_folder(temporary)
            temporary.rename(target)
            _flush_folder(target.parent)
        except StorageError as error:  # of something in it, whose name nobody knows
            raise StorageError(str(error).replace(str(temporary), str(target))) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def put_in_place(temporary: Path, target: Path) -> None:
    """Make a folder appear as `target` in one step; what was there takes its name."""
    try:
        temporary.rename(target)  # also replaces an empty folder
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        exchange(temporary, target)
    _flush_folder(target.parent)


def json_checksum(value: Json) -> str:
    """Return the SHA-256 of a value's one canonical text."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _flush_to_disk(descriptor: int) -> None:
    os.fsync(descriptor)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current


def _one(kind: str) -> str:
    return kind if kind.endswith("s") else with_article(kind)  # "attributes" are several


def _reason(error: OSError) -> str:
    if isinstance(error, FileExistsError):  # where a folder was to be made
        return "a file is in the way"
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        return str(error.args[0][0][-1])  # of all files that were not copied, the first
    # Arrow's errors have a text of their own where the system's is shorter.
    return os.strerror(error.errno) if error.errno else str(error)
