"""What new items gain by being folded in: gitlog, cut at a moment, judged after a later one.

Items that first appear between a cut (80 % of the log) and a later moment (90 %) get codes in the
model of the cut, from their first 1, 3 or 10 interactions until that moment, from their paths, or
both. Then every user's next item that is one of them, in the 5 % of the log that follow, is looked
for in the full catalogue, and so is every user's next item, whichever it is. Beside that stand
leaving new items out, and a model that was trained on everything up to the later moment. Settings
are chosen in the same way one step earlier (85 %), where nothing of the test has happened yet.

    python -m benchmarks.fold_in prepare WORK gitlog.parquet
    python -m benchmarks.fold_in train WORK         # needs torch, safetensors and NumPy; with a GPU
    python -m benchmarks.fold_in choose WORK gitlog.parquet gitlog_items.parquet
    python -m benchmarks.fold_in judge WORK gitlog.parquet gitlog_items.parquet

`judge` looks at the test once, and writes a record to docs/measured, and a table from it into
docs/catalogue.md.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from benchmarks.measure import write_result
from recprune import Index, Interactions, Prepared, Recommender, read_interactions
from recprune.evaluation.metrics import RelevantRanks, ndcg
from recprune.evaluation.resampling import bootstrap_mean
from recprune.recommender.newcomers.code_finder import MOST_PASSERS, CodeFinder
from recprune.recommender.newcomers.content_places import GrowingIds, find_places
from recprune.recommender.newcomers.evidence import NumberedLog
from recprune.types import Float32Array, Float64Array, Int64Array

_CUT, _CHOICE, _TEST, _SPAN = 0.8, 0.85, 0.9, 0.05  # shares of the log's interactions
_COUNTS = (1, 3, 10)  # interactions of a new item that are looked at
_K = 10
_SEED = 0
# New items that compete beside the targets, drawn from all: their states take most of the time.
_OTHERS = 4_000
_USERS = 3_000  # who are asked for, at most: for an item that is new, and for any
_SETTINGS = {
    "embedding": "recjpq", "codes": "learnt", "num_splits": 8, "repeats": 0, "activity": "false",
    "transitions": 0, "dropout": 0.5, "full_epochs": 4, "code_epochs": 10,
    "batches_per_epoch": 150, "validation_users": 2048,
}  # fmt: skip
_RECORD = Path("docs/measured/fold-in.json")
_DOCUMENT, _MARK = Path("docs/catalogue.md"), "<!-- fold-in -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("step", choices=("prepare", "train", "choose", "judge"))
    parser.add_argument("work", type=Path, help="folder for prepared logs, models and states")
    parser.add_argument("log", type=Path, nargs="?")
    parser.add_argument("content", type=Path, nargs="?")
    parser.add_argument("--minutes", type=float, default=5.0, help="of each training")
    parsed = parser.parse_args()
    {"prepare": prepare, "train": train, "choose": choose, "judge": judge}[parsed.step](parsed)


def prepare(parsed: argparse.Namespace) -> None:
    """Prepare the log until the cut, and until the test; `epochs` says how long to train."""
    rows = pl.read_parquet(parsed.log)
    options = ["--assignment", "random", "--splits", "1", "--sub-items", "2", "--out"]
    for name, share in (("early", _CUT), ("retrained", _TEST)):
        part = parsed.work / f"{name}.parquet"
        rows.filter(pl.col("timestamp") <= _moment(rows, share)).write_parquet(part)
        _recprune("prepare", str(part), "--holdout", "none", *options, str(parsed.work / name))
    validated = ["--validation", "temporal", "--validation-users", "4096"]
    early = str(parsed.work / "early.parquet")
    _recprune("prepare", early, *validated, *options, str(parsed.work / "epochs"))


def train(parsed: argparse.Namespace) -> None:
    values = [f"--set={name}={value}" for name, value in _SETTINGS.items()]
    chosen = ["--set=max_epochs=40", "--set=patience=1000", f"--max-minutes={parsed.minutes}"]
    epochs = str(parsed.work / "models" / "epochs")
    for name in ("epochs", "early", "retrained"):
        folder, out = str(parsed.work / name), str(parsed.work / "models" / name)
        how_long = chosen if name == "epochs" else ["--epochs-of", epochs]
        _recprune("train", folder, "--out", out, *values, *how_long)


# One moment --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Moment:
    """What is known at a moment, and what is asked after it."""

    recommender: Recommender  # of the cut
    numbers: Int64Array  # of the log's items: as the model numbers them, then the new ones
    new: Int64Array  # numbers of items that came between the cut and the moment: see _OTHERS
    interactions: Int64Array  # of each of them until the moment
    sums: dict[int, Float64Array]  # of states, by how many interactions are looked at, [new, d]
    counts: dict[int, Int64Array]
    passing: Float32Array
    places: dict[int, Float64Array]  # by content
    asked: dict[str, Int64Array]  # events of the whole log whose items are to be found
    states: dict[str, Float32Array]  # of the model of the cut, before each
    own: NDArray[np.bool_]  # whether the user had had the new item before

    def codes(self, count: int, *, content: bool, **values: float) -> Any:
        """Return the codes of new items, and which of them have one."""
        finder = CodeFinder(self.recommender.index, self.passing, **values)
        codes = np.zeros((len(self.new), finder.num_splits), finder.dtype)
        there = np.zeros(len(self.new), np.bool_)
        nothing = np.zeros(self.recommender.index.width)
        for row, number in enumerate(self.new.tolist()):
            place = self.places.get(number) if content else None
            taken = int(self.counts[count][row]) if count else 0
            if taken or place is not None:
                state_sum = self.sums[count][row] if count else nothing
                codes[row], there[row] = finder.code(state_sum, taken, place), True
        return codes, there

    def ranks(self, codes: Any, there: NDArray[np.bool_]) -> dict[str, NDArray[np.int64]]:
        """Return how many items stand above each target, of the old ones and those with a code."""
        index = self.recommender.index
        names = np.concatenate([np.arange(index.num_items), self.new[there]])
        whole = Index.build(
            np.concatenate([index.item_codes(), codes[there]]), index.sub_item_embeddings()
        )
        return {
            what: _ranks(whole, self.states[what], names, self.numbers[events])
            for what, events in self.asked.items()
        }


def _ranks(
    index: Index, states: Float32Array, names: Int64Array, targets: Int64Array, allow: Any = None
) -> NDArray[np.int64]:
    ids = index.search(states, _K, allow=allow, threads=2).ids
    found = names[ids] == targets[:, None]
    ranks: NDArray[np.int64] = np.where(found.any(1), found.argmax(1), 1 << 40)
    return ranks


def _moment_of(parsed: argparse.Namespace, share: float) -> tuple[Moment, Interactions]:
    rows = pl.read_parquet(parsed.log)
    now, until = (1_000_000 * _moment(rows, part) for part in (share, share + _SPAN))
    prepared = Prepared.load(parsed.work / "early", verify=False)
    recommender = Recommender.from_training(prepared, parsed.work / "models" / "early")
    num_known = len(recommender.item_ids)
    log = read_interactions(parsed.log)
    ids = GrowingIds(recommender)
    numbers = ids.find_all(log.item_ids.take(range(log.num_items)))
    first = np.full(len(ids), np.iinfo(np.int64).max)
    np.minimum.at(first, numbers[log.items], log.times)
    came = np.flatnonzero(first <= now)
    came = came[came >= num_known]
    event_numbers = numbers[log.items]
    asked = _asked(log, event_numbers, came, now, until)
    targets = event_numbers[asked["new"]]
    others = np.random.default_rng(_SEED).permutation(np.setdiff1d(came, targets))[:_OTHERS]
    new = np.union1d(targets, others)
    _say(f"{len(came)} new items, {len(targets)} targets on {len(np.unique(targets))} of them")
    past = log.select(log.times <= now)
    known = NumberedLog(past, numbers, num_known, recommender.encoder)
    past_numbers = numbers[past.items]
    sums, counts = _first_states(known, past_numbers, past.times, new)
    passing = known.evidence(new[:0], most=1, passers=MOST_PASSERS, seed=_SEED).passing
    everything = NumberedLog(log, numbers, num_known, recommender.encoder)
    states = {}
    for what, events in asked.items():
        found, there = everything.states(events, _say)
        asked[what], states[what] = events[there], found[there]
    moment = Moment(
        recommender,
        event_numbers,
        new,
        np.bincount(past_numbers, minlength=len(ids))[new],
        sums,
        counts,
        passing,
        _places(parsed, recommender, ids, new),
        asked,
        states,
        _had(log, event_numbers, asked["new"]),
    )
    return moment, log


def _places(
    parsed: argparse.Namespace, recommender: Recommender, ids: GrowingIds, new: Int64Array
) -> dict[int, Float64Array]:
    """Return where the paths of new items would have them; later items' paths are not known."""
    there = ids.take([*range(len(recommender.item_ids)), *new.tolist()])
    part = parsed.work / "described.parquet"
    pl.read_parquet(parsed.content).filter(pl.col("item_id").is_in(there)).write_parquet(part)
    met = GrowingIds(recommender)
    places = find_places(recommender, part, met, progress=_say)
    numbers = ids.find_all(met.take(places.rows)).tolist()
    found = map(places.get, places.rows)
    return {
        number: place for number, place in zip(numbers, found, strict=True) if place is not None
    }


