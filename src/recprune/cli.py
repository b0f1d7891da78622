"""The `recprune` command: parse, call, print."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.codebook import KIND as CODEBOOK
from recprune.codebook import Codebook, assign_random, assign_svd, check_size
from recprune.holdout import Holdout, leave_one_out, temporal_holdout
from recprune.index import KIND as INDEX
from recprune.index import Index
from recprune.interactions import DEFAULT_MIN_INTERACTIONS, Interactions, read_interactions
from recprune.methods import METHODS
from recprune.statistics import Statistics, iso_time, log_statistics
from recprune.storage import check_target
from recprune.synthetic import PRESETS, write_synthetic_log
from recprune.types import Columns, InputError, Json, RecpruneError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser, commands = _parsers()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        parser.print_help()
        return 0
    parsed, unknown = parser.parse_known_args(words)
    if unknown:  # said by the command itself, which then shows its own usage
        commands[parsed.command].error(f"unknown: {' '.join(unknown)}")
    try:
        parsed.run(parsed)
        sys.stdout.flush()
    except RecpruneError as error:
        return _complain(parsed.command, str(error), EXIT_BAD_INPUT)
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output, say `head`, has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return _complain(parsed.command, str(error), EXIT_BAD_INPUT)
    except MemoryError as error:
        return _complain(parsed.command, f"not enough memory: {error}", EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        return _complain(parsed.command, "interrupted", EXIT_INTERRUPTED)
    return 0


def _complain(command: str, message: str, exit_code: int) -> int:
    print(f"recprune {command}: {message}", file=sys.stderr)  # noqa: T201
    return exit_code


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="recprune",
        description="Exact top-K recommendation from catalogues of millions of items.",
    )
    parser.add_argument("--version", action="version", version=version("recprune"))
    added = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = {
        "stats": added.add_parser(
            "stats",
            help="what a log looks like",
            description="Print what a log looks like: its size, lengths, repeats and long tail.",
        ),
        "synth": added.add_parser(
            "synth",
            help="write a synthetic log",
            description="Write a seeded synthetic log as Parquet: user_id, item_id, timestamp.",
        ),
        "codebook": added.add_parser(
            "codebook",
            help="assign sub-item ids to the items of a log",
            description="Assign each item of a log its sub-item ids, from the training part of the "
            "log, and save them as a folder.",
        ),
        "index": added.add_parser(
            "index",
            help="build an index from codes and vectors, or look at one",
            description="Build an index for exact search from NumPy files, or look at a saved one.",
        ),
        "search": added.add_parser(
            "search",
            help="find the exact top K in a saved index",
            description="Search a saved index with sequence embeddings from a NumPy file.",
        ),
    }
    _add_stats_arguments(commands["stats"])
    _add_synth_arguments(commands["synth"])
    _add_codebook_arguments(commands["codebook"])
    _add_index_arguments(commands["index"])
    _add_search_arguments(commands["search"])
    return parser, commands


def _add_stats_arguments(parser: argparse.ArgumentParser) -> None:
    _add_log_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_stats)


def _add_synth_arguments(parser: argparse.ArgumentParser) -> None:
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
    _add_seed_argument(parser)
    parser.set_defaults(run=_synth)


def _add_codebook_arguments(parser: argparse.ArgumentParser) -> None:
    _add_log_arguments(parser)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder to write")
    parser.add_argument(
        "--method", choices=("svd", "random"), default="svd",
        help="svd: items liked by the same users share sub-item ids; default %(default)s",
    )  # fmt: skip
    parser.add_argument("--splits", type=int, default=8, metavar="M", help="default %(default)s")
    parser.add_argument(
        "--sub-items", type=int, default=256, metavar="B", help="per split; default %(default)s"
    )
    parser.add_argument(
        "--holdout", choices=("temporal", "leave-one-out", "none"), default="temporal",
        help="what the codebook may not see; default %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--train-fraction", type=float, default=0.9, metavar="SHARE",
        help="of the interactions, for a temporal hold-out; default %(default)s",
    )  # fmt: skip
    _add_seed_argument(parser)
    parser.set_defaults(run=_codebook)


def _add_index_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser("build", help="lay out codes and sub-item embeddings")
    build.add_argument(
        "codes", metavar="CODES", help="a saved codebook, or an .npy of uint8 or uint16 [n, M]"
    )
    build.add_argument("embeddings", metavar="EMBEDDINGS", help=".npy of float32 [M, B, d/M]")
    build.add_argument("--out", required=True, metavar="FOLDER", help="folder to write")
    build.add_argument("--item-bias", metavar="FILE", help=".npy of float32 [n]")
    build.add_argument(
        "--layout", choices=("auto", "full", "compact"), default="auto",
        help="compact keeps only what a scan needs; default %(default)s",
    )  # fmt: skip
    build.add_argument("--threads", type=int, default=1, help="default %(default)s")
    build.set_defaults(run=_index_build)
    info = actions.add_parser("info", help="say what a saved index holds and costs")
    info.add_argument("index", metavar="FOLDER")
    info.add_argument("--verify", action="store_true", help="compare every byte with its checksum")
    info.set_defaults(run=_index_info)


def _add_search_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("index", metavar="FOLDER")
    parser.add_argument("queries", metavar="QUERIES", help=".npy of float32 [queries, d]")
    parser.add_argument("-k", type=int, default=10, help="default %(default)s")
    parser.add_argument(
        "--method", default="auto", metavar="NAME", help=f"one of {', '.join(METHODS)}"
    )
    parser.add_argument("--threads", type=int, default=1, help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="one JSON object a query, in lines")
    parser.set_defaults(run=_search)


def _add_seed_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of all chance; default %(default)s")


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
        help="auto, seconds, milliseconds, microseconds, nanoseconds, iso8601 or yyyymmdd",
    )  # fmt: skip
    parser.add_argument("--delimiter", metavar="CHAR", help="of a text file; default: detected")
    parser.add_argument(
        "--no-header", action="store_true", help="the columns of a text file are called 0, 1, 2 ..."
    )
    parser.add_argument(
        "--min-interactions", type=int, default=DEFAULT_MIN_INTERACTIONS, metavar="N",
        help="leave out users with fewer; default %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--on-bad-rows", choices=("error", "skip"), default="error",
        help="stop at the first bad row, or leave bad rows out and count them; default %(default)s",
    )  # fmt: skip


def _read_log(parsed: argparse.Namespace) -> Interactions:
    from recprune.console import say, showing_progress

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
        rows = "1 row" if bad.count == 1 else f"{bad.count:,} rows"
        say(f"left out {rows}: {bad.reason}; the first: {bad.first}")
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
        ("user ids / item ids", f"{statistics.user_ids} / {statistics.item_ids}"),
    ]


def _synth(parsed: argparse.Namespace) -> None:
    from recprune.console import say, showing_progress

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


def _codebook(parsed: argparse.Namespace) -> None:
    from recprune.console import say, showing_progress

    check_target(parsed.out, kind=CODEBOOK)
    check_size(parsed.splits, parsed.sub_items)
    log = _read_log(parsed)
    if parsed.method == "random":
        parsed.holdout = "none"  # chance needs no training
    train, training = _training_log(log, parsed)
    sizes = {"num_splits": parsed.splits, "num_sub_items": parsed.sub_items, "seed": parsed.seed}
    with showing_progress("codebook") as progress:
        if parsed.method == "svd":
            codebook = assign_svd(train, progress=progress, **sizes)
        else:
            codebook = assign_random(log.num_items, item_ids=log.item_ids, **sizes)
        codebook = dataclasses.replace(
            codebook, settings=codebook.settings | {"training": training}
        )
        progress("saving")
        codebook.save(parsed.out)
    print_codebook(codebook)
    say(f"saved to {parsed.out}")


def _training_log(log: Interactions, parsed: argparse.Namespace) -> tuple[Interactions, Json]:
    """Return what the codebook may see, and how that was chosen."""
    training: Json = {
        "log": Path(parsed.log).name,
        "min_interactions": parsed.min_interactions,
        "holdout": parsed.holdout,
    }
    if parsed.holdout == "none":
        return log, training
    held_out: Holdout
    if parsed.holdout == "temporal":
        held_out = temporal_holdout(log, train_fraction=parsed.train_fraction, seed=parsed.seed)
        training |= {
            "train_fraction": parsed.train_fraction,
            "cut_time": iso_time(held_out.cut_time or 0),
        }
    else:
        held_out = leave_one_out(log, seed=parsed.seed)
    print_holdout(held_out)
    return held_out.train, training


def print_holdout(holdout: Holdout) -> None:
    """Print how a log was divided."""
    from recprune.console import print_table

    cut = (
        f"cut after {iso_time(holdout.cut_time)}"
        if holdout.cut_time is not None
        else "leave one out"
    )
    trained = int((holdout.train.lengths > 0).sum())
    validated, tested = len(holdout.validation), len(holdout.test)
    print_table(
        f"Hold-out: {cut}",
        ("", "interactions", "users"),
        [
            ("training", f"{holdout.train.num_interactions:,}", f"{trained:,}"),
            ("validation targets", f"{validated:,}", f"{validated:,}"),
            ("test targets", f"{tested:,}", f"{tested:,}"),
            ("dropped, without a past", "", f"{len(holdout.dropped_users):,}"),
        ],
    )


def _index_build(parsed: argparse.Namespace) -> None:
    check_target(parsed.out, kind=INDEX)
    codes = (
        Codebook.load(parsed.codes).codes
        if Path(parsed.codes).is_dir()
        else _read_array(parsed.codes)
    )
    index = Index.build(
        codes,
        _read_array(parsed.embeddings),
        item_bias=_read_array(parsed.item_bias) if parsed.item_bias else None,
        layout=parsed.layout,
        threads=parsed.threads,
    )
    index.save(parsed.out)
    _print_lines(index.describe())


def _index_info(parsed: argparse.Namespace) -> None:
    _print_lines(Index.load(parsed.index, verify=parsed.verify).describe())


def _search(parsed: argparse.Namespace) -> None:
    index = Index.load(parsed.index)
    queries = np.atleast_2d(_read_array(parsed.queries))
    top = index.search(queries, parsed.k, method=parsed.method, threads=parsed.threads)
    microseconds = top.stats.nanoseconds / 1000
    for query in range(len(queries)):
        ids, scores = top.ids[query].tolist(), top.scores[query].tolist()
        answer: Json = {
            "ids": ids,
            "scores": [score if math.isfinite(score) else None for score in scores],
            "method": top.stats.method[query],
            "exact": bool(top.stats.exact[query]),
            "microseconds": round(float(microseconds[query]), 1),
        }
        if parsed.json:
            print(json.dumps(answer))  # noqa: T201
        else:
            found = "  ".join(f"{i}:{s:.4f}" for i, s in zip(ids, scores, strict=True) if i >= 0)
            print(f"{query}\t{answer['method']}\t{microseconds[query]:.0f} µs\t{found}")  # noqa: T201


def _read_array(path: str) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: not a readable .npy file: {error}") from None
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path}: holds several arrays, expected one .npy")
    return array


def _print_lines(values: Json) -> None:
    for name, value in values.items():
        shown = ", ".join(value) if isinstance(value, list) else value
        print(f"{name.replace('_', ' '):16} {shown}")  # noqa: T201


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
    if codebook.settings.get("unseen_items"):
        output.print(
            f"{codebook.settings['unseen_items']:,} items have no training interaction: "
            "their codes are chance"
        )


if __name__ == "__main__":
    sys.exit(main())
