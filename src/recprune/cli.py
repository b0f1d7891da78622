"""The `recprune` command: parse, call, print."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version

from recprune.codebook import Codebook, assign_random, assign_svd
from recprune.holdout import Holdout, leave_one_out, temporal_holdout
from recprune.interactions import DEFAULT_MIN_INTERACTIONS, Interactions, read_interactions
from recprune.statistics import Statistics, log_statistics
from recprune.synthetic import PRESETS, write_synthetic_log
from recprune.types import Columns, RecpruneError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        parsed.run(parsed)
    except RecpruneError as error:
        print(f"recprune {parsed.command}: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print(f"recprune {parsed.command}: interrupted", file=sys.stderr)  # noqa: T201
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output, say `head`, has seen enough
        sys.stderr.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="recprune",
        description="Exact top-K recommendation from catalogues of millions of items.",
    )
    parser.add_argument("--version", action="version", version=version("recprune"))
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    stats = commands.add_parser("stats", help="what a log looks like")
    _add_log_arguments(stats)
    stats.add_argument("--json", action="store_true", help="print JSON instead of a table")
    stats.set_defaults(run=_stats)

    synth = commands.add_parser("synth", help="write a synthetic log")
    synth.add_argument("--preset", choices=sorted(PRESETS), default="gowalla-like")
    synth.add_argument("--out", required=True, metavar="FILE", help="Parquet file to write")
    for name in ("users", "items", "interactions"):
        synth.add_argument(
            f"--{name}", type=int, metavar="N", help=f"instead of the preset's {name}"
        )
    synth.add_argument("--seed", type=int, default=0)
    synth.set_defaults(run=_synth)

    codebook = commands.add_parser("codebook", help="assign sub-item ids to the items of a log")
    _add_log_arguments(codebook)
    codebook.add_argument("--out", required=True, metavar="FOLDER", help="folder to write")
    codebook.add_argument("--method", choices=("svd", "random"), default="svd")
    codebook.add_argument("--splits", type=int, default=8, metavar="M", help="default %(default)s")
    codebook.add_argument(
        "--sub-items", type=int, default=256, metavar="B", help="per split; default %(default)s"
    )
    codebook.add_argument(
        "--holdout", choices=("temporal", "leave-one-out", "none"), default="temporal",
        help="what the codebook may not see; default %(default)s",
    )  # fmt: skip
    codebook.add_argument(
        "--train-fraction", type=float, default=0.9, help="of a temporal hold-out; default 0.9"
    )
    codebook.add_argument("--seed", type=int, default=0)
    codebook.set_defaults(run=_codebook)
    return parser


def _add_log_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "log", metavar="LOG", help="CSV, TSV, Parquet, JSON lines, or a folder of parts"
    )
    parser.add_argument(
        "--format", default="auto", metavar="NAME",
        help="auto (by the file's name and columns), gowalla, tmall or movielens",
    )  # fmt: skip
    for role in ("user", "item", "time"):
        parser.add_argument(f"--{role}-column", metavar="NAME", help="default: detected")
    parser.add_argument(
        "--time-format", default="auto", metavar="NAME",
        help="auto, seconds, milliseconds, iso8601 or yyyymmdd",
    )  # fmt: skip
    parser.add_argument("--delimiter", metavar="CHAR", help="of a text file; default: detected")
    parser.add_argument(
        "--no-header", action="store_true", help="the columns of a text file are called 0, 1, 2, …"
    )
    parser.add_argument(
        "--min-interactions", type=int, default=DEFAULT_MIN_INTERACTIONS, metavar="N",
        help="leave out users with fewer; default %(default)s",
    )  # fmt: skip
    parser.add_argument("--on-bad-rows", choices=("error", "skip"), default="error")


def _read_log(parsed: argparse.Namespace) -> Interactions:
    from recprune.console import messages, showing_progress

    columns = Columns(parsed.user_column, parsed.item_column, parsed.time_column)
    with showing_progress("log") as progress:
        log = read_interactions(
            parsed.log,
            log_format=parsed.format,
            columns=columns,
            time_format=parsed.time_format,
            delimiter=parsed.delimiter,
            header=not parsed.no_header,
            min_interactions=parsed.min_interactions,
            on_bad_rows=parsed.on_bad_rows,
            progress=progress,
        )
    for bad in log.left_out.bad_rows:
        messages.print(
            f"left out {bad.count:,} rows: {bad.reason}; the first: {bad.first}", markup=False
        )
    return log


def _stats(parsed: argparse.Namespace) -> None:
    log = _read_log(parsed)
    statistics = log_statistics(log)
    if parsed.json:
        print(json.dumps(dataclasses.asdict(statistics), indent=2))  # noqa: T201
        return
    from recprune.console import print_table

    print_table(str(parsed.log), ("", "value"), statistics_rows(statistics))


def statistics_rows(statistics: Statistics) -> list[tuple[str, str]]:
    """Return the figures of a log in words, the paper's dataset table first."""
    return [
        ("users", f"{statistics.users:,}"),
        ("items", f"{statistics.items:,}"),
        ("interactions", f"{statistics.interactions:,}"),
        ("average length", f"{statistics.average_length:.2f}"),
        ("median length", f"{statistics.median_length:.0f}"),
        ("95th / 99th percentile", f"{statistics.p95_length:.0f} / {statistics.p99_length:.0f}"),
        ("longest", f"{statistics.longest:,}"),
        ("repeated consumption", f"{statistics.repeat_share:.1%}"),
        ("interactions on the top 1 % of items", f"{statistics.top_1_percent_share:.1%}"),
        ("items seen once", f"{statistics.single_items_share:.1%}"),
        ("Gini of item popularity", f"{statistics.gini:.3f}"),
        ("first", statistics.first_time),
        ("last", statistics.last_time),
        ("users left out as too short", f"{statistics.left_out_users:,}"),
        ("  and their interactions", f"{statistics.left_out_interactions:,}"),
        ("bad rows left out", f"{statistics.bad_rows:,}"),
    ]


