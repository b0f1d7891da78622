from __future__ import annotations

import numpy as np

from recprune.preparation.k_means import k_means, nearest_centroids


def test_centroids_are_the_means_of_the_vectors_nearest_to_them() -> None:
    vectors = np.random.default_rng(0).standard_normal((500, 3)).astype(np.float32)
    centroids = k_means(vectors, 6, 1000, np.random.default_rng(1))
    nearest, squared_errors = nearest_centroids(vectors, centroids)
    distances = ((vectors[:, None] - centroids[None]) ** 2).sum(axis=2)
    assert np.array_equal(nearest, distances.argmin(axis=1))
    np.testing.assert_allclose(squared_errors, distances.min(axis=1), rtol=1e-5)
    means = [vectors[nearest == centroid].mean(axis=0) for centroid in range(6)]
    np.testing.assert_allclose(centroids, means, atol=1e-5)


def test_of_equally_near_centroids_the_first_is_taken() -> None:
    centroids = np.array([[1.0], [-1.0], [1.0]], np.float32)
    nearest, squared_errors = nearest_centroids(np.array([[0.0], [3.0]], np.float32), centroids)
    assert nearest.tolist() == [0, 0]
    assert squared_errors.tolist() == [1.0, 4.0]


def test_an_empty_cluster_takes_the_worst_fit() -> None:
    # Two of the three centroids begin in the crowd at 0, of which the second gets nothing.
    vectors = np.array([[0.0]] * 10 + [[4.0], [9.0]], np.float32)
    for seed in range(10):
        centroids = k_means(vectors, 3, 10, np.random.default_rng(seed))
        assert sorted(centroids.ravel().tolist()) == [0.0, 4.0, 9.0]


def test_the_size_of_the_parts_does_not_change_what_is_nearest() -> None:
    rng = np.random.default_rng(2)
    centroids = rng.integers(-9, 10, (1 << 14, 2)).astype(np.float32)
    vectors = rng.integers(-9, 10, (3000, 2)).astype(np.float32)  # three parts of 1024
    nearest, squared_errors = nearest_centroids(vectors, centroids)
    for row in (0, 1023, 1024, 2999):
        alone = nearest_centroids(vectors[row : row + 1], centroids)
        assert (nearest[row], squared_errors[row]) == (alone[0][0], alone[1][0])
