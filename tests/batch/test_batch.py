"""Every user gets a row, whatever is killed, and its bits are those of a single request."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recprune import Attributes, InputError, LiveIndex, SnapshotIds, StorageError
from recprune.batch.frozen_catalogue import FrozenCatalogue
from recprune.batch.in_processes import write_parts_in_processes
from recprune.batch.output import opened_output, run_batch
from recprune.batch.parts import PartReport, PartWriter
from recprune.batch.plan import BatchPlan, BatchSettings, make_plan
from recprune.recommender.recommender import Recommender
from recprune.storage import MANIFEST
from recprune.types import RecpruneError
from tests.support.clusters import descendants, is_running
from tests.support.serving import save_recommender, wait_until
from tests.support.trainings import Trained

CLI = [sys.executable, "-m", "recprune.cli"]
ROWS, ROWS_PER_PART = 3_000, 20
PARTS = ROWS // ROWS_PER_PART
History = list[str | None] | None

# Rows without a known item in their history, or with something in it that is no id.
POISONED: dict[int, History] = {
    0: None,
    1: [],
    2: [None],
    3: ["nobody", "no one"],
    4: [None, "a", "nobody"],
    5: ["b", None],
}


@dataclass
class Work:
    """A saved recommender, histories in several files, and the output of an undisturbed run."""

    folder: Path
    recommender: Recommender
    histories: list[History]
    rows_per_part: int
    expected: dict[str, bytes]

    @property
    def saved(self) -> Path:
        return self.folder / "recommender"

    @property
    def source(self) -> Path:
        return self.folder / "histories"

    def command(self, out: Path, *options: str, workers: int = 2) -> list[str]:
        words = [self.saved, "--histories", self.source, "--out", out]
        sizes = ["-k", 7, "--rows-per-part", self.rows_per_part, "--workers", workers]
        return [*CLI, "batch", *map(str, words), *map(str, sizes), *options]


def drawn_histories(recommender: Recommender, count: int) -> list[History]:
    """Draw histories of known items, longer than the model looks at, some with unknown ones."""
    rng = np.random.default_rng(1)
    names = [*recommender.item_ids.take(range(len(recommender.item_ids))), "nobody"]
    lengths = rng.integers(1, 25, count)
    drawn: list[History] = [
        [str(names[place]) for place in rng.integers(0, len(names), length)] for length in lengths
    ]
    for row, history in POISONED.items():
        drawn[row] = history
    return drawn


def write_histories(path: Path, first_user: int, histories: list[History], **more: Any) -> None:
    users = [f"user {first_user + row}" for row in range(len(histories))]
    items = pa.array(histories, pa.list_(pa.string()))
    columns = {"user_id": pa.array(users, pa.string()), "history": items}
    pq.write_table(pa.table(columns), path, **more)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=90)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    return make_work(tmp_path_factory.mktemp("batch"), ROWS_PER_PART)


def make_work(folder: Path, rows_per_part: int) -> Work:
    recommender = save_recommender(folder / "recommender")
    histories = drawn_histories(recommender, ROWS)
    (folder / "histories").mkdir()
    # Row groups that fit no part, one larger than many, and a file without rows in between.
    write_histories(folder / "histories" / "a.parquet", 0, histories[:1003], row_group_size=77)
    write_histories(folder / "histories" / "b.parquet", 0, [])
    write_histories(folder / "histories" / "c.parquet", 1003, histories[1003:])
    found = Work(folder, recommender, histories, rows_per_part, {})
    done = run(found.command(folder / "undisturbed", workers=1))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "leaked" not in done.stderr
    lost = sum(not set(history or []) - {None, "nobody", "no one"} for history in histories)
    assert f"{ROWS:,} users, {lost} by popularity" in done.stderr
    for word in ("users/s", "encode", "search", "io"):
        assert word in done.stderr
    found.expected = contents(folder / "undisturbed")
    return found


# Processes ---------------------------------------------------------------------------------------


def parts_in(out: Path) -> dict[str, int]:
    """Return the finished parts and which files they are."""
    return {path.name: path.stat().st_ino for path in out.glob("part-*.parquet")}


def start_and_wait(command: list[str], out: Path, parts: int) -> subprocess.Popen[str]:
    """Start a run and return when it has made some parts, and has most of them to go."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        wait_until(lambda: len(parts_in(out)) >= parts or process.poll() is not None, "some parts")
        assert process.poll() is None, process.communicate()[1]
    except AssertionError:
        process.kill()
        process.communicate()
        raise
    return process


