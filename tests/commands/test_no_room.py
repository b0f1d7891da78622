"""Commands on a full disk: a line that names the place, and the same command works with room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recprune.cli import main
from tests.support.shops import SETTINGS, SIZES, Shop
from tests.support.small_disk import SmallDisk, small_disk

ONE_EPOCH = [*SETTINGS, "--set", "max_epochs=1", "--device", "cpu"]
COMMANDS = {
    "synth": "--preset gowalla-like --users 40 --items 60 --interactions 400 --out {out}.parquet",
    "prepare": "{shop}/log.csv --out {out}",
    "codebook": "{shop}/log.csv --out {out}",
    "train": "{shop}/prepared --out {out}",
    "tune": "{shop}/prepared --out {out} --trials 1",
    "recode": "{shop}/prepared {shop}/model --out {out}",
    "export": "{shop}/prepared {shop}/model --out {out}",
    "evaluate": "{shop}/prepared {shop}/model --no-baselines --json {out}.json",
    "attributes": "{shop}/recommender {files}/attributes.parquet --out {out}",
    "histories": "{shop}/log.csv --out {out}.parquet",
    "batch": "{shop}/recommender --histories {files}/histories.parquet --workers 1 --out {out}",
    "batch live": "batch {shop}/recommender --histories {files}/histories.parquet --workers 1 "
    "--live {files}/live --out {out}",
    "items": "fold-in {shop}/recommender {files}/since.csv --out {out}.parquet",
    "index build": "index build {files}/codes.npy {files}/embeddings.npy --out {out}",
    "index build live": "index build {files}/codes.npy {files}/embeddings.npy --live --out {out}",
    "index build vectors": "index build --vectors {files}/vectors.npy --splits 4 --out {out}",
    "index shard": "index shard {shop}/recommender --shards 2 --out {out}",
    "index live": "index live {shop}/recommender --out {out}",
    "refresh": "refresh {shop}/recommender {files}/newer.csv --epochs 1 --device cpu --out {out}",
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "small") as disk:
        yield disk


@pytest.fixture(scope="module")
def files(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands read beside the shop."""
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    np.save(folder / "codes.npy", rng.integers(0, 16, (500, 4)).astype(np.uint8))
    np.save(folder / "embeddings.npy", rng.standard_normal((4, 16, 3)).astype(np.float32))
    np.save(folder / "vectors.npy", rng.standard_normal((500, 8)).astype(np.float32))
    prices = pa.table({"item_id": ["tea5", "tea6"], "price": [1.5, 2.0]})
    pq.write_table(prices, folder / "attributes.parquet")
    assert main(["index", "live", shop.recommender, "--out", str(folder / "live")]) == 0
    log = (shop.folder / "log.csv").read_text(encoding="utf-8")
    rows = [f"user {user},tea{10 + step},{1_500_300_000 + 10_000 * step + user}"
            for user in range(40) for step in range(6)]  # fmt: skip
    (folder / "newer.csv").write_text(log + "\n".join(rows) + "\n", encoding="utf-8")
    rows += [f"user {user},new,1500400000" for user in range(40)]
    (folder / "since.csv").write_text(
        "user_id,item_id,timestamp\n" + "\n".join(rows) + "\n", encoding="utf-8"
    )
    out = str(folder / "histories.parquet")
    assert main(["histories", str(shop.folder / "log.csv"), "--out", out]) == 0
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_ends_a_command_in_a_line(
    shop: Shop, files: Path, disk: SmallDisk, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    words = COMMANDS[name].format(shop=shop.folder, files=files, out=disk.place / "out").split()
    if " " not in name:
        words = [name, *words] if words[0] != name else words
    words += SIZES if name == "prepare" else SIZES[:4] if name == "codebook" else []
    words += ONE_EPOCH if name in ("train", "tune") else []
    with disk.full():
        assert main(words) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        left = [path for path in disk.place.rglob("*") if path.is_file() and path.stat().st_size]
    assert said.startswith(f"recprune {words[0]}: {disk.place}")
    assert "No space left" in said or "disk is full" in said
    assert [path.name for path in left] == ["filler"]
    assert {path.name.partition(".")[0] for path in disk.place.iterdir()} <= {"out"}, "no leftovers"
    assert main(words) == 0, "with room, the same command does it"
