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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.types import VERSION, InputError, Json, StorageError

MANIFEST = "manifest.json"
_ATTEMPTS = 20  # to load a folder that others keep replacing


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
    target = Path(os.path.realpath(folder))  # a link stays, what it points to is replaced
    try:
        check_target(target, kind=kind)
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
            "written_by": f"recprune {VERSION}",
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
    for attempt in range(_ATTEMPTS):
        try:
            opened = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            raise StorageError(f"{source}: not a saved {kind}: no such folder") from None
        except OSError as error:
            raise StorageError(f"{source}: cannot be read: {_reason(error)}") from None
        try:
            # Everything is opened relative to this one folder: if a save swaps another one in
            # meanwhile, we still see a single one whole.
            manifest = _read_manifest(source, opened, kind, version)
            arrays = {
                name: _read_array(source, opened, name, entry, verify)
                for name, entry in manifest["arrays"].items()
            }
        except _VanishedError as error:
            # A save has swapped our folder out and removed it: begin again with the new one.
            if attempt == _ATTEMPTS - 1 or _is_same_folder(source, opened):
                raise StorageError(str(error)) from None
        else:
            return manifest["settings"], arrays
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


def _open_inside(opened: int, name: str) -> Any:
    return open(name, "rb", opener=lambda path, flags: os.open(path, flags, dir_fd=opened))


def _read_manifest(source: Path, opened: int, kind: str, version: int) -> Json:
    path = source / MANIFEST
    try:
        with _open_inside(opened, MANIFEST) as file:
            text = file.read().decode()
    except FileNotFoundError:
        raise _VanishedError(f"{source}: not a saved {kind}: it has no {MANIFEST}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{path}: cannot be read: {error}") from None
    try:
        manifest = json.loads(text)
        checksum = manifest.pop("sha256")
        found, found_version = manifest["kind"], manifest["version"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise StorageError(f"{path}: not a recprune manifest, or a truncated one") from None
    if found != kind:
        article = "an" if kind[0] in "aeiou" else "a"
        raise StorageError(f"{source}: holds a saved {found}, not {article} {kind}")
    if found_version != version:
        raise StorageError(
            f"{source}: {kind} format version {found_version}, this recprune reads {version}"
        )
    if checksum != _manifest_checksum(manifest):
        raise StorageError(f"{path}: checksum does not match: the manifest was changed or damaged")
    return dict(manifest)


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
    """Map the array of an .npy file that somebody else made."""
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
    try:
        found = json.loads((target / MANIFEST).read_text(encoding="utf-8"))["kind"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        found = None
    if found != kind:
        what = f"a saved {found}" if isinstance(found, str) else "something else"
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


def _manifest_checksum(manifest: Json) -> str:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
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
