"""A recommender and its live index are refreshed while they are served: no request fails."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from recprune import LiveIndex, Recommender
from recprune.serve.keys import add_key
from tests.support.serving import (
    CLI,
    HISTORY,
    Load,
    items_of,
    save_recommender,
    serving,
    wait_until,
)
from tests.support.small_models import walks

NEW = "new tea"
DAY = 86_400


def write_log(place: Path) -> Path:
    """Write what the recommender of `save_recommender` knows, and some days more."""
    log = walks(60, 90, "strings")
    users, items, times = [], [], []
    for user in range(log.num_users):
        names = [*log.item_ids.take(log.history(user).tolist())]
        last = int(log.times[log.offsets[user + 1] - 1]) // 1_000_000
        for step, name in enumerate(names):
            users.append(log.user_ids[user])
            items.append(name)
            times.append(int(log.times[log.offsets[user] + step]) // 1_000_000)
        for step in range(6):
            users.append(log.user_ids[user])
            items.append(NEW if step == 2 else names[step])
            times.append(max(last, 1_500_100_000) + DAY * (step + 1) + user)
    columns = {"user_id": users, "item_id": items, "timestamp": times}
    pl.DataFrame(columns).write_parquet(place / "log.parquet")
    return place / "log.parquet"


def run_refresh(*words: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, "refresh", *map(str, words), "--device", "cpu"],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )


@pytest.fixture
def served(tmp_path: Path) -> tuple[Path, Path, Path]:
    recommender = save_recommender(tmp_path / "recommender")
    recommender.make_live(tmp_path / "catalogue").close()
    return tmp_path / "recommender", tmp_path / "catalogue", write_log(tmp_path)


def test_what_stays_out_of_the_catalogue_is_told_and_can_be_put(
    served: tuple[Path, Path, Path],
) -> None:
    folder, catalogue, log = served
    words = ("--live", catalogue, "--epochs", 1, "--margin", 0.99, "--min-interactions", 1)
    done = run_refresh(folder, log, *words)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "though the model knows them: 1; --add-new would have put them there" in said
    # By the code that the model has for it.
    recommender = Recommender.load(folder)
    with LiveIndex.open(catalogue) as live:
        assert live.find([NEW]).tolist() == [-1]
        live.put([NEW], recommender.index.item_codes()[recommender.item_ids.find_all([NEW])])
        best = recommender.with_live(live).recommend([HISTORY], k=500, exclude_seen=False)
        assert NEW in best.items[0]


def test_a_service_under_load_takes_it_over(
    served: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    folder, catalogue, log = served
    keys = tmp_path / "keys.json"
    for scope in ("ask", "items", "admin"):
        (tmp_path / scope).write_text(add_key(keys, scope, scope) + "\n")
    ask, items, admin = (
        (tmp_path / scope).read_text().strip() for scope in ("ask", "items", "admin")
    )
    code = Recommender.load(folder).index.item_codes()[5].tolist()
    options = ("--live", catalogue, "--workers", "2", "--keys", keys)
    with serving(folder, *options) as service:
        service.client.headers["authorization"] = f"Bearer {items}"
        added: list[str] = []
        answered: dict[int, int] = {}
        stop = threading.Event()

        def add_items() -> None:
            """Add one after the other; between the exchange and the reload that is put off."""
            number = 0
            while not stop.is_set():
                name = f"hat {number}"
                found = service.post("/items", {"items": [{"id": name, "code": code}]})
                answered[found.status_code] = answered.get(found.status_code, 0) + 1
                if found.status_code == 200:
                    added.append(name)
                number += 1
                stop.wait(0.02)

        adding = threading.Thread(target=add_items)
        load = Load(service, keep_alive=True, key=ask)
        with load.running():
            adding.start()
            before = load.answers[-1][1]
            done = run_refresh(
                folder, log, "--live", catalogue, "--add-new", "--epochs", 3, "--margin", 0.9,
                "--min-interactions", 1, "--reload", service.url, "--key-file", tmp_path / "admin",
                "--json", tmp_path / "figures.json",
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            load.more()
            wait_until(lambda: load.answers[-1][1] != before, "the new version")
            stop.set()
            adding.join()
        assert not load.failures
        assert admin not in done.stdout + done.stderr
        assert set(answered) <= {200, 503}
        figures = json.loads((tmp_path / "figures.json").read_text())
        assert figures["swapped"]
        assert figures["new_items"]["their company"] == 1
        # All that was acknowledged is there, in whichever index it came into, and so is what is new.
        service.client.headers["authorization"] = f"Bearer {ask}"
        everything = items_of(service.recommend(history=HISTORY, k=500, exclude_seen=False))
        assert added
        assert {*added, NEW} <= set(everything)
