"""The encoder of a trained model as an ONNX graph: item vectors → sequence embedding.

Each encoder writes its graph itself, operator by operator; nothing is traced. So it is a few dozen
nodes without any arithmetic on shapes, weights that would meet at every call are multiplied once
and for all, and nothing but `onnx` is needed.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from recprune.models.architectures import SequenceModel
from recprune.types import VERSION, Float64Array, needs_extra

with needs_extra("train"):
    import onnx
    from onnx import helper, numpy_helper
with needs_extra("train"):
    from torch import Tensor, nn

_VECTORS = "vectors"
_SEQUENCE_EMBEDDING = "sequence_embedding"
_OPSET = 23  # the first that knows Attention
_IR_VERSION = 11  # which came with it; a newer one would only lock out older runtimes
_END = int(np.iinfo(np.int64).max)  # of an axis, however long


def export_encoder(model: SequenceModel) -> bytes:
    """Return an ONNX model of `model.encode_last`, its weights inside.

    Input `vectors`, float32 [batch, length, d]; output `sequence_embedding`, float32 [batch, d].
    An encoder that reads times also takes `gaps` and `ages`, int64 [batch, length]: the buckets of
    how long each event was the newest, and of how long it is ago.
    The longest history stands in its metadata as `length`.
    """
    graph = OnnxGraph()
    last = model.write_graph(graph, _VECTORS)
    graph.add("Squeeze", last, graph.integers(1), output=_SEQUENCE_EMBEDDING)
    return graph.finished(model.longest_history, model.embedding.width)


class AttentionLayers(Protocol):
    """What attention is made of, in a block of any encoder."""

    num_heads: int
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear


class OnnxGraph:
    """Nodes and constants; what its methods take and return are names of values."""

    def __init__(self) -> None:
        self._buckets: list[str] = []  # inputs beside the vectors
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []

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

    def rows(self, table: Tensor, places: str) -> str:
        """Look rows of a table up: [..., width]."""
        return self.add("Gather", self.constant(_array(table)), places, axis=0)

    def linear(self, inputs: str, weight: Float64Array, bias: Float64Array | None = None) -> str:
        """Multiply by a weight laid out as torch does, [out, in], and add the bias."""
        product = self.add("MatMul", inputs, self.constant(weight.T))
        return product if bias is None else self.add("Add", product, self.constant(bias))

    def layer(self, inputs: str, module: nn.Linear) -> str:
        return self.linear(inputs, _array(module.weight), _array(module.bias))

    def norm(self, states: str, module: nn.LayerNorm) -> str:
        scale, shift = self.constant(_array(module.weight)), self.constant(_array(module.bias))
        return self.add("LayerNormalization", states, scale, shift, axis=-1, epsilon=module.eps)

    def attend(
        self,
        layers: AttentionLayers,
        queries: str,
        states: str,
        *,
        last: bool,
        causal: bool,
        bias: str | None = None,
    ) -> str:
        """Return what every query gathers from the states, [batch, queries, d].

        `last` says that there is one query a history, that of its last state. A bias is added to
        the scores of [batch, heads, queries, states].
        What a key's bias adds to all scores of a query is lost in the softmax, and is left out.
        """
        heads, width = layers.num_heads, layers.query.in_features
        size = width // heads
        added = [] if bias is None else [bias]
        options = {"q_num_heads": heads, "is_causal": int(causal), "scale": size**-0.5}
        query_weight, query_bias = _array(layers.query.weight), _array(layers.query.bias)
        key_weight, value_weight = _array(layers.key.weight), _array(layers.value.weight)
        value_bias = _array(layers.value.bias)
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
            against = self.by_head(projected, key_weight.reshape(heads, size, width))
        means = self.add("Attention", against, states, states, *added, kv_num_heads=1, **options)
        if heads == 1:
            return self.linear(means, value_weight, value_bias)
        attended = self.by_head(means, value_weight.reshape(heads, size, width).transpose(0, 2, 1))
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

    def add_last_rows(self, states: str, table: Tensor) -> str:
        """Add the last rows of a table, as many as there are states."""
        start = self.add("Neg", self.add("Shape", states, start=1, end=2))
        rows = self.add(
            "Slice", self.constant(_array(table)), start, self.integers(_END), self.integers(0)
        )
        return self.add("Add", states, rows)

    def finished(self, length: int, width: int) -> bytes:
        """Return the checked model."""
        kind = onnx.TensorProto.FLOAT
        vectors = helper.make_tensor_value_info(_VECTORS, kind, ["batch", "length", width])
        embedding = helper.make_tensor_value_info(_SEQUENCE_EMBEDDING, kind, ["batch", width])
        integers = onnx.TensorProto.INT64
        buckets = [
            helper.make_tensor_value_info(name, integers, ["batch", "length"])
            for name in self._buckets
        ]
        graph = helper.make_graph(
            self._nodes, "encoder", [vectors, *buckets], [embedding], self._constants
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


def _array(tensor: Tensor) -> Float64Array:
    """Return a copy of some weights, wide enough that products of them lose nothing."""
    return tensor.detach().double().cpu().numpy().copy()