def pool_workers(pid: int) -> list[int]:
    return [child for child, line in descendants(pid).items() if "spawn_main" in line]


# What is written ---------------------------------------------------------------------------------


def test_one_row_for_every_row_in_order_with_the_bits_of_a_single_request(work: Work) -> None:
    parts = sorted((work.folder / "undisturbed").glob("*.parquet"))
    found = pa.concat_tables(map(pq.read_table, parts)).to_pylist()
    assert [row["user_id"] for row in found] == [f"user {row}" for row in range(ROWS)]
    assert list(found[0]) == ["user_id", "items", "scores", "exact", "by_popularity", "unknown"]
    rng = np.random.default_rng(2)
    for row in [*POISONED, *rng.integers(0, ROWS, 300).tolist()]:
        history: Any = work.histories[row] or []
        alone = work.recommender.recommend([history], 7, exclude_seen=True)
        answer = found[row]
        assert answer["items"] == alone.items[0]
        scores = np.array(answer["scores"], np.float32)
        bits = alone.scores[0, : len(alone.items[0])].view(np.uint32)
        assert scores.view(np.uint32).tolist() == bits.tolist()
        assert answer["unknown"] == len(alone.unknown[0])
        assert answer["by_popularity"] == bool(alone.by_popularity[0])
        assert answer["exact"]
    assert [found[row]["by_popularity"] for row in POISONED] == [True] * 4 + [False] * 2
    assert [found[row]["unknown"] for row in POISONED] == [0, 0, 1, 2, 2, 1]


def test_an_embedding_does_not_depend_on_what_else_is_in_the_batch(work: Work) -> None:
    rng = np.random.default_rng(3)
    num_items = len(work.recommender.item_ids)
    histories = [
        rng.integers(0, num_items, length).astype(np.int32) for length in rng.integers(1, 15, 200)
    ]
    encode = work.recommender.encoder.encode
    alone = np.concatenate([encode([history]) for history in histories])
    for size in (2, 7, 200):
        together = np.concatenate(
            [encode(histories[first : first + size]) for first in range(0, 200, size)]
        )
        assert together.tobytes() == alone.tobytes()


def test_the_manifest_comes_with_checksums_of_everything(work: Work) -> None:
    manifest = json.loads(work.expected[MANIFEST])
    assert manifest["rows"] == ROWS
    assert manifest["settings"]["k"] == 7
    saved = json.loads((work.saved / MANIFEST).read_text())
    assert manifest["recommender"] == saved["sha256"]
    assert len(manifest["parts"]) == PARTS
    for part in manifest["parts"]:
        assert part["rows"] == ROWS_PER_PART
        assert part["sha256"] == hashlib.sha256(work.expected[part["name"]]).hexdigest()
    others = {MANIFEST, "plan.json"}
    assert set(work.expected) == {part["name"] for part in manifest["parts"]} | others


def test_users_keep_their_type_and_integers_find_integers(tmp_path: Path) -> None:
    recommender = save_recommender(tmp_path / "recommender", ids="integers")
    known = recommender.item_ids.take(range(3))
    for kind in (pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.int64(), 3)):
        source = tmp_path / "in.parquet"
        # Arrow before 26 can neither write nor read a list of fixed size that is not there.
        has_none = not pa.types.is_fixed_size_list(kind) or int(pa.__version__.split(".")[0]) >= 26
        absent = None if has_none else [10**6] * 3
        histories = pa.array([known, absent, [10**6, known[0], None]], kind)
        users = pa.array([7, None, 7], pa.uint16())
        pq.write_table(pa.table({"who": users, "what": histories}), source)
        settings = BatchSettings(5, False, user_column="who", history_column="what")
        names = tmp_path / "names.csv"  # whose ids are text
        names.write_text("item_id,name\n" + "".join(f"{item},No. {item}\n" for item in known))
        plan = make_plan(tmp_path / "recommender", source, settings, names=names)
        PartWriter(plan, tmp_path).write(0)
        found = pq.read_table(tmp_path / "part-00000.parquet")
        assert found.column("user_id").type == pa.uint16()
        assert found.column("user_id").to_pylist() == [7, None, 7]
        assert found.column("by_popularity").to_pylist() == [False, True, False]
        assert found.column("unknown").to_pylist() == [0, 0 if has_none else 3, 2]
        expected = recommender.recommend([known, [], [known[0]]], 5, exclude_seen=False)
        assert found.column("items").to_pylist() == expected.items
        assert found.column("names").to_pylist() == [
            [f"No. {item}" if item in known else None for item in items] for items in expected.items
        ]


