"""The same batch on a real Ray cluster: the same bytes, whatever is lost."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recprune import InputError
from recprune.batch.on_ray import write_parts_on_ray
from recprune.batch.plan import make_plan
from recprune.cluster import connected
from recprune.storage import MANIFEST
from tests.batch.test_batch import (
    CLI,
    ROWS,
    Work,
    contents,
    damage,
    make_work,
    parts_in,
    run,
    start_and_wait,
    write_histories,
)
from tests.support.clusters import (
    Cluster,
    descendants,
    end,
    is_running,
    ray_environment,
    running_cluster,
)
from tests.support.serving import wait_until

PARTS = 30


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    """What is expected of a cluster is what processes of this machine write, without Ray."""
    return make_work(tmp_path_factory.mktemp("batch"), ROWS // PARTS)


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[Path]:
    pytest.importorskip("ray", reason="needs Ray: pip install 'recprune[ray]'")
    with ray_environment() as folder:
        yield folder


@pytest.fixture(scope="module")
def cluster(ray_folder: Path) -> Iterator[Cluster]:
    with running_cluster(ray_folder) as started:
        yield started


def at_work(cluster: Cluster, count: int) -> list[int]:
    """Wait for so many processes that are answering a part."""
    found: list[int] = []

    def are_there() -> bool:
        found[:] = cluster.workers("_answer_part")
        return len(found) >= count

    wait_until(are_there, f"{count} at work")
    return found


def test_a_killed_process_costs_nothing_and_only_the_sum_is_said(
    work: Work, cluster: Cluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start_and_wait(work.command(out, "--address", cluster.address), out, 5)
    os.kill(at_work(cluster, 1)[0], signal.SIGKILL)
    assert len(parts_in(out)) < PARTS, "killed too late to see anything"
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert contents(out) == work.expected
    sums = r"3,000 users, \d+ by popularity; .* users/s; time in .*\n"
    assert re.fullmatch(re.escape(f"{out}: ") + sums, said)


def test_a_lost_node_s_parts_are_made_by_the_others(
    work: Work, cluster: Cluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start_and_wait(work.command(out, "--address", cluster.address), out, 5)
    at_work(cluster, 2)  # one on each node
    cluster.tell("lose the second node")
    assert len(parts_in(out)) < PARTS, "lost too late to see anything"
    _, said = process.communicate(timeout=60)
    cluster.tell("add a second node")
    assert process.returncode == 0, said
    assert contents(out) == work.expected


def test_the_same_command_goes_on_after_a_killed_driver(
    work: Work, cluster: Cluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = work.command(out, "--address", cluster.address)
    process = start_and_wait(command, out, 5)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    names = ("_answer_part", "IDLE")
    wait_until(lambda: not any(map(cluster.workers, names)), "no worker writes any more")
    before = parts_in(out)
    assert 5 <= len(before) < PARTS
    assert not (out / MANIFEST).exists()
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert "were there already" in done.stderr
    assert contents(out) == work.expected
    assert before.items() <= parts_in(out).items(), "no finished part was written again"


def test_a_full_object_store_is_not_needed(work: Work, cluster: Cluster, tmp_path: Path) -> None:
    cluster.tell("fill the object store")
    done = run(work.command(tmp_path / "out", "--address", cluster.address))
    cluster.tell("empty the object store")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out") == work.expected


def test_what_a_process_cannot_read_is_named(work: Work, cluster: Cluster, tmp_path: Path) -> None:
    path, out = tmp_path / "in.parquet", tmp_path / "out"
    write_histories(path, 0, work.histories[:300], row_group_size=100)
    damage(path, 2)
    words = [work.saved, "--histories", path, "--out", out, "--address", cluster.address]
    command = [*CLI, "batch", *map(str, words), "--rows-per-part", "50", "--workers", "1"]
    done = run(command)
    assert done.returncode == 2
    assert f"{path}, row group 2: cannot be read" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (out / MANIFEST).exists()
    os.truncate(path, path.stat().st_size // 2)
    done = run(command)
    assert done.returncode == 2
    assert f"{path}: not readable as Parquet" in done.stderr


class _Taker:
    """Takes a CPU."""

    def is_there(self) -> bool:
        return True


def test_a_cluster_without_a_free_cpu_is_waited_for_aloud(
    work: Work, cluster: Cluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with connected(cluster.address):
        import ray

        taker: Any = ray.remote(num_cpus=1)(_Taker)
        takers = [taker.remote() for _ in range(2)]  # they end with the connection
        assert ray.get([actor.is_there.remote() for actor in takers], timeout=30)
        process = subprocess.Popen(
            work.command(out, "--address", cluster.address), stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line == "all CPUs of the cluster are taken: waiting until one is free\n"
        assert not parts_in(out)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert contents(out) == work.expected


@pytest.mark.usefixtures("ray_folder")
def test_an_interrupted_run_says_so_and_ends_the_cluster_it_started(
    work: Work, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start_and_wait(work.command(out, "--address", "local"), out, 5)
    below = descendants(process.pid)
    assert any("raylet" in line for line in below.values())
    process.send_signal(signal.SIGTERM)  # for which Ray has its own ideas
    _, said = process.communicate(timeout=30)
    try:
        assert process.returncode == 130, said
        assert "interrupted with" in said
        assert "Traceback" not in said
        wait_until(lambda: not any(map(is_running, below)), "the cluster is gone")
    finally:
        end(below)


def test_an_unreachable_cluster_is_an_error_within_seconds(work: Work, tmp_path: Path) -> None:
    plan = make_plan(work.saved, work.source)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(InputError, match=f"no Ray cluster at {address}: .*refused"):
            next(write_parts_on_ray(plan, tmp_path, [0], 1, address))
        assert time.monotonic() - begun < 10.0
    for nonsense in ("somewhere", "ray://host:10001", "host:port"):
        with pytest.raises(InputError, match=f"the address is '{nonsense}', expected host:port"):
            next(write_parts_on_ray(plan, tmp_path, [0], 1, nonsense))
