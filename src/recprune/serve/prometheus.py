"""What the service counts, for Prometheus.

Workers write their figures to files that they share (see `metric_files`), so that any of them
returns the figures of all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache

from recprune.serve.engine.backend import size_of
from recprune.serve.engine.engine import Engine, Found
from recprune.serve.metric_files import SHARED_FOLDER
from recprune.types import needs_extra

with needs_extra("serve"):
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from prometheus_client.metrics_core import Metric
    from prometheus_client.multiprocess import MultiProcessCollector
    from prometheus_client.parser import text_string_to_metric_families
    from prometheus_client.registry import Collector

_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10,
)  # fmt: skip
_ITEMS = (0, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
_GAPS = (0.0, 0.001, 0.01, 0.1, 1.0, 10.0)


class Metrics:
    """The figures of one worker."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "recprune_requests", "Requests answered.", ["route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "recprune_request_seconds",
            "Time from the first byte of a request to its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._stages = Histogram(
            "recprune_stage_seconds",
            "Time in one stage of a request.",
            ["stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._queries = Counter(
            "recprune_queries",
            "Searches, by the method that ran.",
            ["method", "exact"],
            registry=registry,
        )
        self._fallbacks = Counter(
            "recprune_fallbacks",
            "Histories answered by popularity: nothing in them was known.",
            registry=registry,
        )
        self._encoded = Counter(
            "recprune_encoded",
            "Histories of users encoded by an encoder that can be continued: how.",
            ["how"],
            registry=registry,
        )
        self._items_scored = Histogram(
            "recprune_items_scored", "Items scored by a search.", buckets=_ITEMS, registry=registry
        )
        self._gap = Histogram(
            "recprune_threshold_gap",
            "Upper bound less threshold: 0 where the answer is exact.",
            buckets=_GAPS,
            registry=registry,
        )
        self._turned_away = Counter(
            "recprune_turned_away",
            "Requests and connections that found no room: 503.",
            registry=registry,
        )
        self._rate_limited = Counter(
            "recprune_rate_limited",
            "Requests beyond the rate of their API key: 429.",
            registry=registry,
        )
        self._events = Counter("recprune_events", "Events kept.", registry=registry)
        self._folded = Counter(
            "recprune_folded_items",
            "Items that users took and the model does not know: added, replaced, left as others "
            "had changed them, or failed.",
            ["outcome"],
            registry=registry,
        )
        self._items = Gauge(
            "recprune_index_items",
            "Items of the index that are there.",
            registry=registry,
            multiprocess_mode="livemostrecent",  # of the worker that is asked: items may leave
        )
        self._fault = Gauge(
            "recprune_live_fault",
            "1 where a worker does not see changes of the catalogue, or cannot tidy it up.",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._bytes = Gauge(
            "recprune_index_bytes",
            "Size of the index, which the workers share.",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._reloads = Gauge(
            "recprune_reloads",
            "Reloads since the start, of all workers together.",
            ["outcome"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._depth = Gauge(
            "recprune_queue_depth",
            "Requests that are at work, or wait.",
            ["work", "state"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        # Known from the start, so that a rate of them is 0 and not missing.
        for method in ("cells", "scan"):
            for exact in ("true", "false"):
                self._queries.labels(method, exact)
        for outcome in ("added", "replaced", "left", "failed"):
            self._folded.labels(outcome)
        for how in ("continued", "unchanged", "anew"):
            self._encoded.labels(how)

        # A figure is found by its labels for every request, in less time than the library takes.
        # There are few of each: routes are templates.
        self._request_count = cache(self._requests.labels)
        self._request_seconds = cache(self._seconds.labels)
        self._stage_seconds = cache(self._stages.labels)
        self._query_count = cache(self._queries.labels)
        self._depth_of = cache(self._depth.labels)

    def count_request(self, route: str, status: int, seconds: float) -> None:
        self._request_count(route, status).inc()
        self._request_seconds(route).observe(seconds)

    def count_stage(self, stage: str, seconds: float) -> None:
        self._stage_seconds(stage).observe(seconds)

    def count_found(self, answers: Iterable[Found]) -> None:
        for found in answers:
            for stage, milliseconds in found.milliseconds.items():
                self.count_stage(stage, milliseconds / 1000.0)
            if found.method is None:
                self._fallbacks.inc()
                continue
            self._query_count(found.method, "true" if found.exact else "false").inc()
            self._items_scored.observe(found.items_scored)
            if found.gap is not None:
                self._gap.observe(found.gap)

    def count_encoded(self, how: str) -> None:
        self._encoded.labels(how).inc()

    def count_events(self, new: int) -> None:
        self._events.inc(new)

    def count_folded(self, outcome: str) -> None:
        """Note an item that was folded in, or why it was not."""
        self._folded.labels(outcome).inc()

    def count_turned_away(self) -> None:
        """Note a request, or a connection, that there was no room for."""
        self._turned_away.inc()

    def count_rate_limited(self) -> None:
        """Note a request that came faster than its key allows."""
        self._rate_limited.inc()

    def set_engine(self, engine: Engine) -> None:
        moment = engine.now()
        self.set_items(moment)
        self._bytes.set(size_of(moment.index))

    def set_items(self, moment: Engine) -> None:
        """Note how many items are there, and whether changes are followed."""
        self._items.set(moment.num_present)
        if moment.live is not None:
            self._fault.set(0 if moment.live.fault is None else 1)

    def set_reloads(self, outcomes: dict[str, int]) -> None:
        for outcome, count in outcomes.items():
            self._reloads.labels(outcome).set(count)

    def set_depth(self, work: str, running: int, waiting: int) -> None:
        self._depth_of(work, "running").set(running)
        self._depth_of(work, "waiting").set(waiting)

    def text(self) -> bytes:
        """Return the figures of all workers, as Prometheus reads them."""
        if SHARED_FOLDER not in os.environ:
            return generate_latest(self._registry)
        all_workers = CollectorRegistry()
        MultiProcessCollector(all_workers)  # type: ignore[no-untyped-call]
        return generate_latest(all_workers)


def merged_texts(texts: dict[str, bytes]) -> bytes:
    """Return the figures of several replicas as one text, each with the name of its replica."""
    merged: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text.decode()):
            same = Metric(family.name, family.documentation, family.type)
            into = merged.setdefault(family.name, same)
            for sample in family.samples:
                labels = {**sample.labels, "replica": replica}
                into.add_sample(sample.name, labels, sample.value, sample.timestamp)

    class Merged(Collector):
        def collect(self) -> Iterable[Metric]:
            return merged.values()

    registry = CollectorRegistry()
    registry.register(Merged())
    return generate_latest(registry)
