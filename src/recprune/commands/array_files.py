"""Arrays that a command is given as files."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.types import InputError


def read_array(path: str) -> NDArray[Any]:
    """Map the array of an .npy file."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: not a readable .npy file: {error}") from None
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path}: holds several arrays, expected one .npy")
    return array
