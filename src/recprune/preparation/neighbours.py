"""The trained items that are nearest to others, exactly: by text, by vector, or by company.

A text is the set of its words, of the directories above it where it is a path, and of its last
part as a whole, each weighing as much as it is rare (TF-IDF: Spärck Jones, 1972). Similarity is the
cosine. A directory says most of what a file is, and a rare word most of what a title is about; a
word that thousands of items share tells hardly any of them apart, and is left out of the
sums, though not of the lengths.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recprune.types import Float32Array, Int64Array, Progress, needs_extra

if TYPE_CHECKING:
    from recprune.data.interactions import Interactions

# "fooBarHTML2" is foo, Bar, HTML and 2.
_WORD = re.compile(r"[A-Z]+(?![^\W\d_A-Z])|[A-Z]?[^\W\d_A-Z]+|\d+")
# Items that share a word, at most; more frequent ones cost most of the time.
_MOST_SHARED = 2_000
_ROWS_AT_ONCE = 512  # of the product
_SCORES_AT_ONCE = 1 << 24
_COMPANY = 5  # events before and after an item that are its company

Nearest = tuple[Int64Array, Float32Array]
"""Places, [asked, k], and similarities, best first; 0 where there are fewer than k."""


def nearest_by_text(
    texts: Sequence[str], asked: Int64Array, among: Int64Array, k: int, progress: Progress
) -> Nearest:
    """Return for each of the texts `asked` the nearest of those `among`, all given by place."""
    with needs_extra("data"):
        import scipy.sparse as sp
    progress(f"words of {len(texts):,} texts")
    starts, words, num_words = _word_sets(texts)
    shared = np.bincount(words, minlength=num_words)
    idf = np.log(len(texts) / shared, where=shared > 0, out=np.zeros(num_words))
    values = idf[words]
    lengths = np.sqrt(np.add.reduceat(np.append(values**2, 0.0), starts[:-1]))
    values /= np.repeat(np.maximum(lengths, 1e-9), np.diff(starts))
    values[shared[words] > _MOST_SHARED] = 0.0
    matrix = sp.csr_matrix((values.astype(np.float32), words, starts), (len(texts), num_words))
    matrix.eliminate_zeros()
    left, right = matrix[asked], matrix[among].T.tocsr()
    places = np.zeros((len(asked), k), np.int64)
    similarities = np.zeros((len(asked), k), np.float32)
    for first in range(0, len(asked), _ROWS_AT_ONCE):
        progress(f"neighbours of {first:,} of {len(asked):,} items")
        product = left[first : first + _ROWS_AT_ONCE] @ right
        product.sort_indices()
        for row in range(product.shape[0]):
            part = slice(product.indptr[row], product.indptr[row + 1])
            best = _best(product.data[part], k)
            places[first + row, : len(best)] = among[product.indices[part][best]]
            similarities[first + row, : len(best)] = product.data[part][best]
    return places, similarities


def nearest_by_vector(
    vectors: Float32Array, asked: Int64Array, among: Int64Array, k: int, progress: Progress
) -> Nearest:
    """Return for each of the vectors `asked` the nearest of those `among`, all given by place.

    What points away is not near: its similarity counts as 0.
    """
    directions = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    pool = directions[among]
    places = np.zeros((len(asked), k), np.int64)
    similarities = np.zeros((len(asked), k), np.float32)
    at_once = max(1, _SCORES_AT_ONCE // max(len(among), 1))
    for first in range(0, len(asked), at_once):
        progress(f"neighbours of {first:,} of {len(asked):,} items")
        for row, scores in enumerate(directions[asked[first : first + at_once]] @ pool.T, first):
            found = _best(scores, k)
            places[row, : len(found)] = among[found]
            similarities[row, : len(found)] = scores[found]
    return places, similarities


def nearest_by_company(
    log: Interactions, asked: Int64Array, among: NDArray[np.bool_], k: int
) -> Nearest:
    """Return for each of the items `asked` those `among` that are near it in histories most often.

    Near is up to five events before or after it. What is near everything tells nothing: a pair
    counts the less the more interactions the other item has, as in a cosine.
    """
    with needs_extra("data"):
        import scipy.sparse as sp
    row_of = np.full(log.num_items, -1, np.int64)
    row_of[asked] = np.arange(len(asked))
    users = np.repeat(np.arange(log.num_users), log.lengths)
    rows, items = [], []
    for distance in range(1, _COMPANY + 1):
        same = users[distance:] == users[:-distance]
        earlier, later = log.items[:-distance][same], log.items[distance:][same]
        for one, other in ((earlier, later), (later, earlier)):
            counts = (row_of[one] >= 0) & among[other]
            rows.append(row_of[one[counts]])
            items.append(other[counts])
    pairs = np.concatenate(rows), np.concatenate(items)
    popularity = np.maximum(np.bincount(log.items, minlength=log.num_items), 1)
    values = 1.0 / np.sqrt(popularity[pairs[1]])
    matrix = sp.csr_matrix((values, pairs), (len(asked), log.num_items), np.float32)
    matrix.sum_duplicates()
    places = np.zeros((len(asked), k), np.int64)
    similarities = np.zeros((len(asked), k), np.float32)
    for row in range(len(asked)):
        part = slice(matrix.indptr[row], matrix.indptr[row + 1])
        best = _best(matrix.data[part], k)
        places[row, : len(best)] = matrix.indices[part][best]
        similarities[row, : len(best)] = matrix.data[part][best]
    return places, similarities


def _best(scores: Float32Array, k: int) -> Int64Array:
    """Return where the k best scores above 0 are, best first, the lowest place first on a tie."""
    least = np.partition(scores, -k)[-k] if len(scores) > k else np.float32(0.0)
    candidates = np.flatnonzero((scores >= least) & (scores > 0.0))
    order = np.argsort(-scores[candidates], kind="stable")
    return candidates[order[:k]]


def _word_sets(texts: Sequence[str]) -> tuple[Int64Array, Int64Array, int]:
    """Return the words of each text as numbers, [starts[i], starts[i + 1]), and how many exist."""
    numbers: dict[str, int] = {}
    starts, words = array("q", [0]), array("q")
    for text in texts:
        words.extend({numbers.setdefault(word, len(numbers)) for word in text_words(text)})
        starts.append(len(words))
    return np.array(starts, np.int64), np.array(words, np.int64), len(numbers)


def text_words(text: str) -> list[str]:
    """Return the words of a text, in small letters, and of paths the directories and the name."""
    words = [word.lower() for word in _WORD.findall(text)]
    for line in text.split("\n"):
        ends = [place + 1 for place, letter in enumerate(line) if letter == "/"]
        if ends:
            words += [line[:end] for end in ends]
            words.append("/" + line[ends[-1] :])
    return words
