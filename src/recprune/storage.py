"""One saved thing is one folder: `manifest.json` and plain arrays that are memory-mapped.

The folder is written under a temporary name and put in place in one step, so a reader sees the old
one or the new one, whole. The manifest carries a format version, the caller's settings, and a
checksum for itself and for every array. Nothing is ever unpickled.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.types import Json, StorageError

MANIFEST = "manifest.json"


def save_folder(
    folder: str | Path,
    *,
    kind: str,
    version: int,
    settings: Json,
    arrays: Mapping[str, NDArray[Any]],
) -> None:
    """Write `arrays` and `settings` as a folder of the given kind.

    An existing folder of the same kind is replaced; anything else in the way is left alone and
    refused, so that a mistyped path cannot cost anybody their files.
    """
    target = Path(folder)
    check_target(target, kind=kind)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise StorageError(f"{target}: cannot be written: {_reason(error)}") from None
    try:
        temporary.chmod(0o777 & ~_umask())  # mkdtemp's 0700 would lock out the service's own user
        entries = {name: _write_array(temporary, name, array) for name, array in arrays.items()}
        manifest: Json = {
            "kind": kind,
            "version": version,
            "written_by": f"recprune {package_version('recprune')}",
            "settings": settings,
            "arrays": entries,
        }
        manifest["sha256"] = _manifest_checksum(manifest)
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
    folder: str | Path, *, kind: str, version: int, verify: bool = True
) -> tuple[Json, dict[str, NDArray[Any]]]:
    """Return the settings and the read-only, memory-mapped arrays of a saved folder.

    `verify=False` skips the arrays' checksums (which read every byte) but still compares each
    file's size, type and shape with the manifest.
    """
    source = Path(folder)
    manifest = _read_manifest(source, kind, version)
    arrays = {}
    for name, entry in manifest["arrays"].items():
        arrays[name] = _read_array(source / entry["file"], entry, verify)
    return manifest["settings"], arrays


def _read_manifest(source: Path, kind: str, version: int) -> Json:
    path = source / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        what = "has no manifest.json" if source.exists() else "does not exist"
        raise StorageError(f"{source}: not a saved {kind}: the folder {what}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{path}: cannot be read: {error}") from None
    try:
        manifest = json.loads(text)
        found, checksum = manifest["kind"], manifest.pop("sha256")
        found_version = manifest["version"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise StorageError(f"{path}: not a recprune manifest, or a truncated one") from None
    if found != kind:
        raise StorageError(f"{source}: holds a saved {found}, not a {kind}")
    if found_version != version:
        raise StorageError(
            f"{source}: {kind} format version {found_version}, this recprune reads {version}"
        )
    if checksum != _manifest_checksum(manifest):
        raise StorageError(f"{path}: checksum does not match: the manifest was changed or damaged")
    return dict(manifest)


def _write_array(folder: Path, name: str, array: NDArray[Any]) -> Json:
    path = folder / f"{name}.npy"
    # Little-endian on disk whatever the machine, so that a folder can be moved.
    stored = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    with path.open("wb") as file:
        np.save(file, stored, allow_pickle=False)
        _flush_to_disk(file.fileno())
    return {
        "file": path.name,
        "dtype": stored.dtype.str,
        "shape": list(stored.shape),
        "bytes": path.stat().st_size,
        "sha256": _file_checksum(path),
    }


def _read_array(path: Path, entry: Json, verify: bool) -> NDArray[Any]:
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise StorageError(f"{path}: {size} bytes, expected {entry['bytes']}: truncated?")
        if verify and _file_checksum(path) != entry["sha256"]:
            raise StorageError(f"{path}: checksum does not match: the file was changed or damaged")
        # A memory map of nothing is refused by the system; an empty array is read instead.
        mapped = 0 not in entry["shape"]
        array: NDArray[Any] = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except FileNotFoundError:
        raise StorageError(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        raise StorageError(f"{path}: cannot be read: {error}") from None
    if array.dtype.str != entry["dtype"] or list(array.shape) != entry["shape"]:
        raise StorageError(
            f"{path}: holds {array.dtype.str}{list(array.shape)}, "
            f"expected {entry['dtype']}{entry['shape']}"
        )
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
    try:
        found = json.loads((target / MANIFEST).read_text(encoding="utf-8"))["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        found = None
    if found != kind:
        what = f"a saved {found}" if isinstance(found, str) else "something else"
        raise StorageError(f"{target}: already exists and is {what}, not a {kind}; not overwritten")


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


def _manifest_checksum(manifest: Json) -> str:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _file_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