def _first_states(
    known: NumberedLog, event_numbers: Int64Array, times: Int64Array, new: Int64Array
) -> tuple[dict[int, Float64Array], dict[int, Int64Array]]:
    """Return the sums of the states in which new items were taken first, and of how many."""
    events = known.first_events(new, max(_COUNTS))
    states, there = known.states(events, _say)
    rows = np.searchsorted(new, event_numbers[events])
    order = np.lexsort((events, times[events], rows))
    place = np.empty(len(events), np.int64)
    place[order] = np.arange(len(events)) - np.searchsorted(rows[order], rows[order])
    has_state = np.zeros(len(events), np.bool_)
    has_state[there] = True
    sums, counts = {}, {}
    for count in _COUNTS:
        used = has_state & (place < count)
        sums[count] = np.zeros((len(new), states.shape[1]))
        np.add.at(sums[count], rows[used], states[used])
        counts[count] = np.bincount(rows[used], minlength=len(new))
    return sums, counts


def _asked(
    log: Interactions, event_numbers: Int64Array, new: Int64Array, now: int, until: int
) -> dict[str, Int64Array]:
    """Return every user's first event after a moment, and the first whose item is a new one."""
    after = (log.times > now) & (log.times <= until)
    users = np.repeat(np.arange(log.num_users), log.lengths)
    found = {}
    for what, wanted in (("all", after), ("new", after & np.isin(event_numbers, new))):
        events = np.flatnonzero(wanted)
        _, first = np.unique(users[events], return_index=True)
        drawn = np.random.default_rng(_SEED).permutation(len(first))[:_USERS]
        found[what] = events[first[np.sort(drawn)]]
    return found


