"""The codebook G₁ of RecJPQ: which M sub-item ids each item consists of.

RecJPQ (Petrov and Macdonald, WSDM 2024) takes the codes from a truncated SVD of the user–item
matrix: one component per split, cut into quantile bins, so that items liked by the same users share
sub-item ids and every sub-item id serves the same number of items. The vectors of the sub-items are
trained later, with the model; here only their assignment is fixed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recprune.data.identifiers import ExternalIds, ids_from_arrays
from recprune.preparation.k_means import k_means, nearest_centroids
from recprune.storage import Saved, load_folder, save_folder
from recprune.types import (
    MAX_SUB_ITEMS,
    CodeArray,
    Float32Array,
    Float64Array,
    InputError,
    Int64Array,
    Json,
    Progress,
    StorageError,
    frozen,
    needs_extra,
    no_progress,
    random_generator,
)

if TYPE_CHECKING:
    from recprune.data.interactions import Interactions

KIND = "codebook"
_VERSION = 1

# Up to this many users or items, the SVD is computed densely.
_DENSE_SIZE = 256

# The noise that separates items of equal value, relative to a component scaled to [0, 1].
_NOISE = 1e-5


@dataclass(frozen=True, eq=False)
class Codebook:
    """The fixed map from items to codes, and how it was made."""

    codes: CodeArray  # [num_items, num_splits]
    num_sub_items: int
    item_ids: ExternalIds | None = None  # whose codes these are, where known
    settings: Json = field(default_factory=dict)  # method, seed and what the method reports

    def __post_init__(self) -> None:
        check_codes(self.codes, self.num_sub_items)
        if self.item_ids is not None and len(self.item_ids) != self.num_items:
            raise InputError(f"{len(self.item_ids)} item ids for {self.num_items} codes")
        frozen(self.codes)

    def __repr__(self) -> str:
        return (
            f"Codebook({self.num_items:,} items, {self.num_splits} splits of "
            f"{self.num_sub_items} sub-items)"
        )

    @property
    def num_items(self) -> int:
        """Catalogue size."""
        return int(self.codes.shape[0])

    @property
    def num_splits(self) -> int:
        """M: sub-item ids per item."""
        return int(self.codes.shape[1])

    def occupancy(self) -> Int64Array:
        """Return how many items each sub-item id serves, [num_splits, num_sub_items]."""
        counts = [np.bincount(column, minlength=self.num_sub_items) for column in self.codes.T]
        return np.stack(counts)

    def items_sharing_full_code(self) -> int:
        """Count the items whose whole code some other item has too: no score tells them apart."""
        rows = np.ascontiguousarray(self.codes).view(
            np.dtype((np.void, self.num_splits * self.codes.dtype.itemsize))
        )
        _, counts = np.unique(rows, return_counts=True)
        return int(counts[counts > 1].sum())

    def save(self, folder: str | Path) -> None:
        """Write the codebook as a folder, in place of an older codebook if there is one."""
        arrays: dict[str, NDArray[Any]] = {"codes": self.codes}
        if self.item_ids is not None:
            arrays |= self.item_ids.to_arrays("item_ids")
        settings = {"num_sub_items": int(self.num_sub_items), "assignment": self.settings}
        save_folder(folder, Saved(KIND, _VERSION, settings, arrays))

    @classmethod
    def load(cls, folder: str | Path, *, verify: bool = True) -> Codebook:
        """Memory-map a saved codebook; `verify` compares every byte with its checksum first."""
        saved = load_folder(folder, kind=KIND, version=_VERSION, verify=verify)
        settings, arrays = saved.settings, saved.arrays
        try:
            item_ids = ids_from_arrays(arrays, "item_ids")
            return cls(arrays["codes"], settings["num_sub_items"], item_ids, settings["assignment"])
        except KeyError as error:
            raise StorageError(f"{folder}: the codebook has no {error.args[0]}") from None
        except (InputError, StorageError) as error:
            raise StorageError(f"{folder}: {error}") from None


def assign_svd(
    train: Interactions,
    *,
    num_splits: int = 8,
    num_sub_items: int = 256,
    seed: int = 0,
    progress: Progress = no_progress,
) -> Codebook:
    """Assign codes by a truncated SVD of the user–item matrix of the training log.

    The matrix counts interactions. Each of the `num_splits` right singular vectors, strongest
    first, is scaled to [0, 1], gets a little Gaussian noise so that equal values separate, and is
    cut into `num_sub_items` bins that hold the same number of items, give or take one. The result
    depends on the log and the seed alone, not on the number of threads.
    """
    check_size(num_splits, num_sub_items)
    rng = random_generator(seed)
    vectors, singular_values = _item_components(train, num_splits, rng, progress)
    codes = np.empty((train.num_items, num_splits), code_dtype(num_sub_items))
    for split in range(num_splits):
        progress(f"binning split {split + 1} of {num_splits}")
        component = vectors[split]
        spread = float(np.ptp(component)) if train.num_items else 0.0
        scaled = (component - component.min()) / spread if spread else np.zeros_like(component)
        scaled += rng.normal(0.0, _NOISE, train.num_items)
        codes[:, split] = _quantile_bins(scaled, num_sub_items)
    settings = {
        "method": "svd",
        "seed": seed,
        "singular_values": singular_values.tolist(),
        # Items without training interactions: their codes are noise.
        "unseen_items": int((np.bincount(train.items, minlength=train.num_items) == 0).sum()),
    }
    return Codebook(codes, num_sub_items, train.item_ids, settings)


def assign_random(
    num_items: int,
    *,
    num_splits: int = 8,
    num_sub_items: int = 256,
    seed: int = 0,
    item_ids: ExternalIds | None = None,
) -> Codebook:
    """Assign codes at random, every sub-item id serving the same number of items, ±1."""
    check_size(num_splits, num_sub_items)
    if num_items < 0:
        raise InputError(f"num_items is {num_items}, expected 0 or more")
    rng = random_generator(seed)
    codes = np.empty((num_items, num_splits), code_dtype(num_sub_items))
    for split in range(num_splits):
        codes[:, split] = _quantile_bins(rng.random(num_items), num_sub_items)
    return Codebook(codes, num_sub_items, item_ids, {"method": "random", "seed": seed})


@dataclass(frozen=True, eq=False)
class QuantisedItems:
    """Item vectors replaced by codes: what `assign_pq` returns."""

    codebook: Codebook
    sub_item_embeddings: Float32Array  # [num_splits, num_sub_items, d / num_splits]
    relative_error: float  # Σ‖vector − reconstruction‖² / Σ‖vector − mean‖²: 0 is lossless

    def __post_init__(self) -> None:
        frozen(self.sub_item_embeddings)


def assign_pq(
    embeddings: Float32Array,
    *,
    num_splits: int = 8,
    num_sub_items: int = 256,
    iterations: int = 25,
    sample_size: int = 65_536,
    seed: int = 0,
    threads: int = 1,
    item_ids: ExternalIds | None = None,
    progress: Progress = no_progress,
) -> QuantisedItems:
    """Assign codes to items that already have vectors (float32 [n, d]): k-means in every split.

    Centroids are trained on a random sample of at least `sample_size` items (and 32 per sub-item),
    then every item takes its nearest. Splits run in parallel on `threads`; the result does not
    depend on their number.
    """
    check_size(num_splits, num_sub_items)
    for name, value in (("iterations", iterations), ("threads", threads)):
        if value < 1:
            raise InputError(f"{name} is {value}, expected at least 1")
    if embeddings.ndim != 2 or embeddings.dtype != np.float32:
        raise InputError(
            f"embeddings is {embeddings.dtype}{list(embeddings.shape)}, expected float32 [n, d]"
        )
    num_items, width = embeddings.shape
    if num_items < num_sub_items:
        raise InputError(f"{num_items} items cannot fill {num_sub_items} sub-items")
    if width == 0 or width % num_splits:
        raise InputError(f"embeddings of width {width} do not divide into {num_splits} splits")
    finite = np.isfinite(embeddings).all(axis=1)
    if not finite.all():
        raise InputError(f"embeddings[{int(finite.argmin())}] holds NaN or infinity")
    with needs_extra("data"):
        from threadpoolctl import threadpool_limits

    sample_size = min(num_items, max(sample_size, 32 * num_sub_items))
    sample = np.sort(random_generator(seed).permutation(num_items)[:sample_size])
    codes = np.empty((num_items, num_splits), code_dtype(num_sub_items))
    sub_item_embeddings = np.empty((num_splits, num_sub_items, width // num_splits), np.float32)

    def quantise_split(split: int) -> tuple[float, float]:
        columns = slice(split * width // num_splits, (split + 1) * width // num_splits)
        vectors = np.ascontiguousarray(embeddings[:, columns])
        # Around their mean, so that float32 tells near vectors apart however far from the origin.
        mean = vectors.mean(axis=0, dtype=np.float64)
        vectors = (vectors - mean).astype(np.float32)
        rng = random_generator(seed, split)
        centroids = k_means(vectors[sample], num_sub_items, iterations, rng)
        nearest, squared_errors = nearest_centroids(vectors, centroids)
        codes[:, split] = nearest
        sub_item_embeddings[split] = centroids + mean
        progress(f"split {split + 1} of {num_splits} quantised")
        spread = float(np.square(vectors, dtype=np.float64).sum())
        return float(squared_errors.sum(dtype=np.float64)), spread

    # One BLAS thread per split: sums then have one order, whatever the machine's thread count.
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(quantise_split, range(num_splits)))
    error, spread = (sum(column) for column in zip(*parts, strict=True))
    relative_error = error / spread if spread else 0.0
    settings = {"method": "pq", "seed": seed, "relative_error": relative_error}
    return QuantisedItems(
        Codebook(codes, num_sub_items, item_ids, settings), sub_item_embeddings, relative_error
    )


def code_dtype(num_sub_items: int) -> np.dtype[Any]:
    """Return the smallest type that holds sub-item ids 0 … num_sub_items − 1."""
    return np.dtype(np.uint8 if num_sub_items <= 256 else np.uint16)


def check_size(num_splits: int, num_sub_items: int) -> None:
    """Refuse numbers of splits and sub-items that no codebook can have."""
    if num_splits < 1:
        raise InputError(f"num_splits is {num_splits}, expected at least 1")
    is_integer = isinstance(num_sub_items, int | np.integer) and not isinstance(num_sub_items, bool)
    if not is_integer or not 1 <= num_sub_items <= MAX_SUB_ITEMS:
        raise InputError(f"num_sub_items is {num_sub_items!r}, expected 1 to {MAX_SUB_ITEMS}")


def check_codes(codes: CodeArray, num_sub_items: int) -> None:
    """Refuse what are not codes, [num_items, num_splits], of so many sub-items."""
    check_size(codes.shape[-1] if codes.ndim == 2 else 0, num_sub_items)
    if codes.dtype != code_dtype(num_sub_items):
        raise InputError(
            f"codes is {codes.dtype}, expected {code_dtype(num_sub_items)} "
            f"for {num_sub_items} sub-items"
        )
    if codes.size and int(codes.max()) >= num_sub_items:
        item, split = np.unravel_index(int(codes.argmax()), codes.shape)
        raise InputError(
            f"codes[{item}, {split}] is {codes[item, split]}, expected less than {num_sub_items}"
        )


# SVD ---------------------------------------------------------------------------------------------


def _item_components(
    train: Interactions, count: int, rng: np.random.Generator, progress: Progress
) -> tuple[Float64Array, Float64Array]:
    """Return the strongest right singular vectors of the user–item matrix, and their values.

    Where the matrix has fewer than `count` directions, the rest are zeros.
    """
    with needs_extra("data"):
        import scipy.sparse.linalg  # and its own BLAS: only what is loaded can be limited
        from threadpoolctl import threadpool_limits

    progress("building the user–item matrix")
    # Repeated (user, item) entries need not be merged: products add them up.
    ones = np.ones(train.num_interactions)
    shape = (train.num_users, train.num_items)
    matrix = scipy.sparse.csr_array((ones, train.items, train.offsets), shape)
    # The eigenvectors of the smaller of A·Aᵀ and Aᵀ·A.
    by_users = train.num_users <= train.num_items
    half = matrix if by_users else matrix.T
    # One BLAS thread, so that sums have one order whatever the machine's thread count.
    with threadpool_limits(1, user_api="blas"):
        eigenvalues, eigenvectors = _strongest_eigenvectors(half, count, rng, progress)
        vectors: Any = matrix.T @ eigenvectors if by_users else eigenvectors
        lengths = np.linalg.norm(vectors, axis=0)
    vectors = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0).T
    components = np.zeros((count, train.num_items))
    values = np.zeros(count)
    # Whatever is not clearly above rounding is no direction of the data, but an arbitrary one.
    real = eigenvalues > max(1e-12 * eigenvalues.max(initial=0.0), 0.0)
    components[: len(vectors)][real] = vectors[real]
    values[: len(vectors)][real] = np.sqrt(eigenvalues[real])
    # A singular vector's sign is arbitrary: fix it, so that codes do not depend on the solver's.
    signs = np.sign(components[np.arange(count), np.abs(components).argmax(axis=1)])
    return components * np.where(signs == 0, 1.0, signs)[:, None], values


def _strongest_eigenvectors(
    half: Any, count: int, rng: np.random.Generator, progress: Progress
) -> tuple[Float64Array, Float64Array]:
    """Return the largest eigenvalues of half·halfᵀ, at most `count`, and vectors as columns."""
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh

    size = half.shape[0]
    if size <= max(_DENSE_SIZE, 2 * count):
        eigenvalues, eigenvectors = np.linalg.eigh((half @ half.T).toarray())
        return eigenvalues[::-1][:count], eigenvectors[:, ::-1][:, :count]
    products = 0

    def multiply(vector: Any) -> Any:
        nonlocal products
        products += 1
        progress(f"SVD: {products} products with the user–item matrix")
        return half @ (half.T @ vector)

    operator = LinearOperator((size, size), matvec=multiply, dtype=np.float64)
    if half.nnz == 0:
        return np.zeros(0), np.zeros((size, 0))
    try:
        # The generator also seeds ARPACK's restarts, which a matrix of low rank provokes.
        eigenvalues, eigenvectors = eigsh(
            operator, count, which="LM", v0=rng.standard_normal(size), tol=1e-10, rng=rng
        )
    except ArpackError as error:
        raise InputError(f"no SVD of the user–item matrix: {error}") from None
    strongest_first = np.argsort(-eigenvalues, kind="stable")
    return eigenvalues[strongest_first], eigenvectors[:, strongest_first]


def _quantile_bins(values: Float64Array, num_bins: int) -> Int64Array:
    """Return each value's bin by rank: every bin holds ⌊n / bins⌋ or ⌈n / bins⌉ values."""
    bins = np.empty(len(values), np.int64)
    bins[np.argsort(values, kind="stable")] = (
        np.arange(len(values)) * num_bins // max(len(values), 1)
    )
    return bins
