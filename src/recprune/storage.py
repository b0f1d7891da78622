"""One saved thing is one folder: `manifest.json` and plain arrays that are memory-mapped.

The folder is written under a temporary name and put in place in one step, so a reader sees the old
one or the new one, whole. The manifest carries a format version, the caller's settings, and a
checksum for itself and for every array. What is saved inside something else (an index in a
recommender) is a part, with a kind and a format version of its own. Nothing is ever unpickled.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.types import VERSION, InputError, Json, StorageError

MANIFEST = "manifest.json"
_ATTEMPTS = 20  # to load a folder that others keep replacing


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
            article = "an" if kind[0] in "aeiou" else "a"
            raise StorageError(f"{source}: holds a saved {self.kind}, not {article} {kind}")
        known = range(version if oldest is None else oldest, version + 1)
        if self.version not in known:
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
    try:
        check_target(target, kind=saved.kind)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise StorageError(f"{target}: cannot be written: {_reason(error)}") from None
    try:
        temporary.chmod(0o777 & ~_umask())  # mkdtemp's 0700 would lock out the service's own user
        manifest = _write_part(temporary, saved, "") | {"written_by": f"recprune {VERSION}"}
        manifest["sha256"] = json_checksum(manifest)
        with (temporary / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=2, ensure_ascii=False)
            file.write("\n")
            _flush_to_disk(file.fileno())
        _flush_folder(temporary)
        _put_in_place(temporary, target)
        _flush_folder(target.parent)
    except OSError as error:
        raise StorageError(f"{target}: cannot be written: {_reason(error)}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_folder(
    folder: str | Path, *, kind: str, version: int, oldest: int | None = None, verify: bool = True
) -> Saved:
    """Return what a folder holds, with read-only, memory-mapped arrays.

    It must be in this format version, or in one from `oldest` on. `verify=False` skips the arrays'
    checksums (which read every byte) but still compares each file's size, type and shape with the
    manifest.
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
            return _read_part(source, opened, manifest, "", verify)
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
        return os.open(source, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        raise StorageError(f"{source}: not a saved {kind}: no such folder") from None
    except OSError as error:
        raise StorageError(f"{source}: cannot be read: {_reason(error)}") from None


def _open_inside(opened: int, name: str) -> Any:
    return open(name, "rb", opener=lambda path, flags: os.open(path, flags, dir_fd=opened))


def saved_kind(folder: str | Path) -> str | None:
    """Return what kind of thing a folder says that it holds; None if it says nothing.

    Damage is not looked for: a folder that is to be replaced need not be whole.
    """
    try:
        return str(_manifest_of(Path(folder), "folder")["kind"])
    except StorageError:
        return None


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
        raise _VanishedError(f"{source}: not a saved {kind}: it has no {MANIFEST}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{path}: cannot be read: {error}") from None
    try:
        manifest: Json = json.loads(text)
        _ = manifest["kind"], manifest["version"], manifest["sha256"]
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


def _read_part(source: Path, opened: int, entry: Json, prefix: str, verify: bool) -> Saved:
    try:
        kind, version, settings = entry["kind"], entry["version"], entry["settings"]
        arrays, parts = dict(entry["arrays"]), dict(entry.get("parts", {}))
    except (KeyError, TypeError, ValueError, AttributeError):
        what = f"part {prefix[:-1]!r}" if prefix else "manifest"
        raise StorageError(f"{source / MANIFEST}: an incomplete {what}") from None
    return Saved(
        kind,
        version,
        settings,
        {
            name: _read_array(source, opened, f"{prefix}{name}", array, verify)
            for name, array in arrays.items()
        },
        {
            name: _read_part(source, opened, part, f"{prefix}{name}_", verify)
            for name, part in parts.items()
        },
    )


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
            array = _map_array(file)
    except FileNotFoundError:
        raise _VanishedError(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        raise StorageError(f"{path}: cannot be read: {error}") from None
    if array.dtype.str != entry["dtype"] or list(array.shape) != entry["shape"]:
        raise StorageError(
            f"{path}: holds {array.dtype.str}{list(array.shape)}, "
            f"expected {entry['dtype']}{entry['shape']}"
        )
    return array


def _map_array(file: Any) -> NDArray[Any]:
    """Memory-map the array of an open .npy file; `np.load` would open it a second time."""
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("not an array that recprune wrote")
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.hasobject or fortran_order:
        raise ValueError("not an array that recprune wrote")
    if 0 in shape:  # a memory map of nothing is refused by the system
        return np.empty(shape, dtype)
    return np.memmap(file, dtype, mode="r", offset=file.tell(), shape=shape)


def _write_array(folder: Path, name: str, array: NDArray[Any]) -> Json:
    path = folder / f"{name}.npy"
    # Little-endian on disk whatever the machine, so that a folder can be moved.
    stored = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    with path.open("wb") as file:
        np.save(file, stored, allow_pickle=False)
        _flush_to_disk(file.fileno())
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "dtype": stored.dtype.str,
        "shape": list(stored.shape),
        "bytes": path.stat().st_size,
        "sha256": checksum,
    }


def read_npy(path: str) -> NDArray[Any]:
    """Map the array of an .npy file from outside."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: not a readable .npy file: {error}") from None
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
        raise StorageError(f"{target}: already exists and is {what}, not a {kind}; not overwritten")


@contextmanager
def writing_file(path: str | Path) -> Iterator[Path]:
    """Give a temporary path to write to; on success it becomes `path`, else it is removed."""
    target = Path(path)
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


def _put_in_place(temporary: Path, target: Path) -> None:
    """Make `temporary` appear as `target` in one step; what was there takes its name."""
    try:
        temporary.rename(target)  # also replaces an empty folder
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _exchange(temporary, target)


def _exchange(first: Path, second: Path) -> None:
    """Swap two folders atomically where the system can, in three renames where it cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        at_cwd, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of linux/fcntl.h and linux/fs.h
        if renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange) == 0:
            return
        if ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(second))
    aside = first.with_name(first.name + ".old")
    second.rename(aside)
    first.rename(second)
    aside.rename(first)


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


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
