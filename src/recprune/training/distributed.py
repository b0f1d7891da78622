"""Several workers that train one model: which one this is, and what they send each other.

All of it goes through torch.distributed: gloo between processors, NCCL between GPUs. A worker alone
sends nothing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from recprune.types import InputError, Json, RecpruneError, needs_extra

with needs_extra("train"):
    import torch
    import torch.distributed as dist
    from torch import Tensor

# Long enough for the first worker to validate or save while the others wait; a worker that dies
# is noticed at once.
_TIMEOUT = timedelta(minutes=10)
_NOTICE_AFTER = 5.0  # seconds of waiting for the others until a line says so
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class LostWorkerError(RecpruneError):
    """A worker is gone, or cannot be reached."""


class SharedError(RecpruneError):
    """What went wrong at the first worker, raised at the others: it need not be reported twice."""


@dataclass(frozen=True)
class Workers:
    """The workers of a training, and which of them this is. The first alone reads and writes."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0  # among the workers of this machine: which GPU is its own

    @property
    def is_first(self) -> bool:
        """Whether this worker reads, writes and reports for all."""
        return self.rank == 0

    def all_reduce(self, buffer: Tensor) -> None:
        """Put the sum of all workers' buffers into each of them."""
        with self._connected():
            dist.all_reduce(buffer)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Put the first worker's tensors into those of all others."""
        with self._connected():
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def run_on_first(self, work: Callable[[], Json]) -> Json:
        """Run something at the first worker alone, and return its result at all.

        If it fails there, it fails everywhere, so that no worker waits in vain.
        """
        if self.count == 1:
            return work()
        if not self.is_first:
            outcome: Json = json.loads(self._broadcast_bytes(b""))
            if "failed" in outcome:
                raise SharedError(outcome["failed"])
            done: Json = outcome["done"]
            return done
        try:
            done = work()
        except (RecpruneError, OSError, MemoryError) as error:
            self._broadcast_bytes(json.dumps({"failed": str(error)}).encode())
            raise
        self._broadcast_bytes(json.dumps({"done": done}).encode())
        return done

    def _broadcast_bytes(self, message: bytes) -> bytes:
        """Return the message of the first worker; what the others pass is ignored."""
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"  # NCCL knows nothing else
        size = torch.tensor(len(message), device=device)
        self.broadcast([size])
        content = torch.zeros(int(size), dtype=torch.uint8, device=device)
        if self.is_first:
            content = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)
        self.broadcast([content])
        return content.cpu().numpy().tobytes()

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise LostWorkerError(
                f"worker {self.rank} of {self.count} lost touch with another: {reason}"
            ) from None


ALONE = Workers()


def appointed() -> Workers | None:
    """Return which worker this is by the variables that torchrun sets; None without them."""
    if not all(os.environ.get(name) for name in _ENVIRONMENT):
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    try:
        rank, count, local_rank = (int(os.environ.get(name, "0")) for name in names)
    except ValueError:
        found = ", ".join(f"{name}={os.environ.get(name)}" for name in names)
        raise InputError(f"{found} in the environment: expected integers") from None
    if not 0 <= rank < count:
        raise InputError(f"RANK={rank}, WORLD_SIZE={count} in the environment do not go together")
    return Workers(rank, count, local_rank)


@contextmanager
def joined(workers: Workers, device: torch.device) -> Iterator[None]:
    """Join the process group that the environment describes, and leave it in the end."""
    options: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = {"backend": "nccl", "device_id": device}
    try:
        try:
            with _waiting_for_others(workers):
                dist.init_process_group(timeout=_TIMEOUT, **options)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise LostWorkerError(
                f"worker {workers.rank} of {workers.count} cannot meet the others: {reason}"
            ) from None
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _waiting_for_others(workers: Workers) -> Iterator[None]:
    """Print a line if it takes long, and let Ctrl-C end it, which torch would ignore."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    line = f"worker {workers.rank}: waiting for {workers.count} workers at {host}:{port}\n"
    notice = threading.Timer(_NOTICE_AFTER, lambda: sys.stderr.write(line))
    notice.daemon = True
    notice.start()
    before = None
    if threading.current_thread() is threading.main_thread():  # signals arrive only there
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        notice.cancel()
        if before is not None:
            signal.signal(signal.SIGINT, before)
