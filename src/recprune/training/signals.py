"""Requests to stop, Ctrl-C and SIGTERM: passed to a callback instead of followed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def requests_to_stop(on_request: Callable[[], None]) -> Iterator[None]:
    """Call back at every request to stop meanwhile. Signals arrive in the main thread alone."""

    def handle(_signal: int, _frame: FrameType | None) -> None:
        on_request()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
