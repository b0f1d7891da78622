"""A recommender learns what is new: what it knew stays, and it is swapped only if not worse."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from recprune import (
    Attributes,
    InputError,
    Interactions,
    LiveIndex,
    Recommender,
    Refreshed,
    SnapshotIds,
    StorageError,
    assign_svd,
    interactions_from_columns,
    no_holdout,
    prepare,
    read_content,
    refresh,
)
from recprune.cli import main
from recprune.models.settings import Settings
from recprune.storage import put_in_place
from recprune.training.checkpoint import MODEL
from recprune.training.loop import train
from tests.support.small_models import MODELS, SMALL

torch.set_num_threads(1)

NUM_ITEMS, NEW_ITEMS, NUM_USERS = 60, 6, 80
START, DAY = 1_500_000_000, 86_400
CUT = 20  # days that the old model knows
DAYS = 30
ROLES = ("user_id", "item_id", "timestamp")
GONE = 7  # an item that occurs in the first days only


def name_of(item: int, ids: str) -> Any:
    return f"item é{item}" if ids == "strings" else 7 * item - 100


def rows(seed: int = 0, *, until: int = DAYS, new_rule: Callable[[int], int] | None = None) -> Any:
    """Everybody walks round a cycle; from the cut on, the cycle has some further items."""
    rng = np.random.default_rng(seed)
    found: list[tuple[str, int, int]] = []
    for user in range(NUM_USERS):
        place = int(rng.integers(NUM_ITEMS))
        for day in range(until):
            length = NUM_ITEMS if day < CUT else NUM_ITEMS + NEW_ITEMS
            place = (place + 1) % length
            if rng.random() < 0.1:
                place = int(rng.integers(length))
            item = GONE + 1 if place == GONE and day >= 5 else place
            if new_rule is not None and CUT <= day < DAYS - 2:
                item = new_rule(day)
            found.append((f"user {user}", item, START + DAY * day + 7 * user))
    return found


def log_of(found: Any, ids: str = "strings") -> Interactions:
    users, items, times = zip(*found, strict=True)
    names = [name_of(item, ids) for item in items]
    return interactions_from_columns(users, names, times, time_format="seconds")


def save_old(place: Path, name: str = "sasrec", epochs: int = 12) -> Path:
    """Train a model on the first days, and return the folder of its recommender."""
    ids, num_splits, num_sub_items, values = MODELS[name]
    holdout = no_holdout(log_of(rows(until=CUT), ids))
    codebook = assign_svd(holdout.train, num_splits=num_splits, num_sub_items=num_sub_items)
    prepared = prepare(holdout, codebook, {"holdout": "none"})
    settings = Settings().with_values(SMALL | values | {"max_epochs": epochs})
    train(prepared, settings, place / "model", device="cpu")
    Recommender.from_training(prepared, place / "model").save(place / "recommender")
    return place / "recommender"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save_old(tmp_path_factory.mktemp(name.replace(" ", "-")), name)
        for name in ("sasrec", "full table", "repeats")
    }


@pytest.fixture
def folder(saved: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(saved["sasrec"], tmp_path / "recommender")


def refreshed(folder: Path, log: Interactions | None = None, **more: Any) -> Refreshed:
    return refresh(folder, log or log_of(rows()), **{"epochs": 3, "device": "cpu", **more})


def vectors_of(recommender: Recommender, items: list[Any]) -> Any:
    """Return the codes of items; of a full table, where these are rows, the vectors."""
    places = recommender.item_ids.find_all(items)
    codes = recommender.index.item_codes()[places]
    if recommender.settings["model"]["embedding"] == "full":
        return np.array(recommender.index.sub_item_embeddings())[0][codes[:, 0]]
    return codes


def content_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("name", ["sasrec", "full table", "repeats"])
def test_ids_and_codes_stay_and_new_items_are_found(
    saved: dict[str, Path], tmp_path: Path, name: str
) -> None:
    ids = MODELS[name][0]
    folder = shutil.copytree(saved[name], tmp_path / "recommender")
    old = Recommender.load(folder)
    log = log_of([row for row in rows() if row[1] != GONE], ids)
    found = refreshed(folder, log, epochs=8)
    assert found.swapped
    assert not found.kept_moments
    new = Recommender.load(folder)

    known = list(old.item_ids.take(range(len(old.item_ids))))
    added = [name_of(NUM_ITEMS + item, ids) for item in range(NEW_ITEMS)]
    assert name_of(GONE, ids) in known
    assert set(new.item_ids.take(range(len(new.item_ids)))) == {*known, *added}
    assert (found.known_items, sum(found.new_items.values())) == (len(known), NEW_ITEMS)
    assert found.new_items["their company"] == NEW_ITEMS
    if new.settings["model"]["embedding"] == "recjpq":
        assert np.array_equal(vectors_of(new, known), vectors_of(old, known))
        assert found.changed_codes == 0
    # To users who then had it, what is new is recommended: by the new model alone.
    assert found.by_target["new"][0] > 0.0 == found.by_target["new"][1]
    assert new.settings["preparation"]["refreshed"]["known_items"] == len(known)
    # Judged by the newest events, which it has not learnt: the next refresh does.
    assert (
        new.settings["preparation"]["trained_until"] > old.settings["preparation"]["trained_until"]
    )
    again = refreshed(folder, log)
    assert again.kept_moments
    assert 0 < again.num_events < found.num_events


def test_both_models_are_asked_the_same(folder: Path) -> None:
    """The figures are those of a walk over all users with an event after the cut."""
    old, log = Recommender.load(folder), log_of(rows())
    found = refreshed(folder, log)
    new = Recommender.load(folder)
    until = np.datetime64(new.settings["preparation"]["trained_until"].split("+")[0], "us").astype(
        int
    )
    gains: dict[str, list[float]] = {"new": [], "old": []}
    names = list(log.item_ids.take(range(log.num_items)))
    for user in range(log.num_users):
        first, last = log.offsets[user : user + 2]
        place = first + int((log.times[first:last] <= until).sum())
        if not first < place < last:
            continue
        history = [names[item] for item in log.items[first:place]]
        for name, recommender in (("new", new), ("old", old)):
            (best,) = recommender.recommend([history], 10, exclude_seen=False).items
            target = names[log.items[place]]
            rank = best.index(target) + 2 if target in best else np.inf
            gains[name].append(1.0 / np.log2(rank))
    assert found.num_users == len(gains["new"])
    assert found.comparison.first == pytest.approx(np.mean(gains["new"]))
    assert found.comparison.second == pytest.approx(np.mean(gains["old"]))
    assert found.new_targets > 0
    assert found.by_target["new"][1] == 0.0


def test_a_worse_model_is_not_put_in_place(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is learnt, and validated, is gone again when both models are judged."""
    before = content_of(folder)
    bad = rows(new_rule=lambda day: day % 2)
    log = log_of(bad)
    found = refreshed(folder, log, epochs=6, values={"learning_rate": 0.03})
    assert not found.swapped
    assert found.comparison.difference.low < found.least <= 0.0
    assert content_of(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    # Scripts can tell.
    names = {role: [row[place] for row in bad] for place, role in enumerate(ROLES)}
    names["item_id"] = [name_of(item, "strings") for item in names["item_id"]]
    pl.DataFrame(names).write_parquet(folder.parent / "log.parquet")
    words = ["refresh", folder, folder.parent / "log.parquet", "--epochs", 6, "--device", "cpu"]
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in [*words, "--set", "learning_rate=0.03"]])
    assert ended.value.code == 3
    said = capsys.readouterr()
    assert "NDCG@10 on the newest events" in said.out
    assert "not shown to be no worse" in said.out
    assert f"{folder} stays as it was" in said.err
    assert content_of(folder) == before
    # By a margin that allows it, it is.
    assert refreshed(folder, log, epochs=6, values={"learning_rate": 0.03}, margin=0.999).swapped