def _had(log: Interactions, event_numbers: Int64Array, events: Int64Array) -> NDArray[np.bool_]:
    """Return whether the user of each event had had its item before."""
    users = np.searchsorted(log.offsets, events, side="right") - 1
    return np.array(
        [
            event_numbers[event] in event_numbers[log.offsets[user] : event]
            for user, event in zip(users, events, strict=True)
        ],
        np.bool_,
    )


# Choosing and judging -----------------------------------------------------------------------------


def choose(parsed: argparse.Namespace) -> None:
    """Print what several settings bring at the earlier moment."""
    moment, _ = _moment_of(parsed, _CHOICE)
    for rarity, closeness in product((0.0, 0.001, 0.003, 0.01, 0.03), (1.0, 3.0, 10.0, 30.0)):
        values = {"rarity": rarity, "closeness": closeness}
        shown = []
        for count, content in product((0, *_COUNTS), (False, True)):
            if not (count or content) or (not content and closeness != 1.0):
                continue
            found = moment.ranks(*moment.codes(count, content=content, **values))
            figures = " ".join(f"{_ndcg(found[what]).mean():.4f}" for what in ("new", "all"))
            shown.append(f"{count}{'c' if content else ''}: {figures}")
        print(values, "; ".join(shown), flush=True)


def judge(parsed: argparse.Namespace) -> None:
    """Judge every way at the moment of the test; write a record, and its table."""
    moment, log = _moment_of(parsed, _TEST)
    write_result(_RECORD, figures_of(moment, _retrained(parsed, moment, log)))
    document = _DOCUMENT.read_text(encoding="utf-8")
    before, begin, rest = document.partition(f"{_MARK}\n")
    _, end, after = rest.partition("<!-- end -->")
    if not begin or not end:
        raise SystemExit(f"{_DOCUMENT}: has no place for {_MARK}")
    lines = table(json.loads(_RECORD.read_text(encoding="utf-8")))
    _DOCUMENT.write_text(before + begin + "\n".join(lines) + "\n" + end + after, encoding="utf-8")


