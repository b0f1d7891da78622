"""Admission: so many in flight, and no more."""

from __future__ import annotations

import asyncio
import threading

import pytest

from recprune.serve.admission import Admission, OverloadedError, WorkPool
from tests.support.serving import wait_until


def test_as_many_as_there_is_room_for_are_admitted() -> None:
    counts: list[int] = []
    refusals: list[None] = []
    admission = Admission(2, on_refused=lambda: refusals.append(None), on_change=counts.append)
    with admission.admitted(), admission.admitted():
        with pytest.raises(OverloadedError, match="busy"):
            admission.refuse_if_full()
        with pytest.raises(OverloadedError), admission.admitted():
            raise AssertionError("there is no room")
        assert admission.in_flight == 2
    with pytest.raises(ZeroDivisionError), admission.admitted():
        1 // 0  # noqa: B018
    admission.refuse_if_full()
    assert len(refusals) == 2
    assert counts == [1, 2, 1, 0, 1, 0]


def pool(most: int, threads: int) -> tuple[WorkPool, Admission]:
    admission = Admission(most, on_refused=lambda: None)
    return WorkPool("test", threads=threads, admission=admission), admission


def test_a_pool_refuses_what_would_wait_too_long() -> None:
    held = threading.Event()
    work, admission = pool(3, threads=2)

    async def go() -> None:
        tasks = [asyncio.create_task(work.run(lambda: held.wait(20))) for _ in range(3)]
        await asyncio.sleep(0)
        assert admission.in_flight == 3
        with pytest.raises(OverloadedError):
            await work.run(lambda: None)
        held.set()
        assert await asyncio.gather(*tasks) == [True, True, True]
        assert admission.in_flight == 0
        with pytest.raises(ZeroDivisionError):
            await work.run(lambda: 1 // 0)

    asyncio.run(go())
    work.close()
    wait_until(lambda: not any("test" in t.name for t in threading.enumerate()), "the threads' end")


def test_work_that_takes_too_long_stays_in_flight() -> None:
    held = threading.Event()
    work, admission = pool(1, threads=1)

    async def go() -> None:
        with pytest.raises(TimeoutError):
            await work.run(lambda: held.wait(20), 0.01)
        assert admission.in_flight == 1, "the thread is still at it"
        held.set()
        while admission.in_flight:
            await asyncio.sleep(0.001)
        assert await work.run(lambda: 7, 20) == 7

    asyncio.run(asyncio.wait_for(go(), 20))
    work.close()