def test_content_places_what_the_log_tells_nothing_of(folder: Path, tmp_path: Path) -> None:
    log = log_of(rows())
    ids = list(log.item_ids.take(range(log.num_items)))
    numbers = [int(str(name).removeprefix("item é")) for name in ids]
    angle = 2 * np.pi * np.array(numbers) / (NUM_ITEMS + NEW_ITEMS)
    vectors = np.stack([np.cos(angle), np.sin(angle)], 1).astype(np.float32)
    np.savez(tmp_path / "content.npz", ids=np.array(ids), vectors=vectors)
    found = refreshed(folder, log, content=read_content(tmp_path / "content.npz", log.item_ids))
    assert found.new_items["content"] == NEW_ITEMS
    assert found.new_items["chance"] == 0


def test_a_killed_refresh_goes_on(folder: Path, tmp_path: Path) -> None:
    whole = shutil.copytree(folder, tmp_path / "whole" / "recommender")
    lines: list[Any] = []
    refreshed(whole, epochs=5, on_epoch=lines.append)
    before = content_of(folder)
    script = tmp_path / "die.py"
    script.write_text(
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.recommender.test_refresh import refreshed\n"
        "def die(report):\n"
        "    if report.epoch == 3:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "refreshed(Path(sys.argv[1]), epochs=5, on_epoch=die)\n"
    )
    died = subprocess.run(
        [sys.executable, script, folder],
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert died.returncode == -signal.SIGKILL
    assert content_of(folder) == before
    rest: list[Any] = []
    assert refreshed(folder, epochs=5, on_epoch=rest.append).swapped
    assert rest
    assert lines[-1].epoch == rest[-1].epoch
    first, second = (place.parent / "recommender.refresh" / MODEL for place in (whole, folder))
    assert first.read_bytes() == second.read_bytes()
    # With more of a log, it begins anew.
    assert content_of(folder).keys() == content_of(whole).keys()


def test_nothing_of_another_model_is_gone_on_with(folder: Path, tmp_path: Path) -> None:
    log = log_of([row for row in rows() if row[1] < NUM_ITEMS])
    better, work = Recommender.load(folder), tmp_path / "work"
    for place in ("clean", "killed", "finished"):
        better.save(tmp_path / place)
    clean: list[Any] = []
    expected = refreshed(tmp_path / "clean", log, work=work, on_epoch=clean.append)
    wanted = (work / MODEL).read_bytes()
    other = save_old(tmp_path / "other", epochs=1)

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    killed, finished = (tmp_path / f"{place}.refresh" for place in ("killed", "finished"))
    with pytest.raises(KeyboardInterrupt):
        refreshed(other, log, work=killed, on_epoch=stop)
    assert refreshed(other, log, work=finished, margin=0.99).swapped
    # Meanwhile another model was trained and exported.
    for place, more in (("killed", {}), ("finished", {"checkpoint": finished})):
        found = refreshed(tmp_path / place, log, **more)
        assert not found.kept_moments
        assert found.begin_ndcg == expected.begin_ndcg
        assert (tmp_path / f"{place}.refresh" / MODEL).read_bytes() == wanted


def test_a_refresh_that_was_killed_anywhere_is_begun_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = folder.with_name("recommender.refresh")
    assert refreshed(folder).swapped

    def die(removed: Path, **_: object) -> None:
        note = Path(removed) / "refresh.json"
        if note.exists():
            note.unlink()  # the first of its files, as it may be
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            refreshed(folder)
    assert refreshed(folder, margin=0.99).swapped
    (place / "refresh.json").write_text('{"settings": {"mod')
    assert refreshed(folder, margin=0.99).swapped
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, place.name}