def _synth(parsed: argparse.Namespace) -> None:
    from recprune.console import messages, showing_progress

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
    messages.print(
        f"wrote {settings.num_interactions:,} interactions of {settings.num_users:,} users "
        f"with {settings.num_items:,} items to {parsed.out}"
    )


def _codebook(parsed: argparse.Namespace) -> None:
    from recprune.console import messages, showing_progress

    log = _read_log(parsed)
    train = _training_log(log, parsed)
    sizes = {"num_splits": parsed.splits, "num_sub_items": parsed.sub_items, "seed": parsed.seed}
    with showing_progress("codebook") as progress:
        if parsed.method == "svd":
            codebook = assign_svd(train, progress=progress, **sizes)
        else:
            codebook = assign_random(log.num_items, item_ids=log.item_ids, **sizes)
        progress("saving")
        codebook.save(parsed.out)
    print_codebook(codebook)
    messages.print(f"saved to {parsed.out}", markup=False)


def _training_log(log: Interactions, parsed: argparse.Namespace) -> Interactions:
    if parsed.holdout == "none":
        return log
    held_out: Holdout
    if parsed.holdout == "temporal":
        held_out = temporal_holdout(log, train_fraction=parsed.train_fraction, seed=parsed.seed)
    else:
        held_out = leave_one_out(log, seed=parsed.seed)
    return held_out.train


def print_codebook(codebook: Codebook) -> None:
    """Print what a codebook looks like, split by split."""
    from recprune.console import output, print_table

    singular_values = codebook.settings.get("singular_values")
    header = ["split", "fewest items", "most items", "unused ids"]
    rows = []
    for split, counts in enumerate(codebook.occupancy()):
        row = [str(split), f"{counts.min():,}", f"{counts.max():,}", f"{(counts == 0).sum():,}"]
        rows.append(row + ([f"{singular_values[split]:,.1f}"] if singular_values else []))
    if singular_values:
        header.append("singular value")
    title = (
        f"{codebook.num_items:,} items in {codebook.num_splits} splits "
        f"of {codebook.num_sub_items} sub-items"
    )
    print_table(title, header, rows)
    shared = codebook.items_sharing_full_code()
    output.print(f"{shared:,} items share their whole code with another item")


if __name__ == "__main__":
    sys.exit(main())
