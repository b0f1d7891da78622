"""History → sequence embedding, for serving: with ONNX Runtime, or with torch itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from recprune.models.graph_names import VECTORS
from recprune.models.timelines import AGE_BUCKETS, event_times, gap_and_age_buckets
from recprune.search.checks import checked_count
from recprune.types import (
    Float32Array,
    InputError,
    Int32Array,
    Int64Array,
    StorageError,
    Timeline,
    needs_extra,
)

if TYPE_CHECKING:
    from recprune.models.architectures import SequenceModel

# Positions in one batch: enough that weights are read once for many short histories, and few
# enough that what lies between two layers stays in the cache.
_POSITIONS_AT_ONCE = 512


_BUCKETS = ["gaps", "ages"]


class ExportedEncoder(NamedTuple):
    """An encoder as it is saved: see `export_encoder`."""

    onnx: bytes
    tables: Mapping[str, Float32Array]  # of what is looked up, by the input that takes it


class Encoder(Protocol):
    """What makes sequence embeddings of histories. Safe to share between threads."""

    length: int  # how many items of a history it looks at, at most
    width: int  # d

    def encode(
        self,
        histories: Sequence[Int32Array],
        timelines: Sequence[Timeline | None] | None = None,
    ) -> Float32Array:
        """Return the sequence embeddings φ of histories, of each its last items, [users, d].

        Encoders that do not read times leave timelines aside.
        """
        ...


class ItemVectors:
    """The vectors of items, looked up or put together with NumPy alone."""

    def __init__(self, rows: Float32Array, num_items: int, codes: NDArray[Any] | None) -> None:
        """Use `from_codes` or `from_table`."""
        self.num_items = num_items
        self._rows = rows
        self._codes = codes
        num_splits = 1 if codes is None else codes.shape[1]
        self.width = num_splits * rows.shape[1]  # d
        # Where the sub-items of a split begin.
        self._starts = np.arange(num_splits) * (len(rows) // num_splits)

    @classmethod
    def from_codes(cls, codes: NDArray[Any], sub_item_embeddings: Float32Array) -> ItemVectors:
        """Put vectors together from codes, integers [n, M], and sub-items, float32 [M, B, d/M].

        Every code is less than B, as in an index. The codes are not copied.
        """
        codes, embeddings = np.asarray(codes), np.asarray(sub_item_embeddings)
        _check_floats(embeddings, 3, "sub_item_embeddings", "[M, B, d/M]")
        num_splits = len(embeddings)
        if not np.can_cast(codes.dtype, np.int64) or codes.shape[1:] != (num_splits,):
            given = f"{codes.dtype}{list(codes.shape)}"
            raise InputError(f"codes is {given}, expected integers [n, {num_splits}]")
        # A view, unless the sub-items come from a search index, which has them transposed.
        rows = embeddings.reshape(-1, embeddings.shape[2])
        return cls(rows, len(codes), codes)

    @classmethod
    def from_table(cls, item_embeddings: Float32Array) -> ItemVectors:
        """Look vectors up in a full table, float32 [n, d], which is not copied."""
        table = np.asarray(item_embeddings)
        _check_floats(table, 2, "item_embeddings", "[n, d]")
        return cls(table, len(table), None)

    def __call__(self, items: Int32Array | Int64Array) -> Float32Array:
        """Return the vectors of items, [len, d]."""
        return self.of_sub_items(self.sub_items(checked_history(items, self.num_items, "items")))

    @property
    def num_sub_items(self) -> int:
        """M · B, of all splits; as many as items where each has a vector of its own."""
        return len(self._rows)

    def of_sub_items(self, sub_items: Int64Array) -> Float32Array:
        """Return the vectors of items that are made up of these: [..., d]."""
        return self._rows.take(sub_items, axis=0).reshape(*sub_items.shape[:-1], self.width)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return what the vectors are made of."""
        codes = {} if self._codes is None else {"codes": self._codes}
        return {"rows": self._rows, **codes}

    def sub_items(self, items: Int64Array) -> Int64Array:
        """Return which of all sub-items make up items, which are there: [..., M]."""
        codes = items[..., None] if self._codes is None else self._codes[items]
        return codes + self._starts


