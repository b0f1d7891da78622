"""A lock between processes is let go of, waited for, and not fooled."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from recprune.live.file_lock import LockedError, locked

FORKING = """
import os, sys, time
from pathlib import Path
from recprune.live.file_lock import locked
path = Path(sys.argv[1])
with locked(path, 1.0):
    child = os.fork()
    if child == 0:
        time.sleep(60)
with locked(path, 5.0):
    print("again", flush=True)
os.kill(child, 9)
"""


def test_a_process_that_was_forked_meanwhile_does_not_hold_it(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKING, str(tmp_path / "LOCK")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout == "again\n", done.stderr


def test_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    with (
        locked(path, 1.0),
        pytest.raises(LockedError, match=r"LOCK: held by another process for 0.05 s"),
        locked(path, 0.05),
    ):
        raise AssertionError("two have it")
    with locked(path, 0.0):
        assert path.exists()


def test_waiting_ends_when_it_is_time_to_stop(tmp_path: Path) -> None:
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    with (
        locked(tmp_path / "LOCK", 1.0),
        pytest.raises(LockedError, match="no longer waited for"),
        locked(tmp_path / "LOCK", 3600.0, stop),
    ):
        raise AssertionError("two have it")
