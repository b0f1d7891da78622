"""Codes and vectors to and from `faiss.IndexPQ`."""

from __future__ import annotations

from typing import Any

import numpy as np

from recprune.types import CodeArray, Float32Array, InputError, needs_extra

_BITS = 8  # of a code in one split, the only number that both sides have


def read_faiss(index_pq: Any) -> tuple[CodeArray, Float32Array]:
    """Return the codes, [n, M], and the centroids, [M, B, d/M], of a `faiss.IndexPQ`."""
    with needs_extra("bench"):
        import faiss
    if not isinstance(index_pq, faiss.IndexPQ):
        raise InputError(f"index_pq is a {type(index_pq).__name__}, expected a faiss.IndexPQ")
    if index_pq.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise InputError("index_pq does not rank by inner product")
    pq = index_pq.pq
    if pq.nbits != _BITS:
        raise InputError(f"index_pq has {pq.nbits} bits a code, expected {_BITS}")
    codes = faiss.vector_to_array(index_pq.codes).reshape(index_pq.ntotal, pq.M)
    centroids = faiss.vector_to_array(pq.centroids).reshape(pq.M, pq.ksub, pq.dsub)
    return codes, centroids


def make_faiss(codes: CodeArray, sub_item_embeddings: Float32Array) -> Any:
    """Return a `faiss.IndexPQ` with these codes, [n, M], and vectors, [M, B, d/M]."""
    with needs_extra("bench"):
        import faiss
    num_splits, num_sub_items, width = sub_item_embeddings.shape
    if num_sub_items != 1 << _BITS:
        raise InputError("faiss.IndexPQ needs 256 sub-items per split and no item bias")
    peer = faiss.IndexPQ(num_splits * width, num_splits, _BITS, faiss.METRIC_INNER_PRODUCT)
    embeddings = np.ascontiguousarray(sub_item_embeddings)
    faiss.copy_array_to_vector(embeddings.ravel(), peer.pq.centroids)
    faiss.copy_array_to_vector(np.ascontiguousarray(codes).ravel(), peer.codes)
    peer.ntotal, peer.is_trained = len(codes), True
    return peer