def test_names_stand_beside_the_items(work: Work, tmp_path: Path) -> None:
    names, out, histories = (tmp_path / name for name in ("names.csv", "out", "in.parquet"))
    write_histories(histories, 0, [["a"], None])
    known = [str(item) for item in work.recommender.item_ids.take(range(3, 30))]
    names.write_text("item_id,name\n" + "".join(f'{item},"The  {item}"\n' for item in known))
    command = [*CLI, "batch", str(work.saved), "--histories", str(histories), "--out", str(out)]
    done = run([*command, "--names", str(names), "-k", "20"])
    assert done.returncode == 0, done.stderr
    rows = pq.read_table(out / "part-00000.parquet").to_pylist()
    for row in rows:
        assert row["names"] == [f"The {item}" if item in known else None for item in row["items"]]
    assert {None} < {name for row in rows for name in row["names"]}
    # They are part of what the output is made of.
    names.write_text("item_id,name\nnobody,Someone\n")
    for options in (["--names", str(names)], []):
        again = run([*command, *options, "-k", "20"])
        assert again.returncode == 2
        assert "with different names: give" in again.stderr
    other = run([*command[:-1], str(tmp_path / "other"), "--names", str(names)])
    assert other.returncode == 0, other.stderr
    assert "names no item of the catalogue" in other.stderr
    missing = run([*command, "--names", str(tmp_path / "none.csv")])
    assert missing.returncode == 2
    assert "none.csv: cannot be read: No such file" in missing.stderr
    os.mkfifo(tmp_path / "pipe")
    pipe = run([*command, "--names", str(tmp_path / "pipe")])
    assert pipe.returncode == 2
    assert "pipe: is no plain file, and every worker reads the names" in pipe.stderr


def test_without_users_there_is_a_manifest_alone(work: Work, tmp_path: Path) -> None:
    write_histories(tmp_path / "in.parquet", 0, [])
    words = [work.saved, "--histories", tmp_path / "in.parquet", "--out", tmp_path / "out"]
    done = run([*CLI, "batch", *map(str, words)])
    assert done.returncode == 0, done.stderr
    assert "0 users" in done.stderr
    assert json.loads((tmp_path / "out" / MANIFEST).read_text())["parts"] == []


def test_half_a_character_is_an_unknown_item(work: Work, tmp_path: Path) -> None:
    values = pa.array([b"a", b"\xff\xfe", b"b"]).cast(pa.string(), safe=False)
    histories = pa.ListArray.from_arrays(pa.array([0, 3], pa.int32()), values)
    pq.write_table(pa.table({"user_id": [1], "history": histories}), tmp_path / "in.parquet")
    plan = make_plan(work.saved, tmp_path / "in.parquet")
    PartWriter(plan, tmp_path).write(0)
    (answer,) = pq.read_table(tmp_path / "part-00000.parquet").to_pylist()
    assert answer["unknown"] == 1
    expected = work.recommender.recommend([["a", "b"]])
    assert answer["items"] == expected.items[0]


@pytest.mark.parametrize("rows_per_part", [1, 3, 7, 50, 1000])
def test_parts_cover_every_row_once(work: Work, rows_per_part: int) -> None:
    plan = make_plan(work.saved, work.source, BatchSettings(rows_per_part=rows_per_part))
    pieces = [piece for part in range(plan.num_parts) for piece in plan.pieces(part)]
    covered = [
        (piece.file.path, piece.row_group, row)
        for piece in pieces
        for row in range(piece.first, piece.first + piece.rows)
    ]
    expected = [
        (file.path, group, row)
        for file in plan.files
        for group, rows in enumerate(file.row_groups)
        for row in range(rows)
    ]
    assert covered == expected
    sizes = [plan.rows_of(part) for part in range(plan.num_parts)]
    assert sum(sizes) == ROWS
    assert set(sizes[:-1]) <= {rows_per_part}


