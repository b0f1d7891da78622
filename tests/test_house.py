"""The house rules: public names, the order of the packages, what `import recprune` may need."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import nanobind.stubgen
import pytest

import recprune
from recprune import _native
from recprune.cli import COMMANDS

SOURCE = Path(recprune.__file__).parent
ROOT = Path(__file__).parents[1]

# In the order in which data flows: a package imports only packages before it. `__init__` names what
# is public. Inside a package, files are siblings.
PACKAGES = [
    "types",
    "system",
    "storage",
    "data",
    "preparation",
    "search",
    "vectors",
    "live",
    "attributes",
    "models",
    "evaluation",
    "training",
    "recommender",
    "cluster",
    "shards",
    "batch",
    "serve",
    "experiments",
    "commands",
    "cli",
]


def packages_imported_by(path: Path) -> set[str]:
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


def files_of(package: str) -> list[Path]:
    folder = SOURCE / package
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [SOURCE / f"{package}.py"]


def test_every_package_has_its_place() -> None:
    modules = {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    folders = {path.parent.name for path in SOURCE.glob("*/*.py")}
    assert modules | folders == set(PACKAGES)


def test_the_listing_fits_on_a_screen() -> None:
    assert len([path for path in SOURCE.iterdir() if path.name != "__pycache__"]) <= 24


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_earlier_ones(package: str) -> None:
    earlier = set(PACKAGES[: PACKAGES.index(package) + 1])  # its own siblings too
    for path in files_of(package):
        assert packages_imported_by(path) <= earlier, path


def test_search_needs_numpy_only() -> None:
    allowed = {"numpy", "recprune", "faiss"} | set(sys.stdlib_module_names)
    for path in files_of("search"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {str(node.module)}
            else:
                continue
            assert {name.split(".")[0] for name in names} <= allowed, path


def test_tests_mirror_the_tree() -> None:
    tests = Path(__file__).parent
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    for folder in folders:
        assert (SOURCE / folder).is_dir(), f"tests/{folder} tests no package"


def test_every_command_is_listed() -> None:
    helpers = {
        "__init__",
        "answer_options",
        "codebook_options",
        "console",
        "folded",
        "live_actions",
        "log_options",
        "settings_options",
        "tables",
        "vector_options",
    }
    assert {path.stem for path in files_of("commands")} - helpers == set(COMMANDS)


def test_all_names_everything_public_once() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    homes = {
        alias.name: str(node.module).removeprefix("recprune.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("recprune.")
        for alias in node.names
    }
    assert recprune._HOMES == homes, "what a checker sees is what can be had"
    assert recprune.__all__ == sorted(recprune.__all__, key=recprune.__all__.index)
    assert sorted(recprune.__all__) == sorted(homes)
    for name in recprune.__all__:
        assert getattr(recprune, name) is not None


def test_everything_public_says_what_it_is_for() -> None:
    for name in recprune.__all__:
        public = getattr(recprune, name)
        if not inspect.isclass(public) and not inspect.isfunction(public):
            continue
        assert inspect.getdoc(public), name
        for part, member in vars(public).items():
            if inspect.isfunction(member) and not part.startswith("_"):
                assert inspect.getdoc(getattr(public, part)), f"{name}.{part}"


def test_a_public_name_whose_extra_is_missing_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import recprune\n"
        "try: recprune.RecJPQEmbedding\n"
        "except recprune.MissingExtraError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = "this needs torch, which is not installed: pip install 'recprune[train]'"
    assert done.stdout.strip() == expected


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Indexx'"):
        recprune.Indexx  # type: ignore[attr-defined] # noqa: B018


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


def test_a_name_means_one_thing() -> None:
    """No two classes have one name, nor two files, but for commands and what they are about."""
    classes: dict[str, Path] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                name = node.name.lstrip("_")
                assert name not in classes, f"{name}: {classes[name]} and {path}"
                classes[name] = path
    files = [path.name for path in SOURCE.rglob("*.py") if path.parent.name != "commands"]
    assert len(files) == len({*files}) + files.count("__init__.py") - 1


def test_what_contributing_says_to_touch_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| a")]
    assert len(rows) >= 10
    for _, what, touched, *_ in rows:
        paths = re.findall(r"`((?:src|native)/[^`]+|CMakeLists.txt)`", touched)
        assert 1 <= len(paths) <= 3, what
        for path in paths:
            assert (ROOT / path).exists(), path
