"""Continues the encoder `continued`: φ after a further item, from what was kept of those before.

NumPy alone, as ONNX Runtime would take longer to be called than a position takes. A product with
the states of one position reads each weight once, so those that take the same input are one
matrix, and what normalisation scales and shifts is multiplied into it.

What is kept is bound to the items that it stands for: before it is used, these are compared with
the history that is asked about, and where they do not lead there, all is encoded anew. So nothing
that happens to a history can make an answer wrong: late events, a history that was cut, a state of
another process. In exact arithmetic φ is that of the last `length` items encoded at once; in
float32 it differs by rounding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recprune.models.inference import ItemVectors
from recprune.models.settings import ModelSettings
from recprune.types import Float32Array, Float64Array, Int32Array, StorageError

_MOST_NEW = 32  # items by which a state is continued; for more, all are encoded at once
_NORM_EPSILON = 1e-5  # as torch has it
_FORM = b"1"  # of states; to be raised where the same weights would give others


class KeptState(NamedTuple):
    """What an encoder keeps of a history."""

    items: Int32Array  # the last `length`, or all
    rows: Float32Array  # keys and values of the last ones, as far as a block looks back
    embedding: Float32Array  # φ, [d]


class Continuation:
    """The encoder `continued`, item by item. Safe to share between threads."""

    def __init__(
        self, weights: Mapping[str, NDArray[Any]], settings: ModelSettings, vectors: ItemVectors
    ) -> None:
        """Take the encoder out of a model's arrays."""
        self.length = settings.length
        self.width = settings.width
        self._vectors = vectors
        parts = _Weights(weights)
        biases = parts("positions.table", settings.length, -1).T.astype(np.float32)
        self._blocks = [
            _Block(parts, f"blocks.{place}.", settings, biases, place)
            for place in range(settings.num_blocks)
        ]
        self._norm = [
            parts(f"norm.{part}", settings.width).astype(np.float32) for part in ("weight", "bias")
        ]
        self.row_width = sum(block.kept for block in self._blocks)
        self.most_rows = max(settings.reaches)
        self.behind = settings.length - 1 - settings.reaches[-1]  # items that a row depends on
        self.fingerprint = _fingerprint(weights, vectors)

    def anew(self, history: Int32Array) -> KeptState:
        """Return the state of a history with items in it."""
        items = np.asarray(history[-self.length :], np.int32)
        return self._state(items, np.empty((0, self.row_width), np.float32), len(items))

    def continued(self, before: KeptState, history: Int32Array) -> KeptState | None:
        """Return the state of a history, given one of a part of it, or None if it is of another.

        That of the whole is returned as it is.
        """
        items = np.asarray(history[-self.length :], np.int32)
        new = new_items(before.items, items, self.length)
        if not new:
            return None if new is None else before
        return self._state(items, before.rows, new)

    def _state(self, items: Int32Array, rows: Float32Array, count: int) -> KeptState:
        """Return the state of some items, so many of which are new, and have no rows yet."""
        looked_at = items[max(0, len(items) - count - self.most_rows) :]
        sub_items = self._vectors.sub_items(looked_at.astype(np.int64))
        vectors = self._vectors.of_sub_items(sub_items)
        states = vectors[-count:]
        added = []
        first = 0
        for block in self._blocks:
            # What lies before the window is looked at by positions that do not count any more.
            seen = min(len(rows), block.reach, len(items) - count)
            kept = rows[len(rows) - seen :, first : first + block.kept]
            states, own = block(states, kept, vectors)
            added.append(own)
            first += block.kept
        new_rows = min(count, self.most_rows)
        old_rows = min(len(rows), self.most_rows - new_rows)
        # An array of its own: a part of another one would keep all of that in memory.
        kept_rows = np.concatenate(
            [rows[len(rows) - old_rows :], np.concatenate(added, axis=1)[count - new_rows :]]
        )
        scale, shift = self._norm
        embedding = _normalised(states[-1:])[0] * scale + shift
        return KeptState(items.copy(), kept_rows, embedding)


