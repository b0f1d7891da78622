"""The encoder of a trained model as an ONNX graph: items → sequence embedding.

Each encoder writes its graph itself, operator by operator; nothing is traced. So it is a few dozen
nodes without any arithmetic on shapes, weights that would meet at every call are multiplied once
and for all, and nothing but `onnx` is needed.

The vector of an item is made of a few sub-item vectors, and of these there are few. So what the
first block multiplies with single items is looked up in tables and added, see `look_up`.

Weights may be kept as int8, which is a quarter of what a request reads of them: see `quantised`.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from recprune.models.architectures import SequenceModel
from recprune.models.attention import array_of
from recprune.models.embedding import RecJPQEmbedding
from recprune.models.graph_names import VECTORS
from recprune.models.inference import ExportedEncoder
from recprune.types import VERSION, Float32Array, Float64Array, InputError, needs_extra

with needs_extra("train"):
    import onnx
    from onnx import helper, numpy_helper
with needs_extra("train"):
    from torch import nn

EncoderPrecision = Literal["float32", "int8"]

_SEQUENCE_EMBEDDING = "sequence_embedding"
_OPSET = 23  # the first that knows Attention
_IR_VERSION = 11  # which came with it; a newer one would only lock out older runtimes
_END = int(np.iinfo(np.int64).max)  # of an axis, however long
_LEAST_SHARE = 32  # how many times as wide as its splits are many a model is, for look-ups to pay
_MOST_SHARE = 8  # how many times as many rows a table of look-ups may have as a weight
_BLOCK = 32  # inputs of a layer that share a scale; ONNX Runtime has kernels for 16 to 256


def export_encoder(
    model: SequenceModel, precision: EncoderPrecision = "float32"
) -> ExportedEncoder:
    """Return an ONNX model of `model.encode_last`, its weights inside, and what it looks up.

    Input `vectors`, float32 [batch, length, d]; output `sequence_embedding`, float32 [batch, d].
    For every table there is an input of its name, float32 [batch, length, columns]: for each item
    the sum of the rows of its sub-items, all splits one after the other, and of one further row.
    That is the row of its position or, for an encoder that reads times, of its gap.
    Such an encoder also takes `gaps` and `ages`, int64 [batch, length]: the buckets of how long
    each event was the newest, and of how long it is ago.
    The longest history stands in its metadata as `length`.
    With `precision` int8, layers have weights of 8 bits, and ONNX Runtime multiplies them with
    inputs of 8 bits, which moves φ a little; what is looked up stays as it is.
    """
    if precision not in get_args(EncoderPrecision):
        expected = " or ".join(get_args(EncoderPrecision))
        raise InputError(f"encoder_precision is {precision!r}, expected {expected}")
    graph = OnnxGraph(model.embedding.width, _sub_items_to_look_up(model), precision)
    last = model.write_graph(graph)
    graph.add("Squeeze", last, graph.integers(1), output=_SEQUENCE_EMBEDDING)
    return ExportedEncoder(graph.finished(model.longest_history), graph.tables)


def quantised(weight: Float64Array) -> tuple[NDArray[np.int8], Float32Array]:
    """Return a weight [in, out] as int8, and scales [in / 32, out].

    No number is further off than half its scale, the largest of 32 in magnitude / 127.
    """
    inputs, outputs = weight.shape
    blocks = weight.reshape(inputs // _BLOCK, _BLOCK, outputs)
    scales = (np.abs(blocks).max(axis=1) / 127).astype(np.float32)
    scales[scales == 0.0] = 1.0  # of zeros alone
    whole = np.rint(blocks / scales[:, None]).clip(-127, 127).astype(np.int8)
    return whole.reshape(inputs, outputs), scales


def _sub_items_to_look_up(model: SequenceModel) -> Float64Array | None:
    """Return the sub-item embeddings [M, B, d/M], if products with them are worth keeping.

    A look-up adds M rows where a product adds d: where M is not far less, or where the rows would
    be many more than those of the weights, nothing is gained.
    """
    embedding = model.embedding
    if not isinstance(embedding, RecJPQEmbedding) or not model.looks_items_up:
        return None
    splits, rows = embedding.num_splits, embedding.num_splits * embedding.num_sub_items
    if splits * _LEAST_SHARE > embedding.width or rows > _MOST_SHARE * embedding.width:
        return None
    return array_of(embedding.sub_item_embeddings)


class AttentionLayers(Protocol):
    """What attention is made of, in a block of any encoder."""

    num_heads: int
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear


class OnnxGraph:
    """Nodes and constants; what its methods take and return are names of values."""

    def __init__(
        self,
        width: int,
        sub_items: Float64Array | None = None,
        precision: EncoderPrecision = "float32",
    ) -> None:
        """With sub-item embeddings [M, B, d/M], products of items can be looked up."""
        self.tables: dict[str, Float32Array] = {}  # of these, each with an input of its name
        self._width = width
        self._sub_items = sub_items
        self._precision = precision  # of the weights of layers
        self._buckets: list[str] = []  # further inputs
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []

    @property
    def looks_up(self) -> bool:
        """Whether products of items can be looked up."""
        return self._sub_items is not None

    def add(self, kind: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        """Add a node; return its output."""
        name = output or f"{kind}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [name], name, **attributes))
        return name

    def constant(self, array: Float64Array) -> str:
        """Add weights, as float32."""
        return self._stored(np.ascontiguousarray(array, np.float32))

    def integers(self, *values: int) -> str:
        """Add the integers that an operator takes as an input."""
        return self._stored(np.array(values, np.int64))

    def _stored(self, array: NDArray[Any]) -> str:
        name = f"constant_{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(array, name))
        return name

    def buckets(self, name: str) -> str:
        """Add an input that has a bucket for every item of the histories, int64 [batch, length]."""
        self._buckets.append(name)
        return name

    def look_up(
        self, name: str, weight: Float64Array, rows: Float64Array, bias: Float64Array | float = 0.0
    ) -> str:
        """Add a table and its input: a weight [out, d] times items and rows [n, d], plus a bias."""
        assert self._sub_items is not None  # noqa: S101 # `looks_up` was asked for
        by_split = np.split(weight, len(self._sub_items), axis=1)
        parts = [vectors @ part.T for vectors, part in zip(self._sub_items, by_split, strict=True)]
        # An item has one row of these: the bias is added once.
        table = np.concatenate([*parts, rows @ weight.T + bias])
        self.tables[name] = table.astype(np.float32)
        return name

    def rows(self, table: Float64Array, places: str) -> str:
        """Look rows of a table up: [..., width]."""
        return self.add("Gather", self.constant(table), places, axis=0)

    def linear(self, inputs: str, weight: Float64Array, bias: Float64Array | None = None) -> str:
        """Multiply by a weight laid out as torch does, [out, in], and add the bias."""
        product = self.add("MatMul", inputs, self._weights(weight.T))
        return product if bias is None else self.add("Add", product, self.constant(bias))

    def _weights(self, weight: Float64Array) -> str:
        """Add what inputs are multiplied by, [in, out]; as int8, ONNX Runtime never unpacks it."""
        if self._precision == "float32" or len(weight) % _BLOCK:
            return self.constant(weight)
        whole, scales = quantised(weight)
        stored = self._stored(whole), self._stored(scales)
        return self.add("DequantizeLinear", *stored, axis=0, block_size=_BLOCK)

    def layer(self, inputs: str, module: nn.Linear) -> str:
        return self.linear(inputs, array_of(module.weight), array_of(module.bias))

    def norm(self, states: str, module: nn.LayerNorm) -> str:
        scale, shift = self.constant(array_of(module.weight)), self.constant(array_of(module.bias))
        return self.add("LayerNormalization", states, scale, shift, axis=-1, epsilon=module.eps)

    def norm_and_scale(self, states: str, module: nn.LayerNorm) -> tuple[str, str]:
        """Return normalised states, and what their deviations from the mean are multiplied by."""
        normalised = self.norm(states, module)
        scale = f"{normalised}_scale"  # [batch, length, 1]
        self._nodes[-1].output.extend(["", scale])  # the mean is of no use
        return normalised, scale

    def cut(self, states: str, *widths: int) -> list[str]:
        """Cut states into parts of some widths."""
        names = [f"{states}_{place}" for place in range(len(widths))]
        node = helper.make_node("Split", [states, self.integers(*widths)], names, names[0], axis=-1)
        self._nodes.append(node)
        return names

    def attend(
        self,
        layers: AttentionLayers,
        queries: str,
        states: str,
        *,
        last: bool,
        causal: bool,
        bias: str | None = None,
        outer: nn.Linear | None = None,
    ) -> str:
        """Return what every query gathers from the states, [batch, queries, d].

        `last` says that there is one query a history, that of its last state. A bias is added to
        the scores of [batch, heads, queries, states].
        What a key's bias adds to all scores of a query is lost in the softmax, and is left out.
        With `outer`, which is for the last query, what is given as states are parts of them, one
        beside the other: a state is the first part plus `outer` of the second.
        """
        heads, width = layers.num_heads, layers.query.in_features
        size = width // heads
        added = [] if bias is None else [bias]
        options = {"q_num_heads": heads, "is_causal": int(causal), "scale": size**-0.5}
        query_weight, query_bias = array_of(layers.query.weight), array_of(layers.query.bias)
        key_weight, value_weight = array_of(layers.key.weight), array_of(layers.value.weight)
        value_bias = array_of(layers.value.bias)
        if outer is not None:  # a product with the sum is one with the parts
            value_bias += value_weight @ array_of(outer.bias)
            whole = np.concatenate([np.eye(width), array_of(outer.weight)], axis=1)
            key_weight, value_weight = key_weight @ whole, value_weight @ whole
        if not last and heads > 1:
            attended = self.add(
                "Attention",
                self.linear(queries, query_weight, query_bias),
                self.linear(states, key_weight),
                self.linear(states, value_weight),
                *added,
                kv_num_heads=heads,
                **options,
            )
            return self.add("Add", attended, self.constant(value_bias))
        # q · W_k x = (W_kᵀ q) · x, and the weighted mean of W_v x is W_v times that of x: all heads
        # look at the states themselves, which are never projected.
        if heads == 1:
            product = key_weight.T @ query_weight
            against = self.linear(queries, product, key_weight.T @ query_bias)
        else:
            projected = self.linear(queries, query_weight, query_bias)
            against = self.by_head(projected, key_weight.reshape(heads, size, -1))
        means = self.add("Attention", against, states, states, *added, kv_num_heads=1, **options)
        if heads == 1:
            return self.linear(means, value_weight, value_bias)
        attended = self.by_head(means, value_weight.reshape(heads, size, -1).transpose(0, 2, 1))
        return self.add("Add", attended, self.constant(value_bias))

    def gated(self, values: str, inputs: str, gate: nn.Linear) -> str:
        """Multiply values by the sigmoid of a layer over the inputs."""
        return self.add("Mul", values, self.add("Sigmoid", self.layer(inputs, gate)))

    def by_head(self, inputs: str, weights: Float64Array) -> str:
        """Multiply one position, cut into heads, by each head's own [in, out]: [batch, 1, …]."""
        heads, incoming, outgoing = weights.shape
        parts = self.add("Reshape", inputs, self.integers(0, heads, 1, incoming))
        products = self.add("MatMul", parts, self.constant(weights))
        return self.add("Reshape", products, self.integers(0, 1, heads * outgoing))

    def last_position(self, states: str) -> str:
        """Return the last of the states, [batch, 1, d]."""
        start, end, axis = self.integers(-1), self.integers(_END), self.integers(1)
        return self.add("Slice", states, start, end, axis)

    def add_last_rows(self, states: str, table: Float64Array) -> str:
        """Add the last rows of a table, as many as there are states."""
        start = self.add("Neg", self.add("Shape", states, start=1, end=2))
        rows = self.add("Slice", self.constant(table), start, self.integers(_END), self.integers(0))
        return self.add("Add", states, rows)

    def corner(self, table: Float64Array, states: str) -> str:
        """Cut [1, heads, n, n] to the first rows and columns, as many as there are states."""
        count = self.add("Shape", states, start=1, end=2)
        both = self.add("Concat", count, count, axis=0)
        starts, axes = self.integers(0, 0), self.integers(2, 3)
        return self.add("Slice", self.constant(table), starts, both, axes)

    def last_columns(self, table: Float64Array, states: str) -> str:
        """Cut [..., n] to the last columns, as many as there are states."""
        start = self.add("Neg", self.add("Shape", states, start=1, end=2))
        end, axis = self.integers(_END), self.integers(-1)
        return self.add("Slice", self.constant(table), start, end, axis)

    def finished(self, length: int) -> bytes:
        """Return the checked model."""
        kind, integers = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
        widths = {VECTORS: self._width}
        widths |= {name: table.shape[1] for name, table in self.tables.items()}
        items = [
            helper.make_tensor_value_info(name, kind, ["batch", "length", width])
            for name, width in widths.items()
        ]
        embedding = helper.make_tensor_value_info(_SEQUENCE_EMBEDDING, kind, ["batch", self._width])
        buckets = [
            helper.make_tensor_value_info(name, integers, ["batch", "length"])
            for name in self._buckets
        ]
        graph = helper.make_graph(
            self._nodes, "encoder", [*items, *buckets], [embedding], self._constants
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", _OPSET)],
            ir_version=_IR_VERSION,
            producer_name="recprune",
            producer_version=VERSION,
        )
        helper.set_model_props(model, {"length": str(length)})
        onnx.checker.check_model(model, full_check=True)
        content: bytes = model.SerializeToString(deterministic=True)
        return content
