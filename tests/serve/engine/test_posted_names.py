"""Names of posted items are found by words, the newest of them where there is no room for all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from recprune import LiveIndex
from recprune.serve.engine import posted_names
from recprune.serve.engine.posted_names import PostedNames


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveIndex]:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (40, 4), dtype=np.uint8)
    embeddings = rng.standard_normal((4, 16, 2), dtype=np.float32)
    names = np.array([f"i{place:02}" for place in range(40)], object)
    with LiveIndex.create(tmp_path / "live", codes, embeddings, item_ids=names) as made:
        yield made


def name(live: LiveIndex, numbers: range) -> None:
    live.note([*numbers], [{"name": f"Hat {number:02}"} for number in numbers])


def test_lines_follow_what_is_said(live: LiveIndex) -> None:
    names = PostedNames()
    assert names.lines(live.snapshot()) == {}
    live.note([3, 4], [{"name": "Straw HAT"}, {"attributes": {"price": 5}}])
    assert names.lines(live.snapshot()) == {3: "i03 straw hat"}
    live.note([3, 4], [{"name": None}, {"name": "Cap"}])
    assert names.lines(live.snapshot()) == {3: "i03 ", 4: "i04 cap"}
    live.remove([3])
    live.compact().result()
    assert names.lines(live.snapshot()) == {4: "i04 cap"}


def test_the_newest_stay_and_the_others_come_back(
    live: LiveIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posted_names, "_MOST_BYTES", 10 * 159 + 100)  # ten lines, and a bit
    names = PostedNames()
    name(live, range(5, 15))
    assert set(names.lines(live.snapshot())) == {*range(5, 15)}
    name(live, range(2, 6))  # and these are older items
    assert set(names.lines(live.snapshot())) == {*range(5, 15)}
    name(live, range(20, 24))
    assert set(names.lines(live.snapshot())) == {*range(9, 15), *range(20, 24)}
    live.remove([20, 21])
    assert set(names.lines(live.snapshot())) == {*range(9, 15), 22, 23}
    live.remove([9, 10, 11, 12])  # half of the room is free
    expected = {*range(2, 9), 13, 14, 22, 23}
    found = names.lines(live.snapshot())
    assert set(found) == expected - {2}
    assert set(PostedNames().lines(live.snapshot())) == set(found), "as another worker has them"