def test_two_refreshes_are_not_at_work_in_one_folder(folder: Path) -> None:
    refused: list[str] = []

    def begin_another(_: object) -> None:
        with pytest.raises(StorageError) as error:
            refreshed(folder)
        refused.append(str(error.value))

    assert refreshed(folder, epochs=1, on_epoch=begin_another).swapped
    assert refused == [f"{folder}.refresh: another refresh is at work there"]


def test_what_cannot_be_refreshed_is_said(folder: Path, tmp_path: Path) -> None:
    before = content_of(folder)
    refused: dict[str, dict[str, Any]] = {
        "has no event after": {"log": log_of(rows(until=CUT))},
        "histories begin in the older log": {
            "log": log_of([row for row in rows() if row[2] >= START + DAY * CUT])
        },
        "ids are strings in one and integers": {"log": log_of(rows(), "integers")},
        "width is of the model": {"values": {"width": 16}},
        "unknown setting 'learning_rat'": {"values": {"learning_rat": 0.1}},
        "held_out is 1": {"held_out": 1.0},
        "margin is -1": {"margin": -1.0},
        "replay is -1": {"replay": -1.0},
        "since is 'yesterday'": {"since": "yesterday"},
        "it has no checkpoint": {"checkpoint": tmp_path},
        "takes the place of the old one": {"live": tmp_path, "out": tmp_path / "other"},
        "holds something else than a refresh": {"work": folder},
    }
    for match, more in refused.items():
        with pytest.raises(InputError, match=match):
            refreshed(folder, **more)
    assert content_of(folder) == before