def open_session(model: bytes, threads: int) -> Any:
    """Return an ONNX model as ONNX Runtime's session, that runs on so many threads."""
    with needs_extra("onnx"):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = _checked_positive(threads, "threads")
    options.log_severity_level = 3  # errors: what matters is raised
    # Patterns are kept for every shape that was ever seen, and make nothing faster here.
    options.enable_mem_pattern = False
    # Waiting threads do not take cores from searching ones.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Weights of 8 bits are multiplied as such (4), not turned into numbers of 32 bits first.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "4")
    # Weights that a model keeps in other files would be looked for where this process happens to
    # be, so that a stranger's model could have files of ours: they are looked for in no folder.
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", os.devnull
    )
    try:
        # Without a fallback, which would print and try the same once more.
        session = onnxruntime.InferenceSession(
            model,
            options,
            providers=["CPUExecutionProvider"],
            enable_fallback=False,
            # The fused operator takes longer than addition and normalisation.
            disabled_optimizers=["SkipLayerNormFusion"],
        )
        # Names that are not UTF-8 raise here, and not where they are first asked for.
        for value in (*session.get_inputs(), *session.get_outputs()):
            value.name, value.type, value.shape  # noqa: B018
        session.get_modelmeta().custom_metadata_map  # noqa: B018
    except Exception as error:  # ONNX Runtime's own have no other base
        advice = ""
        if "external" in str(error).lower():
            advice = " (its weights have to be inside: torch.onnx.export(…, external_data=False))"
        raise StorageError(f"the encoder is not a usable ONNX model{advice}: {error}") from None
    return session


class OnnxEncoder:
    """Runs an encoder written by `export_encoder`."""

    def __init__(
        self,
        model: bytes,
        vectors: ItemVectors,
        length: int,
        *,
        tables: Mapping[str, Float32Array] | None = None,
        threads: int = 1,
    ) -> None:
        self._session = open_session(model, threads)
        self._vectors = vectors
        self._tables = tables or {}
        self._memory = threading.local()  # for the sums of a thread
        from recprune._native import add_rows  # here: models are trained without the core

        self._add_rows = add_rows
        self.length = _checked_positive(length, "length")
        self.width = vectors.width
        self._check()

    def encode(
        self,
        histories: Sequence[Int32Array],
        timelines: Sequence[Timeline | None] | None = None,
    ) -> Float32Array:
        return _encode_by_length(
            histories, timelines, self.length, self._vectors.num_items, self.width, self._run
        )

    def _run(self, items: Int64Array, timelines: list[Timeline | None]) -> Float32Array:
        length, sub_items = items.shape[1], self._vectors.sub_items(items)
        inputs: dict[str, NDArray[Any]] = {VECTORS: self._vectors.of_sub_items(sub_items)}
        added: NDArray[Any] = np.arange(self._longest - length, self._longest)
        if self._reads_times:
            inputs["gaps"], inputs["ages"] = gap_and_age_buckets(timelines, length)
            added = inputs["gaps"]
        if self._tables:
            inputs |= self._looked_up(sub_items, added)
        try:
            found: Float32Array = self._session.run(None, inputs)[0]
        except Exception as error:  # ONNX Runtime's own have no other base
            raise StorageError(f"the encoder cannot run: {error}") from None
        expected = (len(items), self.width)
        if found.dtype != np.float32 or found.shape != expected:
            given = f"{found.dtype}{list(found.shape)}"
            raise StorageError(f"the encoder returns {given}, expected float32{list(expected)}")
        return found

    def _looked_up(self, sub_items: Int64Array, added: NDArray[Any]) -> dict[str, Float32Array]:
        """Return the sums of the rows of every item, and of the row that is added to it."""
        *shape, num_splits = sub_items.shape
        places = np.empty((*shape, num_splits + 1), np.int64)
        places[..., :-1] = sub_items
        places[..., -1] = self._vectors.num_sub_items + added
        rows = places.reshape(-1, num_splits + 1)
        found = {}
        for name, table in self._tables.items():
            sums = self._sums(name, len(rows), table.shape[1])
            self._add_rows(table, rows, sums)
            found[name] = sums.reshape(*shape, -1)
        return found

    def _sums(self, name: str, count: int, columns: int) -> Float32Array:
        """Return an array that this thread has used before, if it is large enough.

        New memory of this size comes from the system, page by page, which takes longer than adding.
        """
        of_thread: dict[str, Float32Array] = self._memory.__dict__.setdefault("sums", {})
        kept = of_thread.get(name)
        if kept is None or len(kept) < count:
            kept = np.empty((max(count, _POSITIONS_AT_ONCE), columns), np.float32)
            of_thread[name] = kept
        return kept[:count]

    def _check(self) -> None:
        """Refuse a model that is not an encoder, or not one of these items and this length."""
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        names = [value.name for value in (*inputs, *outputs)]
        self._reads_times = names[-3:-1] == _BUCKETS
        expected = [VECTORS, *self._tables, *(_BUCKETS if self._reads_times else [])]
        longest = self._session.get_modelmeta().custom_metadata_map.get("length", "")
        if sorted(names) != sorted([*expected, "sequence_embedding"]) or not longest.isdecimal():
            raise StorageError(f"the ONNX model is not an encoder: it has {', '.join(names)}")
        self._longest = int(longest)
        columns = {value.name: value.shape[-1] for value in inputs}
        width = columns[VECTORS]
        if width != self.width:
            raise InputError(f"the encoder takes vectors of {width}, those of items {self.width}")
        if self.length > self._longest:
            raise InputError(f"length is {self.length}, expected at most the model's {longest}")
        added = AGE_BUCKETS if self._reads_times else self._longest
        for name, table in self._tables.items():
            shape = (self._vectors.num_sub_items + added, columns[name])
            if table.dtype != np.float32 or table.shape != shape:
                given = f"{table.dtype}{list(table.shape)}"
                raise StorageError(f"table {name} is {given}, expected float32{list(shape)}")