def test_parts_can_be_written_in_any_order(work: Work, tmp_path: Path) -> None:
    settings = BatchSettings(7, exclude_seen=True, rows_per_part=ROWS_PER_PART)
    plan = make_plan(work.saved, work.source, settings)
    writer = PartWriter(plan, tmp_path)
    for part in (5, 2, 3, 3, 60, 61, 149, 50, 0):
        writer.write(part)
        name = f"part-{part:05}.parquet"
        assert (tmp_path / name).read_bytes() == work.expected[name]


PEAK = """
import pathlib, sys
from recprune.batch.parts import PartWriter
from recprune.batch.plan import BatchPlan, BatchSettings, make_plan
recommender, small, large, out = sys.argv[1:]
for source in (small, large):
    plan = make_plan(recommender, source, BatchSettings(rows_per_part=500))
    PartWriter(plan, out).write(plan.num_parts - 1)
    status = pathlib.Path("/proc/self/status").read_text()
    print(int(status.split("VmHWM:")[1].split()[0]) // 1024)
"""


def test_a_row_group_larger_than_memory_may_be(tmp_path: Path) -> None:
    save_recommender(tmp_path / "recommender", ids="integers")
    drawn = np.random.default_rng(4).integers(0, 10**9, 150_000 * 100)  # 120 MB
    for name, rows in (("small", 1_000), ("large", 150_000)):
        offsets = pa.array(np.arange(rows + 1) * 100, pa.int32())
        histories = pa.ListArray.from_arrays(offsets, drawn[: rows * 100])
        table = pa.table({"user_id": np.arange(rows), "history": histories})
        pq.write_table(table, tmp_path / name, rows, compression="none", use_dictionary=False)
    words = [str(tmp_path / name) for name in ("recommender", "small", "large", "")]
    done = run([sys.executable, "-c", PEAK, *words])
    assert done.returncode == 0, done.stderr
    small, large = map(int, done.stdout.split())
    assert large - small < 24, "megabytes more for a part at the end of 120"


# Kills -------------------------------------------------------------------------------------------


