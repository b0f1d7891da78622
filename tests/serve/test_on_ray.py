"""The service on Ray Serve: a real cluster, real requests, and what may befall it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recprune import LiveIndex, Recommender, StorageError
from recprune.cli import main
from recprune.cluster import connected
from recprune.shards.folder import ShardInputs, shard_folder, write_shards
from tests.support.clusters import (
    Cluster,
    processes_of,
    ray_environment,
    running_cluster,
)
from tests.support.histories_places import RedisServer, free_port
from tests.support.serving import (
    CLI,
    HISTORY,
    PATIENCE_S,
    Load,
    Service,
    error_of,
    expected,
    items_of,
    replace,
    save_index,
    save_recommender,
    scores_of,
    serving,
    wait_until,
)

pytest.importorskip("ray", reason="needs Ray: pip install 'recprune[ray]'")

from recprune.serve.configuration import ServeSettings
from recprune.serve.engine.engine import load_engine
from recprune.shards.sharded_index import ShardedIndex

NUM_SHARDS = 2
CPUS = 6  # of each of two nodes
NUM_ITEMS = 3_000


class Saved:
    """Folders that are served: recommenders, an index, and all of them in shards."""

    def __init__(self, place: Path) -> None:
        self.recommenders = [place / "0", place / "1"]
        self.shards = [place / "0-shards", place / "1-shards"]
        for seed, (folder, shards) in enumerate(zip(self.recommenders, self.shards, strict=True)):
            save_recommender(folder, seed)
            shard(folder, shards)
        self.index = save_index(place / "index", NUM_ITEMS)
        shard(place / "index", place / "index-shards")
        self.index_folder, self.index_shards = place / "index", place / "index-shards"


def shard(folder: Path, shards: Path) -> None:
    """Write what a folder has as shards."""
    codes, embeddings, bias, layout = ShardInputs(str(folder)).read()
    write_shards(codes, embeddings, shards, NUM_SHARDS, item_bias=bias, layout=layout)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_environment() as folder, running_cluster(folder, CPUS) as started:
        yield started
        wait_until(lambda: not started.workers("ServeReplica"), "all replicas are gone")


def shards_of(cluster: Cluster) -> list[int]:
    """The processes of the shards."""
    return cluster.workers("ServeReplica:recprune:shard-")


def edges_of(cluster: Cluster) -> list[int]:
    return cluster.workers("ServeReplica:recprune:edge")


@pytest.fixture(scope="module")
def port() -> int:
    """Where Serve listens on the cluster of this module, from the first service on."""
    return free_port()


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server.url
    server.kill()


@pytest.fixture
def on_ray(cluster: Cluster, port: int, redis_url: str) -> Callable[..., list[str | Path]]:
    """The options that have shards searched."""

    def options(shards: Path | None, *more: str) -> list[str | Path]:
        given: list[str | Path] = ["--shards", shards] if shards is not None else []
        words = [*given, "--ray", cluster.address, "--history", redis_url, *more]
        return [*words, "--port", str(port)]

    return options


def embedding(seed: int, width: int = 32) -> list[float]:
    numbers = np.random.default_rng(seed).standard_normal(width).astype(np.float32)
    return [float(number) for number in numbers]


def essence(answer: dict[str, Any]) -> tuple[Any, ...]:
    """What has to be the same, whoever searched; scores by their bits."""
    names = ("unknown", "by_popularity", "exact", "gap", "missing_share")
    return (items_of(answer), scores_of(answer), *(answer[name] for name in names))


QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    ("/recommend", {"history": HISTORY, "k": 5}),
    ("/recommend", {"history": HISTORY, "k": 90, "exclude_seen": False}),
    ("/recommend", {"history": ["nobody knows it"], "k": 5}),
    ("/recommend", {"history": HISTORY, "exclude": ["b", "c"], "method": "pqtopk"}),
    ("/recommend", {"history": HISTORY, "allow": ["a", "b", "tea é33"], "k": 3}),
    ("/recommend", {"batch": [{"history": ["a"]}, {"history": ["b", "n"]}], "method": "scan"}),
    ("/recommend", {"history": HISTORY, "timeout_ms": 20_000}),
    ("/recommend", {"history": HISTORY, "boosts": [{"item": "b", "boost": 2.5}], "k": 20}),
    ("/search", {"sequence_embedding": embedding(0), "k": 20}),
    ("/search", {"batch": [embedding(1), embedding(2)], "method": "default"}),
    ("/search", {"sequence_embedding": embedding(3), "method": "recjpqprune", "exclude": ["a"]}),
]


OnRay = Callable[..., list[str | Path]]


def test_answers_are_those_without_ray(saved: Saved, cluster: Cluster, on_ray: OnRay) -> None:
    folder, shards = saved.recommenders[0], saved.shards[0]
    with serving(folder) as plain:
        right = [plain.post(path, body).json()["answers"] for path, body in QUESTIONS]
    with serving(folder, *on_ray(shards, "--workers", "2")) as service:
        assert len(edges_of(cluster)) == 2
        assert len(shards_of(cluster)) == NUM_SHARDS
        for (path, body), answers in zip(QUESTIONS, right, strict=True):
            response = service.post(path, body)
            assert response.status_code == 200, response.text
            found = response.json()["answers"]
            assert list(map(essence, found)) == list(map(essence, answers)), body
        explained = service.recommend(history=HISTORY, explain=True)["explanation"]
        assert all(run["identical"] for run in explained["methods"] if not run["unavailable"])
        readiness = service.client.get("/readyz").json()
        assert readiness["ready"]
        assert readiness["kind"] == "recommender"
        assert "-" in readiness["version"], "it names the recommender and the shards"
        page = service.client.get("/")
        assert page.status_code == 200
        assert "<html" in page.text
        posted = service.post("/events", {"events": [{"user": "u", "item": "b"}]})
        assert posted.status_code == 200, posted.text
        kept = [service.recommend(user="u", k=5) for _ in range(4)]  # whichever edge is asked
        assert all(items_of(answer) == items_of(kept[0]) for answer in kept)
        figures = service.client.get("/metrics").text.splitlines()
        counted = [line for line in figures if line.startswith("recprune_index_items{")]
        assert len(counted) == 2, "the figures of both edges"
        asked = [line for line in figures if 'route="/recommend",status="200"} ' in line]
        totals = [float(line.rpartition(" ")[2]) for line in asked if "requests_total" in line]
        assert sum(totals) == len([path for path, _ in QUESTIONS if path == "/recommend"]) + 5
    wait_until(lambda: not shards_of(cluster), "they end with the service")


def test_a_lost_shard_is_503_until_it_is_back(
    saved: Saved, cluster: Cluster, on_ray: OnRay
) -> None:
    folder = saved.recommenders[0]
    right = expected(folder)

    def is_back(service: Service) -> bool:
        """Either the right answer or 503, whatever else happens."""
        response = service.post("/recommend", {"history": HISTORY, "k": 5})
        if response.status_code == 200:
            (answer,) = response.json()["answers"]
            assert items_of(answer) == right
            assert answer["exact"]
            return True
        assert error_of(response)[:2] == (503, "shard_lost")
        assert response.headers["retry-after"]
        return False

    with serving(folder, *on_ray(saved.shards[0], "--max-shard-seconds", "0.5")) as service:
        for victim in shards_of(cluster):
            os.kill(victim, signal.SIGKILL)
        wait_until(lambda: is_back(service), "the killed ones are back")
        wait_until(lambda: len(shards_of(cluster)) == NUM_SHARDS, "both of them")
        frozen, _ = shards_of(cluster)
        os.kill(frozen, signal.SIGSTOP)
        try:
            wait_until(lambda: not is_back(service), "one does not answer")
            refused = service.client.get("/readyz")
            assert error_of(refused)[:2] == (503, "shard_lost")
            assert service.client.get("/healthz").status_code == 200
        finally:
            os.kill(frozen, signal.SIGCONT)
        wait_until(lambda: service.client.get("/readyz").status_code == 200, "ready again")
        wait_until(lambda: is_back(service), "it answers again")


def test_killed_replicas_fail_no_request(saved: Saved, cluster: Cluster, on_ray: OnRay) -> None:
    folder = saved.recommenders[0]
    right = expected(folder)
    options = on_ray(saved.shards[0], "--replicas", "2", "--max-waiting", "64")
    with serving(folder, *options) as service:
        wait_until(lambda: len(shards_of(cluster)) == 2 * NUM_SHARDS, "all replicas are up")
        with Load(service, keep_alive=True).running() as load:
            for _ in range(3):
                os.kill(shards_of(cluster)[0], signal.SIGKILL)
                load.more(50)
                wait_until(lambda: len(shards_of(cluster)) == 2 * NUM_SHARDS, "it is replaced")
        assert not load.failures
        assert all(items == right for _, _, items in load.answers)


def test_edges_agree_after_one_was_replaced_from_a_new_folder(
    saved: Saved, cluster: Cluster, on_ray: OnRay, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved.recommenders[0], tmp_path / "served")
    shards = shutil.copytree(saved.shards[0], tmp_path / "shards")
    right = expected(saved.recommenders[1])
    with serving(folder, *on_ray(shards, "--workers", "2")) as service:
        replace(folder, saved.recommenders[1])
        replace(shards, saved.shards[1])
        os.kill(edges_of(cluster)[0], signal.SIGKILL)

        def all_new() -> bool:
            asked = [service.post("/recommend", {"history": HISTORY, "k": 5}) for _ in range(6)]
            answered = [one.json()["answers"][0] for one in asked if one.status_code == 200]
            return len(answered) == 6 and all(items_of(one) == right for one in answered)

        wait_until(all_new, "both serve the new one")


def test_refused_reloads_take_nothing_away(saved: Saved, on_ray: OnRay, tmp_path: Path) -> None:
    folder, right = saved.recommenders[0], expected(saved.recommenders[0])
    shards = shutil.copytree(saved.shards[0], tmp_path / "shards")
    codes, embeddings, bias, _ = ShardInputs(str(folder)).read()
    with serving(folder, *on_ray(shards)) as service:
        for number in range(5):
            other = tmp_path / f"other {number}"
            write_shards(np.roll(codes, number + 1, axis=0), embeddings, other, NUM_SHARDS,
                         item_bias=bias)  # fmt: skip
            replace(shards, other)
            assert error_of(service.client.post("/admin/reload"))[:2] == (409, "reload_failed")
            assert items_of(service.recommend(history=HISTORY, k=5)) == right
            assert service.client.get("/readyz").status_code == 200
        renumbered = tmp_path / "renumbered"
        write_shards(codes, embeddings, renumbered, NUM_SHARDS + 1, item_bias=bias)
        replace(shards, renumbered)
        status, code, message = error_of(service.client.post("/admin/reload"))
        assert (status, code) == (409, "reload_failed")
        assert "start it anew" in message or "are not those" in message


def test_who_comes_second_is_told_so(
    saved: Saved, cluster: Cluster, on_ray: OnRay, port: int
) -> None:
    folder = saved.recommenders[0]
    with serving(folder, *on_ray(saved.shards[0])) as service:
        with pytest.raises(AssertionError, match="has an application 'recprune' on this cluster"):
            Service(folder, *on_ray(saved.shards[0]))
        assert service.recommend(history=HISTORY, k=5)["exact"], "which has not ended this one"
        with pytest.raises(AssertionError, match=f"cannot listen on 127.0.0.1, port {port}"):
            Service(saved.index_shards, "--ray", "local", "--port", str(port))
        service.process.kill()
        service.process.wait()
        wait_until(lambda: not shards_of(cluster), "the application ends with its command")


def test_a_cluster_that_is_too_small_is_waited_for_until_ctrl_c(
    saved: Saved, on_ray: OnRay
) -> None:
    log = saved.recommenders[0].with_name("small.log")
    words = [saved.recommenders[0], *on_ray(saved.shards[0], "--replicas", "20")]
    with log.open("wb") as file:
        command = subprocess.Popen([*CLI, "serve", *map(str, words)], stderr=file)
    try:
        wait_until(lambda: "waiting for the cluster" in log.read_text(), "it says so")
        command.send_signal(signal.SIGINT)
        assert command.wait(PATIENCE_S) == 0
    finally:
        command.kill()


def test_a_killed_edge_is_replaced(saved: Saved, cluster: Cluster, on_ray: OnRay) -> None:
    folder = saved.recommenders[0]
    with serving(folder, *on_ray(saved.shards[0], "--workers", "2")) as service:
        before = edges_of(cluster)
        with Load(service, keep_alive=True).running(threads=2) as load:
            load.more(20)
            os.kill(before[0], signal.SIGKILL)
            load.more(50)
            wait_until(lambda: len(edges_of(cluster)) == 2, "it is replaced")
        assert len(load.failures) <= 2, "those that it was answering, one for each client"
        assert set(edges_of(cluster)) != set(before)


def test_a_live_index_is_changed_and_searched_through_any_edge(
    saved: Saved, cluster: Cluster, on_ray: OnRay, tmp_path: Path
) -> None:
    folder, live = saved.recommenders[0], tmp_path / "catalogue"
    with Recommender.load(folder).make_live(live) as whole:
        whole.compact(shards=NUM_SHARDS).result()
    recommender = Recommender.load(folder)
    items = recommender.item_ids.find_all(HISTORY).astype(np.int32)
    encoded = recommender.encoder.encode([items], [None])[0]
    best: list[int] = recommender.index.sub_item_scores(encoded).argmax(axis=1).tolist()

    with (
        LiveIndex.open(live) as oracle,
        serving(folder, *on_ray(None, "--live", str(live), "--workers", "2")) as service,
    ):
        recommender = recommender.with_live(oracle)
        assert len(edges_of(cluster)) == 2
        assert len(shards_of(cluster)) == NUM_SHARDS

        def are_right() -> bool:
            """Whether each of several answers, of whichever edge, is that of one index."""
            oracle.refresh()
            right = recommender.recommend([HISTORY], 20, exclude_seen=False)
            said = [service.recommend(history=HISTORY, k=20, exclude_seen=False) for _ in range(6)]
            assert all(answer["exact"] and not answer["missing_share"] for answer in said)
            scores = right.scores.view(np.uint32)[0].tolist()
            return all(
                (items_of(answer), scores_of(answer)) == (right.items[0], scores) for answer in said
            )

        assert are_right()
        with Load(service, keep_alive=True).running(threads=2) as load:
            for turn in range(4):
                body = {"items": [{"id": f"hat {turn}", "code": best}, {"id": "b", "code": best}]}
                made = service.post("/items", {**body, "replace": True})
                assert made.status_code == 200, made.text
                wait_until(are_right, "all edges have seen it")
                assert service.client.delete(f"/items/{'ac'[turn % 2]}").status_code in (200, 404)
                if turn == 1:
                    os.kill(shards_of(cluster)[0], signal.SIGKILL)
                if turn == 2:
                    oracle.compact().result()
                    reloaded = service.client.post("/admin/reload")
                    assert reloaded.status_code == 200, reloaded.text
                    assert reloaded.json()["workers"] == 2
                wait_until(are_right, "all edges have seen it")
            load.more(20)
        assert not load.failures
        gone = service.recommend(history=HISTORY, k=90, exclude_seen=False)
        assert not {"a", "c"} & set(items_of(gone))
        assert {f"hat {turn}" for turn in range(4)} <= set(items_of(gone))
        assert service.client.get("/items/hat 1").json()["code"] == best
        assert service.client.get("/readyz").json()["live"] is True
    wait_until(lambda: not shards_of(cluster), "they end with the service")


def test_a_truncated_shard(saved: Saved, on_ray: OnRay, tmp_path: Path) -> None:
    folder, shards = saved.recommenders[0], shutil.copytree(saved.shards[0], tmp_path / "shards")
    codes = shard_folder(shards, 1) / "codes.npy"
    os.truncate(codes, codes.stat().st_size // 2)
    with pytest.raises(AssertionError, match="(?s)does not serve: .*shard 1 .*codes.npy"):
        Service(folder, *on_ray(shards))
    with serving(folder, *on_ray(shards, "--allow-partial")) as service:
        answer = service.recommend(history=HISTORY, k=90, exclude_seen=False)
        assert not answer["exact"]
        assert answer["missing_share"] == pytest.approx(26 / 90)
        assert len(answer["items"]) == 64
        best = service.recommend(history=HISTORY, k=5)
        whole = [item["score"] for item in whole_answer(folder)]
        found = [item["score"] for item in best["items"]]
        assert all(a >= b for a, b in zip(whole, found, strict=True))
        assert best["gap"] >= whole[-1] - found[-1]
        assert service.client.get("/readyz").status_code == 200  # it answers, as it was told to
        shutil.copy(shard_folder(saved.shards[0], 1) / "codes.npy", codes)
        wait_until(lambda: service.recommend(history=HISTORY, k=5)["exact"], "it was mended")
        mended = service.recommend(history=HISTORY, k=5)
        assert mended["missing_share"] == 0
        assert items_of(mended) == expected(folder)


def whole_answer(folder: Path) -> list[dict[str, float]]:
    from recprune.recommender.recommender import Recommender

    scores = Recommender.load(folder).recommend([HISTORY], 5).scores[0]
    return [{"score": float(score)} for score in scores]


def test_a_reload_swaps_recommender_and_shards(
    saved: Saved, cluster: Cluster, on_ray: OnRay, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved.recommenders[0], tmp_path / "served")
    shards = shutil.copytree(saved.shards[0], tmp_path / "shards")
    right = [expected(source) for source in saved.recommenders]
    with serving(folder, *on_ray(shards, "--workers", "2")) as service:
        old = shards_of(cluster)
        before = service.client.get("/readyz").json()["version"]
        with Load(service, keep_alive=True).running() as load:
            replace(folder, saved.recommenders[1])
            refused = service.client.post("/admin/reload")
            status, code, message = error_of(refused)
            assert (status, code) == (409, "reload_failed")
            assert "the shards are not those of the folder that is served" in message
            load.more()
            replace(shards, saved.shards[1])
            answer = service.client.post("/admin/reload")
            assert answer.status_code == 200, answer.text
            assert answer.json()["workers"] == 2
            load.more()
        assert not load.failures
        after = answer.json()["version"]
        assert {version: items for _, version, items in load.answers} == {
            before: right[0],
            after: right[1],
        }
        assert load.answers[-1][1] == after
        assert shards_of(cluster) == old, "the same processes have both versions"
        service.process.send_signal(signal.SIGHUP)
        wait_until(lambda: reloads_of(service) >= 4, "two edges have reloaded twice")


def reloads_of(service: Service) -> float:
    lines = service.client.get("/metrics").text.splitlines()
    ours = [line for line in lines if line.startswith("recprune_reloads{") and '"ok"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in ours)


@dataclass
class OpenedAlready:
    """How an engine gets shards that a test has opened."""

    opened: ShardedIndex

    def __call__(self, _: Path, live: LiveIndex | None) -> ShardedIndex:
        assert live is None
        return self.opened


def test_shards_of_something_else_are_refused(
    saved: Saved, cluster: Cluster, tmp_path: Path
) -> None:
    codes, embeddings, _, _ = ShardInputs(str(saved.index_folder)).read()
    others = {
        "items 2999, expected 3000": (codes[1:], embeddings),
        "sub-item embeddings differ": (codes, embeddings * np.float32(2)),
        "they answer differently": (np.roll(codes, 1, axis=0), embeddings),
    }
    with connected(cluster.address):
        for number, (message, arrays) in enumerate(others.items()):
            shards = tmp_path / str(number)
            write_shards(*arrays, shards, NUM_SHARDS)
            settings = ServeSettings(folder=saved.index_folder, ray=cluster.address, shards=shards)
            with ShardedIndex.open(shards) as opened, pytest.raises(StorageError, match=message):
                load_engine(settings, OpenedAlready(opened))


def test_a_sharded_index_by_itself_on_a_cluster_of_its_own(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):  # which nobody has to have set
        monkeypatch.delenv(name)
    with ray_environment() as place:
        with serving(saved.index_shards, "--ray", "local") as service:
            for number in range(3):
                query = embedding(number)
                response = service.post("/search", {"sequence_embedding": query, "k": 50})
                (answer,) = response.json()["answers"]
                right = saved.index.search(np.array(query, np.float32), 50)
                assert items_of(answer) == right.ids.tolist()
                assert scores_of(answer) == right.scores.view(np.uint32).tolist()
            asked = {"sequence_embedding": embedding(0), "explain": True}
            status, code, message = error_of(service.post("/search", asked))
            assert (status, code) == (422, "invalid")
            assert "in shards" in message
            refused = service.post("/recommend", {"history": [1]})
            assert error_of(refused)[:2] == (409, "no_encoder")
            assert service.client.get("/items/2999").json()["code"] is None
            assert service.client.get("/readyz").json()["items"] == NUM_ITEMS
            nodes = [line for line in processes_of(place).values() if "raylet/raylet" in line]
            assert len(nodes) == 1
            assert service.stop() == 0
        left = processes_of(place).values()
        assert not [line for line in left if "raylet/raylet" in line], "it ends with the service"


def test_what_does_not_go_together_is_refused(
    saved: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
    recommender, shards = str(saved.recommenders[0]), str(saved.shards[0])
    nobody = "127.0.0.1:1"
    for words, message in (
        ([recommender, "--shards", shards], "which is searched on Ray: give --ray"),
        ([recommender, "--ray", nobody], "which is not in shards: give --shards SHARDS"),
        ([shards], "holds a sharded index, which is searched on Ray: give --ray"),
        ([shards, "--shards", shards, "--ray", nobody], "is a sharded index itself"),
        ([recommender, "--replicas", "2"], "are for shards: give --ray too"),
        ([recommender, "--allow-partial"], "are for shards: give --ray too"),
        ([shards, "--ray", nobody, "--replicas", "0"], "replicas is 0, expected 1 to 100"),
        ([recommender, "--shards", recommender, "--ray", nobody], "sharded index"),
        ([recommender, "--shards", shards, "--ray", nobody], f"no Ray cluster at {nobody}"),
        ([recommender, "--shards", shards, "--ray", "what"], "expected host:port, auto or local"),
    ):
        assert main(["serve", *words, "--port", "0"]) == 2, words
        said = capsys.readouterr().err
        assert message in said, said
        assert "Traceback" not in said
