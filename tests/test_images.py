"""The images: what a build may see, what it installs, and as whom it runs."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from recprune.commands import serve

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
REQUIREMENTS = ROOT / "deploy" / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
RENEW = "make requirements"


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of every stage, in the order of the file; before the first, under ''."""
    text = DOCKERFILE.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    found: dict[str, list[tuple[str, str]]] = {"": []}
    stage = ""
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line:
            word, rest = line.split(maxsplit=1)
            if word == "FROM":
                stage = rest.split(" AS ")[1]
                found[stage] = []
            found[stage].append((word, " ".join(rest.split())))
    return found


def words_of(stage: str, word: str) -> list[str]:
    return [rest for instruction, rest in stages()[stage] if instruction == word]


# What a build may see ----------------------------------------------------------------------------


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets a file into the build: the last line that fits decides."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        pattern = re.escape(line.removeprefix("!")).replace(r"\*\*/", "(.*/)?")
        pattern = pattern.replace(r"\*", "[^/]*")
        # What fits a folder fits everything in it.
        if re.fullmatch(f"{pattern}(/.*)?", path):
            sent = line.startswith("!")
    return sent


def test_a_build_sees_what_it_needs() -> None:
    ours = [
        *(path for path in (ROOT / "src").rglob("*") if path.suffix not in (".pyc", ".so")),
        *(ROOT / "native").rglob("*"),
        *(ROOT / name for name in ("CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml")),
        *REQUIREMENTS.glob("*.txt"),
    ]
    for path in ours:
        if path.is_file():
            assert is_sent(str(path.relative_to(ROOT))), path


@pytest.mark.parametrize(
    "path",
    [
        ".env",
        ".git/config",
        ".venv/bin/python",
        "build/cp312/CMakeCache.txt",
        "deploy/keys.json",
        "deploy/requirements/.netrc",
        "keys.json",
        "native/core.o",
        "out/model/manifest.json",
        "recommender-histories.db",
        "recommender/manifest.json",
        "src/recprune/.env",
        "src/recprune/_native.cpython-312-x86_64-linux-gnu.so",
        "src/recprune/serve/keys.json",
        "tests/test_images.py",
    ],
)
def test_a_build_sees_nothing_local(path: str) -> None:
    assert not is_sent(path)