class _Block:
    """A block of the encoder; its keys and values are rows [positions, kept]."""

    def __init__(
        self,
        parts: _Weights,
        name: str,
        settings: ModelSettings,
        biases: Float32Array,
        place: int,
    ) -> None:
        width, narrow, heads = settings.width, settings.kept_width, settings.num_heads
        inner = settings.inner_width
        self.reach = settings.reaches[place]
        self._heads, self._narrow = heads, narrow
        self._biases = np.ascontiguousarray(biases[place * heads : (place + 1) * heads])
        self._first = place == 0
        layers = {"key": narrow, "attention_gate": width, "query": heads * narrow}
        weight, bias = parts.layer(f"{name}value", width, width)
        self._value = weight.astype(np.float32)
        self.kept = narrow
        if not self._first:
            self.kept += narrow
            layers = {"key": narrow, "narrow": narrow} | layers
            spread, more = parts.layer(f"{name}spread", heads * narrow, width)
            self._spread = _columns(spread)
            bias = bias + more
        self._bias = bias.astype(np.float32)
        stacked = {one: parts.layer(f"{name}{one}", width, out) for one, out in layers.items()}
        # Scores are divided by this; and what a key's bias adds to all of a query is lost.
        stacked["query"] = tuple(part * narrow**-0.5 for part in stacked["query"])
        stacked["key"] = stacked["key"][0], np.zeros(narrow)
        norm = parts.norm(f"{name}attention_norm", width)
        self._attention = _after_norm(norm, [*stacked.values()])
        network = [
            parts.layer(f"{name}{one}", width, out)
            for one, out in (("inner", inner), ("inner_factor", inner), ("network_gate", width))
        ]
        self._network = _after_norm(parts.norm(f"{name}network_norm", width), network)
        weight, bias = parts.layer(f"{name}outer", inner, width)
        self._outer = _columns(weight), bias.astype(np.float32)
        self._width, self._inner = width, inner

    def __call__(
        self, states: Float32Array, kept: Float32Array, vectors: Float32Array
    ) -> tuple[Float32Array, Float32Array]:
        """Return the next states of new positions, and their rows.

        Given are the rows before these, of which all are looked at by the first new position, and
        the vectors of all items that are looked at.
        """
        count, width, narrow = len(states), self._width, self._narrow
        weight, bias = self._attention
        projected = _normalised(states) @ weight
        projected += bias
        own = projected[:, : self.kept]
        gate = projected[:, self.kept : self.kept + width]
        query = projected[:, self.kept + width :].reshape(count * self._heads, narrow)
        seen = np.concatenate([kept, own]) if len(kept) else own
        scores = (query @ seen[:, :narrow].T).reshape(count, self._heads, len(seen))
        scores += self._distances(count, len(seen))
        scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
        shares = np.exp(scores, out=scores)
        shares /= np.add.reduce(shares, axis=-1, keepdims=True)
        attended = self._of_items(shares, vectors[len(vectors) - len(seen) :])
        attended += self._bias
        if not self._first:
            attended += (shares @ seen[:, narrow:]).reshape(count, -1) @ self._spread
        attended *= _sigmoid(gate)
        states = states + attended
        weight, bias = self._network
        projected = _normalised(states) @ weight
        projected += bias
        inside = projected[:, : self._inner]
        inside = inside * _sigmoid(inside) * projected[:, self._inner : 2 * self._inner]
        weight, bias = self._outer
        states += _sigmoid(projected[:, 2 * self._inner :]) * (inside @ weight + bias)
        return states, own

    def _of_items(self, shares: Float32Array, vectors: Float32Array) -> Float32Array:
        """Return a weighted mean of values of items: of each head, its part of the numbers."""
        count, weight = len(shares), self._value
        if count == 1:  # then a mean of the vectors is less to be multiplied
            means = shares[0] @ vectors
            parts = weight.reshape(self._heads, -1, self._width)
            found: Float32Array = np.matmul(parts, means[:, :, None]).reshape(1, -1)
            return found
        values = (vectors @ weight.T).reshape(len(vectors), self._heads, -1)
        by_head = shares.swapaxes(0, 1) @ values.swapaxes(0, 1)  # [heads, count, d / heads]
        return by_head.swapaxes(0, 1).reshape(count, -1)

    def _distances(self, count: int, positions: int) -> Float32Array:
        """Return what is added to scores, [queries, heads, positions], of the last positions."""
        if count == 1:
            return self._biases[None, :, self._biases.shape[1] - positions :]
        ago = np.arange(positions - count, positions)[:, None] - np.arange(positions)
        found = self._biases[:, self._biases.shape[1] - 1 - ago.clip(0, self.reach)]
        found[:, (ago < 0) | (ago > self.reach)] = -np.inf
        return found.swapaxes(0, 1)


