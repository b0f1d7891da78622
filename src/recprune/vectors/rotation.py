"""Turning vectors so that splits share what they vary by: the first step of OPQ.

Ge, He, Ke and Sun, Optimized Product Quantization (2013), section 4.2: principal axes are dealt to
the splits so that the products of their variances are about equal. An inner product stays what it
is when both sides are turned.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.types import Float32Array, Float64Array, InputError, StorageError, needs_extra

_SAMPLE = 65_536  # vectors that the axes are found from
_ROWS = 16_384  # that are looked at together: some megabytes beside those of the folder


def balanced_rotation(
    vectors: Float32Array, num_splits: int, rng: np.random.Generator
) -> Float32Array:
    """Return an orthonormal matrix [d', d], d' being d or what comes next that M divides.

    Beyond d its rows are zero. Turned vectors are `vectors @ rotation.T`.
    """
    width = vectors.shape[1]
    chosen = np.sort(rng.permutation(len(vectors))[:_SAMPLE])
    variances, axes = _principal_axes(vectors[chosen].astype(np.float64))
    size = -(-width // num_splits)  # of a split
    places = _dealt(variances, num_splits, size)
    rotation = np.zeros((num_splits * size, width), np.float32)
    rotation[places] = axes
    return rotation


def turned(vectors: Float32Array, rotation: Float32Array, name: str) -> Float32Array:
    """Return vectors [n, d], which errors call `name`, as an index of turned ones has them.

    They are turned one by one: BLAS gives a row other last bits in company than alone.
    """
    found = np.empty((len(vectors), len(rotation)), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for row, vector in zip(found, vectors, strict=True):
            np.matmul(rotation, vector, out=row)
    finite = np.isfinite(found).all(axis=1)
    if not finite.all():
        raise InputError(f"{name}[{int(finite.argmin())}] is more than float32 can hold, turned")
    return found


def checked_matrix(array: NDArray[Any], rows: int, name: str) -> Float32Array:
    """Return vectors, or a rotation, that were read from a folder, if they are so many rows."""
    if array.dtype != np.float32 or array.ndim != 2 or len(array) != rows or not array.size:
        given = f"{array.dtype}{list(array.shape)}"
        raise StorageError(f"{name} is {given}, expected float32[{rows}, d]")
    for first in range(0, rows, _ROWS):
        if not np.isfinite(array[first : first + _ROWS]).all():
            raise StorageError(f"{name} is not all finite")
    return array


def _principal_axes(sample: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Return the variance along each principal axis, and the axes as rows, by descending variance.

    Which of its two directions an axis points in is decided by its largest entry, not by a solver.
    """
    with needs_extra("data"):
        from threadpoolctl import threadpool_limits
    with threadpool_limits(1, user_api="blas"):  # one order of sums on any machine
        centred = sample - sample.mean(axis=0)
        variances, columns = np.linalg.eigh(centred.T @ centred / max(1, len(sample)))
    axes = columns.T[::-1]
    largest = np.abs(axes).argmax(axis=1)
    signs = np.sign(axes[np.arange(len(axes)), largest])
    return np.maximum(variances[::-1], 0.0), axes * signs[:, None]


def _dealt(variances: Float64Array, num_splits: int, size: int) -> list[int]:
    """Return the row of each axis: every split has room for `size`, and they are dealt evenly."""
    logarithms = np.log(np.maximum(variances, 1e-12 * max(variances.max(), 1e-300)))
    sums = np.zeros(num_splits)
    counts = np.zeros(num_splits, np.int64)
    places = []
    for logarithm in logarithms - logarithms.min() + 1.0:  # every axis counts for something
        free = np.flatnonzero(counts < size)
        split = int(free[np.argmin(sums[free])])
        places.append(split * size + int(counts[split]))
        sums[split] += logarithm
        counts[split] += 1
    return places
