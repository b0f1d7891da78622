"""What a model sees in one training step. Assembled from plain arrays, by seeded chance."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recprune.models.architectures import ARCHITECTURES
from recprune.models.bert4rec import MASK
from recprune.models.repeats import EventFeatures
from recprune.models.settings import Settings
from recprune.models.timelines import UNKNOWN_TIME
from recprune.preparation.prepared import MICROSECONDS, Prepared
from recprune.training.random_streams import Stream, stream_generator
from recprune.types import InputError, Int64Array

# One window in four has only its last item masked: that is what predicting the next looks like.
_ONLY_LAST = 0.25
# Of histories, the share of which a model does not see the times: callers may not know them.
_WITHOUT_TIMES = 0.25
# Own events are padded to a multiple of this on a GPU.
_OWN_COLUMNS = 128


class OwnEvents(NamedTuple):
    """What the users of a minibatch had before, one to a row and farther back than encoders look.

    Events have five numbers: item, events until it comes again, two buckets, and the time. Padding
    comes again at once, so that it never counts.
    """

    events: Int64Array  # [5, users, longest]
    # [5, predictions]: the user, the column of the newest event by then, which of the user's
    # predictions it is, the time in seconds at which it is made, or UNKNOWN_TIME, and that up to
    # which it is known what others did.
    now: Int64Array


@dataclass(frozen=True, eq=False)
class Minibatch:
    """Histories, several to a row, and the positions where something is to be predicted.

    Most histories are short: one to a row, most of a minibatch would be padding.
    """

    items: Int64Array  # [rows, longest], MASK where a bert4rec fills in
    places: Int64Array  # of the items in their history; the newest has the model's last
    segments: Int64Array  # which history of the row; −1 is padding
    positions: Int64Array  # into the flattened items
    targets: Int64Array  # the items to be predicted there; −1 is padding
    # [2, rows, longest] seconds, for encoders that read times: of the event and of the prediction
    # after it, UNKNOWN_TIME where they are not known.
    times: Int64Array | None = None
    own: OwnEvents | None = None  # for a repeat head

    def arrays(self) -> tuple[Int64Array, ...]:
        """Return what a step is given, in its order."""
        arrays = (self.items, self.places, self.segments, self.positions, self.targets)
        times = () if self.times is None else (self.times,)
        return (*arrays, *times, *(self.own or ()))


def epoch_users(prepared: Prepared, settings: Settings, epoch: int) -> Int64Array:
    """Return the users of an epoch in the order in which they are shown."""
    able = np.flatnonzero(prepared.train_ends - prepared.offsets[:-1] >= 2)
    if not len(able):
        raise InputError("no user has two training interactions: there is nothing to learn from")
    training = settings.training
    rng = stream_generator(training.seed, Stream.EPOCH_ORDER, epoch)
    shuffled = rng.permutation(able)
    return shuffled[: training.batches_per_epoch * training.batch_size]


def make_minibatch(
    prepared: Prepared,
    users: Int64Array,
    settings: Settings,
    epoch: int,
    number: int,
    features: EventFeatures | None = None,
) -> Minibatch:
    """Return the minibatch with the given number of an epoch; a repeat head needs features."""
    rng = stream_generator(settings.training.seed, Stream.WINDOWS, epoch, number)
    most = settings.model.length + 1  # one is only a target
    starts = prepared.offsets[users]
    ends = prepared.train_ends[users]
    if settings.training.windows == "random":
        # Any window as long as possible.
        ends = ends - rng.integers(0, np.maximum(ends - starts - most, 0) + 1)
    lengths = np.minimum(ends - starts, most)
    events = _ranges(ends - lengths, lengths)
    windows = prepared.items[events].astype(np.int64)
    last = np.cumsum(lengths) - 1
    architecture = ARCHITECTURES[settings.model.architecture]
    if not architecture.fills_masks:
        # After every item but the last, the next one.
        is_input = np.ones(len(windows), np.bool_)
        is_input[last] = False
        inputs, targets = windows[is_input], windows[np.flatnonzero(is_input) + 1]
        packed = _pack(inputs, lengths - 1, settings.model.length, np.arange(len(inputs)), targets)
        if features is None and not architecture.reads_times:
            return packed
        without_times = np.repeat(rng.random(len(users)) < _WITHOUT_TIMES, lengths - 1)
        if architecture.reads_times:
            times = _event_times(prepared, events[is_input], without_times)
            packed = replace(packed, times=_packed_times(times, packed))
        if features is not None:
            first = np.maximum(starts, ends - lengths - settings.model.repeats)
            own = _own_events(prepared, features, first, ends - 1, lengths - 1)
            own.now[3, without_times] = UNKNOWN_TIME
            if settings.model.activity:
                own.now[4] = _between(own, rng.random(len(own.now[4])))
            packed = replace(packed, own=own)
        return packed
    masked = rng.random(len(windows)) < settings.training.mask_share
    only_last = rng.random(len(users)) < _ONLY_LAST
    only_last |= np.add.reduceat(masked, last - lengths + 1) == 0
    masked[np.repeat(only_last, lengths)] = False
    masked[last[only_last]] = True
    targets = windows[masked]
    windows[masked] = MASK
    return _pack(windows, lengths, most, np.flatnonzero(masked), targets)


def padded_minibatch(minibatch: Minibatch, rows: int, predictions: int) -> Minibatch:
    """Return a minibatch with so much padding that its shape is a multiple of the given one."""
    more_rows = -len(minibatch.items) % rows
    more = -len(minibatch.targets) % predictions
    below, after = ((0, more_rows), (0, 0)), (0, more)
    return Minibatch(
        np.pad(minibatch.items, below),
        np.pad(minibatch.places, below),
        np.pad(minibatch.segments, below, constant_values=-1),
        np.pad(minibatch.positions, after),
        np.pad(minibatch.targets, after, constant_values=-1),
        None if minibatch.times is None else np.pad(minibatch.times, ((0, 0), *below)),
        None if minibatch.own is None else _padded_own(minibatch.own, more, minibatch),
    )


def _padded_own(own: OwnEvents, more: int, minibatch: Minibatch) -> OwnEvents:
    columns = -own.events.shape[2] % _OWN_COLUMNS
    now = np.pad(own.now, ((0, 0), (0, more)))
    now[2, len(minibatch.targets) :] = minibatch.items.shape[1]  # behind all predictions of a user
    return OwnEvents(np.pad(own.events, ((0, 0), (0, 0), (0, columns))), now)


def minibatch_part(minibatch: Minibatch, part: int, parts: int) -> tuple[Minibatch, Int64Array]:
    """Return one of several parts of a minibatch, and which of its predictions that part has.

    The parts are runs of rows, as equal as can be; of few rows, some are empty.
    """
    num_rows, width = minibatch.items.shape
    first, last = num_rows * part // parts, num_rows * (part + 1) // parts
    kept = np.flatnonzero(
        (minibatch.positions >= first * width) & (minibatch.positions < last * width)
    )
    return Minibatch(
        minibatch.items[first:last],
        minibatch.places[first:last],
        minibatch.segments[first:last],
        minibatch.positions[kept] - first * width,
        minibatch.targets[kept],
        None if minibatch.times is None else minibatch.times[:, first:last],
        None if minibatch.own is None else _own_part(minibatch.own, kept),
    ), kept


def _own_part(own: OwnEvents, kept: Int64Array) -> OwnEvents:
    return own._replace(now=np.ascontiguousarray(own.now[:, kept]))  # rows are looked up one by one


def _event_times(
    prepared: Prepared, events: Int64Array, without_times: NDArray[np.bool_]
) -> Int64Array:
    """Return when events were, and the next ones, which are predicted: [2, events] seconds."""
    if prepared.times is None:
        return np.full((2, len(events)), UNKNOWN_TIME)
    times: Int64Array = prepared.times[np.stack([events, events + 1])] // MICROSECONDS
    times[:, without_times] = UNKNOWN_TIME
    return times


def _packed_times(times: Int64Array, packed: Minibatch) -> Int64Array:
    """Lay the times of all positions out as the items are, [2, rows, longest]."""
    laid_out = np.full((2, packed.items.size), UNKNOWN_TIME)
    laid_out[:, packed.positions] = times
    return laid_out.reshape(2, *packed.items.shape)


def _own_events(
    prepared: Prepared,
    features: EventFeatures,
    first: Int64Array,
    end: Int64Array,
    predictions: Int64Array,
) -> OwnEvents:
    """Return the events first … end − 1 of each user, after the last of which is predicted."""
    counts = end - first
    shape = (len(counts), int(counts.max()))
    flat = _ranges(np.arange(len(counts)) * shape[1], counts)
    chosen = _ranges(first, counts)
    events = np.zeros((5, *shape), np.int64)
    numbers: list[NDArray[Any]] = [prepared.items, *features]
    for place, array in enumerate(numbers):
        events[place].flat[flat] = array[chosen]
    users = np.repeat(np.arange(len(counts)), predictions)
    columns = _ranges(counts - predictions, predictions)
    places = _ranges(np.zeros_like(predictions), predictions)
    asked_at = np.full(len(users), UNKNOWN_TIME)
    if prepared.times is not None:
        events[4].flat[flat] = prepared.times[chosen] // MICROSECONDS
        # That of the target, which is the next event.
        asked_at = prepared.times[first[users] + columns + 1] // MICROSECONDS
    return OwnEvents(events, np.stack([users, columns, places, asked_at, asked_at]))


def _between(own: OwnEvents, shares: NDArray[np.float64]) -> Int64Array:
    """Return moments between the newest events and the predictions after them.

    A model that is served knows the log up to some moment, and was not trained anew since.
    """
    users, columns, _, _, asked_at = own.now
    newest = own.events[4, users, columns]
    moments: Int64Array = newest + (shares * (asked_at - newest)).astype(np.int64)
    return moments


def _pack(
    items: Int64Array,
    lengths: Int64Array,
    width: int,
    predicted: Int64Array,
    targets: Int64Array,
) -> Minibatch:
    """Lay histories, given one after the other, out in rows of at most `width` items."""
    rows, starts = _fit(lengths.tolist(), width)
    shape = (int(rows.max()) + 1, width)
    flat = _ranges(rows * width + starts, lengths)
    packed, places = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    segments = np.full(shape, -1, np.int64)
    packed.flat[flat] = items
    places.flat[flat] = _ranges(width - lengths, lengths)
    segments.flat[flat] = np.repeat(np.arange(len(lengths)), lengths)
    return Minibatch(packed, places, segments, flat[predicted], targets)


def _fit(lengths: list[int], width: int) -> tuple[Int64Array, Int64Array]:
    """Return a row and a first column for every history.

    The longest first, each into the row where it leaves the least room: hardly ever a row too many.
    """
    rows, starts = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64)
    num_rows = 0
    room: list[tuple[int, int]] = []  # left in a row, and the row; ascending
    for history in sorted(range(len(lengths)), key=lambda history: -lengths[history]):
        at = bisect_left(room, (lengths[history], -1))
        if at < len(room):
            left, row = room.pop(at)
        else:
            left, row = width, num_rows
            num_rows += 1
        rows[history], starts[history] = row, width - left
        insort(room, (left - lengths[history], row))
    return rows, starts


def _ranges(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """Return start, start + 1, … of each range, one range after the other."""
    ends = np.cumsum(lengths)
    shifts: Int64Array = np.repeat(starts - (ends - lengths), lengths)
    return np.arange(int(ends[-1])) + shifts
