"""An encoder from elsewhere: numbers of items in, padded to one length; sequence embeddings out.

It is an ONNX model or a function. Nothing is known of what happens inside, so that a history is
given in one form whatever is asked beside it, and what comes back is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import numpy as np

from recprune.models.inference import ExportedEncoder, checked_history, open_session
from recprune.search.checks import checked_count
from recprune.types import (
    Float32Array,
    InputError,
    Int32Array,
    Int64Array,
    Json,
    StorageError,
    Timeline,
    frozen,
)
from recprune.vectors.rotation import turned
from recprune.vectors.vector_index import checked_vectors

PadSide = Literal["left", "right"]

# Histories in one call: what attention takes for them is the square of their length for each.
_HISTORIES_AT_ONCE = 256
_LONGEST = 65_536  # items of a history: more is a mistake, or a stranger's
_INTEGERS = {"tensor(int32)": np.int32, "tensor(int64)": np.int64}
_FLOATS = "tensor(float)"  # of 32 bits


@dataclass(frozen=True)
class PaddedForm:
    """How histories are given: their last `length` items, and before or after them padding."""

    length: int
    padding: int  # the number that stands where a history has no item
    pad_side: PadSide

    def __post_init__(self) -> None:
        if not 1 <= checked_count(self.length, "length") <= _LONGEST:
            raise InputError(f"length is {self.length}, expected 1 to {_LONGEST}")
        if not -1 <= checked_count(self.padding, "padding") < 2**31:
            raise InputError(f"padding is {self.padding}, expected -1 to below 2^31")
        if self.pad_side not in get_args(PadSide):
            expected = " or ".join(get_args(PadSide))
            raise InputError(f"pad_side is {self.pad_side!r}, expected {expected}")

    @classmethod
    def from_json(cls, values: Any) -> PaddedForm:
        """Return the form that `to_json` wrote; a file may say anything."""
        names = [field.name for field in fields(cls)]
        if not isinstance(values, Mapping) or sorted(values) != sorted(names):
            raise StorageError(f"encoder is {values!r:.80}, expected {', '.join(names)}")
        return cls(**values)

    def to_json(self) -> Json:
        """Return the form as plain values."""
        return asdict(self)

    def rows(self, histories: Sequence[Int64Array]) -> Int64Array:
        """Return histories of numbers, none of them empty, as [histories, length]."""
        rows = np.full((len(histories), self.length), self.padding, np.int64)
        for row, history in zip(rows, histories, strict=True):
            last = history[-self.length :]
            if self.pad_side == "left":
                row[-len(last) :] = last
            else:
                row[: len(last)] = last
        return rows


class ForeignEncoder:
    """Asks an ONNX model or a function for sequence embeddings."""

    def __init__(
        self,
        answer: Callable[[Int64Array], Any],
        form: PaddedForm,
        item_numbers: Int32Array,
        width: int,
        *,
        rotation: Float32Array | None = None,
        onnx: bytes | None = None,
        at_once: int = _HISTORIES_AT_ONCE,
    ) -> None:
        """Take a function of [histories, length] that returns floats [histories, width].

        `item_numbers` are what items are called there, by internal id. Where the index is of turned
        vectors, the function returns them unturned, and `rotation` [width, d] turns them. It is
        asked at once for two histories, to say here what would otherwise fail at the first
        recommendation. `onnx` is the model that answers, if it is one, as it is saved.
        """
        frozen(item_numbers)
        self.form = form
        self.length = form.length
        self.width = width
        self.rotation = rotation
        self.item_numbers = item_numbers
        self._given_width = _given_width(width, rotation)
        self._answer = answer
        self._onnx = onnx
        self._at_once = at_once
        if (item_numbers == form.padding).any():
            item = int((item_numbers == form.padding).argmax())
            raise InputError(f"padding is {form.padding}, which is the number of item {item} too")
        self._try()

    @classmethod
    def of_onnx(
        cls,
        model: bytes,
        form: PaddedForm,
        item_numbers: Int32Array,
        width: int,
        threads: int,
        *,
        rotation: Float32Array | None = None,
    ) -> ForeignEncoder:
        """Run an ONNX model, if its one input and its one output are of the right types."""
        session = open_session(model, threads)
        kind, at_once = _checked_ends(session, form.length, _given_width(width, rotation))
        from onnxruntime import RunOptions

        (name,) = (value.name for value in session.get_inputs())
        options = RunOptions()
        options.log_severity_level = 4  # what fails is raised, and not printed as well

        def answer(rows: Int64Array) -> Any:
            try:
                return session.run(None, {name: rows.astype(kind, copy=False)}, options)[0]
            except Exception as error:  # ONNX Runtime's own have no other base
                raise StorageError(f"the encoder cannot run: {error}") from None

        return cls(
            answer, form, item_numbers, width, rotation=rotation, onnx=model, at_once=at_once
        )

    def encode(
        self,
        histories: Sequence[Int32Array],
        timelines: Sequence[Timeline | None] | None = None,  # noqa: ARG002 # as `Encoder` has it
    ) -> Float32Array:
        """Return the sequence embeddings of histories, turned; timelines are left aside."""
        given = []
        for user, history in enumerate(histories):
            items = checked_history(history, len(self.item_numbers), f"histories[{user}]")
            if not len(items):
                raise InputError(f"histories[{user}] is empty: there is nothing to encode")
            given.append(self.item_numbers[items[-self.length :]].astype(np.int64))
        found = np.empty((len(given), self.width), np.float32)
        for first in range(0, len(given), self._at_once):
            part = slice(first, first + self._at_once)
            found[part] = self._checked_answer(self.form.rows(given[part]))
        return found

    def exported(self) -> ExportedEncoder:
        """Return the model as it is saved."""
        if self._onnx is None:
            raise InputError(
                "the encoder is a Python function, which is not saved: give an ONNX model of it to "
                "`Recommender.from_encoder`, such as torch.onnx.export writes"
            )
        return ExportedEncoder(self._onnx, {})

    def _checked_answer(self, rows: Int64Array) -> Float32Array:
        name, width = "what the encoder returns", self._given_width
        found = checked_vectors(self._answer(rows), name)
        if found.shape != (len(rows), width):
            raise InputError(
                f"the encoder returns {list(found.shape)} for {len(rows)} histories, expected "
                f"[{len(rows)}, {width}]: vectors of the index are {width} wide"
            )
        return found if self.rotation is None else turned(found, self.rotation, name)

    def _try(self) -> None:
        """Ask for the items of the lowest and of the highest number."""
        if not len(self.item_numbers):
            return
        first, last = int(self.item_numbers.argmin()), int(self.item_numbers.argmax())
        try:
            self.encode([np.array([item], np.int32) for item in (first, last)])
        except StorageError as error:
            least, most = self.item_numbers[[first, last]].tolist()
            raise InputError(
                f"{error} (its items have the numbers {least} to {most}, and padding is "
                f"{self.form.padding})"
            ) from None


def _given_width(width: int, rotation: Float32Array | None) -> int:
    """Return how wide vectors are before they are turned."""
    return width if rotation is None else rotation.shape[1]


def _checked_ends(session: Any, length: int, width: int) -> tuple[type[Any], int]:
    """Return the type of the input, and how many histories it takes at once."""
    inputs, outputs = session.get_inputs(), session.get_outputs()
    expected = f"one input, int32 or int64 [histories, {length}], and one output, "
    expected += f"float32 [histories, {width}]"
    wrong = InputError(f"the ONNX model has {_said(inputs)} and {_said(outputs)}, not {expected}")
    if len(inputs) != 1 or len(outputs) != 1:
        raise wrong
    (given,), (found,) = inputs, outputs
    if given.type not in _INTEGERS or found.type != _FLOATS:
        raise wrong
    for end, last in ((given, length), (found, width)):
        # What is not a number may be any.
        if len(end.shape) != 2 or (isinstance(end.shape[1], int) and end.shape[1] != last):
            raise wrong
    histories = given.shape[0]
    if isinstance(histories, int) and histories != 1:
        raise InputError(
            f"the ONNX model takes {histories} histories, no more and no fewer: its first axis has "
            "to be 1, or dynamic"
        )
    return _INTEGERS[given.type], 1 if histories == 1 else _HISTORIES_AT_ONCE


def _said(values: Sequence[Any]) -> str:
    """Return inputs or outputs as a person reads them."""
    return ", ".join(
        f"{value.name!r} {value.type.removeprefix('tensor(').removesuffix(')')}"
        f"[{', '.join(map(str, value.shape))}]"
        for value in values
    )
