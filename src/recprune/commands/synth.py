"""`recprune synth`: a synthetic log."""

from __future__ import annotations

import argparse
import dataclasses

from recprune.commands.console import say, showing_progress
from recprune.commands.log_options import add_seed_argument
from recprune.data.synthetic import PRESETS, write_synthetic_log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = "; ".join(
        f"{name}: {preset.num_users:,} users, {preset.num_items:,} items, "
        f"{preset.num_interactions:,} interactions"
        for name, preset in PRESETS.items()
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), required=True, help=sizes)
    parser.add_argument("--out", required=True, metavar="FILE", help="Parquet file to write")
    for name in ("users", "items", "interactions"):
        parser.add_argument(
            f"--{name}", type=int, metavar="N", help=f"instead of the preset's {name}"
        )
    add_seed_argument(parser)


def run(parsed: argparse.Namespace) -> None:
    preset = PRESETS[parsed.preset]
    settings = dataclasses.replace(
        preset,
        num_users=parsed.users if parsed.users is not None else preset.num_users,
        num_items=parsed.items if parsed.items is not None else preset.num_items,
        num_interactions=(
            parsed.interactions if parsed.interactions is not None else preset.num_interactions
        ),
        seed=parsed.seed,
    )
    with showing_progress("synthetic log") as progress:
        write_synthetic_log(parsed.out, settings, progress=progress)
    say(
        f"wrote {settings.num_interactions:,} interactions of {settings.num_users:,} users "
        f"with {settings.num_items:,} items to {parsed.out}"
    )
