"""`recprune refresh`: a recommender learns what is new, and is put in place if it is not worse."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path

from recprune.commands.console import output, print_table, say, showing_progress
from recprune.commands.log_options import add_log_arguments, read_log
from recprune.commands.settings_options import add_budget_argument, single_values
from recprune.data.content import read_content
from recprune.evaluation.comparison import in_words
from recprune.recommender.beginning import FROM_LIVE
from recprune.recommender.refreshing import (
    DEFAULT_EPOCHS,
    DEFAULT_HELD_OUT,
    DEFAULT_MARGIN,
    DEFAULT_REPLAY,
    METRIC,
    Refreshed,
    refresh,
)
from recprune.storage import writing_file
from recprune.training.loop import EpochReport
from recprune.types import InputError, Json, RecpruneError

EXIT_WORSE = 3
_RELOAD_SECONDS = 600.0  # as long as a service may take to load its folders


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recommender", metavar="RECOMMENDER", help="made by recprune export")
    add_log_arguments(parser)
    parser.add_argument(
        "--out", metavar="FOLDER", help="folder to write; default: in place of RECOMMENDER"
    )
    parser.add_argument(
        "--since",
        metavar="TIME",
        help="events after this are new, in ISO-8601; default: what the model was not trained with",
    )
    parser.add_argument(
        "--held-out",
        type=float,
        default=DEFAULT_HELD_OUT,
        metavar="SHARE",
        help="of the new events, the newest, which judge both models and are learnt by the next "
        "refresh; default %(default)s",
    )
    parser.add_argument(
        "--margin",
        type=float,
        default=DEFAULT_MARGIN,
        metavar="SHARE",
        help=f"of the old {METRIC}, by which the new one may be lower, by the 95 %% interval of "
        "the users' differences; default %(default)s",
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=DEFAULT_EPOCHS,
        metavar="N",
        help="at most, fewer where validation gets no better; default %(default)s",
    )
    add_budget_argument(parser)
    parser.add_argument(
        "--replay",
        type=float,
        default=DEFAULT_REPLAY,
        metavar="N",
        help="users without new events that are shown for each one with some; default %(default)s",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of training; may be repeated",
    )
    parser.add_argument(
        "--content", metavar="FILE", help="what items are, as for recprune prepare: places new ones"
    )
    parser.add_argument(
        "--content-item", metavar="NAME", help="its column of ids; default: detected"
    )
    parser.add_argument("--live", metavar="FOLDER", help="live index of the recommender")
    parser.add_argument(
        "--add-new",
        action="store_true",
        help="items that the log has, and neither model nor live index, come into the latter, also "
        "those that were withdrawn from it",
    )
    parser.add_argument(
        "--attributes", metavar="FOLDER", help="attributes of the live index, whose numbers change"
    )
    parser.add_argument("--reload", metavar="URL", help="of a service that is to load it then")
    parser.add_argument("--key-file", metavar="FILE", help="has its key with the scope admin")
    parser.add_argument(
        "--work", metavar="FOLDER", help="for the training; default: OUT.refresh, which is kept"
    )
    parser.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        help="of the training that the recommender was made of: the optimiser goes on; default: "
        "that of the last refresh",
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1 ...; default: a GPU where there is one"
    )
    parser.add_argument("--threads", type=int, default=1, help="of the encoder; default 1")
    parser.add_argument("--json", metavar="FILE", help="write all figures to a file as well")


def run(parsed: argparse.Namespace) -> None:
    if not parsed.max_minutes > 0.0:
        raise InputError(f"--max-minutes is {parsed.max_minutes}, expected more than 0")
    for name in ("add_new", "attributes"):
        if getattr(parsed, name) and not parsed.live:
            raise InputError(f"--{name.replace('_', '-')} goes with --live")
    if parsed.key_file and not parsed.reload:
        raise InputError("--key-file goes with --reload")
    key = _read_key(parsed.key_file) if parsed.key_file else None
    log = read_log(parsed)
    content = None
    if parsed.content is not None:
        content = read_content(parsed.content, log.item_ids, item_column=parsed.content_item)
    with showing_progress("refreshing") as progress:
        found = refresh(
            parsed.recommender,
            log,
            out=parsed.out,
            live=parsed.live,
            attributes=parsed.attributes,
            add_new=parsed.add_new,
            content=content,
            since=parsed.since,
            held_out=parsed.held_out,
            margin=parsed.margin,
            epochs=parsed.epochs,
            replay=parsed.replay,
            max_seconds=60.0 * parsed.max_minutes,
            values=single_values(parsed.set),
            work=parsed.work,
            checkpoint=parsed.checkpoint,
            device=parsed.device,
            threads=parsed.threads,
            on_epoch=_say_epoch,
            progress=progress,
        )
    _show(found)
    if parsed.json:
        with writing_file(parsed.json) as temporary:
            temporary.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
    where = parsed.out or parsed.recommender
    if not found.swapped:
        say(f"{where} stays as it was")
        sys.exit(EXIT_WORSE)
    say(
        f"the new recommender is in {where}"
        + (f", its live index in {parsed.live}" * bool(parsed.live))
    )
    came = sum(found.new_items.values()) - found.new_items.get(FROM_LIVE, 0)
    if parsed.live and came and not parsed.add_new:
        say(
            f"new items of the log that stay out of {parsed.live}, though the model knows them: "
            f"{came:,}; --add-new would have put them there, see docs/models.md#keeping-it-fresh"
        )
    if parsed.reload:
        version = _reload(parsed.reload, key)
        say(f"{parsed.reload} has loaded it: version {version}")


def _say_epoch(report: EpochReport) -> None:
    best = " *" if report.best else ""
    say(f"epoch {report.epoch}  loss {report.loss:.5f}  NDCG@10 {report.ndcg:.4f}{best}")


def _show(found: Refreshed) -> None:
    moments = "goes on with what it remembered" if found.kept_moments else "remembers nothing"
    say(
        f"{found.num_events:,} new events; {found.epochs} epochs, NDCG@10 of validation users "
        f"{found.begin_ndcg:.4f} → {found.best_ndcg:.4f}; the optimiser {moments}"
    )
    new = sum(found.new_items.values())
    sources = ", ".join(f"{count:,} by {name}" for name, count in found.new_items.items() if count)
    changed = (
        "all codes kept"
        if not found.changed_codes
        else (f"{found.changed_codes:,} codes replaced, as in the live index")
    )
    say(
        f"{found.known_items:,} known items, {changed}; {new:,} new ones"
        + (f", whose codes are {sources}" if new else "")
    )
    figures = found.comparison
    rows = [("all", found.num_users, figures.first, figures.second)]
    sizes = {"known": found.num_users - found.new_targets, "new": found.new_targets}
    names = {"known": "whose target the old model knows", "new": "whose target is new to it"}
    rows += [(names[name], sizes[name], *pair) for name, pair in found.by_target.items()]
    print_table(
        f"{METRIC} on the newest events, full catalogue",
        ("users", "", "new model", "old model"),
        [(name, f"{users:,}", f"{new:.4f}", f"{old:.4f}") for name, users, new, old in rows],
    )
    verdict = "not worse" if found.swapped else "not shown to be no worse"
    output.print(
        f"{verdict}: {in_words(figures.difference, figures.confidence)}, least allowed "
        f"{found.least:+.4f}, p = {figures.p_value:.2g}; {found.seconds:.0f} s",
        markup=False,
        soft_wrap=True,
    )


def _read_key(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text in UTF-8: {error}") from None


def _reload(url: str, key: str | None) -> str:
    """Have a service load its folders; what it says if it does not is an error."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    request = urllib.request.Request(  # noqa: S310 # checked below
        f"{url.rstrip('/')}/admin/reload", method="POST", headers=headers
    )
    if request.type not in ("http", "https"):
        raise InputError(f"--reload is {url!r}, expected http://HOST:PORT")
    put = "the new folders are in place, but not loaded"
    try:
        with urllib.request.urlopen(request, timeout=_RELOAD_SECONDS) as response:  # noqa: S310
            answer: Json = json.loads(response.read())
            return str(answer["version"])
    except urllib.error.HTTPError as error:
        said = error.read().decode("utf-8", "replace").strip()
        raise RecpruneError(f"{put}: {url} answers {error.code}: {said:.500}") from None
    except (OSError, ValueError, KeyError) as error:
        raise RecpruneError(f"{put}: {url}: {error}") from None
