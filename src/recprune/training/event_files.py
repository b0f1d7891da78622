"""A training as event files, which TensorBoard shows while it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recprune.training.loop import EpochReport, Report
from recprune.types import StorageError, needs_extra


@contextmanager
def event_files(folder: str | Path, *, validated: bool = True) -> Iterator[Report]:
    """Give an `on_epoch` that writes the loss, NDCG@10 on validation and the steps per second.

    Their steps are epochs. Where a training goes on, epochs that an interruption has undone are
    replaced. Without validation users (`validated`), there is no NDCG@10.
    """
    with needs_extra("tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written: {error.strerror}") from None
    writers: list[SummaryWriter] = []  # one, as soon as it is known which epoch comes first

    def on_epoch(report: EpochReport) -> None:
        if not writers:
            writers.append(SummaryWriter(str(folder), purge_step=report.epoch))
        values = {
            "training/loss": report.loss,
            "training/steps per second": report.steps_per_second,
        }
        if validated:
            values["validation/NDCG@10"] = report.ndcg
        for name, value in values.items():
            writers[0].add_scalar(name, value, report.epoch)
        writers[0].flush()  # seen at once, and kept if the training is killed

    try:
        yield on_epoch
    finally:
        for writer in writers:
            writer.close()
