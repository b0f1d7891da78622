"""Where it runs: on systems without what Linux alone has, tried by taking that away."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recprune import system
from tests.support import other_system
from tests.support.serving import (
    CLI,
    HISTORY,
    expected,
    items_of,
    save_recommender,
    serving,
    wait_until,
)

ROOT = Path(__file__).parents[1]
LIBRARY = """
import numpy as np
import recprune
rng = np.random.default_rng(0)
codes = rng.integers(0, 16, (500, 4), np.uint8)
index = recprune.Index.build(codes, rng.standard_normal((4, 16, 2)).astype(np.float32))
for _ in range(2):  # the second one takes the place of the first
    index.save("index")
queries = rng.standard_normal((3, 8)).astype(np.float32)
found = recprune.Index.load("index").search(queries, 5)
assert (found.ids == index.search(queries, 5, method="pqtopk").ids).all()
with recprune.LiveIndex.create("live", codes[:400], index.sub_item_embeddings()) as live:
    live.add(codes[400:])
    live.compact().result()
with recprune.LiveIndex.open("live") as live:
    assert (live.search(queries, 5).ids == found.ids).all()
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of processes that run on another system, as far as they can tell."""
    folder = tmp_path_factory.mktemp("elsewhere")
    shutil.copy(ROOT / "tests" / "support" / "other_system.py", folder / "sitecustomize.py")
    return os.environ | {"PYTHONPATH": str(folder)}


def run(arguments: list[str], environment: dict[str, str], place: Path) -> str:
    done = subprocess.run(
        arguments, env=environment, cwd=place, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "call",
    [
        "os.sched_getaffinity(0)",
        "os.fork()",
        "os.O_DIRECTORY",
        "multiprocessing.get_context('fork').Process().start()",
        "open('/proc/cpuinfo')",
        "pathlib.Path('/proc/self/status').read_text()",
        "os.listdir('/proc')",
        "ctypes.CDLL(None).renameat2",
        "os.sysconf('SC_AVPHYS_PAGES')",
        "select.epoll()",
    ],
)
def test_a_call_that_is_not_guarded_fails(
    call: str, elsewhere: dict[str, str], tmp_path: Path
) -> None:
    code = f"import ctypes, multiprocessing, os, pathlib, select; {call}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=elsewhere, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 1


def test_what_only_linux_has_is_called_in_one_place() -> None:
    taken = {name for names in other_system.TAKEN.values() for name in names}
    names = "|".join(sorted(taken | set(other_system.TAKEN_FROM_LIBC)))
    called = re.compile(rf"\.({names})\b|[\"']/(proc|sys|dev/shm)\b|SC_AVPHYS_PAGES")
    # The supervisor asks `can_fork` first, which the service below shows.
    allowed = {"src/recprune/system.py", "src/recprune/serve/processes/server.py"}
    allowed |= {"benchmarks/proc.py"}  # which is asked for with `has_proc`
    for folder in ("src", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            place = str(path.relative_to(ROOT))
            if place not in allowed:
                assert not called.search(path.read_text(encoding="utf-8")), place


def test_the_library_needs_no_linux(elsewhere: dict[str, str], tmp_path: Path) -> None:
    run([sys.executable, "-c", LIBRARY], elsewhere, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "live"]


def test_the_command_line_needs_no_linux(elsewhere: dict[str, str], tmp_path: Path) -> None:
    def recprune(words: str) -> str:
        return run([*CLI, *words.split()], elsewhere, tmp_path)

    recprune(
        "synth --preset gowalla-like --users 80 --items 120 --interactions 1500 --out log.parquet"
    )
    recprune("prepare log.parquet --splits 4 --sub-items 16 --out prepared")
    small = (
        "--set embedding=recjpq --set codes=svd --set width=16 --set length=8 --set num_blocks=1"
    )
    # Two workers find each other over the machine's own loopback interface.
    recprune(f"train prepared {small} --set max_epochs=1 --workers 2 --device cpu --out model")
    assert "NDCG@10" in recprune("evaluate prepared model")
    for _ in range(2):  # the second one takes the place of the first
        recprune("export prepared model --out recommender")
    assert recprune("recommend recommender --history 1,2,3 -k 5")

    pl.DataFrame({"user_id": [1, 2], "history": [[1, 2], [3]]}).write_parquet(
        tmp_path / "h.parquet"
    )
    recprune("batch recommender --histories h.parquet --workers 1 --out recommended")
    assert (tmp_path / "recommended" / "manifest.json").exists()
    recprune("keys add shop --file keys.json")


def test_a_service_needs_no_linux(
    elsewhere: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "recommender"
    save_recommender(folder)
    monkeypatch.setenv("PYTHONPATH", elsewhere["PYTHONPATH"])
    with serving(folder) as service:
        assert items_of(service.recommend(history=HISTORY, k=5)) == expected(folder)
        assert service.post("/admin/reload", {}).json()["workers"] == 1
        (worker,) = service.workers
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: service.workers not in ([], [worker]), "another worker")
        assert items_of(service.recommend(history=HISTORY, k=5)) == expected(folder)
        assert service.stop() == 0


def test_cores_are_counted_where_none_are_assigned(monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(os, "sched_getaffinity"):
        assert system.available_cores() == len(os.sched_getaffinity(0))
        monkeypatch.delattr(os, "sched_getaffinity")
    assert system.available_cores() == os.cpu_count()


@pytest.mark.parametrize("is_known", [True, False])
def test_only_folders_are_opened_as_folders(
    is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_known:
        monkeypatch.delattr(os, "O_DIRECTORY")
    os.close(system.open_folder(tmp_path))
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for name in ("file", "pipe"):
        with pytest.raises(NotADirectoryError):
            system.open_folder(tmp_path / name)


def test_memory_is_known() -> None:
    assert 0 < system.free_bytes() <= system.memory_bytes()
    held = np.ones(1 << 20)
    assert held.nbytes < system.peak_bytes() < system.memory_bytes()
