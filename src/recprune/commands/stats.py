"""`recprune stats`: what a log looks like."""

from __future__ import annotations

import argparse
import dataclasses
import json

from recprune.commands.console import print_table
from recprune.commands.log_options import add_log_arguments, read_log
from recprune.commands.tables import statistics_rows
from recprune.data.statistics import log_statistics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_log_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(parsed: argparse.Namespace) -> None:
    log = read_log(parsed)
    statistics = log_statistics(log)
    if parsed.json:
        print(json.dumps(dataclasses.asdict(statistics), indent=2))  # noqa: T201
        return
    print_table(str(parsed.log), ("", "value"), statistics_rows(statistics))
