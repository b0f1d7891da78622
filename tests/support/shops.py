"""A shop: a small log, and what the commands make of it."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recprune.cli import main

torch.set_num_threads(1)  # of tiny models, threads would only wait for each other

COMMAND = Path(sys.executable).with_name("recprune")
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
SIZES = ["--splits", "4", "--sub-items", "8", "--validation-users", "10"]
SETTINGS = ["--preset", "gsasrec"] + [
    word
    for value in (
        "width=16", "length=8", "num_blocks=1", "num_negatives=4", "batch_size=10", "max_epochs=2"
    )
    for word in ("--set", value)
]  # fmt: skip


@dataclass
class Shop:
    """A log, and all that the commands made of it."""

    folder: Path
    shown: dict[str, str]  # by command

    @property
    def prepared(self) -> str:
        return str(self.folder / "prepared")

    @property
    def model(self) -> str:
        return str(self.folder / "model")

    @property
    def recommender(self) -> str:
        return str(self.folder / "recommender")


def run_shown(*words: str) -> str:
    """Run a command that succeeds and return all that it says."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        assert main(words) == 0, shown.getvalue()
    return shown.getvalue()


def make_shop(folder: Path, name_of: Callable[[int], str]) -> Shop:
    rng = np.random.default_rng(6)
    with (folder / "log.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user_id", "item_id", "timestamp"])
        for user in range(40):
            place = int(rng.integers(60))
            for step in range(20):
                place = int(rng.integers(60)) if rng.random() < 0.2 else (place + 1) % 60
                seconds = 1_500_000_000 + 10_000 * step + user  # over two days
                writer.writerow([f"user {user}", name_of(place), seconds])
    shop = Shop(folder, {})
    for command, words in (
        ("prepare", [str(folder / "log.csv"), "--out", shop.prepared, *SIZES]),
        ("train", [shop.prepared, "--out", shop.model, "--device", "cpu", *SETTINGS]),
        ("export", [shop.prepared, shop.model, "--out", shop.recommender]),
    ):
        shop.shown[command] = run_shown(command, *words)
    return shop


def named(item: int) -> str:
    return {0: "salt, fine", 1: "éclair", 2: "[red]"}.get(item, f"tea{item}")


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]
