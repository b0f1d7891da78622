"""Who may ask: API keys, scopes, addresses and origins."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from recprune import InputError
from recprune.serve.configuration import Limits, ServeSettings
from recprune.serve.keys import Keys, StoredKey, add_key, read_keys, remove_key
from tests.support.serving import CLI, Service, error_of, save_recommender, serving, wait_until

QUESTION = {"history": ["a"]}


def keys(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*CLI, "keys", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "recommender"
    save_recommender(folder)
    return folder


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    return folder.with_name("keys.json")


@pytest.fixture(scope="module")
def given(file: Path) -> dict[str, str]:
    """A key of each scope, made by the command."""
    return {
        "ask": keys("add", "shop", "--file", file).stdout.strip(),
        "admin": keys("add", "operator", "--admin", "--file", file).stdout.strip(),
    }


@pytest.fixture(scope="module")
def service(folder: Path, file: Path, given: dict[str, str]) -> Iterator[Service]:
    assert given
    options = ("--host", "0.0.0.0", "--keys", file, "--cors-origin", "https://shop.example")
    with serving(folder, *options) as running:
        running.url = f"http://127.0.0.1:{running.port}"
        running.client = httpx.Client(base_url=running.url)
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_key_is_shown_once_and_kept_as_a_hash(file: Path, given: dict[str, str]) -> None:
    text = file.read_text()
    assert all(len(key) >= 43 and key not in text for key in given.values())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert keys("list", "--file", file).stdout.split() == ["ask", "shop", "admin", "operator"]
    again = keys("add", "shop", "--file", file)
    assert again.returncode == 2
    assert "already has a key of the name 'shop'" in again.stderr


def test_a_key_is_needed_and_its_scope_counts(service: Service, given: dict[str, str]) -> None:
    def asked(headers: dict[str, str]) -> httpx.Response:
        return service.client.post("/recommend", json=QUESTION, headers=headers)

    assert asked(bearer(given["ask"])).status_code == 200
    assert asked({"authorization": f"bearer  {given['admin']}"}).status_code == 200
    wrong = [{}, bearer("x"), bearer(given["ask"] + "x"), bearer(given["ask"][:-1]), bearer("é"),
             {"authorization": given["ask"]}, {"authorization": f"Basic {given['ask']}"}]  # fmt: skip
    for headers in wrong:
        encoded = {name.encode(): value.encode() for name, value in headers.items()}
        refused = service.client.post("/recommend", json=QUESTION, headers=encoded)
        assert error_of(refused)[:2] == (401, "unauthorized")
        assert refused.headers["www-authenticate"] == "Bearer"
    reload = service.client.post("/admin/reload", headers=bearer(given["ask"]))
    assert error_of(reload)[:2] == (403, "forbidden")
    assert service.client.post("/admin/reload").status_code == 401
    assert service.client.post("/admin/reload", headers=bearer(given["admin"])).status_code == 200


@pytest.mark.parametrize("path", ["/metrics", "/items?query=a", "/items/a", "/nothing"])
def test_everything_else_needs_a_key_too(
    service: Service, path: str, given: dict[str, str]
) -> None:
    assert service.client.get(path).status_code == 401
    expected = 404 if path == "/nothing" else 200
    assert service.client.get(path, headers=bearer(given["ask"])).status_code == expected


@pytest.mark.parametrize("path", ["/", "/page/page.css", "/healthz", "/readyz", "/openapi.json"])
def test_what_tells_nothing_is_open(service: Service, path: str) -> None:
    assert service.client.get(path).status_code == 200


def test_a_key_that_is_taken_away_ends_with_a_reload(
    service: Service, file: Path, given: dict[str, str]
) -> None:
    key = keys("add", "guest", "--file", file).stdout.strip()
    answer = service.client.post("/admin/reload", headers=bearer(given["admin"]))
    assert answer.status_code == 200
    assert service.client.get("/items/a", headers=bearer(key)).status_code == 200
    assert keys("remove", "guest", "--file", file).returncode == 0
    service.process.send_signal(signal.SIGHUP)
    wait_until(
        lambda: service.client.get("/items/a", headers=bearer(key)).status_code == 401, "the end"
    )


def test_other_origins_ask_only_if_they_are_named(service: Service, given: dict[str, str]) -> None:
    headers = bearer(given["ask"]) | {"origin": "https://shop.example"}
    named = service.client.post("/recommend", json=QUESTION, headers=headers)
    assert named.headers["access-control-allow-origin"] == "https://shop.example"
    preflight = service.client.options(
        "/recommend",
        headers={
            "origin": "https://shop.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        },
    )
    assert preflight.status_code == 200
    other = bearer(given["ask"]) | {"origin": "https://other.example"}
    refused = service.client.post("/recommend", json=QUESTION, headers=other)
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers


def test_with_keys_the_host_may_have_any_name(service: Service, given: dict[str, str]) -> None:
    headers = bearer(given["ask"]) | {"host": "recommendations.example"}
    assert service.client.post("/recommend", json=QUESTION, headers=headers).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_nobody_serves_the_public_without_keys(folder: Path, host: str) -> None:
    done = subprocess.run(
        [*CLI, "serve", str(folder), "--host", host], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "others can reach: give --keys FILE" in done.stderr


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_this_machine_alone_needs_no_keys(tmp_path: Path, host: str) -> None:
    assert ServeSettings(tmp_path, host=host).is_loopback


@pytest.mark.parametrize(
    "origin", ["*", "shop.example", "https://shop.example/", "https://*.example"]
)
def test_an_origin_is_one_web_site(folder: Path, origin: str) -> None:
    words = ["serve", str(folder), "--port", "0", "--cors-origin", origin]
    done = subprocess.run([*CLI, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"--cors-origin is {origin!r}, expected one web site" in done.stderr


def test_the_description_says_where_a_key_is_needed(service: Service) -> None:
    schema = service.client.get("/openapi.json").json()
    ((name, scheme),) = schema["components"]["securitySchemes"].items()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    for path, operations in schema["paths"].items():
        needed = "null" if path in ("/healthz", "/readyz") else json.dumps([{name: []}])
        assert {json.dumps(one.get("security")) for one in operations.values()} == {needed}, path


def test_a_port_in_use_is_said(folder: Path, service: Service) -> None:
    words = ["serve", str(folder), "--port", str(service.port)]
    done = subprocess.run([*CLI, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Address already in use" in done.stderr


# Without a service -------------------------------------------------------------------------------


def test_keys_are_found_by_their_hash(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    first, second = add_key(path, "a", "ask"), add_key(path, "b", "admin")
    found = read_keys(path)
    assert [found.scope(key) for key in (first, second, "", "é\udc80")] == [
        "ask",
        "admin",
        None,
        None,
    ]
    remove_key(path, "a")
    assert read_keys(path).scope(first) is None
    with pytest.raises(InputError, match="has no key of the name 'a'"):
        remove_key(path, "a")
    remove_key(path, "b")
    with pytest.raises(InputError, match="has no keys"):
        read_keys(path)
    assert Keys([]).scope("x") is None


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"keys": [{}]}', '{"keys": 3}', "\xff",
     json.dumps({"keys": [{"name": "a", "scope": "root", "sha256": "0" * 64}]}),
     *(json.dumps({"keys": [{"name": "a", "scope": "ask", "sha256": sha256}]})
       for sha256 in ("0", 5, None, "g" * 64, "é" * 64, "0" * 64 + "\n", ["0"] * 64)),
     json.dumps({"keys": [{"name": 1, "scope": "ask", "sha256": "0" * 64}]}),
     json.dumps({"keys": [{"name": "a", "scope": ["ask"], "sha256": "0" * 64}]})],
)  # fmt: skip
def test_a_damaged_file_of_keys_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match="keys"):
        read_keys(path)
    with pytest.raises(InputError, match="no such file"):
        read_keys(tmp_path / "missing")
    assert StoredKey("a", "ask", "0" * 64).scope == "ask"


@pytest.mark.parametrize(
    ("limits", "message"),
    [({"k": 0}, "limit k is 0"), ({"waiting": -1}, "limit waiting is -1"),
     ({"client_seconds": 0.0}, "client_seconds"), ({"history": True}, "history"),
     ({"silent_seconds": -1}, "silent_seconds"), ({"reload_seconds": float("nan")}, "reload")],
)  # fmt: skip
def test_limits_are_checked(limits: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Limits(**limits)