def test_a_killed_worker_costs_nothing(work: Work, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start_and_wait(work.command(out), out, 5)
    before = parts_in(out)
    os.kill(pool_workers(process.pid)[0], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert len(before) < PARTS, "killed too late to see anything"
    assert contents(out) == work.expected
    assert before.items() <= parts_in(out).items(), "no finished part was written again"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_goes_on(work: Work, tmp_path: Path, how: signal.Signals) -> None:
    out = tmp_path / "out"
    process = start_and_wait(work.command(out), out, 5)
    below = descendants(process.pid)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does, to all processes
    else:
        process.send_signal(how)
    _, said = process.communicate(timeout=30)
    if how != signal.SIGKILL:
        assert process.returncode == 130
        assert "interrupted with" in said
        assert "Traceback" not in said
    wait_until(lambda: not any(map(is_running, below)), "no worker is left")
    before = parts_in(out)
    assert 5 <= len(before) < PARTS
    assert not (out / MANIFEST).exists()
    done = run(work.command(out, workers=1))
    assert done.returncode == 0, done.stderr
    assert f"{len(before) * ROWS_PER_PART:,} were there already" in done.stderr
    assert contents(out) == work.expected
    assert before.items() <= parts_in(out).items(), "no finished part was written again"


def test_a_damaged_part_is_made_again_and_a_finished_run_is_left_alone(
    work: Work, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name, content in work.expected.items():
        (out / name).write_bytes(content)
    damaged, changed = out / "part-00003.parquet", out / "part-00005.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    change(changed)
    (out / ".part-00007.parquet.abc").write_bytes(b"left by a kill")
    (out / "..part-00007.json.abc").write_bytes(b"left by a kill")
    done = run(work.command(out))
    assert done.returncode == 0
    for path in (damaged, changed):
        assert f"{path}: not as it was written: made again" in done.stderr
    assert done.stderr.count("made again") == 2
    assert contents(out) == work.expected
    before = parts_in(out)
    done = run(work.command(out))
    assert done.returncode == 0
    assert "nothing was left to do" in done.stderr
    assert parts_in(out) == before


def change(part: Path) -> None:
    """Change what a part says, so that all else about it is right: rows, columns, types."""
    table = pq.read_table(part)
    place = table.schema.get_field_index("unknown")
    column = pa.array([99] * len(table), pa.int64())
    pq.write_table(table.set_column(place, "unknown", column), part)


def test_a_part_that_is_changed_before_the_end_is_made_again(work: Work, tmp_path: Path) -> None:
    """There is no manifest yet: its checksum lies beside it. Nor is a part without one trusted."""
    settings = BatchSettings(7, exclude_seen=True, rows_per_part=ROWS_PER_PART)
    plan = make_plan(work.saved, work.source, settings)
    out, said = tmp_path / "out", list[str]()
    with opened_output(plan, out):
        writer = PartWriter(plan, out)
        for part in range(4):
            writer.write(part)
    change(out / "part-00001.parquet")
    (out / ".part-00002.json").unlink()
    (out / "part-00003.parquet").unlink()
    with opened_output(plan, out, said.append) as finished:
        assert list(finished) == [0]
    assert said == [
        f"{out / name}: not as it was written: made again"
        for name in ("part-00001.parquet", "part-00002.parquet")
    ]


def test_histories_that_were_copied_are_the_same_histories(work: Work, tmp_path: Path) -> None:
    write_histories(tmp_path / "in.parquet", 0, [["a"]] * 10)
    with opened_output(make_plan(work.saved, tmp_path / "in.parquet"), tmp_path / "out"):
        pass
    os.utime(tmp_path / "in.parquet", (1, 1))
    with opened_output(make_plan(work.saved, tmp_path / "in.parquet"), tmp_path / "out"):
        pass
    write_histories(tmp_path / "in.parquet", 0, [["b"]] * 10)
    with (
        pytest.raises(StorageError, match="with different histories"),
        opened_output(make_plan(work.saved, tmp_path / "in.parquet"), tmp_path / "out"),
    ):
        pass


def test_no_file_of_a_folder_is_left_out_without_a_word(work: Work, tmp_path: Path) -> None:
    said: list[str] = []
    write_histories(tmp_path / "a.parquet", 0, [["a"]])
    for name in ("b.parquet.snappy", "notes.txt", "_SUCCESS", ".a.parquet.crc"):
        (tmp_path / name).touch()
    (tmp_path / "_temporary").mkdir()
    write_histories(tmp_path / "_temporary" / "b.parquet", 0, [["a"]])
    assert make_plan(work.saved, tmp_path, progress=said.append).num_rows == 1
    assert said == [f"{tmp_path}: 2 files are not named *.parquet: not read"]
    below = tmp_path / "day=2" / "hour=3" / "c.parquet"
    below.parent.mkdir(parents=True)
    assert make_plan(work.saved, tmp_path).num_rows == 1, (
        "a folder without Parquet files is left out"
    )
    write_histories(below, 0, [["a"]])
    with pytest.raises(InputError, match=f"{below}: in a folder below {tmp_path}, of which only"):
        make_plan(work.saved, tmp_path)


def test_crashes_are_counted_from_the_last_finished_part(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(work.saved, work.source, BatchSettings(rows_per_part=300))
    calls = []

    def one_part_and_then_a_crash(*given: Any) -> Iterator[PartReport]:
        calls.append(given[2])
        yield PartReport(given[2][0], 300, 0, 1, "", {})
        if len(given[2]) > 1:
            raise BrokenProcessPool

    monkeypatch.setattr("recprune.batch.in_processes._write_in_one_pool", one_part_and_then_a_crash)
    reports = write_parts_in_processes(plan, tmp_path, range(plan.num_parts), 1)
    assert [report.part for report in reports] == list(range(10))
    assert len(calls) == 10


def test_a_part_in_place_whose_report_was_lost_is_not_made_again(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(work.saved, work.source, BatchSettings(rows_per_part=1_500))
    asked = []

    def killed_before_it_could_report(
        plan: BatchPlan, out: Path, parts: list[int], _workers: int
    ) -> Iterator[PartReport]:
        asked.append(parts)
        PartWriter(plan, out).write(parts[0])
        yield from ()
        raise BrokenProcessPool

    monkeypatch.setattr(
        "recprune.batch.in_processes._write_in_one_pool", killed_before_it_could_report
    )
    reports = [*write_parts_in_processes(plan, tmp_path, [0, 1], 1)]
    assert [report.part for report in reports] == [0, 1]
    assert [report.rows for report in reports] == [1_500, 1_500]
    assert asked == [[0, 1], [1]]


def test_workers_that_always_die_are_an_error(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(work.saved, work.source)
    monkeypatch.setattr(
        "recprune.batch.in_processes._work", os._exit
    )  # with the number of the part
    with pytest.raises(RecpruneError, match="worker processes were killed 5 times"):
        run_batch(
            plan,
            tmp_path / "out",
            lambda plan, out, parts: write_parts_in_processes(plan, out, parts, 1),
        )


# Refusals ----------------------------------------------------------------------------------------


def test_another_run_s_output_is_refused(work: Work, tmp_path: Path) -> None:
    settings = BatchSettings(7, exclude_seen=True, rows_per_part=ROWS_PER_PART)
    plan = make_plan(work.saved, work.source, settings)
    out = tmp_path / "out"
    with opened_output(plan, out) as finished:
        assert finished == {}
        with (
            pytest.raises(StorageError, match="another run is writing"),
            opened_output(plan, out),
        ):
            pass
    save_recommender(tmp_path / "other", seed=5)
    write_histories(tmp_path / "other.parquet", 0, [["a"]])
    others = {
        "settings": make_plan(work.saved, work.source, BatchSettings(8)),
        "recommender": make_plan(tmp_path / "other", work.source, settings),
        "histories": make_plan(work.saved, tmp_path / "other.parquet", settings),
    }
    for name, other in others.items():
        with (
            pytest.raises(StorageError, match=f"with different {name}: give"),
            opened_output(other, out),
        ):
            pass
    with opened_output(plan, out):
        pass  # still its own
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with (
        pytest.raises(StorageError, match="not a batch's output; not overwritten"),
        opened_output(plan, tmp_path / "full"),
    ):
        pass


def test_bad_histories_are_refused_before_any_work(work: Work, tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"

    def plan_of(table: pa.Table, settings: BatchSettings | None = None) -> None:
        pq.write_table(table, path)
        make_plan(work.saved, path, settings)

    good = pa.array([["a"]])
    with pytest.raises(InputError, match="no such file"):
        make_plan(work.saved, tmp_path / "nothing")
    with pytest.raises(InputError, match="has no Parquet files"):
        make_plan(work.saved, tmp_path)
    with pytest.raises(InputError, match="no column 'user_id', but who, history"):
        plan_of(pa.table({"who": [1], "history": good}))
    with pytest.raises(InputError, match="'user_id' is double"):
        plan_of(pa.table({"user_id": [0.5], "history": good}))
    for wrong in (pa.array([[1]]), pa.array(["a"]), pa.array([1.5]), pa.array([[["a"]]])):
        with pytest.raises(InputError, match="expected lists of strings, as the ids"):
            plan_of(pa.table({"user_id": [1], "history": wrong}))
    with pytest.raises(InputError, match="both said to be in"):
        BatchSettings(user_column="x", history_column="x")
    for k in (0, -1):
        with pytest.raises(InputError, match="k is"):
            BatchSettings(k)
    with pytest.raises(InputError, match="k is 1000000000, expected 1 to"):
        plan_of(pa.table({"user_id": [1], "history": good}), BatchSettings(10**9))
    path.unlink()
    folder = tmp_path / "mixed"
    folder.mkdir()
    pq.write_table(pa.table({"user_id": [1], "history": good}), folder / "a.parquet")
    pq.write_table(pa.table({"user_id": ["1"], "history": good}), folder / "b.parquet")
    with pytest.raises(InputError, match="b.parquet: 'user_id' is string, in .*a.parquet int64"):
        make_plan(work.saved, folder)


def test_a_truncated_file_is_refused_by_name(work: Work, tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    write_histories(path, 0, [["a"]] * 100)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="in.parquet: not readable as Parquet"):
        make_plan(work.saved, path)


def damage(path: Path, row_group: int) -> None:
    """Overwrite the histories of a row group, keeping size and footer."""
    column = pq.ParquetFile(path).metadata.row_group(row_group).column(1)
    with path.open("r+b") as file:
        file.seek(column.dictionary_page_offset or column.data_page_offset)
        file.write(b"\xff" * column.total_compressed_size)


def test_an_unreadable_row_group_is_named_and_finished_parts_stay(
    work: Work, tmp_path: Path
) -> None:
    path, out = tmp_path / "in.parquet", tmp_path / "out"
    write_histories(path, 0, work.histories[:300], row_group_size=100)
    damage(path, 2)
    words = [str(work.saved), "--histories", str(path), "--out", str(out)]
    done = run([*CLI, "batch", *words, "--rows-per-part", "50", "--workers", "1"])
    assert done.returncode == 2
    assert f"{path}, row group 2: cannot be read" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(parts_in(out)) == [f"part-0000{part}.parquet" for part in range(4)]
    assert not (out / MANIFEST).exists()


def test_what_changes_under_a_run_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    write_histories(path, 0, [["a"]] * 10)
    save_recommender(tmp_path / "recommender")
    plan = make_plan(tmp_path / "recommender", path)
    writer = PartWriter(plan, tmp_path)
    time.sleep(0.01)  # so that the clock of the file system has moved on
    write_histories(path, 0, [["b"]] * 10)
    with pytest.raises(InputError, match="was changed after the plan was made"):
        writer.write(0)
    names = tmp_path / "names.csv"
    names.write_text("item_id,name\na,Apple\n")
    plan = make_plan(tmp_path / "recommender", path, names=names)
    names.write_text("item_id,name\na,Pear\n")
    with pytest.raises(InputError, match=r"names.csv: was changed after the plan was made"):
        PartWriter(plan, tmp_path)
    save_recommender(tmp_path / "recommender", seed=9)
    with pytest.raises(StorageError, match="another recommender than the plan"):
        PartWriter(plan, tmp_path)


# Over a catalogue that changes -------------------------------------------------------------------


def answers_in(out: Path) -> dict[str, list[Any]]:
    parts = [pq.read_table(path) for path in sorted(out.glob("part-*.parquet"))]
    return dict(pa.concat_tables(parts).to_pydict())


def test_a_batch_has_the_catalogue_of_the_moment_at_which_it_began(
    work: Work, tmp_path: Path
) -> None:
    saved = shutil.copytree(work.saved, tmp_path / "recommender")
    recommender = Recommender.load(saved)
    out, live_folder = tmp_path / "out", tmp_path / "catalogue"
    codes = recommender.index.item_codes()
    with recommender.make_live(live_folder) as live:
        live.put(["hat"], codes[5:6])
        live.remove(live.find(recommender.item_ids.take([5, 7])))
        names = live.external_ids(live.snapshot().numbers())
        table = pa.table({"item": names, "nice": [name != "hat" for name in names]})
        Attributes.from_table(table, SnapshotIds(live.snapshot())).save(tmp_path / "nice")
    words = ["--live", live_folder, "--attributes", tmp_path / "nice", "--where", "nice = false"]
    command = [*work.command(out), "--live", str(live_folder)]
    process = start_and_wait(command, out, 3)
    process.kill()
    process.communicate()
    with LiveIndex.open(live_folder) as live:
        before = live.snapshot()
        live.put(["scarf"], codes[5:6], notes=[{"attributes": {"nice": False}}])
        live.remove(live.find(["hat"]))
        live.compact().result()
        done = run(command)
        assert done.returncode == 0, done.stderr
        found = answers_in(out)
        asked = recommender.with_live(live)
        histories: list[list[Any]] = [[*(history or [])] for history in work.histories]
        expected = asked.recommend(histories, 7, index=before)
        assert found["items"] == expected.items
        assert any("hat" in items for items in found["items"])
        # With what it then is, the catalogue is another one.
        again = run(command)
        assert again.returncode == 2
        assert "belongs to another run, with different catalogue" in again.stderr
    assert run([*work.command(tmp_path / "filtered"), *map(str, words)]).returncode == 0
    filtered = answers_in(tmp_path / "filtered")
    assert {item for items in filtered["items"] for item in items} == {"scarf"}
    refused = run([*work.command(tmp_path / "other"), "--attributes", str(tmp_path / "nice")])
    assert refused.returncode == 2
    assert "--attributes goes with --live" in refused.stderr


def test_a_copy_of_the_catalogue_that_no_run_goes_on_with_is_not_answered_from(
    work: Work, tmp_path: Path
) -> None:
    recommender, out = work.recommender, tmp_path / "out"
    write_histories(tmp_path / "one.parquet", 0, [["a", "b"]])
    words = ["batch", work.saved, "--histories", tmp_path / "one.parquet", "--out", out]
    command = [*CLI, *map(str, words), "-k", "5", "--workers", "1", "--live"]
    live_folder, copy = tmp_path / "live", tmp_path / ".out.catalogue"
    recommender.make_live(live_folder).close()
    recommender.make_live(tmp_path / "another").close()
    refused = run([*command, str(live_folder), "--where", "no_such = 1"])
    assert refused.returncode == 2
    assert "has no attributes" in refused.stderr
    assert not out.exists()
    assert not list(tmp_path.glob(".out.*"))

    # One that a run left behind which was killed before it had a plan, of any live index.
    FrozenCatalogue.freeze(tmp_path / "another", copy, None)
    before = recommender.recommend([["a", "b"]], 5).items[0]
    with LiveIndex.open(live_folder) as live:
        live.remove(live.find(before[:1]))
        expected = recommender.with_live(live).recommend([["a", "b"]], 5).items
    done = run([*command, str(live_folder)])
    assert done.returncode == 0, done.stderr
    assert answers_in(out)["items"] == expected
    assert before[0] not in expected[0]
    assert not list(tmp_path.glob(".out.*"))

    # And one that a finished run left behind.
    FrozenCatalogue.freeze(tmp_path / "another", copy, None)
    again = run([*command, str(tmp_path / "another")])
    assert again.returncode == 2
    assert "belongs to another run, with different catalogue" in again.stderr
    assert not list(tmp_path.glob(".out.*"))


def test_a_mistake_costs_no_run_the_copy_that_it_goes_on_with(work: Work, tmp_path: Path) -> None:
    out, live_folder = tmp_path / "out", tmp_path / "live"
    work.recommender.make_live(live_folder).close()
    work.recommender.make_live(tmp_path / "another").close()
    command = [*work.command(out), "--live", str(live_folder)]
    process = start_and_wait(command, out, 3)
    process.send_signal(signal.SIGSTOP)  # so that it is not done before it is killed
    at_once = run(command)
    assert at_once.returncode == 2
    assert "another run is writing to it" in at_once.stderr
    process.kill()
    process.communicate()
    for words in (["--where", "no_such = 1"], ["--live", str(tmp_path / "another")]):
        refused = run([*command, *words])
        assert refused.returncode == 2
        assert (tmp_path / ".out.catalogue").exists()
    assert "another catalogue than that of the run" in refused.stderr
    with LiveIndex.open(live_folder) as live:
        live.remove(live.find(work.recommender.item_ids.take([5, 7])))
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert "were there already" in done.stderr
    histories: list[list[Any]] = [[*(history or [])] for history in work.histories]
    assert answers_in(out)["items"] == work.recommender.recommend(histories, 7).items
    assert not list(tmp_path.glob(".out.*"))


# When items were ---------------------------------------------------------------------------------


def test_models_that_look_at_times_are_told_them(
    trainings: dict[str, Trained], tmp_path: Path
) -> None:
    trained = trainings["timed"]
    histories = [trained.external(history) for history in ([5, 17, 5, 40], [3], [9, 8, 30])]
    times = [[0.0, 50.0, 10_000.0, 8_640_000.0], [7.0], [5.0, 5.0, 400_000.0]]
    users, items = pa.array([1, 2, 3]), pa.array(histories, pa.list_(pa.int64()))
    source = tmp_path / "histories"
    source.mkdir()
    table = pa.table({"user_id": users, "history": items, "times": times})
    pq.write_table(table, source / "a.parquet")
    pq.write_table(table.slice(0, 0), source / "b.parquet")
    command = [*CLI, "batch", str(trained.saved), "--histories", str(source), "-k", "20"]
    done = run([*command, "--out", str(tmp_path / "out"), "--workers", "1"])
    assert done.returncode == 0, done.stderr
    served = Recommender.load(trained.saved)
    expected = served.recommend(histories, 20, times=times)
    found = answers_in(tmp_path / "out")
    assert found["items"] == expected.items
    assert np.array_equal(np.array(found["scores"], np.float32), expected.scores)
    assert not np.array_equal(expected.scores, served.recommend(histories, 20).scores)
    # Without such a column, or under another name, nothing is known of times.
    done = run([*command, "--out", str(tmp_path / "untimed"), "--times-column", "when"])
    assert done.returncode == 0, done.stderr
    assert answers_in(tmp_path / "untimed")["items"] == served.recommend(histories, 20).items
    pq.write_table(table.drop_columns(["times"]), source / "b.parquet")
    done = run([*command, "--out", str(tmp_path / "some")])
    assert done.returncode == 2
    assert "b.parquet: has no times in 'times', as other files have" in done.stderr
    short = pa.array([[0.0], *times[1:]])
    pq.write_table(table.set_column(2, "times", short), source / "a.parquet")
    (source / "b.parquet").unlink()
    done = run([*command, "--out", str(tmp_path / "short")])
    assert done.returncode == 2
    assert "user 1 has 1 entries in 'times', but 4 items" in done.stderr
