"""The folder that a batch is written to: its plan first, finished parts, the manifest last.

A part that is there under its own name, with the bytes that it was written with, is finished. So a
run that was killed goes on with the others, whichever engine makes them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from recprune.batch.parts import PartReport, finished_part, noted_sha256, part_name
from recprune.batch.plan import BatchPlan
from recprune.storage import MANIFEST, json_checksum, read_manifest, writing_file
from recprune.system import open_folder
from recprune.types import VERSION, Json, Progress, StorageError, no_progress

PLAN = "plan.json"
_VERSION = 1

WriteParts: TypeAlias = Callable[[BatchPlan, str | Path, Sequence[int]], Iterator[PartReport]]
"""An engine: answers the parts that it is given, and yields each report as its part is in place."""


def run_batch(
    plan: BatchPlan,
    out: str | Path,
    write_parts: WriteParts,
    on_part: Callable[[PartReport, bool], None] = lambda _, __: None,
    progress: Progress = no_progress,
) -> list[PartReport]:
    """Make what is missing of the output, the manifest last; return the reports of all parts.

    `on_part` is called with every part and whether it was made now or found, `progress` with those
    that are there, but not as they were written.
    """
    with opened_output(plan, out, progress) as finished:
        reports = list(finished.values())
        for report in reports:
            on_part(report, False)
        left = [part for part in range(plan.num_parts) if part not in finished]
        for report in write_parts(plan, out, left) if left else ():
            on_part(report, True)
            reports.append(report)
        reports.sort(key=lambda report: report.part)
        write_manifest(plan, Path(out), reports)
        for unused in (".part-*", "..part-*"):  # checksums too, which the manifest has now
            _remove_leftovers(Path(out), unused)
    return reports


@contextmanager
def opened_output(
    plan: BatchPlan, out: str | Path, progress: Progress = no_progress
) -> Iterator[dict[int, PartReport]]:
    """Claim a folder for a plan; yield the parts that are finished already, on disk and whole.

    A folder that belongs to another plan, or to anything else, is refused and left as it is.
    """
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = open_folder(folder)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written: {error.strerror}") from None
    try:
        _lock(folder, descriptor)
        _claim(folder, plan)
        for unfinished in (".part-*.parquet.*", "..part-*.json.*"):
            _remove_leftovers(folder, unfinished)
        yield _finished_parts(plan, folder, progress)
    finally:
        os.close(descriptor)


def unfinished_plan(out: str | Path) -> Json | None:
    """Return the plan of the run that goes on in a folder; None if there is none, or it is done."""
    folder = Path(out)
    try:
        found = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and not (folder / MANIFEST).exists() else None


def _finished_parts(plan: BatchPlan, folder: Path, progress: Progress) -> dict[int, PartReport]:
    """Return the parts that are on disk as they were written, and report the others there."""
    known = _manifest_checksums(plan, folder)
    finished = {}
    for part in range(plan.num_parts):
        expected = noted_sha256(folder, part) or known.get(part_name(part))
        report = finished_part(plan, folder, part, expected)
        if report is not None:
            finished[part] = report
        elif (folder / part_name(part)).exists():
            progress(f"{folder / part_name(part)}: not as it was written: made again")
    return finished


def _manifest_checksums(plan: BatchPlan, folder: Path) -> dict[str, str]:
    """Return the checksums of all parts by the manifest; none without a whole one of this plan."""
    try:
        manifest = read_manifest(folder)
        if manifest["plan"] != json_checksum(plan.to_json()):
            return {}
        return {entry["name"]: entry["sha256"] for entry in manifest["parts"]}
    except (StorageError, KeyError, TypeError):
        return {}


def _remove_leftovers(folder: Path, pattern: str) -> None:
    """Remove what killed workers had begun to write, or what is no longer needed."""
    for leftover in folder.glob(pattern):
        leftover.unlink(missing_ok=True)


def _lock(folder: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some network file systems have no locks for folders: there it is up to the caller.
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise StorageError(f"{folder}: another run is writing to it") from None


def _claim(folder: Path, plan: BatchPlan) -> None:
    """Write the plan into an empty folder, or compare it with the one that is there."""
    path = folder / PLAN
    wanted = plan.to_json()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if any(not entry.name.startswith(f".{PLAN}.") for entry in folder.iterdir()):
            raise StorageError(
                f"{folder}: already exists and is not a batch's output; not overwritten"
            ) from None
        _write_json(path, wanted)
        return
    except (OSError, ValueError) as error:
        raise StorageError(f"{path}: cannot be read: {error}") from None
    if found == wanted:
        return
    found = found if isinstance(found, dict) else {}
    differing = [name for name in wanted | found if found.get(name) != wanted.get(name)]
    raise StorageError(
        f"{folder}: belongs to another run, with different {', '.join(differing)}: "
        "give an empty folder, or what that run was given"
    )


def write_manifest(plan: BatchPlan, folder: Path, reports: Sequence[PartReport]) -> None:
    """Write the manifest, after checking that all parts are there."""
    missing = set(range(plan.num_parts)) - {report.part for report in reports}
    if missing:
        raise StorageError(f"{folder}: {part_name(min(missing))} is missing")
    manifest: Json = {
        "kind": "batch",
        "version": _VERSION,
        "written_by": f"recprune {VERSION}",
        "settings": plan.settings.to_json(),
        "plan": json_checksum(plan.to_json()),
        "recommender": plan.recommender_sha256,
        "rows": plan.num_rows,
        "parts": [_entry(folder, report) for report in reports],
    }
    manifest["sha256"] = json_checksum(manifest)
    _write_json(folder / MANIFEST, manifest)


def _entry(folder: Path, report: PartReport) -> Json:
    path = folder / part_name(report.part)
    if not path.exists() or path.stat().st_size != report.bytes:
        raise StorageError(
            f"{path}: was written, but is not here: all workers have to share the folder"
        )
    return {
        "name": path.name,
        "rows": report.rows,
        "bytes": report.bytes,
        "sha256": report.sha256,
    }


def _write_json(path: Path, value: Json) -> None:
    with writing_file(path) as temporary:
        temporary.write_text(
            json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
