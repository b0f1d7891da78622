"""A user acts, and the next answer knows: by one further position, in any worker, after anything."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import numpy as np
import pytest

from recprune import Recommender
from recprune.models.onnx_export import EncoderPrecision
from tests.support.histories_places import RedisServer
from tests.support.serving import (
    Json,
    Service,
    items_of,
    replace,
    save_recommender,
    serving,
    wait_for_workers,
    wait_until,
)

MODEL: Json = {
    "architecture": "continued", "num_blocks": 2, "num_heads": 2, "kept_width": 8, "length": 12,
}  # fmt: skip
HOWS = ("continued", "unchanged", "anew")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        save_recommender(place / str(seed), seed, **MODEL)
    return [place / "0", place / "1"]


@pytest.fixture(params=["sqlite", "redis"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[str]]:
    if request.param == "sqlite":
        yield ["--history", f"sqlite:///{tmp_path}/histories.db"]
        return
    server = RedisServer(tmp_path)
    yield ["--history", server.url]
    server.kill()


def counts(service: Service) -> dict[str, float]:
    return {how: service.metric(f'recprune_encoded_total{{how="{how}"}}') for how in HOWS}


def add(service: Service, user: str, item: str, **more: object) -> None:
    body = {"events": [{"user": user, "item": item, **more}]}
    assert service.post("/events", body).status_code == 200


def asked_anew(service: Service, **body: object) -> Json:
    """Ask over a connection of its own: any worker answers."""
    found = httpx.post(f"{service.url}/recommend", json=body)
    assert found.status_code == 200, found.text
    (answer,) = found.json()["answers"]
    return dict(answer)


def check(service: Service, recommender: Recommender, user: str, history: list[str]) -> None:
    """Hold the answer for a user against that for the same history given in the request."""
    best = recommender.recommend([history], 8, exclude_seen=True)
    answer = asked_anew(service, user=user, k=8, exclude_seen=True)
    scores = [item["score"] for item in answer["items"]]
    np.testing.assert_allclose(scores, best.scores[0], rtol=0, atol=1e-4)
    if np.diff(best.scores[0]).max() < -1e-4:  # else rounding may decide between two
        assert items_of(answer) == best.items[0]


def test_answers_are_those_of_whole_windows_whatever_happens(
    models: list[Path], options: list[str], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(models[0], tmp_path / "served"))
    recommenders = [Recommender.load(folder) for folder in models]
    names = [str(name) for name in recommenders[0].item_ids.take(range(90))]
    rng = random.Random(0)
    histories: dict[str, list[tuple[float, str]]] = {}
    asked = 0
    for round_ in range(3):  # the service is killed in between, and the model swapped within
        with serving(folder, "--workers", "2", *options) as service:
            wait_for_workers(service, 2)
            model = recommenders[round_ % 2]
            for step in range(80):
                if step == 40 and round_ < 2:
                    replace(folder, models[(round_ + 1) % 2])
                    assert service.post("/admin/reload", {}).status_code == 200
                    model = recommenders[(round_ + 1) % 2]
                user = f"user {rng.randrange(4)}"
                history = histories.setdefault(user, [])
                newest = max((moment for moment, _ in history), default=100.0)
                # Now and then late; now and then of an item that there is not.
                moment = newest + 1.0 if rng.random() < 0.9 else newest - 2.5
                item = rng.choice(names) if rng.random() < 0.95 else "never heard of"
                add(service, user, item, timestamp=moment, key=f"{round_} {step}")
                history.append((moment, item))
                history.sort(key=lambda event: event[0])
                known = [item for _, item in history if item in names]
                if known and rng.random() < 0.8:
                    check(service, model, user, known)
                    asked += 1
            wait_until(lambda: sum(counts(service).values()) > 0, "figures")
            service.kill_all()
    assert asked > 150


def test_an_event_continues_a_state(models: list[Path], options: list[str]) -> None:
    recommender = Recommender.load(models[0])
    names = [str(name) for name in recommender.item_ids.take(range(40))]
    with serving(models[0], *options) as service:
        for count, name in enumerate(names, 1):
            add(service, "ann", name)
            check(service, recommender, "ann", names[:count])
        check(service, recommender, "ann", names)
        assert counts(service) == {"anew": 1.0, "continued": 39.0, "unchanged": 1.0}
        # A history in the request is nobody's.
        service.recommend(history=names[:5])
        assert sum(counts(service).values()) == 41.0
        service.stop()
    with serving(models[0], *options) as service:  # what was kept outlives the service
        add(service, "ann", names[0])
        check(service, recommender, "ann", [*names, names[0]])
        assert counts(service) == {"anew": 0.0, "continued": 1.0, "unchanged": 0.0}


def test_states_that_something_has_happened_to_are_made_anew(
    models: list[Path], tmp_path: Path
) -> None:
    recommender = Recommender.load(models[0])
    names = [str(name) for name in recommender.item_ids.take(range(20))]
    where = tmp_path / "histories.db"
    options = ["--history", f"sqlite:///{where}"]
    with serving(models[0], *options) as service:
        for name in names:
            add(service, "ann", name)
        check(service, recommender, "ann", names)
        service.stop()
    with closing(sqlite3.connect(f"{where}-states")) as connection:
        (numbers,) = connection.execute("SELECT max(numbers) FROM state_rows").fetchone()
        changed = bytes([numbers[0] ^ 1]) + numbers[1:]
        connection.execute(
            "UPDATE state_rows SET numbers = ? WHERE numbers = ?", (changed, numbers)
        )
        connection.commit()
    with serving(models[0], *options) as service:
        check(service, recommender, "ann", names)
        assert counts(service) == {"anew": 1.0, "continued": 0.0, "unchanged": 0.0}
        service.stop()
    Path(f"{where}-states").write_bytes(b"damaged" * 4096)
    for rest in ("-states-wal", "-states-shm"):
        Path(f"{where}{rest}").unlink(missing_ok=True)
    with serving(models[0], *options) as service:
        check(service, recommender, "ann", names)
        assert counts(service) == {"anew": 1.0, "continued": 0.0, "unchanged": 0.0}
        assert "states of users are not kept" in [entry["event"] for entry in service.logged()]


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_other_encoders_keep_nothing(tmp_path: Path, precision: EncoderPrecision) -> None:
    """Nor does one with weights of 8 bits: the model's own would give other answers."""
    # Wide enough for weights of 8 bits.
    values = MODEL | {"width": 64} if precision == "int8" else {}
    recommender = save_recommender(tmp_path / "served", encoder_precision=precision, **values)
    assert recommender.continuation is None
    with serving(tmp_path / "served") as service:
        for item in ("a", "b", "n"):
            add(service, "ann", item)
            answer = service.recommend(user="ann", k=8)
        assert answer["items"] == service.recommend(history=["a", "b", "n"], k=8)["items"]
        assert sum(counts(service).values()) == 0.0
    assert not list(tmp_path.glob("*-states*"))
