"""Saved folders as a stranger might make them: some bytes changed, and all checksums right.

A change is drawn from a number, so that one can be looked at again.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.storage import MANIFEST, json_checksum

# What a number or a text may be replaced by: the edges of types, and other types.
_ODD_VALUES: list[Any] = [
    0, 1, 2, -1, 63, 64, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1,
    2**63, 2**70, -(2**63), 0.0, 1.5, -1e300, float("nan"), float("inf"), None, True, False, "",
    "codes", "full", "slim", "compact", "../codes", "/etc/passwd", "a\0b", "\ud800", "<f4", "|O", [], [0],
    [-1], [[]], {}, {"a": 1}, "9" * 5000,
]  # fmt: skip


class Stranger:
    """Changes a copy of a saved folder, one change at a time, and puts it back."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._whole = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        self._changed: set[str] = set()

    def restore(self) -> None:
        for name in self._changed:
            (self._folder / name).write_bytes(self._whole[name])
        self._changed = set()

    def change(self, rng: np.random.Generator) -> str:
        """Make one change or a few, with all checksums right; say what they are."""
        said = []
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            manifests = [name for name in self._whole if name.endswith(MANIFEST)]
            arrays = [name for name in self._whole if name.endswith(".npy")]
            if rng.random() < 0.3:
                name = str(rng.choice(manifests))
                said.append(f"{name}: {self._change_manifest(name, rng)}")
            else:
                name = str(rng.choice(arrays))
                said.append(f"{name}: {self._change_array(name, rng)}")
        return ", ".join(said)

    # Manifests -----------------------------------------------------------------------------------

    def _change_manifest(self, name: str, rng: np.random.Generator) -> str:
        text = self._read(name)
        if rng.random() < 0.1:
            flipped = _flipped(text, rng)
            try:
                manifest = json.loads(flipped)
                manifest["sha256"]
            except (ValueError, KeyError, TypeError, RecursionError):
                self._write(name, flipped)
                return "a byte of it"
            self._seal(name, manifest)
            return "a byte of it, sealed"
        try:
            manifest = json.loads(text)
        except ValueError:  # changed before
            return "nothing"
        places = list(_places(manifest))
        holder, key = places[rng.integers(len(places))]
        kind = rng.choice(["replace", "replace", "remove", "add", "exchange"])
        said = f"{kind} {key!r}"
        if kind == "replace":
            value = _ODD_VALUES[rng.integers(len(_ODD_VALUES))]
            if isinstance(holder[key], int) and rng.random() < 0.5:
                value = holder[key] + int(rng.integers(-2, 3))
            said += f" by {value!r:.40}"
            holder[key] = value
        elif kind == "remove":
            del holder[key]
        elif kind == "exchange":
            other, other_key = places[rng.integers(len(places))]
            holder[key], other[other_key] = other[other_key], holder[key]
        elif isinstance(holder, dict):
            holder[str(_ODD_VALUES[rng.integers(len(_ODD_VALUES))])] = holder[key]
        else:
            holder.append(holder[key])
        try:
            json_checksum(manifest)
        except (ValueError, RecursionError):  # half a character, or a part of itself
            return said + " (nothing)"
        self._seal(name, manifest)
        return said

    def _seal(self, name: str, manifest: Any) -> None:
        """Write a manifest with its own checksum, which the manifest of a whole may have too."""
        if isinstance(manifest, dict):
            before = manifest.pop("sha256", None)
            manifest["sha256"] = json_checksum(manifest)
            parent = f"{Path(name).parent.parent.as_posix()}/{MANIFEST}".removeprefix("./")
            if "/" in name and parent in self._whole:
                try:
                    text = self._read(parent).decode().replace(str(before), manifest["sha256"])
                    self._seal(parent, json.loads(text))
                except ValueError:  # changed before
                    return
        self._write(name, json.dumps(manifest).encode())

    # Arrays --------------------------------------------------------------------------------------

    def _change_array(self, name: str, rng: np.random.Generator) -> str:
        content = self._read(name)
        if rng.random() < 0.1:
            content = _flipped(content, rng, end=128 if rng.random() < 0.5 else None)
            self._put_array(name, content, None)
            return "a byte of the file"
        try:
            array = np.load(io.BytesIO(content)).copy()
        except Exception:  # whatever NumPy makes of a file that was changed before
            return "nothing"
        kinds: list[Callable[[NDArray[Any], np.random.Generator], NDArray[Any]]] = [
            _with_odd_number, _with_odd_number, _with_odd_number, _with_exchange, _with_flip,
            _with_other_size, _with_other_type, _with_noise, _sorted, _with_copy,
        ]  # fmt: skip
        change = kinds[rng.integers(len(kinds))]
        with np.errstate(all="ignore"):  # of a type that a change before made too small
            after = np.ascontiguousarray(change(array, rng))
        file = io.BytesIO()
        np.save(file, after)
        self._put_array(name, file.getvalue(), after)
        return change.__name__.strip("_").replace("_", " ")

    def _put_array(self, name: str, content: bytes, array: NDArray[Any] | None) -> None:
        self._write(name, content)
        place = Path(name)
        path = (place.parent / MANIFEST).as_posix()
        try:
            manifest = json.loads(self._read(path))
            entry = _entry_of(manifest, place.stem)
            if entry is None:
                return
            entry["bytes"], entry["sha256"] = len(content), hashlib.sha256(content).hexdigest()
            if array is not None:
                entry["dtype"], entry["shape"] = array.dtype.str, list(array.shape)
        except (ValueError, KeyError, TypeError, AttributeError):  # changed before
            return
        self._seal(path, manifest)

    def _read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def _write(self, name: str, content: bytes) -> None:
        self._changed.add(name)
        (self._folder / name).write_bytes(content)


