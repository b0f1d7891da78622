"""The live index: a folder with a catalogue that changes, and the one way to change it.

Any process may write, one at a time, by a lock on the folder. A change is in the log and on disk
before it is acknowledged; then all processes that have the folder open read it there.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

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
    NotedUpsert,
    decode,
    encode,
)
from recprune.live.division import WHOLE, Division
from recprune.live.draft import Draft
from recprune.live.file_lock import LockedError, locked
from recprune.live.generation import (
    Generation,
    SegmentKey,
    current_number,
    current_stamp,
    empty_tail,
    is_checksum,
    is_identity,
    load_current,
    name_current,
    new_identity,
    next_segment_name,
    read_division,
    segment_folder,
    sweep,
    write_generation,
)
from recprune.live.given_changes import addition, noting, removal, replacement, upsert
from recprune.live.item_names import IdKind, checked_names, given_kind
from recprune.live.merging import divided, is_full, is_settled, merge, to_merge
from recprune.live.notes import Notes, NotesToBe
from recprune.live.recent_moments import RecentMoments
from recprune.live.segment import Items, Segment, build_segment, save_segment
from recprune.live.snapshot import LiveSnapshot, Moment, PresentSegment
from recprune.search.checks import checked_codes, checked_threads
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
_FAULTY_SECONDS = 1.0  # the same while a look fails, which may read all of a generation
_SHARD_SECONDS = 1.0  # the same for one shard, which follows those who ask it
_MOMENT_SECONDS = 0.005  # between looks for a moment that is waited for
_WAITING_SECONDS = 30.0  # for another writer
_COMPACTOR_SECONDS = 24 * 3600.0  # for another process that compacts
_RESTING_SECONDS = 10.0  # before maintenance that has failed is tried again
# Bytes of changes after which a new generation begins, so that opening is fast.
_LONG_LOG = 64 << 20


class MomentLostError(StorageError):
    """A moment that a catalogue was seen at, or never was, and cannot be seen at any more."""


class LiveIndex:
    """An exact index of a catalogue whose items come and go, kept in a folder.

    Items are numbered in the order of their arrival, from 0 on, and numbers are never used twice.
    At any moment, answers are those of an `Index` built from scratch over the items that are there,
    ids and score bits, with ties by number. A change that has returned survives the process and the
    machine. Safe to share between threads; other processes open the folder themselves, after a
    fork too.
    """

    def __init__(self, folder: Path, generation: Generation, *, verify: bool = True) -> None:
        """Use `LiveIndex.create` or `LiveIndex.open`."""
        self.folder = folder
        self._verify = verify  # segments that others make are compared with their checksums
        self.identity = generation.identity  # tells this catalogue from all others
        self.made_from = generation.made_from  # what `create` was told
        self.origin = generation.origin  # the same as before in one that took everything along
        self._shard = generation.snapshot.shard  # that alone is here; None: all
        self._moments = RecentMoments()  # of a shard
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
        self._follower: threading.Thread | None = None  # which looks for what others change
        weakref.finalize(self, self._stop.set)
        if self._shard is not None:
            self._moments.note(self._snapshot, self._tip)
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
        origin: str | None = None,
        layout: Layout = "auto",
        threads: int = 1,
    ) -> LiveIndex:
        """Lay out a first catalogue, which may be empty, in a folder that is new or empty.

        The arguments are those of `Index.build`. With `item_bias` all items have one, those that
        are added later too. With `item_ids` all items have an external id: integers or strings.
        `made_from`, a SHA-256 in hexadecimal digits, is kept with the catalogue: what it was made
        from can tell it by that. `origin` is that of a catalogue of which everything is to come
        along, before anybody uses this one.
        """
        target = Path(os.path.realpath(folder))
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise StorageError(f"{target}: already exists and is not empty; not overwritten")
        if made_from is not None and not is_checksum(made_from):
            raise InputError(f"made_from is {made_from!r}, expected 64 hexadecimal digits")
        if origin is not None and not is_identity(origin):
            raise InputError(f"origin is {origin!r}, expected 32 hexadecimal digits")
        checked, embeddings = checked_codes(codes, sub_item_embeddings)
        id_kind = given_kind(item_ids)
        items = Items(
            np.arange(len(checked), dtype=np.uint32),
            checked,
            item_bias,
            checked_names(item_ids, id_kind, len(checked)),
        )
        segment = build_segment(items, embeddings, layout, checked_threads(threads))
        with writing_folder(target) as place:
            generation = _begin(place, segment, id_kind, made_from, origin)
        return cls(target, generation)._followed()

    @classmethod
    def open(
        cls, folder: str | Path, *, shard: int | None = None, verify: bool = True
    ) -> LiveIndex:
        """Open a catalogue, to ask it and to change it.

        `verify` compares every byte of its segments with their checksums; changes always are. With
        `shard`, only the items of that shard are opened, to be asked and not to be changed.
        """
        path = Path(os.path.realpath(folder))
        known: dict[SegmentKey, Segment] = {}
        while True:
            stamp = current_stamp(path)
            generation = load_current(path, known, shard=shard, verify=verify)
            known = generation.segments()
            try:
                return cls(path, generation, verify=verify)._followed()
            except StorageError:
                if current_stamp(path) == stamp:
                    raise
            # Its log is gone: another generation counts by now.

    def _followed(self) -> LiveIndex:
        """Begin to look for changes that others make, until this object is closed or gone."""
        self._follower = threading.Thread(
            target=_follow, args=(weakref.ref(self), self._stop), name="recprune-live", daemon=True
        )
        self._follower.start()
        return self

    def close(self) -> None:
        """Wait for a compaction that runs, and let go of the folder. Snapshots stay as they are."""
        with self._lock:
            self._closed = True
            worker = self._worker
        self._stop_following()
        if worker is not None:
            worker.shutdown(wait=True)

    def _stop_following(self) -> None:
        self._stop.set()
        if self._follower is not None and self._follower is not threading.current_thread():
            self._follower.join()

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
        self,
        codes: CodeArray,
        item_bias: Float32Array | None = None,
        *,
        item_ids: Any = None,
        notes: NotesToBe | None = None,
    ) -> Int64Array:
        """Add items, all of them or none, and return their numbers.

        Without `item_bias`, in a catalogue that has biases, that is 0 for each. Where items have
        external ids, these come along; one that an item has which is there is refused. `notes` are
        what is said of the items, in the same change: see `LiveIndex.note`.
        """
        change = self._commit(lambda now: addition(now, codes, item_bias, item_ids, notes))
        added = change.upsert.added if isinstance(change, NotedUpsert) else change
        assert isinstance(added, Addition)  # noqa: S101 # for the type checker
        return added.items.numbers.astype(np.int64)

    def remove(self, ids: Any) -> None:
        """Let items leave, by their numbers, all of them or none; each must be there."""
        self._commit(lambda now: removal(now, ids))

    def replace(self, ids: Any, codes: CodeArray, item_bias: Float32Array | None = None) -> None:
        """Give items that are there other codes, all of them or none.

        They keep their numbers, external ids and notes, and without `item_bias` their biases.
        """
        self._commit(lambda now: replacement(now, ids, codes, item_bias))

    def put(
        self,
        item_ids: Any,
        codes: CodeArray,
        item_bias: Sequence[float | None] | None = None,
        *,
        replace: bool = False,
        expected: Sequence[CodeArray | None] | None = None,
        notes: NotesToBe | None = None,
    ) -> Int64Array:
        """Add items by their external ids, all of them or none, and return their numbers.

        With `replace`, those that are there get other codes, as `LiveIndex.replace` gives them, in
        the same change; without, one that is there is a `KnownItemError`. A bias that is None is 0
        for a new item, and what it was for another. `expected` are the codes that the items have
        when this is done, None for one that is not there; else there is a `ChangedItemError`. A
        note that is None leaves what was said of an item; see `LiveIndex.note`.
        """
        found: list[Int64Array] = []

        def make(now: LiveSnapshot) -> Change:
            change, numbers = upsert(
                now, item_ids, codes, item_bias, notes, replace=replace, expected=expected
            )
            found.append(numbers)
            return change

        self._commit(make)
        return found[-1]

    def note(self, ids: Any, notes: NotesToBe) -> None:
        """Say something else of items that are there, by their numbers; codes stay as they are.

        A note is an object of JSON, 16 KiB at most, which is kept with the item until it leaves,
        and which `LiveSnapshot.notes` has; None says nothing any more. `notes` are as many, or a
        function that is given an item's place among `ids` and what is said of it, and returns what
        is said from now on: nobody else changes anything between the two.
        """
        self._commit(lambda now: noting(now, ids, notes))

    @contextmanager
    def held(self) -> Iterator[LiveSnapshot]:
        """Give the catalogue as it is, while no process changes it or merges its segments.

        Who would, waits: what takes long is to be done before.
        """
        with (
            locked(self.folder / _COMPACTORS, _COMPACTOR_SECONDS, self._stop),
            self._lock,
            locked(self.folder / _WRITERS, _WAITING_SECONDS),
        ):
            self._refuse_unusable()
            self._catch_up()
            yield self._snapshot

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
            draft.moment = Moment(tip.sequence, tip.chain)
            self._snapshot, self._tip = draft.finish(), tip
            self._has_written = True
            if self._is_due():
                self._start(self.maintain)
        return change

    def _refuse_shard(self) -> None:
        if self._shard is not None:
            raise InputError(f"{self.folder}: one shard is not changed: open the whole")

    def _refuse_unusable(self) -> None:
        self._refuse_shard()
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

    def at(self, moment: Moment, seconds: float = 0.0) -> LiveSnapshot:
        """Return the catalogue as it was at a recent moment; for one shard, opened by itself.

        One that comes is waited for. Raises `MomentLostError` where it has passed too long ago, or
        is one of changes that were never acknowledged and are gone.
        """
        deadline = time.monotonic() + seconds
        while True:
            with self._lock:
                if self._closed:
                    raise InputError(f"{self.folder}: the live index is closed")
                if self._snapshot.sequence < moment.sequence:
                    self._catch_up(moment.sequence)
                latest = self._snapshot
                if latest.moment == moment:
                    return latest
                if latest.sequence >= moment.sequence:
                    return self._past(moment)
            if time.monotonic() >= deadline:
                raise StorageError(
                    f"{self.folder}: asked for change {moment.sequence}, and has read "
                    f"{latest.sequence}"
                )
            self._stop.wait(_MOMENT_SECONDS)

    def _past(self, moment: Moment) -> LiveSnapshot:
        for before, tip in self._moments.until(moment.sequence):
            if before.moment == moment:
                return before
            # The log after it may be gone, or hold other changes than those that were read.
            with suppress(StorageError):
                snapshot, tip = self._replayed(before, tip, moment.sequence)
                if snapshot.moment == moment:
                    self._moments.note(snapshot, tip)
                    return snapshot
        raise MomentLostError(
            f"{self.folder}: change {moment.sequence} is past, {self._snapshot.sequence} was read"
        )

    def _catch_up(self, last: int | None = None) -> None:
        """Read the logs to their end, from a newer generation if ours is too old for that.

        With `last`, a change, nothing after that is read.
        """
        try:
            self._read_on(last)
        except StorageError:
            # A record that we have read was cut off again, or our log is gone: then what is there
            # now is whole. Else this says again what is wrong.
            self._adopt(self._newest())

    def _newest(self) -> Generation:
        """Load the generation that counts."""
        return load_current(
            self.folder, self._generation.segments(), shard=self._shard, verify=self._verify
        )

    def _read_on(self, last: int | None = None) -> None:
        stamp = log_stamp(self.folder, self._tip.log)
        # Where one change is waited for, a stamp that a file system keeps for a while says nothing.
        if (
            last is None
            and stamp == self._log_stamp
            and log_stamp(self.folder, self._tip.log + 1) is None
        ):
            return
        self._become(*self._replayed(self._snapshot, self._tip, last))
        # Of before it was read: what was written since changes it.
        self._log_stamp = stamp if last is None else (0, 0)

    def _become(self, snapshot: LiveSnapshot, tip: Tip) -> None:
        """Be another moment from now on."""
        if self._shard is not None and snapshot is not self._snapshot:
            self._moments.note(snapshot, tip)
        self._snapshot, self._tip = snapshot, tip

    def _replayed(
        self, snapshot: LiveSnapshot, tip: Tip, last: int | None = None
    ) -> tuple[LiveSnapshot, Tip]:
        """Return a snapshot with all changes since a tip, up to `last`."""
        draft, shape = Draft(snapshot), ChangeShape.of(snapshot)

        def use(record: LoggedChange) -> None:
            try:
                decode(record.kind, record.content, shape, draft.num_items).apply(draft)
            except RecpruneError as error:
                raise StorageError(f"{record.where}: an impossible change: {error}") from None
            draft.moment = Moment(record.tip.sequence, record.tip.chain)

        tip = read_logs(self.folder, self.identity, tip, use, last)
        return (draft.finish() if draft.moment != snapshot.moment else snapshot), tip

    def _adopt(self, generation: Generation) -> None:
        """Go on from another generation, with all changes since."""
        if generation.identity != self.identity:
            raise StorageError(f"{self.folder}: another catalogue has taken its place")
        if self._shard is not None:
            if generation.snapshot.division != self._division:
                raise self._divided_anew()  # whose shards have other items than those of this one
            self._moments.note(generation.snapshot, generation.tip)
        snapshot, tip = self._replayed(generation.snapshot, generation.tip)
        self._generation = generation
        self._become(snapshot, tip)

    @property
    def _division(self) -> Division:
        return self._snapshot.division

    def _divided_anew(self) -> StorageError:
        return StorageError(f"{self.folder}: was divided anew; open its shards anew")

    def _look(self) -> None:
        """Do what is due after some time: see what others have done."""
        try:
            with self._lock:
                if self._closed:
                    return
                self._catch_up()
                self._moments.sweep()
            if current_stamp(self.folder) != self._current_stamp:
                self._start(self._take_newest)
            if self._has_written and self._is_due():  # it has failed before, or another was at it
                self._start(self.maintain)
            self._unseen = None
        except Exception as error:  # whatever it is, changes are looked for again
            self._unseen = _in_words(error)

    def _take_newest(self) -> None:
        """Load the generation that counts, while changes are still followed by the old one."""
        stamp = current_stamp(self.folder)
        if current_number(self.folder) != self._generation.number:
            if self._shard is not None and read_division(self.folder)[1] != self._division:
                self._current_stamp = stamp  # changes are followed as long as the log is there
                raise self._divided_anew()
            generation = self._newest()
            with self._lock:
                if generation.number > self._generation.number:
                    self._adopt(generation)
        self._current_stamp = stamp

    # Compacting ----------------------------------------------------------------------------------

    def compact(self, *, shards: int | None = None, threads: int = 1) -> Future[None]:
        """Merge everything into one segment, without what has left, in the background.

        Numbers stay the same, and searches and changes go on meanwhile. The result of what is
        returned is there when that is done, or says why it was not. With `shards`, the catalogue is
        divided into so many, as evenly as numbers are, for `ShardedIndex`, and stays so: every
        shard has segments of its own.
        """
        checked_threads(threads)
        with self._lock:
            self._refuse_unusable()
            # Refused at once, where there is no such number of shards.
            count = None if shards is None else Division.even(0, shards).num_shards
            return self._pool().submit(self._rewrite, threads, everything=True, shards=count)

    def maintain(self) -> None:
        """Do now what is else done in the background: make a segment of a tail that is full.

        Nothing is done if that is not due, or if another process is at it.
        """
        self._refuse_shard()
        if not self._is_due():
            return
        try:
            self._rewrite(1, everything=False)
        except LockedError:
            return
        except Exception:
            self._rested = time.monotonic() + _RESTING_SECONDS
            raise

    def _is_due(self) -> bool:
        is_large = is_full(self._snapshot) or self._tip.offset >= _LONG_LOG
        return is_large and time.monotonic() >= self._rested

    def _rewrite(self, threads: int, *, everything: bool, shards: int | None = None) -> None:
        """Begin a new log, and a generation with fewer segments for what was before it."""
        self._refuse_shard()  # which knows its own segments only, and would sweep all others
        seconds = _COMPACTOR_SECONDS if everything else 0.0
        with locked(self.folder / _COMPACTORS, seconds, self._stop):
            with self._lock, locked(self.folder / _WRITERS, _WAITING_SECONDS):
                self._catch_up()
                # Only segments that the newest generation names are sure to stay.
                if current_number(self.folder) != self._generation.number:
                    self._adopt(self._newest())
                division = self._division
                if shards is not None and shards != division.num_shards:
                    division = Division.even(self._snapshot.num_items, shards)
                elif everything and is_settled(self._snapshot) and self._snapshot.notes.is_saved:
                    return
                end_log(self.folder, self._tip)
                self._tip = begin_log(self.folder, self.identity, self._tip)
                before, snapshot, tip = self._generation, self._snapshot, self._tip
            try:
                segments = (
                    self._merged(snapshot, threads, everything=everything)
                    if division == snapshot.division
                    else self._divided(snapshot, division, threads)
                )
                generation = self._generation_after(before, snapshot, tip, segments, division)
                name_current(self.folder, generation.number)
            except BaseException:
                # What was saved for it is named by none; the next attempt saves it again.
                sweep(self.folder, [before])
                raise
            with self._lock:
                self._adopt(generation)
                self._current_stamp = current_stamp(self.folder)
            # Whoever is just opening the one before finds it whole.
            sweep(self.folder, [before, generation])

    def _merged(
        self, snapshot: LiveSnapshot, threads: int, *, everything: bool
    ) -> list[PresentSegment]:
        """Return fewer segments, in which the tail is too; all are saved."""
        segments: list[PresentSegment] = []
        for shard in range(snapshot.division.num_shards):
            part = snapshot.of_shard(shard)
            if is_settled(part):
                segments += part.segments
                continue
            chosen = to_merge(part, everything=everything)
            segments += [at for at in part.segments if at not in chosen]
            if chosen or len(part.tail):
                segments.append(self._saved(merge(part, chosen, threads), shard))
        return segments

    def _divided(
        self, snapshot: LiveSnapshot, division: Division, threads: int
    ) -> list[PresentSegment]:
        """Return one segment for each shard of another division; all are saved."""
        parts = divided(snapshot, division, threads)
        return [self._saved(segment, shard) for shard, segment in enumerate(parts)]

    def _saved(self, segment: Segment, shard: int) -> PresentSegment:
        name = next_segment_name(self.folder)
        segment = save_segment(segment_folder(self.folder, name), name, segment)
        return PresentSegment(segment, None, segment.index.num_items, shard)

    def _generation_after(
        self,
        before: Generation,
        snapshot: LiveSnapshot,
        tip: Tip,
        segments: list[PresentSegment],
        division: Division,
    ) -> Generation:
        """Save the generation after one, which has other segments."""
        base = LiveSnapshot(
            tuple(segments),
            empty_tail(segments[0].segment, snapshot.id_kind),
            snapshot.num_items,
            snapshot.moment,
            snapshot.id_kind,
            division,
            notes=Notes(snapshot.notes.saved()),
        )
        generation = Generation(
            before.number + 1, self.identity, self.made_from, self.origin, base, tip
        )
        write_generation(self.folder, generation)
        return generation

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
        except Exception as error:  # memory may be short, or the disk at fault
            self._undone = _in_words(error)
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


def _begin(
    folder: Path, segment: Segment, id_kind: IdKind, made_from: str | None, origin: str | None
) -> Generation:
    """Write a catalogue of one segment into an empty folder."""
    for name in ("segments", "generations", "logs"):
        (folder / name).mkdir()
    segment = save_segment(segment_folder(folder, 0), 0, segment)
    num_items = segment.index.num_items
    present = PresentSegment(segment, None, num_items)
    tail = empty_tail(segment, id_kind)
    snapshot = LiveSnapshot((present,), tail, num_items, Moment(0, 0), id_kind, WHOLE)
    identity = new_identity()
    tip = begin_log(folder, identity, Tip(-1, 0, 0, 0))
    generation = Generation(0, identity, made_from, origin or identity, snapshot, tip)
    write_generation(folder, generation)
    name_current(folder, generation.number)
    return generation


def _follow(live: weakref.ref[LiveIndex], stop: threading.Event) -> None:
    """Look for changes until it is time to stop; keeps nothing alive."""
    seconds = _FOLLOWING_SECONDS
    while not stop.wait(seconds):
        index = live()
        if index is None:
            return
        index._look()
        seconds = _FOLLOWING_SECONDS if index._shard is None else _SHARD_SECONDS
        if index._unseen:
            seconds = _FAULTY_SECONDS
        del index


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, RecpruneError) else f"{type(error).__name__}: {error}"
