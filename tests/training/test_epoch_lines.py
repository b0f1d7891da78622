"""What is said of a training that goes on, and of the time that it may still take."""

from __future__ import annotations

import math
import re

import pytest

from recprune.models.settings import Settings
from recprune.training.epoch_lines import EpochLines, seconds_left
from recprune.training.loop import EpochReport


def test_the_time_that_is_left_by_hand() -> None:
    # Two epochs in a minute, eight to go: 240 s. Of 100 s, 40 are left; of 50 s, nothing.
    assert seconds_left(60.0, 2, 8, math.inf) == 240.0
    assert seconds_left(60.0, 2, 8, 1000.0) == 240.0
    assert seconds_left(60.0, 2, 8, 100.0) == 40.0
    assert seconds_left(60.0, 2, 8, 50.0) == 0.0
    assert seconds_left(60.0, 2, 0, 100.0) == 0.0


@pytest.mark.parametrize(
    ("passed", "max_seconds", "said"),
    [(60.0, 1e9, "149 min"), (90.0, 239.9, "2 min"), (90.0, 209.9, "119 s"), (9.0, 9.5, "0 s")],
)
def test_a_line_never_says_more_than_is_left(
    passed: float,
    max_seconds: float,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = iter([1000.0, 1000.0 + passed])
    monkeypatch.setattr("recprune.training.epoch_lines.time.monotonic", lambda: next(clock))
    settings = Settings().with_values({"max_epochs": 150})
    lines = EpochLines(settings, validated=True, max_seconds=max_seconds)
    lines.steps(1, 2, 0.5)  # nothing, as this is no terminal
    lines.epoch(EpochReport(1, 0.25, 0.125, True, 20, 4.0, passed))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(
        rf"epoch   1  (codes stay    )?loss 0.25000  NDCG@10 0.1250 \*  "
        rf"   4.0 steps/s  at most {said} to go\n",
        shown.err,
    )
