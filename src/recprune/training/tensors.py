"""Named arrays in one file, in the safetensors format, with some text beside them.

The safetensors package reads and writes it. Here a file appears whole or not at all, and errors
name it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.storage import writing_file
from recprune.types import StorageError, needs_extra

with needs_extra("train"):
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import save_file

# All text is one entry: the package writes several in an order of chance, and a training that is
# repeated is to end with the same bytes. Files of earlier versions have an entry for each.
_TEXT = "recprune"


def save_tensors(
    path: str | Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]
) -> None:
    """Write arrays and some text; the file appears whole, or not at all."""
    contiguous = {
        # NumPy makes a contiguous number one-dimensional.
        name: np.ascontiguousarray(array).reshape(array.shape)
        for name, array in tensors.items()
    }
    with writing_file(path) as temporary:
        mode = temporary.stat().st_mode
        try:
            save_file(contiguous, temporary, metadata={_TEXT: json.dumps(dict(metadata))})
        except SafetensorError as error:
            raise StorageError(f"{path}: cannot be written: {error}") from None
        # The package has put another file in its place, which only we may read, and not flushed it.
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())


def load_tensors(path: str | Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the arrays of a file, and its text."""
    try:
        with safe_open(path, framework="np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except FileNotFoundError:
        raise StorageError(f"{path}: no such file") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise StorageError(f"{path}: damaged, or not a safetensors file: {error}") from None
    return tensors, _text(metadata, path)


def _text(metadata: dict[str, str], path: str | Path) -> dict[str, str]:
    if set(metadata) != {_TEXT}:
        return metadata
    try:
        text = json.loads(metadata[_TEXT])
        if not isinstance(text, dict) or not all(isinstance(one, str) for one in text.values()):
            raise ValueError("the text is not one for each name")
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path}: damaged: {error}") from None
    return text
