"""Run tests with the lowest versions that pyproject.toml allows: `make lowest`.

After the folder for the virtual environment, versions may be given that are to be taken instead of
a lowest one (`torch==2.13.0`), and tests instead of the usual ones.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
# Every extra that is used at run time; those left out are sums of these and what demos download.
EXTRAS = ("data", "train", "tune", "baselines", "tensorboard", "onnx", "ray", "serve", "bench")
# What the tests below need beside them, as it was tested: their versions are no promise.
TOOLS = ("httpx", "hypothesis", "ir-measures", "pytest", "pytest-xdist", "schemathesis")
# What calls into those packages, and is not slow: neither the page nor long trainings.
TESTS = (
    "tests/data",
    "tests/preparation",
    "tests/evaluation",
    "tests/models",
    "tests/search/test_saved_index.py",
    "tests/live",
    "tests/training/test_event_files.py",
    "tests/training/test_tensors.py",
    "tests/training/test_tuning.py",
    "tests/experiments/peers",
    "tests/commands",
    "tests/batch",
    "tests/shards",
    "tests/serve/engine",
    "tests/serve/histories",
    "tests/serve/http/test_openapi.py",
    "tests/serve/http/test_routes.py",
    "tests/serve/processes",
    "tests/serve/test_keys.py",
)


def lowest_versions() -> dict[str, str]:
    """Return what `>=` says of every requirement at run time, by the name of its package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *(text for extra in EXTRAS for text in extras[extra])]
    found = {}
    for requirement in map(Requirement, texts):
        if requirement.name != project["name"]:
            (floor,) = requirement.specifier
            assert floor.operator == ">=", requirement
            found[requirement.name] = floor.version
    return found


def tested_versions(names: tuple[str, ...]) -> dict[str, str]:
    """Return what constraints.txt says of some packages."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    by_name = {re.sub("[-_.]+", "-", name).lower(): version for name, version in pinned.items()}
    return {name: by_name[name] for name in names}


def main(folder: Path, *arguments: str) -> int:
    """Make the environment, say what is in it, and run the tests there; return the exit code."""
    instead = dict(text.split("==") for text in arguments if "==" in text)
    tests = [text for text in arguments if "==" not in text] or list(TESTS)
    versions = lowest_versions() | tested_versions(TOOLS) | instead
    python = str(folder / "bin" / "python")
    if not Path(python).exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pins = folder / "lowest.txt"
    pins.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
    sys.stdout.write(pins.read_text())
    sys.stdout.flush()
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # Not the build of the editable install, which `make test` uses.
    build = "--config-settings=build-dir=build/lowest-core"
    package = f"{ROOT}[{','.join(EXTRAS)}]"
    subprocess.run(
        [*install, "--constraint", str(pins), build, package, *TOOLS], check=True, cwd=ROOT
    )
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, check=False, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), *sys.argv[2:]))
