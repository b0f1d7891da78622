"""Who may ask: API keys, scopes, addresses and origins."""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from recprune import InputError
from recprune.serve.configuration import ServeSettings
from recprune.serve.keys import SCOPES, Keys, add_key, read_keys, remove_key
from tests.support.histories_places import RedisServer
from tests.support.serving import (
    CLI,
    Service,
    error_of,
    events_of,
    save_recommender,
    serving,
    wait_until,
)

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
        "events": keys("add", "till", "--scope", "events", "--file", file).stdout.strip(),
        "admin": keys("add", "operator", "--scope", "admin", "--file", file).stdout.strip(),
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
    shown = [line.split() for line in keys("list", "--file", file).stdout.splitlines()]
    assert shown == [["ask", "-", "shop"], ["events", "-", "till"], ["admin", "-", "operator"]]
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


@pytest.mark.parametrize(
    "path", ["/metrics", "/items?query=a", "/items/a", "/items/a/similar", "/nothing"]
)
def test_everything_else_needs_a_key_too(
    service: Service, path: str, given: dict[str, str]
) -> None:
    assert service.client.get(path).status_code == 401
    expected = 404 if path == "/nothing" else 200
    assert service.client.get(path, headers=bearer(given["ask"])).status_code == expected


@pytest.mark.parametrize(
    "path", ["/", "/docs", "/page/page.css", "/healthz", "/readyz", "/openapi.json"]
)
def test_what_tells_nothing_is_open(service: Service, path: str) -> None:
    assert service.client.get(path).status_code == 200


def status(service: Service, key: str) -> int:
    """Ask over a connection of its own: whichever worker has its turn."""
    return httpx.get(f"http://127.0.0.1:{service.port}/items/a", headers=bearer(key)).status_code


def test_events_have_a_scope_of_their_own(service: Service, given: dict[str, str]) -> None:
    events = {"events": [{"user": "ann", "item": "a"}]}

    def posted(key: str) -> httpx.Response:
        return service.client.post("/events", json=events, headers=bearer(given[key]))

    assert error_of(posted("ask")) == (403, "forbidden", "this needs an API key of scope events")
    assert posted("events").status_code == 200
    assert posted("admin").status_code == 200
    asked = service.client.post("/recommend", json=QUESTION, headers=bearer(given["events"]))
    assert error_of(asked) == (403, "forbidden", "this needs an API key of scope ask")


def test_a_key_that_is_taken_away_ends_at_once(folder: Path, tmp_path: Path) -> None:
    """Without a signal, for all workers, and although the folder could not be loaded any more."""
    served = shutil.copytree(folder, tmp_path / "served")
    file = tmp_path / "keys.json"
    guest, other = add_key(file, "guest", "ask"), add_key(file, "other", "ask")
    with serving(served, "--workers", "2", "--keys", file) as service:
        wait_until(lambda: events_of(service).count("worker started") == 2, "both workers")
        assert [status(service, guest) for _ in range(4)] == [200] * 4
        (served / "manifest.json").unlink()
        assert keys("remove", "guest", "--file", file).returncode == 0
        assert [status(service, guest) for _ in range(4)] == [401] * 4
        assert [status(service, other) for _ in range(4)] == [200] * 4
        later = add_key(file, "later", "ask")
        assert [status(service, later) for _ in range(4)] == [200] * 4
        for name in ("other", "later"):
            remove_key(file, name)
        assert status(service, other) == 401, "no key at all is a state like any other"
        again = add_key(file, "again", "ask")
        assert [status(service, again) for _ in range(4)] == [200] * 4
        file.write_text("{")
        assert status(service, again) == 200, "a damaged file takes no key away"
        assert "keys unreadable" in events_of(service)
        assert "reloaded" not in events_of(service)


