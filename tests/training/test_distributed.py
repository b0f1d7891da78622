"""Several workers train the model that one would train, stop together, and fail with one error."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recprune import InputError
from recprune.cli import main
from recprune.models.settings import Settings
from recprune.preparation.prepared import Prepared
from recprune.training.distributed import Workers, appointed
from recprune.training.loop import train
from recprune.training.minibatches import make_minibatch, minibatch_part
from recprune.training.tensors import load_tensors
from recprune.types import InterruptedWorkError
from tests.preparation.test_prepared import cycle, dated
from tests.training.test_minibatches import KINDS, consecutive, settings_of
from tests.training.test_placement import groups, with_content
from tests.training.test_successors import wandering
from tests.training.test_training import COMMAND, ONE_THREAD, lines_without_times

torch.set_num_threads(1)  # of tiny models, threads would only wait for each other

MODEL, CHECKPOINT = "model.safetensors", "checkpoint.safetensors"
TOLERANCE = 1e-5


def words(values: dict[str, Any]) -> list[str]:
    given = {name: "true" if value is True else value for name, value in values.items()}
    settings = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    return ["--preset", "gsasrec", *settings]


def changed(settings: Settings) -> dict[str, Any]:
    """Return what differs from the defaults, as the command line is told it."""
    before, after = Settings().to_json(), settings.to_json()
    return {
        name: value
        for part in after
        for name, value in after[part].items()
        if value != before[part][name]
    }


def assert_nearly_the_same(first: Path, second: Path) -> None:
    for name in (MODEL, CHECKPOINT):
        left, right = (load_tensors(folder / name)[0] for folder in (first, second))
        assert set(left) == set(right)
        for tensor in left:
            if tensor.endswith("key.bias"):
                continue  # moves a whole softmax alike: all of its gradient is rounding
            np.testing.assert_allclose(
                left[tensor], right[tensor], rtol=0.0, atol=TOLERANCE, err_msg=tensor
            )
    for ours, theirs in zip(lines_without_times(first), lines_without_times(second), strict=True):
        assert ours == pytest.approx(theirs, abs=TOLERANCE)


@contextmanager
def training(out: Path, prepared: Prepared, *more: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command with two workers."""
    prepared.save(out.with_name("prepared"))
    folders: list[str | Path] = [out.with_name("prepared"), "--out", out]
    running = subprocess.Popen(
        [COMMAND, "train", *folders, "--workers", "2", "--device", "cpu", *more],
        stderr=subprocess.PIPE,
        text=True,
        env=ONE_THREAD,
    )
    with running:
        try:
            yield running
        finally:
            running.kill()  # and with it, its workers


def read_until(running: subprocess.Popen[str], wanted: str) -> str:
    assert running.stderr is not None
    shown = ""
    while wanted not in shown:
        line = running.stderr.readline()
        assert line, shown
        shown += line
    return shown


