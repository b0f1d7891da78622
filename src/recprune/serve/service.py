"""Everything that one worker has open: the engine, the histories, the keys, and its threads."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from recprune.serve.admission import Admission, WorkPool
from recprune.serve.configuration import ServeSettings
from recprune.serve.engine.backend import check_not_lost
from recprune.serve.engine.engine import Engine, OpenShards, load_engine
from recprune.serve.folding.folding import Folding
from recprune.serve.histories.histories import Histories, open_histories
from recprune.serve.histories.user_states import UserStates, open_states
from recprune.serve.keys import KeyFile
from recprune.serve.logs import log
from recprune.serve.prometheus import Metrics
from recprune.serve.rates import Rates
from recprune.types import RecpruneError, StorageError

_PROBED_S = 1.0  # for how long it is believed that histories can be kept, or cannot


class ReloadError(RecpruneError):
    """The new folder cannot be served; the old one still is."""


@dataclass(frozen=True)
class ReloadOutcome:
    """How a reload of all workers went."""

    version: str
    workers: int


class Service:
    """One worker's state. What is served changes by one assignment; a request reads it once."""

    def __init__(
        self,
        settings: ServeSettings,
        engine: Engine,
        histories: Histories,
        open_shards: OpenShards | None,
    ) -> None:
        """Use `open_service`."""
        self.settings = settings
        self.engine = engine  # what answers now
        self.histories = histories
        self.keys = KeyFile(settings.keys_file) if settings.keys_file is not None else None
        self.rates = Rates(settings.scratch)
        self.metrics = Metrics()
        limits = settings.limits
        shared = open_states(settings.histories, limits.stored_states, _password(settings))
        self.states = UserStates(shared, limits.state_bytes, self.metrics.count_encoded)
        self.searches = self._pool("search", limits.running, limits.waiting)
        self.lookups = self._pool("histories", 4, 16)  # they wait for a disk or a network
        self.items = self._pool("items", 1, 16)  # apart: events must not wait for a search of names
        self.changes = self._pool("changes", 1, 16)  # of the catalogue: they wait for a disk
        # Explanations and reloads, one at a time, beside the traffic.
        self.visits = self._pool("explain", 1, 2)
        self._probes = self._pool("readiness", 1, 0)
        self._probe: asyncio.Task[RecpruneError | None] | None = None
        self._probe_until = 0.0  # its outcome counts; by time.monotonic()
        # What all workers have a part in, where there are several.
        self.reload_everywhere: Callable[[], Awaitable[ReloadOutcome]] = self._reload_here
        self.figures: Callable[[], Awaitable[bytes]] = self._figures_here
        self._open_shards = open_shards
        self._reloads = {"ok": 0, "failed": 0}
        self.metrics.set_engine(engine)
        self.metrics.set_reloads(self._reloads)
        self.folding: Folding | None = None  # of what is new, if that is asked for
        if settings.fold_in is not None and settings.live is not None:
            self.folding = Folding(
                settings.live, settings.fold_in, lambda: self.engine, histories, self.metrics
            )

    def load(self) -> Engine:
        """Load the folder anew, beside what is served; takes its time."""
        return _load(self.settings, self._open_shards)

    def swap(self, engine: Engine) -> None:
        """Serve something else from now on. Requests that have begun keep what they have."""
        if engine.live is not None:
            # What was acknowledged while it was loaded, by what it takes the place of, is in it.
            with suppress(StorageError):  # then it is seen later, and `fault` says why
                engine.live.refresh()
        self.engine = engine
        self.states.clear()
        self.metrics.set_engine(engine)
        log("swapped", {"version": engine.version, "items": engine.now().num_present})

    async def check_ready(self) -> None:
        """Raise what is in the way of answering or keeping events; may be called at any rate.

        Finding out costs a write, so it is done once a second at most, for all callers.
        """
        if self._probe is None or (self._probe.done() and time.monotonic() >= self._probe_until):
            self._probe = asyncio.create_task(self._find_out())
        problem = await asyncio.shield(self._probe)
        if problem is not None:
            raise problem

    async def _find_out(self) -> RecpruneError | None:
        try:
            if not self.settings.allow_partial:  # else answers have a share of missing items
                await check_not_lost(self.engine.index)
            await self._probes.run(self.histories.ready)
        except RecpruneError as error:
            return error
        finally:
            self._probe_until = time.monotonic() + _PROBED_S
        return None

    def close(self) -> None:
        """Finish what has begun and let go of everything."""
        pools = (self.searches, self.lookups, self.items, self.changes, self.visits, self._probes)
        for pool in pools:
            pool.close()
        if self.folding is not None:
            self.folding.close()
        self.states.close()
        self.histories.close()
        self.engine.close()

    def without_paths(self, error: RecpruneError) -> str:
        """Say what is wrong with a folder or file, without saying where it is."""
        message = str(error)
        settings = self.settings
        files = [settings.shards, settings.live, settings.names_file, settings.attributes]
        paths = [settings.folder, *filter(None, files), *settings.item_sets.values()]
        for path in paths:
            for text in (os.path.realpath(path), str(path)):
                message = message.replace(f"{text}/", "").replace(text, path.name)
        return message

    def _pool(self, name: str, running: int, waiting: int) -> WorkPool:
        def note(in_flight: int) -> None:
            at_work = min(in_flight, running)
            self.metrics.set_depth(name, at_work, in_flight - at_work)

        admission = Admission(
            running + waiting, on_refused=self.metrics.count_turned_away, on_change=note
        )
        return WorkPool(name, threads=running, admission=admission)

    async def _figures_here(self) -> bytes:
        self.metrics.set_items(self.engine.now())
        return await asyncio.to_thread(self.metrics.text)

    async def _reload_here(self) -> ReloadOutcome:
        """Reload this process alone: for an app that no supervisor runs."""
        try:
            engine = await self.visits.run(self.load)
        except RecpruneError as error:
            self._reloads["failed"] += 1
            self.metrics.set_reloads(self._reloads)
            raise ReloadError(self.without_paths(error)) from None
        self._reloads["ok"] += 1
        self.swap(engine)
        self.metrics.set_reloads(self._reloads)
        return ReloadOutcome(engine.version, 1)


def open_service(settings: ServeSettings, open_shards: OpenShards | None = None) -> Service:
    """Load everything; raises what is wrong with it."""
    engine = _load(settings, open_shards)
    histories = open_histories(settings.histories, settings.limits.history, _password(settings))
    return Service(settings, engine, histories, open_shards)


def _password(settings: ServeSettings) -> str | None:
    secret = settings.history_password
    return None if secret is None else secret.get_secret_value()


def _load(settings: ServeSettings, open_shards: OpenShards | None) -> Engine:
    try:
        return load_engine(settings, open_shards)
    except (OSError, MemoryError) as error:
        raise StorageError(f"{settings.folder}: cannot be loaded: {error}") from None