def _entry_of(part: Any, name: str) -> Any:
    """Return the entry of an array in a manifest, by the name of its file."""
    if name in part["arrays"]:
        return part["arrays"][name]
    for prefix, inner in part.get("parts", {}).items():
        if name.startswith(f"{prefix}_"):
            found = _entry_of(inner, name.removeprefix(f"{prefix}_"))
            if found is not None:
                return found
    return None


def _places(value: Any) -> Any:
    """Return everything in a manifest, as what holds it and the key there."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        if key != "sha256":
            yield value, key
        if isinstance(value[key], dict | list) and len(value[key]):
            yield from _places(value[key])


def _flipped(content: bytes, rng: np.random.Generator, end: int | None = None) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        place = int(rng.integers(min(end or len(damaged), len(damaged))))
        damaged[place] ^= 1 << int(rng.integers(8))
    return bytes(damaged)


def _with_odd_number(array: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    flat = array.reshape(-1)
    if not len(flat):
        return array
    place = int(rng.integers(len(flat)))
    if array.dtype.kind == "f":
        flat[place] = rng.choice([0.0, np.nan, np.inf, -np.inf, 1e38, 1e-45, -1.0])
    elif array.dtype.kind in "iu":
        info = np.iinfo(array.dtype)
        near = int(flat[place]) + int(rng.integers(-3, 4))
        odd = [0, 1, info.max, info.min, info.max - 1, len(array), len(flat), near, near, near]
        flat[place] = min(max(odd[rng.integers(len(odd))], info.min), info.max)
    return array


def _with_exchange(array: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    flat = array.reshape(-1)
    if len(flat) > 1:
        one, other = rng.integers(len(flat), size=2)
        flat[[one, other]] = flat[[other, one]]
    return array


def _with_copy(array: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    flat = array.reshape(-1)
    if len(flat) > 1:
        one, other = rng.integers(len(flat), size=2)
        flat[one] = flat[other]
    return array


def _with_flip(array: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    if not array.nbytes:
        return array
    content = _flipped(array.tobytes(), rng)
    return np.frombuffer(content, array.dtype).reshape(array.shape)


def _with_other_size(array: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    ways: list[Callable[[], NDArray[Any]]] = [
        lambda: array[:-1],
        lambda: array[:0],
        lambda: np.concatenate([array, array[:1]]),
        lambda: array.reshape(-1),
        lambda: array[None],
        lambda: np.array(array.T, order="C"),
        lambda: array[..., :-1] if array.ndim else array,
    ]
    return ways[rng.integers(len(ways))]()


def _with_other_type(array: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    types = ["u1", "i1", "u2", "i4", "u4", "i8", "u8", "f4", "f8", "f2", "?", ">i4", "c8", "S3"]
    chosen = types[rng.integers(len(types))]
    if array.dtype.kind not in "biuf":  # changed before
        return array
    return array.astype(chosen)


def _with_noise(array: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    octets = rng.bytes(array.nbytes)
    return np.frombuffer(octets, array.dtype).reshape(array.shape) if octets else array


def _sorted(array: NDArray[Any], _: np.random.Generator) -> NDArray[Any]:
    return np.sort(array.reshape(-1)).reshape(array.shape)
