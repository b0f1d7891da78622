"""The sdist and the wheel: what a user of `pip install recprune` gets."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support import wheels

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    wheels.build(out)
    return out


@pytest.mark.parametrize(
    ("system", "machine", "python", "builds"),
    [
        ("linux", "x86_64", "3.11", {"scann", "bmp", "pyseismic-lsr"}),
        ("linux", "x86_64", "3.13", {"scann", "bmp"}),
        ("linux", "x86_64", "3.14", {"bmp"}),
        ("linux", "aarch64", "3.11", {"scann"}),
        ("darwin", "arm64", "3.13", set()),
    ],
)
def test_peers_are_required_where_they_have_builds(
    system: str, machine: str, python: str, builds: set[str]
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    peers = map(Requirement, project["optional-dependencies"]["peers"])
    where = {"sys_platform": system, "platform_machine": machine, "python_version": python}
    required = {peer.name for peer in peers if peer.marker and peer.marker.evaluate(where)}
    assert required == builds


def test_sdist_holds_what_the_build_needs(distributions: Path) -> None:
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CMakeLists.txt", "native/bindings.cpp", "src/recprune/py.typed", "LICENSE"} <= names
    assert not any(name.startswith((".venv", "build", "out")) for name in names)


def test_wheel_is_typed_and_carries_no_sources(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"recprune/py.typed", "recprune/_native.pyi"} <= names
    assert not any(name.endswith((".cpp", ".hpp")) for name in names)


@pytest.mark.skipif(sys.platform != "linux", reason="wheels of macOS say which versions they need")
def test_the_wheel_is_for_more_systems_than_this_one(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    assert "-manylinux_2_" in wheel.name or "-musllinux_1_" in wheel.name


def test_wheel_searches_in_an_environment_with_numpy_alone(
    distributions: Path, tmp_path: Path
) -> None:
    (wheel,) = distributions.glob("*.whl")
    said = wheels.search_with_numpy_alone(wheel, tmp_path / "env")
    assert said.endswith("return what the reference does\n")
    command = subprocess.run(
        [tmp_path / "env" / "bin" / "recprune", "stats", "log.csv"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert command.returncode == 2
    assert "pip install 'recprune[data]'" in command.stderr
    assert "Traceback" not in command.stderr
