"""The sdist and the wheel: what a user of `pip install recprune` gets."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]

USE_IT = """
import sys
import numpy as np
import recprune
lists = recprune.build_posting_lists(np.array([[1], [0], [1]], np.uint8), 2)
assert lists.posting_list(0, 1).tolist() == [0, 2]
recprune.assign_random(10, num_splits=2, num_sub_items=4).save("saved")
assert recprune.Codebook.load("saved").num_items == 10
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    # The sdist first, then the wheel out of the sdist: that proves that the sdist is complete.
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT],
        check=True,
        capture_output=True,
    )
    return out


@pytest.mark.parametrize(
    ("system", "python", "has_builds"),
    [
        ("linux", "3.11", True),
        ("linux", "3.13", True),
        ("linux", "3.14", False),
        ("darwin", "3.13", False),
    ],
)
def test_scann_is_required_where_it_has_builds(system: str, python: str, has_builds: bool) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    peers = map(Requirement, project["optional-dependencies"]["peers"])
    (scann,) = (requirement for requirement in peers if requirement.name == "scann")
    assert scann.marker is not None
    where = {"sys_platform": system, "python_version": python}
    assert scann.marker.evaluate(where) == has_builds


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


def test_wheel_works_in_an_environment_with_numpy_alone(
    distributions: Path, tmp_path: Path
) -> None:
    (wheel,) = distributions.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel],
        check=True,
        capture_output=True,
    )
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=json"], check=True, capture_output=True
    )
    installed = {package["name"] for package in json.loads(listed.stdout)}
    assert installed - {"pip", "setuptools"} == {"numpy", "recprune"}

    subprocess.run([python, "-c", USE_IT], check=True, cwd=tmp_path)
    command = subprocess.run(
        [tmp_path / "env" / "bin" / "recprune", "stats", "log.csv"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert command.returncode == 2
    assert "pip install 'recprune[data]'" in command.stderr
    assert "Traceback" not in command.stderr
