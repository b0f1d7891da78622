"""The log of changes: a file that only grows, a record for every change, flushed before it counts.

A record has a sequence number, the checksum of the record before it, and one of its own over all of
it. So a record that was cut short, damaged, or written by another history is told from a whole one.
What stands behind the last whole record of the last log was never acknowledged, and is cut off by
the next writer; anything else that is not whole is damage, and an error.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from recprune.live.changes import MOST_BYTES
from recprune.storage import writing_file
from recprune.types import StorageError

_MAGIC = b"rplog\x00\x01\n"  # and its format version
# Magic, the catalogue's identity, the sequence number before the first record, its checksum.
_HEAD = struct.Struct("<8s16sQI")
_MARK = b"\xc3chg"  # how a record begins
_CLOSELY = 16  # times that a torn end may be read to tell it from damage
# Mark, kind, length of the content, checksum of the record before, sequence number.
_RECORD = struct.Struct("<4sIIIQ")
_CHECKSUM = struct.Struct("<I")
HEAD_BYTES = _HEAD.size + _CHECKSUM.size


class Tip(NamedTuple):
    """How far the logs were read, or written."""

    log: int  # its number
    offset: int  # in its file
    sequence: int  # of the last change
    chain: int  # the checksum of the last record


class LoggedChange(NamedTuple):
    """One change, as it stands in a log."""

    kind: int
    content: memoryview
    where: str  # for messages
    tip: Tip  # after it


def log_path(folder: Path, number: int) -> Path:
    return folder / "logs" / f"{number:08}.log"


def begin_log(folder: Path, identity: str, tip: Tip) -> Tip:
    """Make the log after that of `tip`, which ends there; return where it begins."""
    number = tip.log + 1
    head = _HEAD.pack(_MAGIC, bytes.fromhex(identity), tip.sequence, tip.chain)
    path = log_path(folder, number)
    with writing_file(path) as temporary:
        temporary.write_bytes(head + _CHECKSUM.pack(zlib.crc32(head)))
    return Tip(number, HEAD_BYTES, tip.sequence, tip.chain)


def log_stamp(folder: Path, number: int) -> tuple[int, int] | None:
    """Return what changes whenever a log does: size and time; None where there is no such log."""
    try:
        found = log_path(folder, number).stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def read_logs(
    folder: Path,
    identity: str,
    tip: Tip,
    use: Callable[[LoggedChange], None],
    last: int | None = None,
) -> Tip:
    """Use every change after a tip, in its log and all later ones; return the last tip.

    That is before whatever is not a whole record, if nothing whole comes after it and the log is
    the last; or after the change `last`.
    """
    while True:
        # Asked first: where there is a later log, nothing more is written to this one.
        is_last = log_stamp(folder, tip.log + 1) is None
        content = _read_from(folder, identity, tip)
        for record in _records_in(content, tip, str(log_path(folder, tip.log)), is_last):
            if record.tip.sequence - 1 == last:
                return tip
            use(record)
            tip = record.tip
        if is_last:
            return tip
        tip = Tip(tip.log + 1, HEAD_BYTES, tip.sequence, tip.chain)


def _read_from(folder: Path, identity: str, tip: Tip) -> memoryview:
    """Return the bytes of a log after a tip; its head is checked."""
    path = log_path(folder, tip.log)
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            if len(head) < HEAD_BYTES or head[-4:] != _CHECKSUM.pack(zlib.crc32(head[:-4])):
                raise StorageError(f"{path}: not a log of changes, or its head is damaged")
            magic, own, sequence, chain = _HEAD.unpack_from(head)
            if magic != _MAGIC:
                raise StorageError(f"{path}: not a log of changes that this recprune reads")
            if own.hex() != identity:
                raise StorageError(f"{path}: a log of another catalogue")
            if tip.offset == HEAD_BYTES and (sequence, chain) != (tip.sequence, tip.chain):
                raise StorageError(
                    f"{path}: begins after change {sequence}, expected {tip.sequence}"
                )
            # Whoever has read a record that was never acknowledged finds another one in its place,
            # or none.
            file.seek(tip.offset - _CHECKSUM.size)
            before = file.read(_CHECKSUM.size)
            if tip.offset > HEAD_BYTES and before != _CHECKSUM.pack(tip.chain):
                raise StorageError(f"{path}: change {tip.sequence} is not the one that was read")
            return memoryview(file.read())
    except MemoryError:
        raise StorageError(f"{path}: too long to be read") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror or error}") from None


def _records_in(content: memoryview, tip: Tip, path: str, is_last: bool) -> Iterator[LoggedChange]:
    place = 0
    while place < len(content):
        where = f"{path}, byte {tip.offset}"
        found = _whole_record(content, place)
        if found is None:
            if not is_last or _has_whole_record(content, place + 1, tip.sequence):
                raise StorageError(f"{where}: a damaged record, and others after it")
            return
        kind, end, previous, sequence = found
        if (sequence, previous) != (tip.sequence + 1, tip.chain):
            raise StorageError(
                f"{where}: change {sequence}, which does not follow change {tip.sequence}"
            )
        inner = content[place + _RECORD.size : end - _CHECKSUM.size]
        chain = _CHECKSUM.unpack_from(content, end - _CHECKSUM.size)[0]
        tip = Tip(tip.log, tip.offset + end - place, sequence, chain)
        yield LoggedChange(kind, inner, where, tip)
        place = end


def _whole_record(content: memoryview, place: int) -> tuple[int, int, int, int] | None:
    """Return kind, end, checksum before and sequence of a record; None if it is not whole."""
    if len(content) - place < _RECORD.size + _CHECKSUM.size:
        return None
    mark, kind, length, previous, sequence = _RECORD.unpack_from(content, place)
    end = place + _RECORD.size + length + _CHECKSUM.size
    if mark != _MARK or length > MOST_BYTES or end > len(content):
        return None
    body = content[place : end - _CHECKSUM.size]
    if _CHECKSUM.unpack_from(content, end - _CHECKSUM.size)[0] != zlib.crc32(body):
        return None
    return kind, end, previous, sequence


def _has_whole_record(content: memoryview, place: int, sequence: int) -> bool:
    """Whether a later change stands anywhere behind a place.

    Also true of what only pretends to be many of them: to look closely at each would take too long.
    """
    octets = bytes(content[place:])
    left = _CLOSELY * len(octets)  # bytes that may be looked at
    found = octets.find(_MARK)
    while found >= 0:
        record = _whole_record(content, place + found)
        if record is not None and record[3] > sequence:
            return True
        left -= min(_claimed_bytes(content, place + found), len(octets))
        if left < 0:
            return True
        found = octets.find(_MARK, found + 1)
    return False


def _claimed_bytes(content: memoryview, place: int) -> int:
    """Return how long a record says that it is."""
    if len(content) - place < _RECORD.size:
        return 0
    return int(_RECORD.unpack_from(content, place)[2])


def append_record(folder: Path, tip: Tip, kind: int, content: bytes) -> Tip:
    """Write one change behind a tip and flush it to disk; return the tip after it.

    If that fails, the log is as it was. Pre: the caller alone writes, and the tip is the last one.
    """
    path = log_path(folder, tip.log)
    record = _RECORD.pack(_MARK, kind, len(content), tip.chain, tip.sequence + 1) + content
    chain = zlib.crc32(record)
    record += _CHECKSUM.pack(chain)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from None
    try:
        if os.fstat(descriptor).st_size > tip.offset:  # cut short, by a writer that is gone
            os.ftruncate(descriptor, tip.offset)
        try:
            _write_all(descriptor, record, tip.offset)
            os.fsync(descriptor)
        except OSError as error:
            _cut_back(descriptor, tip.offset, path, error)
            raise
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        os.close(descriptor)
    return Tip(tip.log, tip.offset + len(record), tip.sequence + 1, chain)


def end_log(folder: Path, tip: Tip) -> None:
    """Cut off what stands behind the last whole record, and flush that. Pre: as `append_record`.

    The record may be one whose writer was killed before it was flushed. The next log goes on from
    it, so it must not be lost any more.
    """
    path = log_path(folder, tip.log)
    try:
        with path.open("r+b") as file:
            file.truncate(tip.offset)
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from None


class BrokenLogError(StorageError):
    """A log that could not be written, nor be put back to what it was."""


def _write_all(descriptor: int, content: bytes, offset: int) -> None:
    left = memoryview(content)
    while left:
        written = os.pwrite(descriptor, left, offset)
        offset += written
        left = left[written:]


def _cut_back(descriptor: int, offset: int, path: Path, reason: OSError) -> None:
    try:
        os.ftruncate(descriptor, offset)
        os.fsync(descriptor)
    except OSError as error:
        raise BrokenLogError(
            f"{path}: cannot be written ({reason.strerror}), nor cut back: {error.strerror}"
        ) from None