class _Weights:
    """A model's arrays, by name, checked."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._arrays = arrays

    def __call__(self, name: str, *shape: int) -> Float64Array:
        """Return an array of a shape, in which −1 is any number."""
        if name not in self._arrays:
            raise StorageError(f"the encoder has no {name}")
        array = self._arrays[name]
        pairs = zip(array.shape, shape, strict=False)
        if len(array.shape) != len(shape) or any(a != b for a, b in pairs if b != -1):
            raise StorageError(f"{name} is {list(array.shape)}, expected {list(shape)}")
        return array.astype(np.float64)

    def layer(self, name: str, incoming: int, outgoing: int) -> tuple[Float64Array, Float64Array]:
        return self(f"{name}.weight", outgoing, incoming), self(f"{name}.bias", outgoing)

    def norm(self, name: str, width: int) -> tuple[Float64Array, Float64Array]:
        return self(f"{name}.weight", width), self(f"{name}.bias", width)


def _after_norm(
    norm: tuple[Float64Array, Float64Array], layers: Sequence[tuple[Float64Array, ...]]
) -> tuple[Float32Array, Float32Array]:
    """Return layers that take the same normalised input as one, of what is normalised only."""
    scale, shift = norm
    weight = np.concatenate([weight for weight, _ in layers])
    bias = np.concatenate([bias for _, bias in layers]) + weight @ shift
    return _columns(weight * scale), bias.astype(np.float32)


def _columns(weight: Float64Array) -> Float32Array:
    """Return a weight [out, in] as what inputs are multiplied by, [in, out]."""
    return np.ascontiguousarray(weight, np.float32).T


def _normalised(states: Float32Array) -> Float32Array:
    share = np.float32(1.0 / states.shape[-1])
    means: Float32Array = np.add.reduce(states, axis=-1, keepdims=True) * share
    found = states - means
    squares = np.einsum("pd,pd->p", found, found) * share
    found /= np.sqrt(squares + np.float32(_NORM_EPSILON))[:, None]
    return found


def _sigmoid(values: Float32Array) -> Float32Array:
    # By tanh, which does not overflow.
    found: Float32Array = values * np.float32(0.5)
    np.tanh(found, out=found)
    found *= np.float32(0.5)
    found += np.float32(0.5)
    return found


def new_items(before: Int32Array, items: Int32Array, length: int) -> int | None:
    """Return how many items a state has to be continued by, None where it does not lead there.

    It does where the last `length` of its items and the new ones are those that are asked about.
    """
    count, known = len(items), len(before)
    for new in range(max(0, count - known), min(count - 1, _MOST_NEW) + 1):
        if count == min(length, known + new):
            kept = count - new
            if np.array_equal(before[known - kept :], items[:kept]):
                return new
    return None


def _fingerprint(weights: Mapping[str, NDArray[Any]], vectors: ItemVectors) -> bytes:
    """Return what tells this encoder, and the vectors of its items, from all others."""
    digest = hashlib.sha256(_FORM)
    for name, array in sorted({**weights, **vectors.arrays()}.items()):
        plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        digest.update(f"{name} {plain.dtype.str} {plain.shape}\n".encode())
        digest.update(plain.reshape(-1).view(np.uint8).data)
    return digest.digest()
