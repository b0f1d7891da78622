"""What runs on GitHub: its steps are what runs here, on what pyproject.toml promises."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import tagged

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return found


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(path).values() for step in job.get("steps", [])]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_step_is_a_command_of_this_repository(path: Path) -> None:
    targets = re.findall(
        r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    for step in steps(path):
        command = str(step.get("run", "gh release"))
        if command.startswith("make "):
            assert command.split()[1] in targets, command
        elif not command.startswith("gh release"):
            assert (ROOT / command).stat().st_mode & 0o100, command


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_have_no_rights_but_those_that_they_name(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert yaml.safe_load(text)["permissions"] == {}
    for name, job in jobs(path).items():
        assert "permissions" in job, name
        assert "uses" in job or job["timeout-minutes"] <= 90, name
    for action in re.findall(r"uses: (?!\./)(.+)", text):
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", action), "pinned by its commit"


def test_all_promised_pythons_are_tested_and_built() -> None:
    promised = re.findall(r"Python :: (3\.\d+)", str(PROJECT["project"]["classifiers"]))
    tests = jobs(ROOT / ".github" / "workflows" / "tests.yml")
    for job in ("linux", "macos"):
        assert tests[job]["strategy"]["matrix"]["python"] == promised, job
    built = PROJECT["tool"]["cibuildwheel"]["build"]
    assert built == [f"cp{version.replace('.', '')}-*" for version in promised]


def test_a_release_says_its_version_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = PROJECT["project"]["version"]
    assert tagged.versions() == {"pyproject.toml": version, "CITATION.cff": version}
    (tmp_path / "pyproject.toml").write_text('version = "1.2.0"\n')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.1.0\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n")
    monkeypatch.setattr(tagged, "ROOT", tmp_path)
    assert tagged.faults("v1.2.0") == [
        "CITATION.cff says 1.1.0",
        "CHANGELOG.md has no section of 1.2.0 with a date",
    ]
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.2.0\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.0] - 2026-12-01\n")
    assert tagged.faults("v1.2.0") == []
