"""The description of the API holds: schemathesis asks what it allows, and what it does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.serving import Service, save_recommender, serving

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("openapi") / "recommender"
    live = folder.with_name("live")
    save_recommender(folder).make_live(live).close()
    with serving(folder, "--live", live) as running:
        yield running


@pytest.fixture(scope="module")
def described(service: Service) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{service.url}/openapi.json")


OPERATIONS = [
    ("POST", "/recommend"),
    ("POST", "/search"),
    ("POST", "/events"),
    ("GET", "/items"),
    ("POST", "/items"),
    ("GET", "/items/{item}"),
    ("GET", "/items/{item}/similar"),
    ("PATCH", "/items/{item}"),
    ("DELETE", "/items/{item}"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
    ("POST", "/admin/reload"),
]


def test_every_operation_is_tried(service: Service) -> None:
    paths = service.client.get("/openapi.json").json()["paths"]
    described = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    assert sorted(described) == sorted(OPERATIONS)


def tried(operation: Any, mode: GenerationMode, examples: int) -> None:
    """Ask as often, each time something else."""

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case[Any]) -> None:
        response = case.call()
        # A history that is not read within a tiny timeout_ms: the one described answer above 499.
        is_late = response.status_code == 503 and b"histories_unavailable" in response.content
        case.validate_response(response, checks=CHECKS[1:] if is_late else CHECKS)

    ask()


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_answers_are_as_described(
    described: schemathesis.BaseSchema, method: str, path: str
) -> None:
    operation = described[path][method]
    takes_something = bool(operation.body) or path.startswith("/items")
    tried(operation, GenerationMode.POSITIVE, 50 if takes_something else 1)


@pytest.mark.parametrize(("method", "path"), OPERATIONS[:4])
def test_what_is_not_described_gets_a_described_answer(
    described: schemathesis.BaseSchema, method: str, path: str
) -> None:
    tried(described[path][method], GenerationMode.NEGATIVE, 50)
