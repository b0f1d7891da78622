"""The core without Python: on this machine, and on a 64-bit ARM that is emulated.

`native/tests/replay.cpp` holds all kernels against plain arithmetic, and every engine, with every
instruction set, against answers of the oracle that are recorded here.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from recprune._native import instruction_sets
from tests.support.recorded_cases import write_cases

NATIVE = Path(__file__).parents[2] / "native"
# As CMakeLists.txt has them. Compilers for ARM would fuse a multiplication and an addition, whose
# rounding the recorded bits have.
FLAGS = ["-std=c++20", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-pthread"]
# Of GCC: its own headers for AVX-512, and how older versions of it passed pairs of floats.
SILENCED = ["-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-psabi"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "cases"
    write_cases(path)
    return path


def compile_with(compiler: str, target: Path, *options: str) -> None:
    sources = [NATIVE / "tests/replay.cpp", *sorted((NATIVE / "kernels").glob("*.cpp"))]
    command: list[str | Path] = [compiler, *FLAGS, *SILENCED, *options, "-I", NATIVE]
    subprocess.run([*command, *sources, "-o", target], check=True, timeout=600)


def replay(*command: str | Path) -> list[str]:
    """Return the instruction sets that ran, and then how many searches that were."""
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_recorded_answers_on_this_machine(recorded: Path, tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    compile_with("c++", tmp_path / "replay")
    *names, searches = replay(tmp_path / "replay", recorded)
    assert names == instruction_sets()
    assert int(searches) > 0


@pytest.mark.skipif(platform.machine() in ("aarch64", "arm64"), reason="this machine is one")
def test_recorded_answers_on_aarch64(recorded: Path, tmp_path: Path) -> None:
    compiler, emulator = "aarch64-linux-gnu-g++", "qemu-aarch64"
    for tool, package in ((compiler, "g++-aarch64-linux-gnu"), (emulator, "qemu-user")):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool} (Debian: {package})")
    # Static: the emulator then needs no libraries of that machine.
    compile_with(compiler, tmp_path / "replay", "-static")
    *names, searches = replay(emulator, tmp_path / "replay", recorded)
    assert names == ["neon", "portable"]
    assert int(searches) > 0
