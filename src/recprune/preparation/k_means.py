"""k-means by Lloyd's algorithm (1982): what product quantisation does in every split."""

from __future__ import annotations

import numpy as np

from recprune.types import Float32Array, Int64Array


def k_means(
    vectors: Float32Array, num_centroids: int, iterations: int, rng: np.random.Generator
) -> Float32Array:
    """Lloyd's algorithm from random distinct points; empty clusters take the worst fits."""
    centroids = vectors[rng.permutation(len(vectors))[:num_centroids]].copy()
    for _ in range(iterations):
        nearest, squared_errors = nearest_centroids(vectors, centroids)
        counts = np.bincount(nearest, minlength=num_centroids)
        order = np.argsort(nearest, kind="stable")
        occupied = counts > 0
        starts = (np.cumsum(counts) - counts)[occupied]
        sums = np.add.reduceat(vectors[order], starts, axis=0, dtype=np.float64)
        moved = centroids.copy()
        moved[occupied] = sums / counts[occupied, None]
        empty = np.flatnonzero(~occupied)
        moved[empty] = vectors[np.argsort(-squared_errors, kind="stable")[: len(empty)]]
        if np.array_equal(moved, centroids):
            break
        centroids = moved
    return centroids


def nearest_centroids(
    vectors: Float32Array, centroids: Float32Array
) -> tuple[Int64Array, Float32Array]:
    """Return each vector's nearest centroid (lowest id on a tie) and the squared distance to it."""
    nearest = np.empty(len(vectors), np.int64)
    squared_errors = np.empty(len(vectors), np.float32)
    half_norms = 0.5 * (centroids * centroids).sum(axis=1)
    # Bounds the table of distances to about 64 MB.
    chunk = max(1, (1 << 24) // len(centroids))
    for start in range(0, len(vectors), chunk):
        part = vectors[start : start + chunk]
        # ½‖x − c‖² = ½‖x‖² − (x·c − ½‖c‖²): the largest similarity is the smallest distance.
        best = (part @ centroids.T - half_norms).argmax(axis=1)
        nearest[start : start + chunk] = best
        squared_errors[start : start + chunk] = ((part - centroids[best]) ** 2).sum(axis=1)
    return nearest, squared_errors
