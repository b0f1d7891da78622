"""One of the two processes that `benchmarks.cores` compares: an index, and searches that it times.

    python -m benchmarks.core_worker FOLDER [PACKAGE]

A line of JSON in is a block of queries, a line out its times and a digest of what was found. PACKAGE
is a folder that holds another build of recprune.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # which recprune that is, main() decides
    from recprune import Index
    from recprune.types import Float32Array, Json

ARRAYS = ("codes", "sub_item_embeddings", "sequence_embeddings")


def main() -> None:
    """Build the index of the folder, then answer until the input ends."""
    folder, *package = sys.argv[1:]
    if package:
        _use(package[0])
    from recprune import Index

    codes, embeddings, queries = (np.load(Path(folder) / f"{name}.npy") for name in ARRAYS)
    index = Index.build(codes, embeddings, threads=2)
    _say({"instruction_set": index.describe()["instruction_set"]})
    for line in sys.stdin:
        asked = json.loads(line)
        _say(_measure(index, queries, asked["method"], asked["k"], asked["first"], asked["last"]))


def _use(package: str) -> None:
    # The editable install would put itself before the build that is to be measured.
    sys.meta_path = [
        finder for finder in sys.meta_path if "editable" not in type(finder).__module__
    ]
    sys.path.insert(0, package)
    import recprune

    assert Path(recprune.__file__).is_relative_to(package)


def _measure(
    index: Index, queries: Float32Array, method: str, k: int, first: int, last: int
) -> Json:
    index.search(queries[first - 1], k, method=method)  # caches, and what is built on first use
    digest = hashlib.sha256()
    microseconds = []
    for query in queries[first:last]:
        begun = time.perf_counter()
        found = index.search(query, k, method=method)
        microseconds.append(1e6 * (time.perf_counter() - begun))
        digest.update(found.ids.tobytes() + found.scores.tobytes())
    return {"microseconds": microseconds, "digest": digest.hexdigest()}


def _say(content: Json) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    main()
