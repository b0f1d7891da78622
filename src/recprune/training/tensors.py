"""Named arrays in one file, in the safetensors format: a JSON header, then plain bytes.

Written and read here with NumPy alone, so that training needs nothing but torch. Files are the same
that the `safetensors` package writes and reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.storage import writing_file
from recprune.types import InputError, StorageError

_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
# What a header that is not one may raise.
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
_MAX_HEADER = 100 << 20  # bytes: about what the safetensors package allows


def save_tensors(
    path: str | Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]
) -> None:
    """Write arrays and some text; the file appears whole, or not at all."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    for name, array in contiguous.items():
        if array.dtype not in _NAMES:
            raise InputError(f"{name} is {array.dtype}, which safetensors does not know")
        start, end = end, end + array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(tensors[name].shape),  # NumPy makes a contiguous number one-dimensional
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with writing_file(path) as temporary, temporary.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for array in contiguous.values():
            file.write(array.data)


def load_tensors(path: str | Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the arrays of a file, and its text."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise StorageError(f"{path}: no such file") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from None
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(_MAX_HEADER, len(content) - 8):
        raise StorageError(f"{path}: not a safetensors file, or cut off")
    data = memoryview(content)[8 + length :]
    try:
        header = json.loads(content[8 : 8 + length])
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(text, str) for text in dict(metadata).values()):
            raise ValueError("__metadata__ is not text")
        _check_places([entry["data_offsets"] for entry in header.values()], len(data))
        tensors = {name: _array(data, entry) for name, entry in header.items()}
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise StorageError(f"{path}: damaged: {error}") from None
    return tensors, metadata


def _check_places(places: list[list[int]], size: int) -> None:
    """Refuse arrays that overlap, or leave something out, as the format does.

    A small file could else stand for any number of copies of its bytes.
    """
    end = 0
    for start, stop in sorted(places):
        if start != end:
            raise ValueError("arrays overlap, or leave something out")
        end = stop
    if end != size:
        raise ValueError(f"arrays end after {end} bytes, the file after {size}")


def _array(data: memoryview, entry: Mapping[str, Any]) -> NDArray[Any]:
    dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), entry["shape"]
    start, end = entry["data_offsets"]
    if not 0 <= start <= end <= len(data) or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError("an array does not lie inside the file")
    return np.frombuffer(data[start:end], dtype).reshape(shape).copy()