def test_what_is_copied_is_sent() -> None:
    for source in (name for rest in words_of("wheel", "COPY") for name in rest.split()[:-1]):
        path = ROOT / source
        files = [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.cpp")]
        assert files, f"{source} is not there"
        assert all(is_sent(str(file.relative_to(ROOT))) for file in files)
    for stage in ("serve", "ray"):
        assert not words_of(stage, "COPY")
        (bound,) = re.findall(r"type=bind,source=(\S+?),", " ".join(words_of(stage, "RUN")))
        assert bound == f"deploy/requirements/{stage}.txt"


# How it is built ---------------------------------------------------------------------------------


def test_the_linter_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    found = subprocess.run(
        [hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout) == (0, "")


def test_bases_have_a_name_that_can_be_pinned() -> None:
    defaults = dict(rest.split("=", 1) for rest in words_of("", "ARG"))
    assert set(defaults) == {"BUILD_IMAGE", "PYTHON_IMAGE"}
    guide = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name, image in defaults.items():
        found = re.fullmatch(r"python:(3\.\d+)(-slim)?-[a-z]+(@sha256:[0-9a-f]{64})?", image)
        assert found, image
        assert f"--python-version {found[1]} " in makefile, "hashes are for another Python"
        assert f'"{name}=$(pin {image.partition("@")[0]})"' in guide
    # Every stage begins with one of them, or with a stage before it.
    bases = [rest.split(" AS ")[0] for stage in stages() for rest in words_of(stage, "FROM")]
    assert bases == ["${BUILD_IMAGE}", "${PYTHON_IMAGE}", "runtime", "runtime"]


def test_nothing_is_installed_that_is_not_known() -> None:
    commands = [
        command.strip()
        for stage in stages()
        for rest in words_of(stage, "RUN")
        for command in rest.split("&&")
    ]
    installs = [command for command in commands if " install " in command and "pip " in command]
    assert len(installs) == 5
    for command in [*installs, *(line for line in commands if "pip wheel" in line)]:
        by_hash = "--require-hashes --only-binary :all:" in command
        assert by_hash != ("--no-index" in command and "--no-deps" in command), command
    text = " ".join(commands)
    assert not re.search(r"\b(apt-get|apt|curl|wget|git)\b", text)
    for stage in ("runtime", "serve", "ray"):
        assert not re.search(r"g\+\+|gcc|cmake|build\.txt", " ".join(words_of(stage, "RUN")))


@pytest.mark.parametrize("stage", ["serve", "ray"])
def test_an_image_runs_as_a_user_without_rights_and_hears_signals(stage: str) -> None:
    assert words_of(stage, "USER") == ["10001:10001"]
    assert [word for word, _ in stages()[stage] if word in ("RUN", "USER")][-1] == "USER"
    assert json.loads(words_of("runtime", "ENTRYPOINT")[0]) == ["recprune"]
    assert words_of("runtime", "STOPSIGNAL") == ["SIGTERM"]
    assert all(isinstance(word, str) for word in json.loads(words_of(stage, "CMD")[0]))


def test_the_image_serves_unless_told_otherwise() -> None:
    command, *arguments = json.loads(words_of("serve", "CMD")[0])
    assert command == "serve"
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_arguments(parser)
    settings = serve.settings_of(parser.parse_args(arguments))
    assert (settings.host, settings.port) == ("0.0.0.0", int(words_of("serve", "EXPOSE")[0]))
    assert settings.keys_file == Path("/keys/keys.json")
    probe = json.loads(words_of("serve", "HEALTHCHECK")[0].partition("CMD ")[2])
    assert f"http://127.0.0.1:{settings.port}/healthz" in probe[-1]
    compile(probe[-1], "probe", "exec")


# What it installs --------------------------------------------------------------------------------


@functools.cache
def pinned(name: str) -> dict[str, str]:
    """The version of each package in a file, which has to give hashes for it."""
    text = (REQUIREMENTS / name).read_text(encoding="utf-8")
    entries = re.sub(r" *#.*", "", text).replace("\\\n", " ").split("\n")
    versions: dict[str, str] = {}
    for entry in filter(None, map(str.strip, entries)):
        requirement, *hashes = entry.split()
        assert hashes, f"{requirement} has no hash"
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes)
        package, version = requirement.split("==")
        versions[canonicalize_name(package)] = version
    return versions


def constrained() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(package): version for package, version in pairs}


@pytest.mark.parametrize("name", ["build.txt", "serve.txt", "ray.txt"])
def test_versions_are_those_of_the_constraints(name: str) -> None:
    tested = constrained()
    assert pinned(name).items() <= tested.items(), RENEW


def needed(requirements: list[str], known: set[str]) -> set[str]:
    """All packages that these need on Linux, theirs included; of those not in `known`, nothing more."""
    (python,) = re.findall(r"--python-version (\S+)", (ROOT / "Makefile").read_text("utf-8"))
    where = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    extras: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
    packages: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    seen = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        if name == "recprune":
            inner = [*PROJECT["project"]["dependencies"]]
            inner += [text for extra in requirement.extras for text in extras[extra]]
            waiting += map(Requirement, inner)
            continue
        packages.add(name)
        assert name not in constrained() or requirement.specifier.contains(
            constrained()[name], prereleases=True
        ), requirement
        if name not in known:
            continue
        for text in importlib.metadata.requires(name) or []:
            one = Requirement(text)
            wanted = [{**where, "extra": extra} for extra in ("", *requirement.extras)]
            if one.marker is None or any(one.marker.evaluate(given) for given in wanted):
                waiting.append(one)
    return packages


def installed() -> set[str]:
    return {canonicalize_name(one.metadata["Name"]) for one in importlib.metadata.distributions()}


def test_all_that_serving_needs_is_there_and_nothing_else() -> None:
    assert needed(["recprune[serve,onnx]"], installed()) == set(pinned("serve.txt")), RENEW
    assert not {"torch", "ray", "polars"} & set(pinned("serve.txt"))


def test_all_that_a_node_of_ray_needs_is_there() -> None:
    # What only Ray's dashboard needs is not installed here; what it needs in turn is not known.
    assert needed(["recprune[ray-node]"], installed()) <= set(pinned("ray.txt")), RENEW
    assert set(pinned("serve.txt")) <= set(pinned("ray.txt")), "it serves too"
    assert "torch" not in pinned("ray.txt")


def test_all_that_a_build_needs_is_there() -> None:
    build = needed([*PROJECT["build-system"]["requires"], "cmake", "ninja"], installed())
    assert build == set(pinned("build.txt")), RENEW
