"""The load: wrk with mixed traffic, and what came of it, second by second.

wrk itself counts answers and sockets; what it was answered is checked by `load.lua` inside it, against
the oracle's answers that are written down here beforehand.
"""

from __future__ import annotations

import math
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.siege.folders import Oracle, Question
from recprune.types import Json

# Of the requests; what is left over are those for the health of the service.
SHARES = {
    "history": 0.34,
    "user": 0.15,
    "filters": 0.10,
    "batch": 0.05,
    "search": 0.15,
    "events": 0.12,
    "items": 0.05,
    "healthz": 0.04,
}
ADMITTED = ("right", "wrong")  # beside all that begin with "status-", "no-retry-after" among them
_SCRIPT = Path(__file__).with_name("load.lua")
_STEP = 1.02  # as in the script


@dataclass
class Tally:
    """How many requests of one kind ended in one way in one second, and how long they took."""

    count: int = 0
    times: Counter[int] = field(default_factory=Counter)  # by bucket

    def add(self, other: Tally) -> None:
        self.count += other.count
        self.times.update(other.times)

    def milliseconds(self, share: float) -> float:
        """Return a quantile, the end of its bucket."""
        wanted = share * sum(self.times.values())
        for bucket in sorted(self.times):
            wanted -= self.times[bucket]
            if wanted <= 0:
                return _STEP ** (bucket + 1) / 1000.0
        return math.nan


@dataclass
class LoadReport:
    """Everything that wrk and its script have said of a run."""

    tallies: dict[tuple[int, str, str], Tally] = field(
        default_factory=dict
    )  # second, kind, outcome
    acknowledged: dict[str, list[str]] = field(default_factory=dict)  # user: items
    strange: list[str] = field(default_factory=list)  # answers that are none of the expected ones
    errors: dict[str, int] = field(default_factory=dict)  # of sockets, as wrk counts them

    def read(self, lines: Iterable[str]) -> None:
        """Add the lines of a thread's file, or of wrk's output."""
        for line in lines:
            mark, _, rest = line.rstrip("\n").partition(" ")
            if mark == "s":
                second, kind, outcome, count, *times = rest.split(" ")
                buckets = (entry.partition(":") for entry in times)
                tally = Tally(int(count), Counter({int(at): int(n) for at, _, n in buckets}))
                self.tallies.setdefault((int(second), kind, outcome), Tally()).add(tally)
            elif mark == "a":
                user, _, item = rest.partition(" ")
                self.acknowledged.setdefault(user, []).append(item)
            elif mark == "x":
                self.strange.append(rest)
            elif mark == "e":
                name, _, count = rest.partition(" ")
                self.errors[name] = int(count)

    def total(
        self,
        outcomes: Sequence[str] | None = None,
        *,
        kinds: Sequence[str] | None = None,
        seconds: range | None = None,
    ) -> Tally:
        """Add up what ended in one of these ways; of everything where nothing is said."""
        total = Tally()
        for (second, kind, outcome), tally in self.tallies.items():
            if (
                (outcomes is None or outcome in outcomes)
                and (kinds is None or kind in kinds)
                and (seconds is None or second in seconds)
            ):
                total.add(tally)
        return total

    def outcomes(self) -> dict[str, int]:
        counted: Counter[str] = Counter()
        for (_, _, outcome), tally in self.tallies.items():
            counted[outcome] += tally.count
        return dict(counted)

    def seconds(self) -> range:
        seen = [second for second, _, _ in self.tallies]
        return range(min(seen), max(seen) + 1)


class Load:
    """wrk, run over the questions of a plan."""

    def __init__(self, place: Path, port: int, connections: int) -> None:
        self._place = place
        self._port = port
        self._connections = connections
        self._groups: list[str] = []
        self._runs = 0

    def plan(
        self,
        questions: Sequence[Question],
        users: dict[str, list[int]],
        items: Sequence[int],
        oracles: Sequence[Oracle],
    ) -> None:
        """Write down what is asked and what is right; `users` have these histories already."""
        by_kind: dict[str, list[str]] = {kind: [] for kind in SHARES}
        for question in questions:
            expected = {oracle.version: oracle.answer(question.body) for oracle in oracles}
            by_kind[question.kind].append(_entry(question, expected))
        for user, history in users.items():
            asked = Question("user", "/recommend", {"user": user, "k": 10})
            expected = {oracle.version: oracle.answer({"k": 10}, history) for oracle in oracles}
            by_kind["user"].append(_entry(asked, expected))
        by_kind["items"] = [_entry(Question("items", f"/items/{item}", {}), {}) for item in items]
        by_kind["healthz"] = [_entry(Question("healthz", "/healthz", {}), {})]
        self._groups = [
            f"{{kind={_lua(kind)},share={SHARES[kind]},{','.join(entries)}}}"
            for kind, entries in by_kind.items()
        ]

    def start(self, seconds: float, rate: float, connections: int = 0) -> Running:
        """Begin a run; a rate of 0 is as fast as answers come."""
        self._runs += 1
        connections = connections or self._connections
        folder = self._place / f"load-{self._runs}"
        folder.mkdir()
        words = f"connections={connections},run={self._runs},groups={{{','.join(self._groups)}}}"
        (folder / "plan.lua").write_text(f"return {{{words}}}\n")
        command = ["wrk", "-t", str(connections), "-c", str(connections)]
        command += ["-d", f"{max(1, round(seconds))}s", "--timeout", "60s", "-s", str(_SCRIPT)]
        command += [f"http://127.0.0.1:{self._port}"]
        command += ["--", str(folder), str(rate), str(self._runs)]
        said = (folder / "wrk.txt").open("w")
        with said:
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        return Running(process, folder)

    def run(self, seconds: float, rate: float, connections: int = 0) -> LoadReport:
        return self.start(seconds, rate, connections).report()


@dataclass
class Running:
    """A run of wrk that is under way."""

    process: subprocess.Popen[bytes]
    folder: Path

    def report(self) -> LoadReport:
        """Wait for its end and read what it has left."""
        code = self.process.wait()
        said = (self.folder / "wrk.txt").read_text()
        if code:
            raise SystemExit(f"wrk ended with {code}: {said}")
        report = LoadReport()
        report.read(said.splitlines())
        for path in sorted(self.folder.glob("load-*.txt")):
            with path.open() as lines:
                report.read(lines)
        return report


def _entry(question: Question, expected: dict[str, tuple[tuple[int, float], ...]]) -> str:
    import json

    method = "POST" if question.body else "GET"
    fields = [
        f"kind={_lua(question.kind)}",
        f"method={_lua(method)}",
        f"path={_lua(question.path)}",
    ]
    if question.body:
        fields.append(f"body={_lua(json.dumps(question.body))}")
    if expected:
        answers = ",".join(
            f"[{_lua(version)}]={{{','.join(_numbers(answer))}}}"
            for version, answer in expected.items()
        )
        fields.append(f"expected={{{answers}}}")
    return f"{{{','.join(fields)}}}"


def _numbers(answer: Iterable[tuple[int, float]]) -> Iterator[str]:
    for item, score in answer:
        yield str(item)
        yield repr(score)


def _lua(text: str) -> str:
    """Write a string that has no line breaks for Lua."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def as_json(report: LoadReport) -> Json:
    """Return the counts, for the record."""
    kinds = sorted({kind for _, kind, _ in report.tallies})
    return {
        "outcomes": report.outcomes(),
        "admitted_by_kind": {kind: report.total(ADMITTED, kinds=[kind]).count for kind in kinds},
        "sockets": report.errors,
    }