# With a live index ---------------------------------------------------------------------------


ADDED, LATER, REMOVED, MOVED = "hat", "scarf", name_of(3, "strings"), name_of(4, "strings")
ALSO_IN_LOG = name_of(NUM_ITEMS, "strings")  # new, and added before anybody had it


class LiveShop:
    """A recommender, its live index, the attributes of that, and changes that were made since."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.place = folder, folder.parent / "catalogue"
        self.attributes = folder.parent / "attributes"
        old = Recommender.load(folder)
        self.live = old.make_live(self.place)
        self.codes: dict[str, list[int]] = {}
        self.silent: set[str] = set()  # of which nothing is said any more
        self.put(ADDED, old, 10)
        self.put(ALSO_IN_LOG, old, 20)
        self.put(MOVED, old, 30)
        self.live.remove(self.live.find([REMOVED]))
        snapshot = self.live.snapshot()
        self.names = [str(name) for name in snapshot.external_ids(snapshot.numbers())]
        table = pl.DataFrame(
            {"item": self.names, "price": [self.price(name) for name in self.names]}
        )
        Attributes.from_table(table, SnapshotIds(snapshot)).save(self.attributes)

    @staticmethod
    def price(name: str) -> int:
        return sum(name.encode())

    def put(self, name: str, old: Recommender, like: int) -> None:
        (code,) = old.index.item_codes()[old.item_ids.find_all([name_of(like, "strings")])]
        self.live.put([name], code[None], replace=True, notes=[{"name": f"{name}, put"}])
        self.codes[name] = code.tolist()

    def change_during(self, _: object) -> None:
        """Add one more, once, while the model is trained."""
        if LATER not in self.codes:
            self.put(LATER, Recommender.load(self.folder), 40)
            [first] = self.live.find([name_of(9, "strings")])
            self.live.note([first], [{"attributes": {"price": 5}}])
            self.live.note(self.live.find([ALSO_IN_LOG]), [None])

    def check(self, new_items: set[str] | None = None) -> None:
        """What was there is there, with its code, in a live index of the new recommender."""
        new = Recommender.load(self.folder)
        live = LiveIndex.open(self.place)
        new.with_live(live)
        snapshot = live.snapshot()
        names = snapshot.external_ids(snapshot.numbers())
        assert set(names) == {*self.names, *self.codes} | (new_items or set())
        for name, code in self.codes.items():
            assert snapshot.item_codes(snapshot.find([name])).tolist() == [code]
        (first,) = snapshot.find([name_of(9, "strings")]).tolist()
        places = snapshot.find([*self.codes]).tolist()
        said: dict[int, Any] = {
            place: {"name": f"{name}, put"} for place, name in zip(places, self.codes, strict=True)
        }
        for name in self.silent:
            del said[snapshot.find([name])[0]]
        if LATER in self.codes:
            said[first] = {"attributes": {"price": 5}}
            del said[snapshot.find([ALSO_IN_LOG])[0]]
        assert dict(snapshot.notes) == said
        trained = [name for name in self.codes if new.item_ids.find_all([name])[0] >= 0]
        assert sorted(trained) == sorted([ALSO_IN_LOG, MOVED])
        for name in trained:
            assert vectors_of(new, [name]).tolist() == [self.codes[name]]
        attributes = Attributes.load(self.attributes).extended(snapshot.num_items)
        for name in (ADDED, MOVED, self.names[0]):
            here = attributes.where(f"price = {self.price(name)}")
            asked = snapshot.search(
                np.ones(snapshot.width, np.float32), snapshot.num_items, allow=here
            )
            found = [found for found in snapshot.external_ids(asked.ids) if found is not None]
            # What came back is another item, of which the table says nothing.
            assert found == ([] if name in self.silent else [name])
        live.close()


@pytest.fixture
def shop(folder: Path) -> Iterator[LiveShop]:
    made = LiveShop(folder)
    yield made
    made.live.close()


def test_a_live_index_follows_with_all_that_is_there(shop: LiveShop) -> None:
    found = refreshed(
        shop.folder,
        live=shop.place,
        attributes=shop.attributes,
        on_epoch=shop.change_during,
        margin=0.5,
    )
    assert found.swapped
    assert found.changed_codes == 1
    assert found.new_items["the live index"] == 1
    shop.check()
    # The old one is not written to any more, and nothing of it gets into the new one.
    with pytest.raises(Exception, match="another catalogue"):
        shop.live.put(["late"], np.zeros((1, shop.live.num_splits), np.uint8))
    shop.check()


def test_what_is_said_at_the_last_moment_comes_along(
    shop: LiveShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between what is brought while others change the catalogue and what is brought when not."""
    held = LiveIndex.held

    def late(live: LiveIndex) -> Any:
        if LATER not in shop.codes:
            shop.change_during(None)
            # One leaves and comes back, with the code that it had, and nothing is said of it.
            live.remove(live.find([ADDED]))
            live.put([ADDED], np.array([shop.codes[ADDED]], np.uint8))
            shop.silent.add(ADDED)
        return held(live)

    monkeypatch.setattr(LiveIndex, "held", late)
    refreshed(shop.folder, live=shop.place, attributes=shop.attributes, margin=0.5)
    assert shop.silent
    shop.check()


