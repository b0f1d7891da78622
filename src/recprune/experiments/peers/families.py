"""Which peers there are, whether they can be had here, and how they are built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec

from recprune.experiments.peers.bmp_peer import Bmp, BmpLargeBlocks
from recprune.experiments.peers.faiss_flat import FaissFlat
from recprune.experiments.peers.faiss_hnsw import FaissHNSW
from recprune.experiments.peers.faiss_ivf import (
    FaissIVFFlat,
    FaissIVFFlatFewLists,
    FaissIVFPQ,
    FaissIVFPQFewLists,
)
from recprune.experiments.peers.faiss_peer import faiss_threads
from recprune.experiments.peers.faiss_pq import FaissPQ
from recprune.experiments.peers.peer import CodesAndVectors, Family, ModelShape, Peer
from recprune.experiments.peers.scann_peer import Scann
from recprune.experiments.peers.seismic_peer import Seismic
from recprune.experiments.peers.torch_dense import TorchDense
from recprune.experiments.peers.torch_peer import torch_threads
from recprune.experiments.peers.torch_pqtopk import TorchPQTopK
from recprune.experiments.peers.torch_recjpqprune import TorchRecJPQPrune
from recprune.experiments.peers.usearch_peer import Usearch
from recprune.types import InputError, MissingExtraError

_ALL: tuple[Family, ...] = (
    TorchDense(),
    TorchPQTopK(),
    TorchRecJPQPrune(),
    FaissFlat(),
    FaissPQ(),
    FaissHNSW(),
    FaissIVFPQ(),
    FaissIVFPQFewLists(),
    FaissIVFFlat(),
    FaissIVFFlatFewLists(),
    Scann(),
    Usearch(),
    Bmp(),
    BmpLargeBlocks(),
    Seismic(),
)
FAMILIES: dict[str, Family] = {family.key: family for family in _ALL}

# What pip calls a package that Python calls otherwise.
_PIP_NAMES = {"faiss": "faiss-cpu", "seismic": "pyseismic-lsr"}


def available_families() -> list[str]:
    """Return the short names of the families whose libraries are installed."""
    return [key for key, family in FAMILIES.items() if _installed(family)]


def libraries() -> list[str]:
    """Return what pip calls the libraries of all families."""
    return list(dict.fromkeys(map(_pip_name, FAMILIES.values())))


def why_not(family: str | Family, shape: ModelShape, budget_bytes: int) -> str | None:
    """Say in a sentence why a family cannot be built for a model of that shape; None if it can."""
    chosen = _find(family)
    if not _installed(chosen):
        return f"{chosen.package} is not installed: pip install {_pip_name(chosen)}"
    needed = chosen.bytes_needed(shape)
    if needed > budget_bytes:
        return (
            f"{chosen.key} needs {_size(needed)} for {shape.num_items:,} items, "
            f"the budget is {_size(budget_bytes)}"
        )
    return chosen.unsuited(shape)


def build(
    family: str | Family, model: CodesAndVectors, budget_bytes: int, *, threads: int = 2
) -> list[Peer]:
    """Build a family, by its short name or with settings of its own, and return its peers.

    They share one structure, which goes when the last of them is dropped.
    """
    chosen = _find(family)
    reason = why_not(chosen, model.shape, budget_bytes)
    if reason is not None:
        raise (InputError if _installed(chosen) else MissingExtraError)(reason)
    return chosen.build(model, threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch and FAISS on one thread for a whole run.

    Every search does that for itself; within this block it finds nothing left to do, so that
    switching is no part of what is measured.
    """
    with ExitStack() as stack:
        for package, threads in (("torch", torch_threads), ("faiss", faiss_threads)):
            if find_spec(package) is not None:
                stack.enter_context(threads(1))
        yield


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.3f} MB"


def _pip_name(family: Family) -> str:
    return _PIP_NAMES.get(family.package, family.package)


def _installed(family: Family) -> bool:
    return find_spec(family.package) is not None


def _find(family: str | Family) -> Family:
    if not isinstance(family, str):
        return family
    if family not in FAMILIES:
        raise InputError(f"family is {family!r}, expected one of {', '.join(FAMILIES)}")
    return FAMILIES[family]
