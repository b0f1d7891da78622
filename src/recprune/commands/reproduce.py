"""`recprune reproduce`: every table and figure of the paper, and ours, as one report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from recprune.commands.console import messages, output, print_table, say, showing_progress
from recprune.data.formats import LogFormat
from recprune.experiments.framework.experiment import Experiment, LogFolder, Need, Setup
from recprune.experiments.framework.inputs import (
    PAPER_MODELS,
    NamedLog,
    log_folder,
    quick_log,
    workload_of,
)
from recprune.experiments.framework.record import load_records
from recprune.experiments.framework.workload import Workload
from recprune.experiments.registry import EXPERIMENTS
from recprune.experiments.report.summary import check_place, put_summary
from recprune.experiments.run import (
    find_experiments,
    missing_records,
    run_experiments,
    write_report,
)
from recprune.system import free_bytes
from recprune.types import InputError, InterruptedWorkError, Progress, no_progress

# What a quick run trains: enough to see everything work, in seconds.
_QUICK = {
    "width": 64,
    "length": 50,
    "max_epochs": 2,
    "batches_per_epoch": 20,
    "batch_size": 32,
    "full_epochs": 1,
}
_QUICK_USERS, _USERS = 256, 2048  # that are encoded, of the test users
_QUICK_ITEMS = 20_000  # of a model that is given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        default="out/reproduce",
        metavar="FOLDER",
        help="for logs, models, records and the report; default %(default)s",
    )
    parser.add_argument("--list", action="store_true", help="say which experiments there are")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="may be repeated"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="everything in small, in a few minutes; without a log, on a synthetic one",
    )
    parser.add_argument("--gowalla", metavar="PATH", help="loc-gowalla_totalCheckins.txt[.gz]")
    parser.add_argument("--tmall", metavar="PATH", help="ijcai2016_taobao.csv")
    parser.add_argument(
        "--log",
        action="append",
        default=[],
        metavar="NAME[=PATH]",
        help="another log; without a path, one that is prepared in OUT/NAME/prepared already. "
        "Models are looked for in OUT/NAME/models and trained where they are missing",
    )
    parser.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a trained model as arrays: codes.npy (uint8 [n, M]), sub_item_embeddings.npy "
        "(float32 [M, B, d/M]), sequence_embeddings.npy (float32 [users, d]) and, if it is known "
        "which items the users took next, targets.npy. All experiments with searches run on it; "
        f"quick: on {_QUICK_ITEMS:,} of its items, with its first {_QUICK_USERS} users",
    )
    parser.add_argument(
        "--no-train",
        action="store_true",
        help="leave models out that are not there: the full table, those for pruning, other codes",
    )
    parser.add_argument(
        "--report-only", action="store_true", help="make the report from the records that there are"
    )
    parser.add_argument(
        "--records",
        metavar="FOLDER",
        help="of the figures as JSON; default OUT/records, quick: OUT/quick-records",
    )
    parser.add_argument(
        "--report", metavar="FILE", help="Markdown to write; default OUT/results.md"
    )
    parser.add_argument(
        "--readme", metavar="FILE", help="Markdown with a place for the table in small"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the order of queries, and of random codes; default %(default)s",
    )


def run(parsed: argparse.Namespace) -> None:
    if parsed.list:
        rows = [(experiment.name, experiment.title) for experiment in EXPERIMENTS]
        print_table("Experiments", ("name", "what"), rows)
        return
    if parsed.seed < 0:
        raise InputError(f"--seed {parsed.seed}: expected 0 or more")
    if parsed.readme:
        check_place(Path(parsed.readme))  # before hours of work
    out = Path(parsed.out)
    records = out / ("quick-records" if parsed.quick else "records")
    if parsed.records:
        records = Path(parsed.records)
    experiments = find_experiments(parsed.only)
    if not parsed.report_only:
        try:
            with showing_progress("reproduce") as progress:
                # A terminal shows what is going on; a file gets one line for each model and part.
                announce = no_progress if messages.is_terminal else say
                setup = _setup(parsed, experiments, out, progress, announce)
                done = run_experiments(experiments, setup, records, progress, announce)
        except (KeyboardInterrupt, InterruptedWorkError):
            raise InterruptedWorkError(
                f"interrupted; what was finished is in {records}: the same command goes on there"
            ) from None
        say(
            f"{done.run} parts run, {done.kept} kept from before"
            + (f", of them {done.of_others} from other commits" if done.of_others else "")
        )
    markdown = Path(parsed.report) if parsed.report else out / "results.md"
    html = out / "results.html"
    found = load_records(records)
    if missing := missing_records(records):
        say(f"not in the report, as they were never finished: {', '.join(missing)}")
    write_report(found, markdown, html, markdown.parent / "pictures", quick=parsed.quick)
    if parsed.readme:
        # What benchmarks.quality has measured stands beside.
        put_summary(Path(parsed.readme), [*found, *load_records(records / "quality")])
    output.print(f"report: {markdown} and {html}", soft_wrap=True)


def _setup(
    parsed: argparse.Namespace,
    experiments: Sequence[Experiment],
    out: Path,
    progress: Progress,
    announce: Progress,
) -> Setup:
    needs = frozenset[Need]().union(*(experiment.needs for experiment in experiments))
    sources = _sources(parsed)
    given = _given_workloads(parsed.workload, [source.name for source in sources])
    if parsed.quick:
        given = [workload.in_small(_QUICK_ITEMS, _QUICK_USERS) for workload in given]
    home = out / "quick" if parsed.quick else out
    if not needs:
        sources = []
    elif not sources and parsed.quick and not given:
        sources = [NamedLog("synthetic", quick_log(home / "synthetic.parquet"))]
    elif not sources and not given:
        raise InputError(
            "there is nothing to run this on: give a log with --log, a trained model with "
            "--workload, or try --quick"
        )
    memory = free_bytes()
    logs = [
        log_folder(
            source,
            home / source.name,
            needs=needs,
            may_train=not parsed.no_train,
            memory_bytes=memory,
            changes=_QUICK if parsed.quick else {},
            progress=progress,
            announce=announce,
        )
        for source in sources
    ]
    workloads, variants, codes = given, [], []
    for log in logs:
        # A model without sub-items has nothing to prune: it is in the table of models alone.
        if "workloads" in needs:
            paper = {name: log.models[name] for name in PAPER_MODELS}
            workloads += _workloads(parsed, log, paper, home, progress)
        if "variants" in needs:
            variants += _workloads(parsed, log, log.variants, home, progress)
        if "codes" in needs:
            codes += _workloads(parsed, log, log.codes, home, progress)
    return Setup(
        tuple(logs),
        tuple(workloads),
        tuple(variants),
        parsed.quick,
        memory,
        parsed.seed,
        tuple(codes),
    )


def _sources(parsed: argparse.Namespace) -> list[NamedLog]:
    papers: tuple[LogFormat, ...] = ("gowalla", "tmall")
    sources = [
        NamedLog(name, Path(path), name) for name in papers if (path := getattr(parsed, name))
    ]
    for text in parsed.log:
        name, _, path = text.partition("=")
        if not name.replace("-", "").isalnum():
            raise InputError(f"--log {text}: expected NAME or NAME=PATH, of letters and digits")
        if name in {source.name for source in sources}:
            raise InputError(f"--log {text}: {name} is given twice")
        sources.append(NamedLog(name, Path(path) if path else None))
    for source in sources:
        if source.path is not None and not source.path.exists():
            raise InputError(f"{source.path}: no such file or folder")
    return sources


def _given_workloads(texts: Sequence[str], logs: Sequence[str]) -> list[Workload]:
    """Open the models that were given as arrays, each with a name of its own."""
    given: dict[str, Workload] = {}
    for text in texts:
        name, _, folder = text.partition("=")
        if not name.replace("-", "").isalnum() or not folder:
            raise InputError(f"--workload {text}: expected NAME=FOLDER, NAME of letters and digits")
        if name in given or name in logs:
            raise InputError(f"--workload {text}: {name} is given twice")
        given[name] = Workload.from_files(name, Path(folder))
    return list(given.values())


def _workloads(
    parsed: argparse.Namespace,
    log: LogFolder,
    models: dict[str, Path],
    home: Path,
    progress: Progress,
) -> list[Workload]:
    users = _QUICK_USERS if parsed.quick else _USERS
    return [
        workload_of(log, name, folder, home / log.name / "workloads" / name, users, progress)
        for name, folder in models.items()
    ]
