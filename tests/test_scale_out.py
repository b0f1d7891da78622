"""Scaling out on paper: the document's tables, and manifests that a cluster could be given."""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.scale_plan import search_times, slowest_of, with_tables

ROOT = Path(__file__).parents[1]
MANIFESTS = sorted((ROOT / "deploy" / "kuberay").glob("*.yaml"))


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key of a document with its value, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key, inner
            yield from walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner)


def test_the_tables_are_those_of_what_was_measured() -> None:
    text = (ROOT / "docs" / "scale-out.md").read_text(encoding="utf-8")
    assert with_tables(text) == text
    hundred_million, billion = (search_times(size)[0] for size in (10**8, 10**9))
    assert (
        f"100 million items takes {hundred_million:.1f} ms, over one billion {billion:.1f} ms"
        in text
    )


def test_the_slowest_of_several_is_slower() -> None:
    assert slowest_of(1, 2.0, 0.0, 0.99) == pytest.approx(2.0)
    assert slowest_of(1, 2.0, 0.5, 0.5) == pytest.approx(2.0)
    # Of two, the median is where each is with a chance of √½: z = 0.5450.
    assert slowest_of(2, 1.0, 1.0, 0.5) == pytest.approx(1.7244, abs=1e-3)
    medians = [search_times(size)[0] for size in (10**6, 3 * 10**7, 10**9)]
    assert medians == sorted(medians)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_names_what_there_is(path: Path) -> None:
    kinds = {
        ("ray.io/v1", "RayCluster"),
        ("ray.io/v1", "RayJob"),
        ("apps/v1", "Deployment"),
        ("v1", "Service"),
    }
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for document in documents(path):
        assert (document["apiVersion"], document["kind"]) in kinds
        assert document["metadata"]["name"].startswith("recprune")
        found = list(walk(document))
        for spec in (value for key, value in found if key == "spec" and "containers" in value):
            volumes = {volume["name"] for volume in spec["volumes"]}
            for container in spec["containers"]:
                assert container["image"].endswith("/recprune:0.1.0")
                assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
                assert container["resources"]["requests"]["memory"]
        for key, version in found:
            if key == "rayVersion":
                assert f"ray=={version}" in constraints
        for key, group in found:
            if key == "workerGroupSpecs":
                assert all(
                    entry["minReplicas"] <= entry["replicas"] <= entry["maxReplicas"]
                    for entry in group
                )


def test_commands_of_the_manifests_can_be_given() -> None:
    """What the cluster is told to run, our own command line understands."""
    commands = []
    for path in MANIFESTS:
        for key, value in (pair for document in documents(path) for pair in walk(document)):
            lines = [value] if key == "entrypoint" else value if key == "args" else []
            for line in lines:
                words = shlex.split(line)
                commands.append(words[words.index("recprune") + 1 :])
    assert sorted(words[0] for words in commands) == ["batch", "serve"]
    for words in commands:
        parser = argparse.ArgumentParser(exit_on_error=False)
        importlib.import_module(f"recprune.commands.{words[0]}").add_arguments(parser)
        parser.parse_args(words[1:])
