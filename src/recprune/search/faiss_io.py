"""Codes and vectors to and from `faiss.IndexPQ`, and from what FAISS puts around one."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from recprune.types import (
    CodeArray,
    Float32Array,
    InputError,
    Int64Array,
    needs_extra,
    type_in_words,
)

_BITS = 8  # of a code in one split, the only number that both sides have


class FaissParts(NamedTuple):
    """What an index of FAISS is made of, as far as it is searched here."""

    codes: CodeArray  # [n, M]
    centroids: Float32Array  # [M, B, d/M]
    rotation: Float32Array | None  # [d, d before it]: what vectors are multiplied by first
    ids: Int64Array | None  # [n], where they are not positions


def read_faiss(index: Any) -> FaissParts:
    """Take a `faiss.IndexPQ` apart, and what stands around it: rotations, and a map of ids."""
    with needs_extra("bench"):
        import faiss
    turned = ids = None
    while not isinstance(index, faiss.IndexPQ):
        if isinstance(index, faiss.IndexIDMap) and ids is None:  # IndexIDMap2 is one as well
            ids = faiss.vector_to_array(index.id_map)
        elif isinstance(index, faiss.IndexPreTransform) and turned is None:
            turned = index
        else:
            raise _not_taken(index)
        index = faiss.downcast_index(index.index)
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise InputError(
            "the index of FAISS does not rank by inner product: make it with "
            "faiss.METRIC_INNER_PRODUCT"
        )
    pq = index.pq
    if pq.nbits != _BITS:
        raise _other_bits(pq.nbits)
    if not index.is_trained or not index.ntotal:
        raise InputError("the index of FAISS has no vectors yet: train it, and add them")
    rotation = None if turned is None else _rotation(turned)
    codes = faiss.vector_to_array(index.codes).reshape(index.ntotal, pq.M)
    centroids = faiss.vector_to_array(pq.centroids).reshape(pq.M, pq.ksub, pq.dsub)
    return FaissParts(codes, centroids, rotation, ids)


def _rotation(index: Any) -> Float32Array:
    """Return the product of the transforms of a `faiss.IndexPreTransform`."""
    import faiss

    product = np.eye(index.d)
    for place in range(index.chain.size()):
        transform = faiss.downcast_VectorTransform(index.chain.at(place))
        name = type(transform).__name__
        if not isinstance(transform, faiss.LinearTransform):
            raise InputError(f"the index of FAISS has a {name}, expected rotations: an OPQMatrix")
        if transform.have_bias:
            raise InputError(
                f"the index of FAISS has a {name} that adds a bias, expected rotations alone: an "
                "OPQMatrix, or a LinearTransform without"
            )
        matrix = faiss.vector_to_array(transform.A).reshape(transform.d_out, transform.d_in)
        product = matrix @ product
    return product.astype(np.float32)


def _not_taken(index: Any) -> InputError:
    import faiss

    if isinstance(index, faiss.IndexPQFastScan):
        return _other_bits(index.nbits)
    return InputError(
        f"the index is {type_in_words(index)}, expected a faiss.IndexPQ, alone or behind rotations "
        "(OPQ16,PQ16x8); of vectors, VectorIndex.build makes an index"
    )


def _other_bits(bits: int) -> InputError:
    return InputError(
        f"the index of FAISS has {bits} bits a code, expected {_BITS}: train "
        f"faiss.IndexPQ(d, M, {_BITS}, faiss.METRIC_INNER_PRODUCT), with half as many splits M in "
        "place of 4 bits"
    )


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
