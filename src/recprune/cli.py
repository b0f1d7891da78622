"""The `recprune` command: parse, call, complain."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from recprune.types import VERSION, InterruptedWorkError, RecpruneError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

# Name: what it does, in a line and in a sentence. Each is a module of `recprune.commands`, imported
# only when it is called: none needs what only another one uses.
COMMANDS = {
    "stats": (
        "what a log looks like",
        "Print what a log looks like: its size, lengths, repeats and long tail.",
    ),
    "synth": (
        "write a synthetic log",
        "Write a seeded synthetic log as Parquet: user_id, item_id, timestamp.",
    ),
    "codebook": (
        "assign sub-item ids to the items of a log",
        "Assign each item of a log its sub-item ids, from the training part of the log, and save "
        "them as a folder.",
    ),
    "prepare": (
        "hold out and assign sub-item ids: all that training needs",
        "Divide a log into training, validation and test, assign sub-item ids from the training "
        "part, and save both as one folder that `recprune train` reads on any machine.",
    ),
    "train": (
        "train a model on a prepared log",
        "Train a model on a prepared log, with early stopping; needs torch, safetensors and NumPy.",
    ),
    "tune": (
        "try settings on a prepared log, judged by its validation users",
        "Train with different settings on a prepared log, drawn by Optuna, within a number of "
        "trials or minutes; keep a table, the best settings and the best model. Test users have no "
        "say. A tuning that was stopped goes on where it was.",
    ),
    "recode": (
        "give a prepared log the codes of a model that was trained on it",
        "Replace the codes of a prepared log by those of a model that was trained on it; item "
        "vectors of a full table are cut into codes. Any model may then begin with them.",
    ),
    "export": (
        "make a recommender of a trained model",
        "Put a trained model and the catalogue of its prepared log together: one folder that "
        "recommends without torch.",
    ),
    "refresh": (
        "train a recommender on with newer events, and put it in place if it is not worse",
        "Train the model of a saved recommender on with the newer events of its log, compare both "
        "on the newest of these, and put the new one in the place of the old one if it is not "
        "worse; exit code 3 if it is. All ids and codes stay. A refresh that was stopped goes on "
        "where it was.",
    ),
    "attributes": (
        "give items attributes, for filters: prices, brands, what is in stock",
        "Read what items are like from a file of Parquet, Arrow, CSV, TSV or JSON lines, a row an "
        "item, and keep it with a recommender, or in a folder of its own for an index: for "
        "conditions on answers.",
    ),
    "evaluate": (
        "judge a trained model on its test users, beside baselines",
        "Rank the full catalogue for the test users of a prepared log, by a trained model and by "
        "simple baselines, and say which is better.",
    ),
    "recommend": (
        "recommend items to a history",
        "Recommend the next items to histories of external item ids, from a saved recommender.",
    ),
    "similar": (
        "find the items most like some items",
        "Find, for each of some items, the others whose vectors have the greatest cosine with its "
        "own, exactly.",
    ),
    "batch": (
        "recommend items to every user of a Parquet file",
        "Recommend the next items to every history of Parquet files, in worker processes or on a "
        "Ray cluster, and write Parquet. A run that was stopped goes on where it was.",
    ),
    "histories": (
        "write the histories of a log for batch, or import them into a service",
        "Turn a log into histories: a Parquet file for `recprune batch`, or the store of a "
        "service, which then knows what users had before. Importing it again adds nothing.",
    ),
    "serve": (
        "serve a saved recommender over HTTP, with a page to look inside",
        "Serve a saved recommender over HTTP: recommendations, search, events, metrics, and a page "
        "that shows the pruning at work.",
    ),
    "keys": (
        "make API keys for a service",
        "Make, list and remove the API keys of a service; only hashes of them are kept.",
    ),
    "reproduce": (
        "run the paper's evaluation, and ours, and write the report",
        "Run every experiment of the paper and ours on the given logs, keep all figures as JSON, "
        "and make one report of them. Interrupted runs go on where they stopped.",
    ),
    "index": (
        "build an index from codes and vectors, change or look at one",
        "Build an index for exact search from NumPy files, look at a saved one, or add items to a "
        "live one and remove some.",
    ),
    "items": (
        "give new items codes, by who took them first or by content",
        "Give items codes that a recommender does not know yet, so that it can recommend them.",
    ),
    "search": (
        "find the exact top K in a saved index",
        "Search a saved or live index with sequence embeddings from a NumPy file.",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal cannot show, it shows escaped
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else ""
    try:
        parser, command = _parsers(words)
        if not words:
            parser.print_help()
            return 0
        parsed, unknown = parser.parse_known_args(words)
        if unknown:  # said by the command itself, which then shows its own usage
            command.error(f"unknown: {' '.join(unknown)}")
        importlib.import_module(f"recprune.commands.{parsed.command}").run(parsed)
        sys.stdout.flush()
    except InterruptedWorkError as error:
        return _complain(name, str(error), EXIT_INTERRUPTED)
    except RecpruneError as error:
        return _complain(name, str(error), EXIT_BAD_INPUT)
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output, say `head`, has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return _complain(name, str(error), EXIT_BAD_INPUT)
    except MemoryError as error:
        return _complain(name, f"not enough memory: {error}", EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        return _complain(name, "interrupted", EXIT_INTERRUPTED)
    return 0


def _complain(command: str, message: str, exit_code: int) -> int:
    print(f"recprune {command}: {message}", file=sys.stderr)  # noqa: T201
    return exit_code


def _parsers(words: list[str]) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser, and that of the command which the words begin with."""
    parser = argparse.ArgumentParser(
        prog="recprune",
        description="Exact top-K recommendation from catalogues of millions of items.",
    )
    parser.add_argument("--version", action="version", version=VERSION)
    added = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    called = parser
    for name, (line, sentence) in COMMANDS.items():
        command = added.add_parser(name, help=line, description=sentence)
        if words[:1] == [name]:
            called = command
            importlib.import_module(f"recprune.commands.{name}").add_arguments(command)
    return parser, called


if __name__ == "__main__":
    sys.exit(main())
