"""The live index: a folder with a catalogue that changes, and the one way to change it.

Any process may write, one at a time, by a lock on the folder. A change is in the log and on disk
before it is acknowledged; then all processes that have the folder open read it there.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.data.identifiers import ExternalId
from recprune.live.change_log import (
    BrokenLogError,
    LoggedChange,
    Tip,
    append_record,
    begin_log,
    end_log,
    log_stamp,
    read_logs,
)
from recprune.live.changes import (
    MOST_BYTES,
    Addition,
    Change,
    ChangeShape,
    Removal,
    Replacement,
    Upsert,
    decode,
    encode,
)
from recprune.live.draft import Draft, refuse_twice
from recprune.live.file_lock import LockedError, locked
from recprune.live.generation import (
    Generation,
    SegmentKey,
    current_number,
    current_stamp,
    empty_tail,
    is_checksum,
    load_current,
    name_current,
    new_identity,
    next_segment_name,
    segment_folder,
    sweep,
    write_generation,
)
from recprune.live.item_names import IdKind, checked_names, given_kind
from recprune.live.merging import is_full, is_settled, merge, to_merge
from recprune.live.segment import Items, Segment, build_segment, save_segment
from recprune.live.snapshot import LiveSnapshot, PresentSegment, refuse_missing
from recprune.search.checks import (
    MAX_ITEMS,
    checked_bias,
    checked_codes,
    checked_items,
    checked_threads,
)
from recprune.search.index_arrays import Layout
from recprune.search.methods import Method
from recprune.search.top_k import TopK
from recprune.storage import writing_folder
from recprune.types import (
    CodeArray,
    Float32Array,
    InputError,
    Int64Array,
    Json,
    RecpruneError,
    StorageError,
)

_WRITERS = "LOCK"
_COMPACTORS = "COMPACTING"
_FOLLOWING_SECONDS = 0.03  # between looks at the log: others' changes are seen in a tenth of one
_WAITING_SECONDS = 30.0  # for another writer
_COMPACTOR_SECONDS = 24 * 3600.0  # for another process that compacts
_RESTING_SECONDS = 10.0  # before maintenance that has failed is tried again
_LONG_LOG = (
    64 << 20
)  # bytes of changes after which a new generation begins, so that opening is fast


class KnownItemError(InputError):
    """An item is added whose external id is that of one which is there."""

    def __init__(self, place: int, external_id: ExternalId) -> None:
        super().__init__(f"item_ids[{place}] is {external_id!r}, which is there already")
        self.place = place  # among those that were to be added
        self.external_id = external_id


class LiveIndex:
    """An exact index of a catalogue whose items come and go, kept in a folder.

    Items are numbered in the order of their arrival, from 0 on, and numbers are never used twice.
    At any moment, answers are those of an `Index` built from scratch over the items that are there,
    ids and score bits, with ties by number. A change that has returned survives the process and the
    machine. Safe to share between threads; other processes open the folder themselves, after a
    fork too.
    """

    def __init__(self, folder: Path, generation: Generation) -> None:
        """Use `LiveIndex.create` or `LiveIndex.open`."""
        self.folder = folder
        self.identity = generation.identity  # tells this catalogue from all others
        self.made_from = generation.made_from  # what `create` was told
        self._generation = generation
        self._snapshot = generation.snapshot
        self._tip = generation.tip
        self._log_stamp: tuple[int, int] | None = (0, 0)  # of the log when it was last read
        self._current_stamp = (0, 0)  # of the generation that was last looked at
        self._broken: str | None = None  # why nothing can be written any more
        self._unseen: str | None = None  # why changes of others are not seen
        self._undone: str | None = None  # why work in the background has failed
        self._closed = False
        self._has_written = False
        self._rested = 0.0  # when maintenance may be tried again, by time.monotonic()
        self._lock = threading.RLock()  # for all of the above; a search takes none
        self._worker: ThreadPoolExecutor | None = None  # for what takes long
        self._busy = threading.Lock()  # held while something waits for the worker, or runs there
        self._stop = threading.Event()
        weakref.finalize(self, self._stop.set)
        with self._lock:
            self._read_on()

    # Making one ----------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        folder: str | Path,
        codes: CodeArray,
        sub_item_embeddings: Float32Array,
        *,
        item_bias: Float32Array | None = None,
        item_ids: Any = None,
        made_from: str | None = None,
        layout: Layout = "auto",
        threads: int = 1,
    ) -> LiveIndex:
        """Lay out a first catalogue, which may be empty, in a folder that is new or empty.

        The arguments are those of `Index.build`. With `item_bias` all items have one, those that
        are added later too. With `item_ids` all items have an external id: integers or strings.
        `made_from`, a SHA-256 in hexadecimal digits, is kept with the catalogue: what it was made
        from can tell it by that.
        """
        target = Path(os.path.realpath(folder))
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise StorageError(f"{target}: already exists and is not empty; not overwritten")
        if made_from is not None and not is_checksum(made_from):
            raise InputError(f"made_from is {made_from!r}, expected 64 hexadecimal digits")
        checked, embeddings = checked_codes(codes, sub_item_embeddings)
        id_kind = given_kind(item_ids)
        items = Items(
            np.arange(len(checked), dtype=np.uint32),
            checked,
            item_bias,
            checked_names(item_ids, id_kind, len(checked)),
        )
        segment = build_segment(items, embeddings, layout, checked_threads(threads))
        try:
            with writing_folder(target) as place:
                generation = _begin(place, segment, id_kind, made_from)
        except OSError as error:
            raise StorageError(f"{target}: cannot be written: {error.strerror or error}") from None
        return cls(target, generation)._followed()

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = True) -> LiveIndex:
        """Open a catalogue, to ask it and to change it.

        `verify` compares every byte of its segments with their checksums; changes always are.
        """
        path = Path(os.path.realpath(folder))
        known: dict[SegmentKey, Segment] = {}
        while True:
            stamp = current_stamp(path)
            generation = load_current(path, known, verify=verify)
            known = generation.segments()
            try:
                return cls(path, generation)._followed()
            except StorageError:
                if current_stamp(path) == stamp:
                    raise
            # Its log is gone: another generation counts by now.

    def _followed(self) -> LiveIndex:
        """Begin to look for changes that others make, until this object is closed or gone."""
        follow = threading.Thread(
            target=_follow, args=(weakref.ref(self), self._stop), name="recprune-live", daemon=True
        )
        follow.start()
        return self

    def close(self) -> None:
        """Wait for a compaction that runs, and let go of the folder. Snapshots stay as they are."""
        with self._lock:
            self._closed = True
            worker = self._worker
        self._stop.set()
        if worker is not None:
            worker.shutdown(wait=True)

    def __enter__(self) -> LiveIndex:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Changing it ---------------------------------------------------------------------------------

    def add(
        self, codes: CodeArray, item_bias: Float32Array | None = None, *, item_ids: Any = None
    ) -> Int64Array:
        """Add items, all of them or none, and return their numbers.

        Without `item_bias`, in a catalogue that has biases, that is 0 for each. Where items have
        external ids, these come along; one that an item has which is there is refused.
        """

        def make(snapshot: LiveSnapshot) -> Addition:
            checked, _ = checked_codes(codes, snapshot.sub_item_embeddings())
            count, first = len(checked), snapshot.num_items
            if first + count >= MAX_ITEMS:
                raise InputError(f"{count} items after {first}; there are numbers for {MAX_ITEMS}")
            names = checked_names(item_ids, snapshot.id_kind, count)
            if names is not None:
                _refuse_known(snapshot, names.tolist())
            bias = _bias_for(snapshot, item_bias, count)
            if bias is None and snapshot.has_bias:
                bias = np.zeros(count, np.float32)
            numbers = np.arange(first, first + count, dtype=np.uint32)
            return Addition(Items(numbers, np.array(checked), bias, names))

        change = self._commit(make)
        assert isinstance(change, Addition)  # noqa: S101 # for the type checker
        return change.items.numbers.astype(np.int64)

    def remove(self, ids: Any) -> None:
        """Let items leave, by their numbers, all of them or none; each must be there."""

        def make(snapshot: LiveSnapshot) -> Removal:
            return Removal(_checked_numbers(snapshot, ids))

        self._commit(make)

    def replace(self, ids: Any, codes: CodeArray, item_bias: Float32Array | None = None) -> None:
        """Give items that are there other codes, all of them or none.

        They keep their numbers and external ids, and without `item_bias` their biases.
        """

        def make(snapshot: LiveSnapshot) -> Replacement:
            numbers = _checked_numbers(snapshot, ids)
            checked, _ = checked_codes(codes, snapshot.sub_item_embeddings())
            if len(checked) != len(numbers):
                raise InputError(f"codes has {len(checked)} rows for {len(numbers)} ids")
            bias = _bias_for(snapshot, item_bias, len(checked))
            if bias is None:
                bias = snapshot.item_bias(numbers)
            items = Items(numbers, checked, bias, None)
            return Replacement(items.take(np.argsort(numbers)))

        self._commit(make)

    def put(
        self,
        item_ids: Any,
        codes: CodeArray,
        item_bias: Sequence[float | None] | None = None,
        *,
        replace: bool = False,
    ) -> Int64Array:
        """Add items by their external ids, all of them or none, and return their numbers.

        With `replace`, those that are there get other codes, as `LiveIndex.replace` gives them, in
        the same change; without, one that is there is a `KnownItemError`. A bias that is None is 0
        for a new item, and what it was for another.
        """

        def make(snapshot: LiveSnapshot) -> Upsert:
            checked, _ = checked_codes(codes, snapshot.sub_item_embeddings())
            count, first = len(checked), snapshot.num_items
            names = checked_names(item_ids, snapshot.id_kind, count)
            if names is None:
                raise InputError("this catalogue was created without external ids")
            if not replace:
                _refuse_known(snapshot, names.tolist())
            numbers = snapshot.find(names.tolist())
            new = numbers < 0
            if first + int(new.sum()) >= MAX_ITEMS:
                raise InputError(f"{count} items after {first}; there are numbers for {MAX_ITEMS}")
            bias = _some_biases(snapshot, item_bias, numbers)
            numbers[new] = np.arange(first, first + int(new.sum()))
            items = Items(numbers.astype(np.uint32), np.array(checked), bias, names)
            there = items.take(np.flatnonzero(~new)[np.argsort(numbers[~new])])
            changed = Items(there.numbers, there.codes, there.item_bias, None)
            found.append(numbers)
            return Upsert(Replacement(changed), Addition(items.take(new)))

        found: list[Int64Array] = []
        self._commit(make)
        return found[-1]

    def _commit(self, make: Callable[[LiveSnapshot], Change]) -> Change:
        """Check a change against the catalogue as it is, write it down, and then make it."""
        with self._lock, locked(self.folder / _WRITERS, _WAITING_SECONDS):
            self._refuse_unusable()
            self._catch_up()
            change = make(self._snapshot)
            if not change.count():
                return change
            kind, content = encode(change)
            if len(content) > MOST_BYTES:
                raise InputError(
                    f"a change of {len(content):,} bytes, expected at most {MOST_BYTES:,}: "
                    "make several"
                )
            try:
                tip = append_record(self.folder, self._tip, kind, content)
            except BrokenLogError as error:
                self._broken = str(error)
                raise
            draft = Draft(self._snapshot)
            change.apply(draft)
            draft.sequence = tip.sequence
            self._snapshot, self._tip = draft.finish(), tip
            self._has_written = True
            if self._is_due():
                self._start(self.maintain)
        return change

    def _refuse_unusable(self) -> None:
        if self._closed:
            raise InputError(f"{self.folder}: the live index is closed")
        if self._broken is not None:
            raise StorageError(f"nothing is written any more: {self._broken}")

    # Keeping up with others ----------------------------------------------------------------------

    def refresh(self) -> None:
        """See all changes that were made until now; without this, within a tenth of a second."""
        with self._lock:
            if self._closed:
                raise InputError(f"{self.folder}: the live index is closed")
            self._catch_up()

    @property
    def fault(self) -> str | None:
        """Why changes of others are not seen, or what has failed in the background; mostly None.

        Both are tried again. Searches go on with what is known, and changes are refused if they
        cannot be made.
        """
        return self._unseen or self._undone

    def _catch_up(self) -> None:
        """Read the logs to their end, from a newer generation if ours is too old for that."""
        try:
            self._read_on()
        except StorageError:
            # A record that we have read was cut off again, or our log is gone: then what is there
            # now is whole. Else this says again what is wrong.
            self._adopt(load_current(self.folder, self._generation.segments()))

    def _read_on(self) -> None:
        stamp = log_stamp(self.folder, self._tip.log)
        if stamp == self._log_stamp and log_stamp(self.folder, self._tip.log + 1) is None:
            return
        self._snapshot, self._tip = self._replayed(self._snapshot, self._tip)
        # Of before it was read: what was written since changes it.
        self._log_stamp = stamp

    def _replayed(self, snapshot: LiveSnapshot, tip: Tip) -> tuple[LiveSnapshot, Tip]:
        """Return a snapshot with all changes since a tip."""
        draft, shape = Draft(snapshot), ChangeShape.of(snapshot)

        def use(record: LoggedChange) -> None:
            try:
                decode(record.kind, record.content, shape, draft.num_items).apply(draft)
            except RecpruneError as error:
                raise StorageError(f"{record.where}: an impossible change: {error}") from None
            draft.sequence = record.tip.sequence

        tip = read_logs(self.folder, self.identity, tip, use)
        return (draft.finish() if draft.sequence != snapshot.sequence else snapshot), tip

    def _adopt(self, generation: Generation) -> None:
        """Go on from another generation, with all changes since."""
        if generation.identity != self.identity:
            raise StorageError(f"{self.folder}: another catalogue has taken its place")
        snapshot, tip = self._replayed(generation.snapshot, generation.tip)
        self._generation, self._snapshot, self._tip = generation, snapshot, tip

    def _look(self) -> None:
        """Do what is due after some time: see what others have done."""
        try:
            with self._lock:
                if self._closed:
                    return
                self._catch_up()
            if current_stamp(self.folder) != self._current_stamp:
                self._start(self._take_newest)
            if self._has_written and self._is_due():  # it has failed before, or another was at it
                self._start(self.maintain)
            self._unseen = None
        except RecpruneError as error:
            self._unseen = str(error)

    def _take_newest(self) -> None:
        """Load the generation that counts, while changes are still followed by the old one."""
        stamp = current_stamp(self.folder)
        if current_number(self.folder) != self._generation.number:
            generation = load_current(self.folder, self._generation.segments())
            with self._lock:
                if generation.number > self._generation.number:
                    self._adopt(generation)
        self._current_stamp = stamp

    # Compacting ----------------------------------------------------------------------------------

    def compact(self, *, threads: int = 1) -> Future[None]:
        """Merge everything into one segment, without what has left, in the background.

        Numbers stay the same, and searches and changes go on meanwhile. The result of what is
        returned is there when that is done, or says why it was not.
        """
        checked_threads(threads)
        with self._lock:
            self._refuse_unusable()
            return self._pool().submit(self._rewrite, threads, everything=True)

    def maintain(self) -> None:
        """Do now what is else done in the background: make a segment of a tail that is full.

        Nothing is done if that is not due, or if another process is at it.
        """
        if not self._is_due():
            return
        try:
            self._rewrite(1, everything=False)
        except LockedError:
            return
        except RecpruneError:
            self._rested = time.monotonic() + _RESTING_SECONDS
            raise

    def _is_due(self) -> bool:
        is_large = is_full(self._snapshot) or self._tip.offset >= _LONG_LOG
        return is_large and time.monotonic() >= self._rested

    def _rewrite(self, threads: int, *, everything: bool) -> None:
        """Begin a new log, and a generation with fewer segments for what was before it."""
        seconds = _COMPACTOR_SECONDS if everything else 0.0
        with locked(self.folder / _COMPACTORS, seconds):
            with self._lock, locked(self.folder / _WRITERS, _WAITING_SECONDS):
                self._catch_up()
                # Only segments that the newest generation names are sure to stay.
                if current_number(self.folder) != self._generation.number:
                    self._adopt(load_current(self.folder, self._generation.segments()))
                if everything and is_settled(self._snapshot):
                    return
                end_log(self.folder, self._tip)
                self._tip = begin_log(self.folder, self.identity, self._tip)
                before, snapshot, tip = self._generation, self._snapshot, self._tip
            chosen = to_merge(snapshot, everything=everything)
            segments = [at for at in snapshot.segments if at not in chosen]
            if chosen or len(snapshot.tail):
                merged = merge(snapshot, chosen, threads)
                name = next_segment_name(self.folder)
                merged = save_segment(segment_folder(self.folder, name), name, merged)
                segments.append(PresentSegment(merged, None, merged.index.num_items))
            tail = empty_tail(segments[0].segment, snapshot.id_kind)
            base = LiveSnapshot(
                tuple(segments), tail, snapshot.num_items, snapshot.sequence, snapshot.id_kind
            )
            generation = Generation(before.number + 1, self.identity, self.made_from, base, tip)
            write_generation(self.folder, generation)
            name_current(self.folder, generation.number)
            with self._lock:
                self._adopt(generation)
                self._current_stamp = current_stamp(self.folder)
            # Whoever is just opening the one before finds it whole.
            sweep(self.folder, [before, generation])

    def _pool(self) -> ThreadPoolExecutor:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="recprune-live")
        return self._worker

    def _start(self, work: Callable[[], None]) -> None:
        """Have something done in the background, unless something is waiting there already."""
        with self._lock:
            if self._closed or not self._busy.acquire(blocking=False):
                return
            self._pool().submit(self._run, work)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
            self._undone = None
        except RecpruneError as error:
            self._undone = str(error)
        finally:
            self._busy.release()

    # Asking it -----------------------------------------------------------------------------------

    def snapshot(self) -> LiveSnapshot:
        """Return the catalogue as it is now; it answers like this index, and never changes.

        What goes by the length of the catalogue, as an `allow` mask does, belongs to a snapshot:
        the index itself may have grown since the mask was made.
        """
        return self._snapshot

    def search(
        self,
        sequence_embeddings: Float32Array,
        k: int = 10,
        *,
        method: str | Method = "auto",
        exclude: Any = None,
        allow: Any = None,
        floor: Any = None,
        boosts: Any = None,
        threads: int = 1,
    ) -> TopK:
        """Return the exact top k of the items that are there now; see `LiveSnapshot.search`."""
        return self._snapshot.search(
            sequence_embeddings,
            k,
            method=method,
            exclude=exclude,
            allow=allow,
            floor=floor,
            boosts=boosts,
            threads=threads,
        )

    def search_scores(
        self,
        sub_item_scores: Float32Array,
        k: int = 10,
        *,
        method: str | Method = "auto",
        exclude: Any = None,
        allow: Any = None,
        floor: Any = None,
        boosts: Any = None,
        threads: int = 1,
    ) -> TopK:
        """Return the exact top k for sub-item scores S (float32 [queries, M, B], or [M, B])."""
        return self._snapshot.search_scores(
            sub_item_scores,
            k,
            method=method,
            exclude=exclude,
            allow=allow,
            floor=floor,
            boosts=boosts,
            threads=threads,
        )

    def score(self, sequence_embeddings: Float32Array, items: Any) -> Float32Array:
        """Return the scores of given numbers, [queries, items] or [items]; all must be there."""
        return self._snapshot.score(sequence_embeddings, items)

    def external_ids(self, numbers: Any) -> list[ExternalId | None]:
        """Return the external ids of numbers, as a search returns them; None for −1."""
        return self._snapshot.external_ids(numbers)

    def find(self, external_ids: Sequence[ExternalId]) -> Int64Array:
        """Return the numbers of items that are there by their external ids, −1 where none is."""
        return self._snapshot.find(external_ids)

    @property
    def num_items(self) -> int:
        """How many numbers were ever used; `num_present` items are there."""
        return self._snapshot.num_items

    @property
    def num_present(self) -> int:
        """How many items are there."""
        return self._snapshot.num_present

    @property
    def num_splits(self) -> int:
        """How many sub-item ids a code has."""
        return self._snapshot.num_splits

    @property
    def num_sub_items(self) -> int:
        """How many sub-items a split has."""
        return self._snapshot.num_sub_items

    @property
    def width(self) -> int:
        """How many numbers a sequence embedding has."""
        return self._snapshot.width

    def describe(self) -> Json:
        """Say what the catalogue holds and costs."""
        return self._snapshot.describe() | {"generation": self._generation.number}

    def __repr__(self) -> str:
        return f"LiveIndex({str(self.folder)!r}, {self.num_present:,} items)"


def _begin(folder: Path, segment: Segment, id_kind: IdKind, made_from: str | None) -> Generation:
    """Write a catalogue of one segment into an empty folder."""
    for name in ("segments", "generations", "logs"):
        (folder / name).mkdir()
    segment = save_segment(segment_folder(folder, 0), 0, segment)
    num_items = segment.index.num_items
    present = PresentSegment(segment, None, num_items)
    snapshot = LiveSnapshot((present,), empty_tail(segment, id_kind), num_items, 0, id_kind)
    identity = new_identity()
    tip = begin_log(folder, identity, Tip(-1, 0, 0, 0))
    generation = Generation(0, identity, made_from, snapshot, tip)
    write_generation(folder, generation)
    name_current(folder, generation.number)
    return generation


def _follow(live: weakref.ref[LiveIndex], stop: threading.Event) -> None:
    """Look for changes until it is time to stop; keeps nothing alive."""
    while not stop.wait(_FOLLOWING_SECONDS):
        index = live()
        if index is None:
            return
        index._look()
        del index


def _checked_numbers(snapshot: LiveSnapshot, ids: Any) -> NDArray[np.uint32]:
    """Return numbers of items that are there, each given once."""
    given = np.asarray(ids)
    if given.size == 0 and given.ndim == 1:
        given = given.astype(np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise InputError(f"ids is {given.dtype}{list(given.shape)}, expected item numbers")
    outside = (given < 0) | (given >= snapshot.num_items)
    refuse_missing(given, outside)
    numbers = checked_items(given, snapshot.num_items).astype(np.uint32)
    refuse_missing(numbers, ~snapshot.are_there(numbers))
    refuse_twice(numbers)
    return numbers


def _bias_for(snapshot: LiveSnapshot, given: Any, count: int) -> Float32Array | None:
    """Return the biases that a change brings, if this catalogue may have any."""
    if given is None:
        return None
    if not snapshot.has_bias:
        raise InputError("item_bias: this catalogue was created without biases")
    return checked_bias(given, count)


def _some_biases(
    snapshot: LiveSnapshot, given: Sequence[float | None] | None, numbers: Int64Array
) -> Float32Array | None:
    """Return the biases of items, where some are given; new items have the number −1."""
    values = [None] * len(numbers) if given is None else list(given)
    if len(values) != len(numbers):
        raise InputError(f"item_bias has {len(values)} numbers for {len(numbers)} items")
    chosen = [place for place, value in enumerate(values) if value is not None]
    with np.errstate(over="ignore"):
        new = np.array([values[place] for place in chosen], np.float64).astype(np.float32)
    checked = _bias_for(snapshot, new, len(chosen)) if chosen else None
    kept = snapshot.item_bias(numbers[numbers >= 0])
    if kept is None:
        return None
    bias = np.zeros(len(numbers), np.float32)
    bias[numbers >= 0] = kept
    if checked is not None:
        bias[chosen] = checked
    return bias


def _refuse_known(snapshot: LiveSnapshot, names: list[ExternalId]) -> None:
    """Refuse an external id that an item has which is there."""
    known = snapshot.find(names) >= 0
    if known.any():
        place = int(known.argmax())
        raise KnownItemError(place, names[place])
