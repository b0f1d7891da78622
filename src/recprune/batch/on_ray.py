"""The parts of a batch answered by processes of a Ray cluster, through Ray Data.

Ray repeats the parts of a process that dies, or of a node that is lost. A part is put in place in
one step, so one that is made twice is there once.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from recprune.batch.parts import PartReport, PartWriter
from recprune.batch.plan import BatchPlan
from recprune.cluster import connected, say_if_busy
from recprune.types import Progress, RecpruneError, no_progress

if TYPE_CHECKING:
    import ray.data


def write_parts_on_ray(
    plan: BatchPlan,
    out: str | Path,
    parts: Sequence[int],
    workers: int | None,
    address: str,
    progress: Progress = no_progress,
) -> Iterator[PartReport]:
    """Answer parts on a cluster; yield each report as soon as its part is in place.

    The address is one that `connected` takes. Without a number of workers, every CPU is one.
    """
    with connected(address, workers):
        import ray
        import ray.data.exceptions

        try:
            say_if_busy(progress)
            for row in _answered(plan, out, parts, workers).iter_rows():
                report = json.loads(row["report"])
                if "error" in report:
                    raise RecpruneError(report["error"])
                yield PartReport(**report)
        except (
            ray.exceptions.RayError,
            ray.data.exceptions.ExecutionTimeoutError,
            ray.data.exceptions.SystemException,
        ) as error:
            first = (str(error).strip() or repr(error)).splitlines()[0]
            raise RecpruneError(
                f"the cluster gave up: {first}; finished parts are kept, and the same command "
                "goes on"
            ) from None


def _answered(
    plan: BatchPlan, out: str | Path, parts: Sequence[int], workers: int | None
) -> ray.data.Dataset:
    """Return the answers to parts as a dataset, of which nothing is computed yet."""
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    size = workers or max(1, int(resources.get("CPU", 1)))
    # One row a block: Ray hands out, and repeats, one part at a time.
    rows = ray.data.from_items([{"part": part} for part in parts], override_num_blocks=len(parts))
    return rows.map(
        cast(Any, _answer_part),  # Ray's annotation allows functions of a row only
        fn_args=(plan, os.path.realpath(out)),
        compute=ray.data.TaskPoolStrategy(size=min(size, len(parts))),
        num_cpus=1,
    )


class _RayWorkerState:
    """What a process of the cluster has loaded, for as long as it is given parts of one plan."""

    given: tuple[BatchPlan, str] | None = None
    writer: PartWriter | None = None


def _answer_part(row: dict[str, Any], plan: BatchPlan, out: str) -> dict[str, Any]:
    """Answer a part in a process of the cluster. Errors travel as data, with their message."""
    try:
        if _RayWorkerState.writer is None or _RayWorkerState.given != (plan, out):
            _RayWorkerState.given, _RayWorkerState.writer = (plan, out), PartWriter(plan, out)
        report = asdict(_RayWorkerState.writer.write(int(row["part"])))
    except RecpruneError as error:
        report = {"error": f"on {socket.gethostname()}: {error}"}
    return {"report": json.dumps(report)}