class TorchEncoder:
    """Runs a model as it is, where it is, on as many threads as torch is set to use."""

    def __init__(self, model: SequenceModel, length: int) -> None:
        """Take a model over: it is put into evaluation mode."""
        longest = model.longest_history
        self.length = _checked_positive(length, "length")
        if self.length > longest:
            raise InputError(f"length is {length}, expected at most the model's {longest}")
        self._model = model.eval()
        self.width = model.embedding.width

    def encode(
        self,
        histories: Sequence[Int32Array],
        timelines: Sequence[Timeline | None] | None = None,
    ) -> Float32Array:
        num_items = self._model.embedding.num_items
        return _encode_by_length(
            histories, timelines, self.length, num_items, self.width, self._run
        )

    def _run(self, items: Int64Array, timelines: list[Timeline | None]) -> Float32Array:
        import torch

        model = self._model
        times = []
        if model.reads_times:
            known = torch.from_numpy(event_times(timelines, items.shape[1]))
            times.append(known.to(model.norm.weight.device))
        with torch.inference_mode():
            chosen = torch.from_numpy(items).to(model.norm.weight.device)
            found = model.encode_last(model.embedding.vectors(chosen), *times)
            array: Float32Array = found.float().cpu().numpy()
        return array


def _encode_by_length(
    histories: Sequence[Int32Array],
    timelines: Sequence[Timeline | None] | None,
    length: int,
    num_items: int,
    width: int,
    run: Callable[[Int64Array, list[Timeline | None]], Float32Array],
) -> Float32Array:
    """Run histories of one length together; return the results in the order of the histories."""
    known = _checked_timelines(timelines, histories)
    cut: list[Int64Array] = []
    by_length: dict[int, list[int]] = {}
    for user, history in enumerate(histories):
        items = checked_history(history, num_items, f"histories[{user}]")[-length:]
        if not len(items):
            raise InputError(f"histories[{user}] is empty: there is nothing to encode")
        cut.append(items)
        by_length.setdefault(len(items), []).append(user)
    if len(cut) == 1:  # as a service asks: nothing to put together
        return run(cut[0][None], [known[0]])
    found = np.empty((len(cut), width), np.float32)
    for count, users in by_length.items():
        at_once = max(1, _POSITIONS_AT_ONCE // count)
        for first in range(0, len(users), at_once):
            chosen = users[first : first + at_once]
            items = np.stack([cut[user] for user in chosen])
            found[chosen] = run(items, [known[user] for user in chosen])
    return found


def _checked_timelines(
    timelines: Sequence[Timeline | None] | None, histories: Sequence[Int32Array]
) -> Sequence[Timeline | None]:
    """Return timelines that are as long as their histories, None where there are none."""
    if timelines is None:
        return [None] * len(histories)
    if len(timelines) != len(histories):
        raise InputError(f"{len(timelines)} timelines for {len(histories)} histories")
    for user, (timeline, history) in enumerate(zip(timelines, histories, strict=True)):
        if timeline is not None and len(timeline.times) != len(history):
            given, expected = len(timeline.times), len(history)
            raise InputError(f"timelines[{user}] has {given} times for a history of {expected}")
    return timelines


def checked_history(items: Any, num_items: int, name: str) -> Int64Array:
    """Return item ids as int64."""
    array = np.asarray(items)
    if not array.size and array.ndim == 1:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(f"{name} is {array.dtype}{list(array.shape)}, expected item ids, [items]")
    if array.min() < 0 or array.max() >= num_items:
        place = int(((array < 0) | (array >= num_items)).argmax())
        raise InputError(f"{name}[{place}] is {array[place]}, expected 0 to {num_items - 1}")
    return array.astype(np.int64, copy=False)


def _checked_positive(count: Any, name: str) -> int:
    checked = checked_count(count, name)
    if checked < 1:
        raise InputError(f"{name} is {checked}, expected 1 or more")
    return checked


def _check_floats(array: NDArray[Any], dimensions: int, name: str, expected: str) -> None:
    if array.dtype != np.float32 or array.ndim != dimensions or 0 in array.shape[1:]:
        raise InputError(f"{name} is {array.dtype}{list(array.shape)}, expected float32 {expected}")