def test_new_items_of_the_log_come_in_if_wanted(shop: LiveShop) -> None:
    refreshed(shop.folder, live=shop.place, attributes=shop.attributes, add_new=True, margin=0.5)
    shop.check({name_of(NUM_ITEMS + item, "strings") for item in range(NEW_ITEMS)})


@pytest.mark.parametrize("step", ["recommender", "catalogue"])
def test_a_swap_that_was_killed_is_finished(
    shop: LiveShop, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Between two folders there is a moment at which they do not belong together."""

    def die(temporary: Path, target: Path) -> None:
        if target.name == step:
            raise KeyboardInterrupt
        put_in_place(temporary, target)

    more: dict[str, Any] = {"live": shop.place, "attributes": shop.attributes, "margin": 0.5}
    with monkeypatch.context() as patch:
        patch.setattr("recprune.recommender.swapping.put_in_place", die)
        with pytest.raises(KeyboardInterrupt):
            refreshed(shop.folder, **more)
    shop.change_during(None)  # and life goes on
    refreshed(shop.folder, **more)
    shop.check()


@pytest.mark.parametrize("was_killed", [False, True])
def test_a_swap_that_fails_is_taken_back(
    shop: LiveShop, monkeypatch: pytest.MonkeyPatch, was_killed: bool
) -> None:
    """As where the folder of the live index is a volume of its own, which cannot be renamed."""
    more: dict[str, Any] = {"live": shop.place, "attributes": shop.attributes, "margin": 0.5}
    before = content_of(shop.folder), content_of(shop.attributes)
    errors = [KeyboardInterrupt()] if was_killed else []
    for error in [*errors, OSError(errno.EBUSY, "Device or resource busy")]:

        def fail(temporary: Path, target: Path, error: BaseException = error) -> None:
            if target == shop.place:
                raise error
            put_in_place(temporary, target)

        with monkeypatch.context() as patch:
            patch.setattr("recprune.recommender.swapping.put_in_place", fail)
            with pytest.raises((KeyboardInterrupt, StorageError)) as raised:
                refreshed(shop.folder, **more)
    assert str(raised.value) == f"{shop.place}: cannot be replaced: Device or resource busy"
    assert content_of(shop.folder) == before[0]
    Recommender.load(shop.folder).with_live(shop.live)
    assert content_of(shop.attributes) == before[1]
    refreshed(shop.folder, **more)
    shop.check()


def test_a_full_table_moves_its_rows(saved: dict[str, Path], tmp_path: Path) -> None:
    """There a code is a row, and rows move when items come between."""
    folder = shutil.copytree(saved["full table"], tmp_path / "recommender")
    old = Recommender.load(folder)
    like, target = name_of(10, "strings"), name_of(30, "strings")
    with old.make_live(tmp_path / "catalogue") as live:
        row = old.item_ids.find_all([like, target])
        live.put(["hat"], np.array([[row[0]]], np.uint16))
    assert refreshed(folder, live=tmp_path / "catalogue").swapped
    new = Recommender.load(folder)
    with LiveIndex.open(tmp_path / "catalogue") as live:
        snapshot = live.snapshot()
        places = new.item_ids.find_all([like])
        assert snapshot.item_codes(snapshot.find(["hat"])).tolist() == [places.tolist()]
        assert snapshot.item_codes(snapshot.find([like])).tolist() == [places.tolist()]


def test_figures_are_plain_values(folder: Path) -> None:
    from dataclasses import asdict

    json.dumps(asdict(refreshed(folder)))
