"""The house rules: public names, the order of the rooms, what `import recprune` may need."""

from __future__ import annotations

import ast
import subprocess
import sys
import types
from pathlib import Path

import nanobind.stubgen
import pytest

import recprune
from recprune import _native

SOURCE = Path(recprune.__file__).parent

# In data order: a room imports only rooms above it. `__init__` names what is public.
ROOMS = [
    "types",
    "storage",
    "identifiers",
    "timestamps",
    "formats",
    "readers",
    "interactions",
    "statistics",
    "synthetic",
    "holdout",
    "codebook",
    "posting_lists",
    "methods",
    "reference",
    "dense",
    "results",
    "arguments",
    "index",
    "console",
    "cli",
]


def rooms_imported_by(path: Path) -> set[str]:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        imported |= {name.split(".")[1] for name in names if name.startswith("recprune.")}
    return imported - {"_native"}


def test_every_module_is_a_known_room() -> None:
    modules = {path.stem for path in SOURCE.glob("*.py")} - {"__init__"}
    assert modules == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_earlier_rooms(room: str) -> None:
    earlier = set(ROOMS[: ROOMS.index(room)])
    assert rooms_imported_by(SOURCE / f"{room}.py") <= earlier


def test_all_names_everything_public_once() -> None:
    public = {
        name
        for name, value in vars(recprune).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert set(recprune.__all__) == public
    assert len(recprune.__all__) == len(public)


def test_importing_recprune_needs_numpy_only() -> None:
    allowed = {"numpy", "recprune"} | set(sys.stdlib_module_names)
    code = (
        "import sys; before = set(sys.modules); import recprune; "
        "print(' '.join({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    foreign = {name for name in result.stdout.split() if name not in allowed}
    # The editable install brings its own import hook.
    assert {name for name in foreign if "editable" not in name} == set()


def test_stub_file_matches_the_compiled_module() -> None:
    generator = nanobind.stubgen.StubGen(_native)
    generator.put(_native)
    stub = (SOURCE / "_native.pyi").read_text(encoding="utf-8")
    assert stub == generator.get(), "run `make stub`"