def _retrained(
    parsed: argparse.Namespace, moment: Moment, log: Interactions
) -> dict[str, NDArray[np.int64]]:
    """Return the ranks of the model that was trained until the test, among the same items."""
    prepared = Prepared.load(parsed.work / "retrained", verify=False)
    recommender = Recommender.from_training(prepared, parsed.work / "models" / "retrained")
    numbers = GrowingIds(recommender).find_all(log.item_ids.take(range(log.num_items)))
    same = np.zeros(recommender.index.num_items, np.bool_)
    rivals = np.isin(moment.numbers, moment.new)
    rivals |= moment.numbers < moment.recommender.index.num_items
    found = numbers[log.items[rivals]]
    same[found[found < len(same)]] = True
    known = NumberedLog(log, numbers, len(recommender.item_ids), recommender.encoder)
    ranks = {}
    for what, events in moment.asked.items():
        states, _ = known.states(events, _say)
        names = np.arange(len(same))
        ranks[what] = _ranks(
            recommender.index, states, names, numbers[log.items[events]], allow=same
        )
    return ranks


def figures_of(moment: Moment, retrained: dict[str, NDArray[np.int64]]) -> dict[str, Any]:
    """Return NDCG@10 with intervals, by way and group of targets."""
    ways: dict[str, tuple[int, bool]] = {"paths alone": (0, True)}
    for content in (False, True):
        for count in _COUNTS:
            first = "1 interaction" if count == 1 else f"the first {count} interactions"
            ways[f"{first}{' and paths' if content else ''}"] = count, content
    no_codes = np.zeros((len(moment.new), moment.recommender.index.num_splits), np.uint8)
    ranks = {"left out": moment.ranks(no_codes, np.zeros(len(no_codes), np.bool_))}
    for way, (count, content) in ways.items():
        ranks[way] = moment.ranks(*moment.codes(count, content=content))
    ranks["trained anew"] = retrained
    targets = np.searchsorted(moment.new, moment.numbers[moment.asked["new"]])
    known = moment.interactions[targets]
    groups = {
        "new": np.ones(len(targets), np.bool_),
        "had before": moment.own,
        "not had before": ~moment.own,
        "3 interactions or more": known >= 3,
        "10 interactions or more": known >= 10,
    }
    return {
        "new_items": len(moment.new),
        "targets": {name: int(mask.sum()) for name, mask in groups.items()}
        | {"all": len(moment.asked["all"])},
        "quality": {
            way: {name: _interval(_ndcg(found["new"])[mask]) for name, mask in groups.items()}
            | {"all": _interval(_ndcg(found["all"]))}
            for way, found in ranks.items()
        },
    }


def table(record: dict[str, Any]) -> list[str]:
    """Return what was judged as Markdown."""
    counts = record["targets"]
    header = " | ".join(f"{name} ({count:,})" for name, count in counts.items())
    lines = [f"| | {header} |", "|---|" + "---:|" * len(counts)]
    for way, groups in record["quality"].items():
        cells = []
        for name in counts:
            mean, low, high = groups[name]
            whole = name in ("new", "all") and mean
            cells.append(f"{mean:.4f} [{low:.4f}, {high:.4f}]" if whole else f"{mean:.4f}")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return lines


def _interval(values: NDArray[np.float64]) -> list[float]:
    """Return a mean over users and its 95 % bootstrap interval."""
    if not len(values):
        return [0.0, 0.0, 0.0]
    estimate = bootstrap_mean(values, resamples=2000, seed=_SEED)
    return [estimate.mean, estimate.low, estimate.high]


def _ndcg(ranks: NDArray[np.int64]) -> NDArray[np.float64]:
    return ndcg(RelevantRanks.of_targets(ranks + 1), _K)


def _moment(rows: pl.DataFrame, share: float) -> int:
    times = np.sort(rows["timestamp"].to_numpy())
    return int(times[math.ceil(share * len(times)) - 1])


def _say(step: str) -> None:
    print(step, file=sys.stderr, flush=True)


def _recprune(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "recprune.cli", *arguments], check=True)


if __name__ == "__main__":
    main()
