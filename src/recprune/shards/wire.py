"""What goes over the wire to a shard and back: one string of bytes, a short header and arrays.

Ray could send arrays and settings as they are, but treats each by itself: a query to four shards
then took a quarter longer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.search.methods import METHODS, Method

_ALIGNMENT = 16  # of every array within the message


def pack(settings: Sequence[Any], arrays: Sequence[NDArray[Any] | None]) -> bytes:
    """Return settings, of types that JSON knows, and arrays as one message."""
    shapes = [None if array is None else (array.dtype.str, array.shape) for array in arrays]
    header = json.dumps([settings, shapes]).encode()
    parts = [len(header).to_bytes(_ALIGNMENT, "little"), header, _padding(len(header))]
    for array in arrays:
        if array is not None:
            parts += [array.tobytes(), _padding(array.nbytes)]
    return b"".join(parts)


def unpack(message: bytes) -> tuple[list[Any], list[Any]]:
    """Return what was packed; the arrays, or None, are views of the message, and read-only."""
    end = _ALIGNMENT + int.from_bytes(message[:_ALIGNMENT], "little")
    settings, shapes = json.loads(message[_ALIGNMENT:end])
    place = end + len(_padding(end))
    arrays: list[Any] = []
    for entry in shapes:
        if entry is None:
            arrays.append(None)
            continue
        dtype, shape = np.dtype(entry[0]), entry[1]
        count = math.prod(shape)
        arrays.append(np.frombuffer(message, dtype, count, place).reshape(shape))
        place += count * dtype.itemsize + len(_padding(count * dtype.itemsize))
    return settings, arrays


def method_to_json(method: Method) -> list[Any]:
    return [method.name, asdict(method)]


def method_from_json(name: str, settings: dict[str, Any]) -> Method:
    return type(METHODS[name])(**settings)


def _padding(size: int) -> bytes:
    return bytes(-size % _ALIGNMENT)
