"""What workers take of memory: most of it they share, and no request makes one grow for good."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from recprune import Index
from tests.support.serving import WIDTH, Service, error_of, save_index, serving, wait_for_workers

ITEMS = 300_000
POSTING_LISTS = 4 * 8 * ITEMS  # bytes: four for each of eight splits
QUESTION = {"sequence_embedding": np.linspace(-1, 1, WIDTH).tolist()}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory") / "index"
    save_index(folder, ITEMS)
    return folder


@pytest.fixture(scope="module")
def names(large: Path) -> Path:
    """A hundred bytes for every item."""
    names = large.with_name("names.csv")
    rows = [f"{row},Item {row} {'of the finest kind ' * 4}".ljust(106, "x") for row in range(ITEMS)]
    names.write_text("\n".join(["item_id,name", *rows]))
    return names


def private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kilobytes = [int(line.split()[1]) for line in lines if line.startswith("Private_")]
    return 1024 * sum(kilobytes)


def ask_all(service: Service, method: str, path: str, **more: object) -> list[httpx.Response]:
    """Ask over several connections, which the workers get in turn."""
    return [
        httpx.request(method, f"{service.url}{path}", timeout=30, **more)  # type: ignore[arg-type]
        for _ in range(8)
    ]


def test_workers_share_the_index(large: Path) -> None:
    size = Index.load(large).describe()["bytes"]
    with serving(large, "--workers", "2") as service:
        question = {"batch": np.random.default_rng(0).normal(size=(32, WIDTH)).tolist()}
        ask_all(service, "POST", "/search", json=question)  # both have looked at all of it
        private = [private_bytes(pid) for pid in service.workers]
        assert size > 15_000_000
        assert max(private) < 60_000_000 + size / 2, "their own, and not the index"


@pytest.fixture(scope="module")
def named(large: Path, names: Path) -> Iterator[Service]:
    with serving(large, "--workers", "2", "--names", names) as service:
        wait_for_workers(service, 2)
        yield service


def test_workers_share_the_names_and_do_not_grow_by_a_search_for_them(named: Service) -> None:
    ask_all(named, "POST", "/search", json=QUESTION)
    before = [private_bytes(pid) for pid in named.workers]
    found = ask_all(named, "GET", "/items", params={"query": "item 299999 of"})
    # Reading and folding them takes a second: that was before the workers were ready.
    assert max(answer.elapsed.total_seconds() for answer in found) < 0.3
    assert {answer.text for answer in found} == {found[0].text}
    assert found[0].json()["items"][0]["item"] == 299_999
    after = [private_bytes(pid) for pid in named.workers]
    assert max(now - then for now, then in zip(after, before, strict=True)) < 5_000_000
    assert max(after) < 75_000_000, "without 100 bytes an item, and as many to search in"


def test_new_names_are_read_and_old_ones_forgotten(tmp_path: Path) -> None:
    folder, names = tmp_path / "index", tmp_path / "names.csv"
    save_index(folder, 1000)
    names.write_text("item_id,name\n7,Apple\n")

    def of_all(service: Service) -> set[str | None]:
        answers = ask_all(service, "GET", "/items/7")
        return {answer.json()["name"] for answer in answers}

    with serving(folder, "--workers", "2", "--names", names) as service:
        wait_for_workers(service, 2)
        assert of_all(service) == {"Apple"}
        for name in ("Birne", "Quince"):
            names.write_text(f"item_id,name\n7,{name}\n")
            assert service.client.post("/admin/reload").status_code == 200
            assert of_all(service) == {name}
        (scratch,) = tmp_path.glob("recprune-serve-*")
        assert len(list(scratch.glob("texts-*"))) == 1
    assert not scratch.exists()


def test_a_method_may_make_a_worker_grow_as_far_as_is_allowed(large: Path) -> None:
    with serving(large, "--max-method-bytes", str(POSTING_LISTS)) as service:
        (worker,) = service.workers
        ask_all(service, "POST", "/search", json=QUESTION)
        before = private_bytes(worker)
        asked = QUESTION | {"method": "recjpqprune"}
        assert {
            answer.status_code for answer in ask_all(service, "POST", "/search", json=asked)
        } == {200}
        assert private_bytes(worker) - before < POSTING_LISTS + 5_000_000
    with serving(large, "--max-method-bytes", str(POSTING_LISTS - 1)) as service:
        (worker,) = service.workers
        ask_all(service, "POST", "/search", json=QUESTION)
        before = private_bytes(worker)
        status, code, message = error_of(service.post("/search", asked))
        assert (status, code) == (422, "invalid")
        assert message == (
            "method recjpqprune needs 9,600,000 bytes in each worker, and the service allows "
            "9,599,999: --max-method-bytes"
        )
        explained = service.post("/search", QUESTION | {"explain": True}).json()
        explanation = explained["answers"][0]["explanation"]
        unavailable = {run["method"] for run in explanation["methods"] if run["unavailable"]}
        assert unavailable == {"recjpqprune", "default"}
        assert explanation["trace"]["method"] == "scan"
        assert private_bytes(worker) - before < POSTING_LISTS / 2


def test_boosts_of_a_compact_index_are_counted_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (1000, 8), np.uint8)
    embeddings = rng.standard_normal((8, 256, WIDTH // 8)).astype(np.float32)
    Index.build(codes, embeddings, layout="compact").save(tmp_path / "index")
    boosted = QUESTION | {"boosts": [{"item": 7, "boost": 100.0}]}
    with serving(tmp_path / "index", "--max-method-bytes", "8000") as service:
        (answer,) = service.post("/search", boosted).json()["answers"]
        assert answer["items"][0]["item"] == 7
    with serving(tmp_path / "index", "--max-method-bytes", "7999") as service:
        status, code, message = error_of(service.post("/search", boosted))
        assert (status, code) == (422, "invalid")
        assert "boosts need 8,000 bytes in each worker" in message