def test_a_key_may_have_a_rate(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    slow = keys("add", "slow", "--rate", "3", "--file", file).stdout.strip()
    free = keys("add", "free", "--file", file).stdout.strip()
    shown = [line.split() for line in keys("list", "--file", file).stdout.splitlines()]
    assert shown == [["ask", "3/s", "slow"], ["ask", "-", "free"]]
    with serving(folder, "--workers", "2", "--keys", file) as service:
        wait_until(lambda: events_of(service).count("worker started") == 2, "both workers")
        begun = time.monotonic()
        found = [status(service, slow) for _ in range(20)]
        passed = time.monotonic() - begun
        # A burst of as many as come in a second, and what came back meanwhile: of both workers.
        assert 3 <= found.count(200) <= 3 + 3 * passed + 1
        assert found.count(200) + found.count(429) == 20
        assert [status(service, free) for _ in range(20)] == [200] * 20
        with httpx.Client(headers=bearer(slow)) as client:  # fast enough on a machine at work too
            answers = (client.get(f"{service.url}/items/a") for _ in range(200))
            refused = next(answer for answer in answers if answer.status_code == 429)
        assert error_of(refused)[:2] == (429, "too_many_requests")
        assert refused.headers["retry-after"] == "1"
        headers = bearer(free)
        text = httpx.get(f"{service.url}/metrics", headers=headers).text
        limited = [line for line in text.splitlines() if line.startswith("recprune_rate_limited_t")]
        assert float(limited[0].split()[1]) > found.count(429)
        time.sleep(1.1)
        assert status(service, slow) == 200, "they come back"


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf", "x"])
def test_a_rate_is_more_than_nothing(tmp_path: Path, rate: str) -> None:
    done = keys("add", "slow", f"--rate={rate}", "--file", tmp_path / "keys.json")
    assert done.returncode == 2
    assert "rate" in done.stderr
    assert not (tmp_path / "keys.json").exists()


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
    assert ServeSettings(folder=tmp_path, host=host).is_loopback


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


def test_keys_added_at_once_are_all_there(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    words = [*CLI, "keys", "add", "--file", str(file)]
    with ExitStack() as opened:
        adding = [
            opened.enter_context(
                subprocess.Popen([*words, f"name {number}"], stdout=subprocess.PIPE, text=True)
            )
            for number in range(8)
        ]
        given = [one.communicate(timeout=60)[0].strip() for one in adding]
    found = read_keys(file)
    assert sorted(stored.name for stored in found.stored) == [f"name {n}" for n in range(8)]
    assert all(found.find(key) for key in given)
    assert [path.name for path in tmp_path.iterdir()] == ["keys.json"]


# Secrets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    ["redis://:hush@127.0.0.1:1/0", "redis://ann:hush@127.0.0.1:1", "rediss://:@127.0.0.1:1",
     "rediss://127.0.0.1:1?ssl_password=hush", "redis+cluster://:hush@127.0.0.1:1"],
)  # fmt: skip
def test_no_password_is_on_a_command_line(folder: Path, url: str) -> None:
    words = ["serve", str(folder), "--port", "0", "--history", url]
    done = subprocess.run([*CLI, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "hush" not in done.stderr
    assert "--history-password-file" in done.stderr


@pytest.mark.parametrize("way", ["file", "variable"])
def test_the_password_of_redis_comes_from_elsewhere(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    password = "hush: a#b@c/d%20"  # nothing in it is meant for a url
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis", "--requirepass", password)
    options: list[str | Path] = ["--history", server.url]
    if way == "file":
        (tmp_path / "password").write_text(f"{password}\n")
        options += ["--history-password-file", tmp_path / "password"]
    else:
        monkeypatch.setenv("RECPRUNE_SERVE_HISTORY_PASSWORD", password)
    try:
        with serving(folder, *options) as service:
            event = {"events": [{"user": "ann", "item": "a"}]}
            assert service.post("/events", event).json()["new"] == 1
            for pid in (service.process.pid, *service.workers):
                assert b"hush" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    finally:
        server.kill()


def test_a_file_without_a_password_is_said(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name, why in (("missing", "No such file"), ("empty", "is empty")):
        options = ["--history", "redis://127.0.0.1:1", "--history-password-file", tmp_path / name]
        words = ["serve", str(folder), "--port", "0", *map(str, options)]
        done = subprocess.run([*CLI, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert f"--history-password-file: {tmp_path / name}" in done.stderr
        assert why in done.stderr


# Without a service -------------------------------------------------------------------------------


def test_keys_are_found_by_their_hash(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    first, second = add_key(path, "a", "ask"), add_key(path, "b", "admin")
    found = read_keys(path)
    named = [found.find(key) for key in (first, second, "", "é\udc80")]
    assert [key and key.name for key in named] == ["a", "b", None, None]
    assert named[0] is not None
    assert named[1] is not None
    assert [named[0].allows(scope) for scope in SCOPES] == [True, False, False, False]
    assert [named[1].allows(scope) for scope in SCOPES] == [True, True, True, True]
    remove_key(path, "a")
    assert read_keys(path).find(first) is None
    with pytest.raises(InputError, match="has no key of the name 'a'"):
        remove_key(path, "a")
    remove_key(path, "b")
    with pytest.raises(InputError, match="has no keys"):
        read_keys(path)
    assert Keys([]).find("x") is None
    third = add_key(path, "c", "ask", "events", rate=0.5)
    found_third = read_keys(path).find(third)
    assert found_third is not None
    assert (found_third.scopes, found_third.rate) == (("ask", "events"), 0.5)


def test_a_file_with_one_scope_for_each_key_is_read(tmp_path: Path) -> None:
    """As they were before events had a scope of their own; `ask` no longer means them."""
    path = tmp_path / "keys"
    old = [
        {"name": name, "scope": scope, "sha256": hashlib.sha256(name.encode()).hexdigest()}
        for name, scope in (("shop", "ask"), ("operator", "admin"))
    ]
    path.write_text(json.dumps({"keys": old}))
    found = read_keys(path)
    shop, operator = found.find("shop"), found.find("operator")
    assert shop is not None
    assert operator is not None
    assert [shop.allows(scope) for scope in SCOPES] == [True, False, False, False]
    assert [operator.allows(scope) for scope in SCOPES] == [True, True, True, True]
    assert shop.rate is None
    add_key(path, "till", "events")
    assert [key.name for key in read_keys(path).stored] == ["shop", "operator", "till"]


DAMAGED: list[dict[str, Any]] = [
    {}, {"scopes": []}, {"scopes": "ask"}, {"scopes": ["root"]}, {"scopes": [["ask"]]},
    {"scopes": ["ask"], "rate": 0}, {"scopes": ["ask"], "rate": "1"},
    {"scopes": ["ask"], "rate": True}, {"scopes": ["ask"], "other": 1},
]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"keys": [{}]}', '{"keys": 3}', "\xff",
     json.dumps({"keys": [{"name": "a", "scope": "root", "sha256": "0" * 64}]}),
     *(json.dumps({"keys": [{"name": "a", "scope": "ask", "sha256": sha256}]})
       for sha256 in ("0", 5, None, "g" * 64, "é" * 64, "0" * 64 + "\n", ["0"] * 64)),
     json.dumps({"keys": [{"name": 1, "scope": "ask", "sha256": "0" * 64}]}),
     json.dumps({"keys": [{"name": "a", "scope": ["ask"], "sha256": "0" * 64}]}),
     *(json.dumps({"keys": [{"name": "a", "sha256": "0" * 64} | more]}) for more in DAMAGED)],
)  # fmt: skip
def test_a_damaged_file_of_keys_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match="keys"):
        read_keys(path)
    with pytest.raises(InputError, match="no such file"):
        read_keys(tmp_path / "missing")