def workers_of(supervisor: int) -> dict[int, int]:
    """Return the process ids of the workers by rank."""
    found: dict[int, int] = {}
    for children in Path(f"/proc/{supervisor}/task").glob("*/children"):
        for pid in children.read_text().split():
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            ranks = [int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")]
            found |= {rank: int(pid) for rank in ranks}
    return found


def wait_for(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for_the_end_of(pids: list[int]) -> None:
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


# The same model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@KINDS
def test_the_parts_of_a_minibatch_are_the_minibatch(architecture: str, parts: int) -> None:
    minibatch = make_minibatch(
        consecutive(), np.arange(8), settings_of(architecture=architecture), 0, 0
    )
    found = [minibatch_part(minibatch, number, parts) for number in range(parts)]
    for name in ("items", "places", "segments"):
        together = np.concatenate([getattr(part, name) for part, _ in found])
        assert np.array_equal(together, getattr(minibatch, name))
    if architecture == "timed":
        assert minibatch.times is not None
        times = [part.times for part, _ in found if part.times is not None]
        assert np.array_equal(np.concatenate(times, axis=1), minibatch.times)
    kept = np.concatenate([kept for _, kept in found])
    assert sorted(kept.tolist()) == list(range(len(minibatch.targets)))
    for part, own in found:
        assert np.array_equal(part.targets, minibatch.targets[own])
        segments = minibatch.segments.flat[minibatch.positions[own]]
        assert np.array_equal(part.segments.flat[part.positions], segments)
    sizes = [len(part.items) for part, _ in found]
    assert max(sizes) - min(sizes) <= 1


SHARED = {"loss": "softmax", "negatives": "shared", "num_in_batch": 3}
# Full vectors, codes that change, and then codes that stay.
LEARNT = {"codes": "learnt", "num_splits": 4, "num_sub_items": 4, "full_epochs": 1,
          "code_epochs": 1}  # fmt: skip
# Of 41 users, the last minibatch has a single history: one of the two workers has nothing to do.
TRAINED: dict[str, tuple[Callable[[], Prepared], dict[str, Any]]] = {
    "codes": (lambda: cycle(41), {"pruning_weight": 0.1, "windows": "random"}),
    "times, repeats": (lambda: dated(cycle(41)), {
        "architecture": "timed", "repeats": 9, "activity": True, "pruning_weight": 0.1, "windows": "random"}),
    "learnt codes": (lambda: cycle(41), {
        **SHARED, **LEARNT, "max_epochs": 4}),
    "full table or learnt codes": (lambda: with_content(groups(41)), {
        **SHARED, **LEARNT, "embedding": "auto", "max_epochs": 3}),
    # 41 users meet few of 300 items in a step: the others stay where they are.
    "rows of a table": (lambda: wandering(41, 8, 300), {**SHARED, "embedding": "full"}),
    "transitions, cold items": (lambda: with_content(groups(41)), {
        **SHARED, "logq": True, "transitions": 2}),
    "digits": (lambda: cycle(41), {"loss": "digits"}),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINED)
def test_two_workers_train_what_one_does(tmp_path: Path, name: str) -> None:
    make, values = TRAINED[name]
    prepared = make()
    settings = settings_of(**{"dropout": 0.0, "max_epochs": 2} | values)
    prepared.save(tmp_path / "prepared")
    train(prepared, settings, tmp_path / "one", device="cpu")
    arguments = ["train", str(tmp_path / "prepared"), "--out", str(tmp_path / "two")]
    assert main([*arguments, "--workers", "2", "--device", "cpu", *words(changed(settings))]) == 0
    assert_nearly_the_same(tmp_path / "two", tmp_path / "one")
    assert (tmp_path / "two" / "training.png").stat().st_size > 1000


@pytest.mark.parametrize("stage", [2, 3], ids=["codes change", "codes stay"])
def test_two_workers_go_on_with_codes_that_are_cut(tmp_path: Path, stage: int) -> None:
    """From the middle of an epoch: only the first of them has read the checkpoint."""
    prepared = cycle(41)
    settings = settings_of(**{"dropout": 0.0, "max_epochs": 3} | LEARNT)
    prepared.save(tmp_path / "prepared")
    train(prepared, settings, tmp_path / "one", device="cpu")

    def interrupt(step: int, of: int, _: float) -> None:
        if lines_of(tmp_path / "two" / "epochs.jsonl") == stage - 1 and step < of:
            signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recprune.training.loop._REPORT_EVERY", 2)
        with pytest.raises(InterruptedWorkError, match=f"in epoch {stage} after 2 of 5"):
            train(prepared, settings, tmp_path / "two", device="cpu", on_steps=interrupt)
    arguments = ["train", str(tmp_path / "prepared"), "--out", str(tmp_path / "two"), "--resume"]
    assert main([*arguments, "--workers", "2", "--device", "cpu"]) == 0
    assert_nearly_the_same(tmp_path / "two", tmp_path / "one")


def test_torchrun_starts_workers_as_well(tmp_path: Path) -> None:
    """More of them than a minibatch has rows; and their number need not be given."""
    prepared = cycle(5, 15, 10)
    settings = settings_of(
        architecture="bert4rec",
        embedding="full",
        loss="softmax",
        clip_norm=0.0,
        dropout=0.0,
        max_epochs=2,
        batch_size=3,
    )
    prepared.save(tmp_path / "prepared")
    train(prepared, settings, tmp_path / "one", device="cpu")
    arguments: list[str | Path] = ["train", tmp_path / "prepared", "--out", tmp_path / "three"]
    torchrun = COMMAND.with_name("torchrun")
    options = ["--standalone", "--nproc-per-node", "3", "--no-python"]
    done = subprocess.run(
        [torchrun, *options, COMMAND, *arguments, "--device", "cpu", *words(changed(settings))],
        capture_output=True,
        text=True,
        check=False,
        env=ONE_THREAD,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("best NDCG@10 on validation") == 1
    assert_nearly_the_same(tmp_path / "three", tmp_path / "one")


# Stopping and going on ---------------------------------------------------------------------------


LONG = settings_of(dropout=0.0, batch_size=2, max_epochs=12, patience=12, learning_rate=0.001)


def test_ctrl_c_stops_all_at_one_step_and_any_number_of_workers_goes_on(tmp_path: Path) -> None:
    """One worker begins, two go on and are interrupted, one ends."""
    prepared, out = cycle(80), tmp_path / "parts"

    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(InterruptedWorkError, match="in epoch 1 after 32 of 40 steps"):
        train(prepared, LONG, out, device="cpu", on_steps=interrupt)
    with training(out, prepared, "--resume") as running:  # with what settings is known
        shown = read_until(running, "epoch   1")
        pids = list(workers_of(running.pid).values())
        assert len(pids) == 2
        running.send_signal(signal.SIGINT)
        _, complaint = running.communicate(timeout=60)
    assert running.returncode == 130, complaint
    wait_for_the_end_of(pids)
    message = r"recprune train: interrupted in epoch \d+ after \d+ of 40 steps; .* --resume"
    assert re.fullmatch(message, complaint.splitlines()[-1]), complaint
    assert "Traceback" not in shown + complaint
    train(prepared, LONG, out, device="cpu", resume=True)
    train(prepared, LONG, tmp_path / "whole", device="cpu")
    assert_nearly_the_same(out, tmp_path / "whole")


LONGER = LONG.with_values({"max_epochs": 200, "patience": 200})


def test_a_worker_that_is_killed_is_named_and_nothing_saved_is_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first: the one that writes."""
    prepared, out = cycle(80), tmp_path / "out"
    prepared.save(tmp_path / "prepared")
    arguments = ["train", str(tmp_path / "prepared"), "--out", str(out), "--workers", "2"]
    arguments += ["--device", "cpu", *words(changed(LONGER))]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(main, arguments)
        wait_for(lambda: running.done() or lines_of(out / "epochs.jsonl") > 1)
        pids = workers_of(os.getpid())
        os.kill(pids[0], signal.SIGKILL)
        begun = time.monotonic()
        assert running.result() == 2
    assert time.monotonic() < begun + 30
    shown = capfd.readouterr().err
    assert shown.splitlines()[-1] == (
        "recprune train: worker 0 of 2 was killed by SIGKILL; "
        "what was saved is whole: go on with --resume"
    )
    assert shown.count("recprune train: ") == 1
    assert "Traceback" not in shown
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
    state = train(prepared, LONG, out, device="cpu", resume=True)
    assert state.epoch == LONG.training.max_epochs


def test_workers_save_and_stop_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    prepared, out = cycle(80), tmp_path / "out"
    with training(out, prepared, *words(changed(LONGER))) as running:
        read_until(running, "epoch   2")
        pids = list(workers_of(running.pid).values())
        before = load_tensors(out / CHECKPOINT)[1]["state"]
        assert json.loads(before)["epoch"] == 1
        running.kill()
        running.communicate(timeout=60)
    wait_for_the_end_of(pids)
    assert json.loads(load_tensors(out / CHECKPOINT)[1]["state"])["epoch"] > 1


def listening_addresses(pid: int) -> set[str]:
    """Return the addresses, as the kernel writes them, at which a process can be reached."""
    links = [
        str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()
    ]
    own = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [
        line.split()
        for family in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]
    ]
    is_listening = "0A"
    return {row[1].partition(":")[0] for row in rows if row[3] == is_listening and row[9] in own}


def test_workers_of_one_machine_can_be_reached_from_it_alone(tmp_path: Path) -> None:
    loopback = "0100007F"
    with training(tmp_path / "out", cycle(80), *words(changed(LONGER))) as running:
        read_until(running, "epoch   1")
        pids = [running.pid, *workers_of(running.pid).values()]
        assert len(pids) == 3
        assert set().union(*map(listening_addresses, pids)) == {loopback}


def test_workers_that_wait_for_others_say_so_and_can_be_interrupted(tmp_path: Path) -> None:
    cycle(20).save(tmp_path / "prepared")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    waiting = subprocess.Popen(
        [COMMAND, "train", tmp_path / "prepared", "--out", tmp_path / "out", "--device", "cpu"],
        stderr=subprocess.PIPE,
        text=True,
        env=ONE_THREAD | place,
    )
    with waiting:
        try:
            read_until(waiting, f"worker 0: waiting for 2 workers at 127.0.0.1:{port}\n")
            waiting.send_signal(signal.SIGINT)
            _, said = waiting.communicate(timeout=20)
        finally:
            waiting.kill()
    assert waiting.returncode == -signal.SIGINT
    assert "Traceback" not in said


WITHOUT_SUPERVISOR = """
import signal, socket, sys
from recprune.training.launch import as_worker
from recprune.types import InputError
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what it sends itself
ours, theirs = socket.socketpair()
ours.close()
def fail():
    raise InputError("whatever")
sys.exit(as_worker(theirs.detach(), fail))
"""


def test_a_worker_whose_supervisor_is_gone_ends_without_complaint() -> None:
    command = [sys.executable, "-c", WITHOUT_SUPERVISOR]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "")


# Mistakes ----------------------------------------------------------------------------------------


def test_a_loss_that_is_not_a_number_is_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cycle().save(tmp_path / "prepared")
    values = changed(settings_of(learning_rate=1e30, batch_size=5))
    arguments = ["train", str(tmp_path / "prepared"), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--workers", "2", "--device", "cpu", *words(values)]) == 2
    shown = capfd.readouterr().err
    assert re.search(r"^recprune train: the loss became (nan|inf) in epoch 1", shown, re.MULTILINE)
    assert shown.count("recprune train: ") == 1
    assert not (tmp_path / "out" / MODEL).exists()


def test_what_the_first_worker_refuses_is_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prepared, settings = cycle(), settings_of(max_epochs=1)
    prepared.save(tmp_path / "prepared")
    train(prepared, settings, tmp_path / "out", device="cpu")
    arguments = ["train", str(tmp_path / "prepared"), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--workers", "2", "--device", "cpu", *words(changed(settings))]) == 2
    shown = capfd.readouterr().err
    assert shown.splitlines()[-1].endswith(
        "out: holds a training already: go on with --resume, or remove it"
    )
    assert shown.count("recprune train: ") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0"], "--workers is 0, expected 1 or more"),
        (["--workers", "2", "--device", "cuda:0"], "--device cuda:0 is one GPU"),
        (["--workers", "99", "--device", "cuda"], "--workers is 99, but there are "),
    ],
)
def test_mistakes_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    cycle(20).save(tmp_path / "prepared")
    folders = [str(tmp_path / "prepared"), "--out", str(tmp_path / "out")]
    assert main(["train", *folders, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_more_workers_than_users_in_a_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="11 workers for a batch_size of 10"):
        train(cycle(), settings_of(), tmp_path, device="cpu", workers=Workers(0, 11))


def test_one_worker_is_no_worker(tmp_path: Path) -> None:
    prepared, settings = cycle(20), settings_of(max_epochs=1)
    prepared.save(tmp_path / "prepared")
    train(prepared, settings, tmp_path / "plain", device="cpu")
    arguments = ["train", str(tmp_path / "prepared"), "--out", str(tmp_path / "one")]
    assert main([*arguments, "--workers", "1", "--device", "cpu", *words(changed(settings))]) == 0
    assert (tmp_path / "one" / MODEL).read_bytes() == (tmp_path / "plain" / MODEL).read_bytes()


def test_the_environment_appoints_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert appointed() is None
    values = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "here", "MASTER_PORT": "1234"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert appointed() == Workers(5, 8)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert appointed() == Workers(5, 8, 1)
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(InputError, match="RANK=5, WORLD_SIZE=5"):
        appointed()
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(InputError, match="WORLD_SIZE=many"):
        appointed()


def test_a_number_that_is_not_torchruns_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    cycle(20).save(tmp_path / "prepared")
    folders = [str(tmp_path / "prepared"), "--out", str(tmp_path / "out")]
    assert main(["train", *folders, "--workers", "3"]) == 2
    assert "--workers is 3, but 2 were started" in capsys.readouterr().err
