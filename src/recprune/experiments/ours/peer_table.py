"""recprune against what people use instead: time against recall@10, and against NDCG@10 lost."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from recprune.experiments.framework.experiment import ExperimentPart, Need, Setup, section_of
from recprune.experiments.framework.record import Record
from recprune.experiments.framework.timing import (
    Search,
    index_search,
    interleaved,
    peer_search,
    recall,
)
from recprune.experiments.framework.workload import Workload
from recprune.experiments.ours.peer_section import OWN_FAMILY, peer_blocks
from recprune.experiments.peers import families
from recprune.experiments.peers.peer import CodesAndVectors
from recprune.experiments.report.document import Section
from recprune.search.index import Index
from recprune.types import CodeArray, Float32Array, Int64Array, Json, Progress, RecpruneError

# Not `cells`, which `auto` takes where they pay, nor `default`, which is the peer torch_dense.
_OWN = ("auto", "scan", "recjpqprune", "pqtopk")
_BUDGET_SHARE = 0.85  # of the machine's memory, for all that is alive at once
_SECONDS = 20.0  # that the timed queries of one search may take, and its answers for recall again
_FEWEST = 5  # queries, however slow a search is
_ENOUGH = 0.99  # recall@10: a library's sweep ends with the first setting that has it
_TRIED = 50  # users of the trial that decides this
_TRIED_EXACT = 6  # users of the trial of an exact search, of which only the time counts
_REFERENCE = "FAISS PQ"  # exact: a sweep also ends with the first setting that takes longer
_FOLDERS = re.compile(r"(?:/[^\s/:]+)+/")  # before the name of a file


@dataclass(frozen=True)
class _Contender:
    """One search with what is known about it before it is timed."""

    name: str
    family: str
    exact: bool
    bytes_used: int
    build_seconds: float
    search: Search
    settings: str  # that it was built with; empty: there are none


class PeerTable:
    """Every peer that can be had, in one interleaved run with our methods."""

    name = "peers"
    title = "What people use instead"
    needs: frozenset[Need] = frozenset({"workloads"})

    def parts(self, setup: Setup) -> list[ExperimentPart]:
        """One, for the first log: building everything for another would take hours."""
        first = [entry for entry in setup.workloads if entry.log == setup.workloads[0].log]
        usual = [entry for entry in first if entry.model == "gsasrecjpq"]
        return [self._part(setup, workload) for workload in (usual or first)[:1]]

    def _part(self, setup: Setup, workload: Workload) -> ExperimentPart:
        queries, users = setup.sized(500, 20), setup.sized(512, 50)
        shape = CodesAndVectors(workload.codes, workload.sub_item_embeddings).shape
        settings = {
            "workload": workload.checksum(),
            "queries": queries,
            "users": users,
            "k": 10,
            "seed": setup.seed,
            "families": {
                key: f"{families.FAMILIES[key]}: {families.FAMILIES[key].settings(shape)}"
                for key in families.available_families()
            },
        }
        budget = int(_BUDGET_SHARE * setup.memory_bytes)
        return ExperimentPart(
            workload.log,
            settings,
            lambda progress: measure(workload, queries, users, budget, setup.seed, progress),
            # On two cores building takes about 50 minutes for a million items, mostly for graphs.
            minutes=5.0 + len(workload.codes) / 2e4,
        )

    def section(self, records: Sequence[Record]) -> Section:
        """Tables and two pictures for each log that was measured."""
        return section_of(
            self,
            "One model, searched by libraries that people use for this: "
            "K = 10, one thread, one query at a time, all in one interleaved run. Approximate "
            "peers search item vectors put together from sub-item vectors, or RecJPQ's own "
            "codes. Recall@10 is the share of the exact top 10 that is found; NDCG@10 lost is "
            "what the exact answers to the same users have more.",
            *map(peer_blocks, records),
        )


def measure(
    workload: Workload, queries: int, users: int, budget: int, seed: int, progress: Progress
) -> Json:
    """Build what fits into the budget, time it, and compare all answers with the exact ones."""
    model = CodesAndVectors(workload.codes, workload.sub_item_embeddings)
    threads = os.cpu_count() or 1
    begun = time.perf_counter()
    index = Index.build(model.codes, model.sub_item_embeddings, threads=threads)
    build_seconds = time.perf_counter() - begun
    size = int(index.describe()["bytes"])
    contenders = {
        method: _Contender(
            method, OWN_FAMILY, True, size, build_seconds, index_search(index, method), ""
        )
        for method in _OWN
    }
    peers, left_out = _build_peers(model, budget - size, threads, progress)
    contenders |= {peer.name: peer for peer in peers}
    embeddings = workload.sequence_embeddings
    exact = index.search(embeddings[:users], 10, method="pqtopk").ids
    twins = same_codes(model.codes)
    with families.one_thread():
        seconds, not_tried = _sweep(contenders, embeddings, exact[:_TRIED], twins, progress)
        contenders = {name: contenders[name] for name in seconds}
        affordable = {name: max(_FEWEST, int(_SECONDS / each)) for name, each in seconds.items()}
        timed = interleaved(
            {name: contender.search for name, contender in contenders.items()},
            embeddings[:queries],
            10,
            seed=seed,
            limits=affordable,
            progress=progress,
        )
        entries = []
        for name, contender in contenders.items():
            progress(f"recall@10 of {name}")
            asked = min(len(exact), affordable[name])
            ids = np.array([contender.search(query, 10)[0] for query in embeddings[:asked]])
            entries.append(
                {
                    "name": name,
                    "family": contender.family,
                    "exact": contender.exact,
                    "bytes": contender.bytes_used,
                    "build_seconds": contender.build_seconds,
                    "settings": contender.settings,
                    "users": asked,
                    "recall": recall(by_codes(ids, twins), by_codes(exact[:asked], twins)),
                    "ndcg": workload.ndcg(ids),
                    "exact_ndcg": workload.ndcg(exact[:asked]),
                    **timed[name].summary(),
                }
            )
    return {
        "log": workload.log,
        "model": workload.model,
        "items": index.num_items,
        "instruction_set": index.describe()["instruction_set"],
        "build_threads": threads,
        "budget_bytes": budget,
        "peers": entries,
        "not_tried": not_tried,
        "left_out": left_out,
    }


def _build_peers(
    model: CodesAndVectors, budget: int, threads: int, progress: Progress
) -> tuple[list[_Contender], dict[str, str]]:
    """Build the families that fit beside each other, the small ones first; say why others do not.

    All have to be alive at once to be timed in turns.
    """
    built: list[_Contender] = []
    left_out: dict[str, str] = {}
    every = families.FAMILIES
    for at, key in enumerate(
        sorted(every, key=lambda key: every[key].bytes_needed(model.shape)), start=1
    ):
        reason = families.why_not(key, model.shape, budget)
        if reason is not None:
            left_out[key] = reason
            continue
        progress(f"building {key}, {at} of {len(every)} families")
        try:
            peers = families.build(key, model, budget, threads=threads)
        except (RecpruneError, ImportError, MemoryError, RuntimeError) as error:
            # An error of one library must not end the whole comparison.
            left_out[key] = f"could not be built: {_FOLDERS.sub('', str(error))}"
            continue
        built += [
            _Contender(
                peer.name,
                peer.family,
                peer.exact,
                peer.bytes_used,
                peer.build_seconds,
                peer_search(peer),
                every[key].settings(model.shape),
            )
            for peer in peers
        ]
        budget -= max(peer.bytes_used for peer in peers)  # one structure, named by each of them
    return built, left_out


def _sweep(
    contenders: Mapping[str, _Contender],
    embeddings: Float32Array,
    exact: Int64Array,
    twins: Int64Array,
    progress: Progress,
) -> tuple[dict[str, float], dict[str, int]]:
    """Return about how long each search takes, and how many settings of a family need no trying.

    Settings of a family go from the quickest to the most thorough: after one that finds enough, or
    is slower than an exact search, the others could only be slower still.
    """
    seconds: dict[str, float] = {}
    not_tried: dict[str, int] = {}
    for name, contender in sorted(contenders.items(), key=lambda entry: not entry[1].exact):
        if contender.family in not_tried:
            not_tried[contender.family] += 1
            continue
        progress(f"trying {name}")
        queries = embeddings[: _TRIED_EXACT if contender.exact else len(exact)]
        seconds[name], ids = _tried(contender.search, queries)
        if contender.exact:
            continue
        too_slow = _REFERENCE in seconds and seconds[name] > seconds[_REFERENCE]
        if too_slow or recall(by_codes(ids, twins), by_codes(exact, twins)) >= _ENOUGH:
            not_tried[contender.family] = 0
    return seconds, {family: count for family, count in not_tried.items() if count}


def same_codes(codes: CodeArray) -> Int64Array:
    """Return a number for each item, which items with the same code have in common."""
    _, numbers = np.unique(codes, axis=0, return_inverse=True)
    return numbers.astype(np.int64)


def by_codes(ids: Int64Array, twins: Int64Array) -> Int64Array:
    """Return answers [queries, k] in which it makes no difference which of several twins is there.

    Items with the same code have the same score, and everybody breaks such ties in their own way.
    An item becomes its code and how many with that code come before it.
    """
    kinds = np.where(ids >= 0, twins[ids], -1)
    before = np.tril(kinds[:, :, None] == kinds[:, None, :], -1).sum(2)
    return np.where(ids >= 0, kinds * ids.shape[1] + before, -1)


def _tried(search: Search, queries: Float32Array) -> tuple[float, Int64Array]:
    """Return about how long a search takes, and what it finds.

    The first queries, while caches are cold, are slow: the median leaves them out.
    """
    seconds, ids = [], []
    for query in queries:
        begun = time.perf_counter()
        ids.append(search(query, 10)[0])
        seconds.append(time.perf_counter() - begun)
    return float(np.median(seconds)), np.array(ids)
