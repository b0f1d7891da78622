"""Catalogues, questions and the oracle's answers in one file, for `native/tests/replay.cpp`.

That program has the core, but no Python: it can run where only an emulator does. The file is a row of
arrays, each with its length in bytes before it and filled up to whole words of eight.

    python -m tests.support.recorded_cases FILE
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from recprune import Index
from recprune.search import reference
from recprune.types import CodeArray, Float32Array
from tests.support.search_cases import Case, assert_same

# Items, splits, sub-items and the width of their vectors: rings of two to eight pairs, some with
# one split left over; a list may be empty, shorter than a block, or much longer.
SHAPES = [
    (60_000, 8, 256, 4),
    (9_000, 12, 60, 2),
    (7_000, 13, 10, 2),
    (3_000, 5, 30, 2),
    (3_000, 4, 30, 2),
    (20_000, 16, 256, 2),
    (9_000, 8, 200, 5),
    (4_000, 3, 7, 3),
    (300, 8, 256, 1),
    (65, 1, 64, 9),
    (1, 8, 2, 2),
]
QUESTIONS = 12  # for each of them


def write_cases(path: Path, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        for number, (num_items, num_splits, num_sub_items, width) in enumerate(SHAPES):
            codes = rng.integers(0, num_sub_items, (num_items, num_splits)).astype(np.uint8)
            if number % 2:  # half of the items share their codes: ties
                codes[num_items // 2 :] = codes[rng.integers(0, min(50, num_items))]
            shape = (num_splits, num_sub_items, width)
            embeddings = rng.standard_normal(shape).astype(np.float32)
            bias = rng.normal(0, 0.1, num_items).astype(np.float32) if number % 3 == 2 else None
            _write(file, np.array([num_items, *shape], np.int64))
            _write(file, embeddings.transpose(0, 2, 1))
            _write(file, codes)
            _write(file, np.empty(0, np.float32) if bias is None else bias)
            _write(file, np.array([QUESTIONS], np.int64))
            index = Index.build(codes, embeddings, item_bias=bias)
            for question in range(QUESTIONS):
                _write_question(file, rng, index, codes, embeddings, bias, question)


def _write_question(
    file: BinaryIO,
    rng: np.random.Generator,
    index: Index,
    codes: CodeArray,
    embeddings: Float32Array,
    bias: Float32Array | None,
    number: int,
) -> None:
    num_items = len(codes)
    phi = rng.standard_normal(embeddings.shape[0] * embeddings.shape[2]).astype(np.float32)
    phi *= np.float32(rng.choice([1.0, 1e-3, 30.0]))
    scores = reference.sub_item_scores(phi, embeddings)
    k = int(rng.choice([1, 10, 60, 300, num_items + 3 if num_items < 1000 else 1000]))
    case = Case(codes, scores, k, bias, None, None)
    if number % 3 == 1:  # the best of all, and some others
        best = case.expected()[0]
        exclude = [*best[best >= 0][:5].tolist(), *rng.integers(0, num_items, 20).tolist()]
        case.exclude = exclude
    if number % 4 == 2:
        case.allow = rng.random(num_items) < rng.choice([0.01, 0.5, 0.95])
    if number % 4 == 3:  # at a score that is returned
        found = case.expected()[1]
        case.floor = float(found[len(found[np.isfinite(found)]) // 2])
    ids, expected = case.expected()
    # What the library says here is what the program is to say elsewhere.
    top = index.search(phi, k, exclude=case.exclude, allow=case.allow, floor=case.floor)
    assert_same(top, (ids, expected), number)
    _write(file, phi)
    _write(file, np.array(case.exclude or [], np.int64))
    _write(file, _bits(case.allow))
    _write(file, np.array([] if case.floor is None else [case.floor], np.float32))
    _write(file, scores)
    _write(file, ids.astype(np.int64))
    _write(file, expected)


def _bits(allow: NDArray[np.bool_] | None) -> NDArray[np.uint64]:
    if allow is None:
        return np.empty(0, np.uint64)
    padded = np.zeros(-(-len(allow) // 64) * 64, bool)
    padded[: len(allow)] = allow
    return np.packbits(padded, bitorder="little").view(np.uint64)


def _write(file: BinaryIO, array: NDArray[Any]) -> None:
    data = np.ascontiguousarray(array).tobytes()
    file.write(len(data).to_bytes(8, "little"))
    file.write(data + bytes(-len(data) % 8))


if __name__ == "__main__":
    write_cases(Path(sys.argv[1]))
