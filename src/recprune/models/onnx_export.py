"""The encoder of a trained model as an ONNX graph: item vectors → sequence embedding.

The graph is written down here, operator by operator, and not traced from the model: so it is a few
dozen nodes without any arithmetic on shapes, weights that would meet at every call are multiplied
once and for all, and nothing but `onnx` is needed.
"""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from recprune.models.bert4rec import BERT4Rec, BERT4RecBlock
from recprune.models.encoder import longest_history
from recprune.models.sasrec import SASRec, SASRecBlock
from recprune.models.sequence_model import SequenceModel
from recprune.types import VERSION, Float64Array, needs_extra

with needs_extra("train"):
    import onnx
    from onnx import helper, numpy_helper
with needs_extra("train"):
    from torch import Tensor, nn

_Block: TypeAlias = SASRecBlock | BERT4RecBlock

_VECTORS = "vectors"
_SEQUENCE_EMBEDDING = "sequence_embedding"
_OPSET = 23  # the first that knows Attention
_IR_VERSION = 11  # which came with it; a newer one would only lock out older runtimes
_END = int(np.iinfo(np.int64).max)  # of an axis, however long


def export_encoder(model: SequenceModel) -> bytes:
    """Return an ONNX model of `model.encode_last`, its weights inside.

    Input `vectors`, float32 [batch, length, d]; output `sequence_embedding`, float32 [batch, d].
    The longest history stands in its metadata as `length`.
    """
    graph = _Graph()
    last = _sasrec(graph, model) if isinstance(model, SASRec) else _bert4rec(graph, model)
    normalised = graph.norm(last, model.norm)
    graph.add("Squeeze", normalised, graph.integers(1), output=_SEQUENCE_EMBEDDING)
    return graph.finished(longest_history(model), model.embedding.width)


# The two architectures ---------------------------------------------------------------------------


def _sasrec(graph: _Graph, model: SASRec) -> str:
    """Return the last state, [batch, 1, d]."""
    states = graph.add_last_rows(_VECTORS, _array(model.positions.table))
    for block in model.blocks[:-1]:
        states = _sasrec_block(graph, cast(SASRecBlock, block), states, last=False)
    return _sasrec_block(graph, cast(SASRecBlock, model.blocks[-1]), states, last=True)


def _sasrec_block(graph: _Graph, block: SASRecBlock, states: str, *, last: bool) -> str:
    """Return the next states, of all positions or of the last alone."""
    queries = graph.norm(graph.last_position(states) if last else states, block.query_norm)
    # The last position sees everything; to the operator, a single query stands at the beginning.
    attended = _attend(graph, block, queries, states, last=last, causal=not last)
    states = graph.norm(graph.add("Add", attended, queries), block.inner_norm)
    inside = graph.add("Relu", graph.layer(states, block.inner))
    return graph.add("Add", states, graph.layer(inside, block.outer))


def _bert4rec(graph: _Graph, model: BERT4Rec) -> str:
    """Return the state at the appended mask, [batch, 1, d]."""
    # Zeros are appended, and the mask's vector is part of what is added at the last position.
    positions = _array(model.positions.table)
    positions[-1] += _array(model.mask_vector)
    appended = graph.add("Pad", _VECTORS, graph.integers(0, 0, 0, 0, 1, 0))
    states = graph.add_last_rows(appended, positions)
    for block in model.blocks[:-1]:
        states = _bert4rec_block(graph, cast(BERT4RecBlock, block), states, last=False)
    return _bert4rec_block(graph, cast(BERT4RecBlock, model.blocks[-1]), states, last=True)


def _bert4rec_block(graph: _Graph, block: BERT4RecBlock, states: str, *, last: bool) -> str:
    """Return the next states, of all positions or of the last alone."""
    normalised = graph.norm(states, block.attention_norm)
    queries = graph.last_position(normalised) if last else normalised
    attended = _attend(graph, block, queries, normalised, last=last, causal=False)
    before = graph.last_position(states) if last else states
    states = graph.add("Add", before, graph.layer(attended, block.output))
    inside = graph.add("Gelu", graph.layer(graph.norm(states, block.network_norm), block.inner))
    return graph.add("Add", states, graph.layer(inside, block.outer))


def _attend(
    graph: _Graph, block: _Block, queries: str, states: str, *, last: bool, causal: bool
) -> str:
    """Return what every query gathers from the states, [batch, queries, d].

    What a key's bias adds to all scores of a query is lost in the softmax, and is left out.
    """
    heads, width = block.num_heads, block.query.in_features
    size = width // heads
    options = {"q_num_heads": heads, "is_causal": int(causal), "scale": size**-0.5}
    query_weight, query_bias = _array(block.query.weight), _array(block.query.bias)
    key_weight, value_weight = _array(block.key.weight), _array(block.value.weight)
    value_bias = _array(block.value.bias)
    if not last and heads > 1:
        attended = graph.add(
            "Attention",
            graph.linear(queries, query_weight, query_bias),
            graph.linear(states, key_weight),
            graph.linear(states, value_weight),
            kv_num_heads=heads,
            **options,
        )
        return graph.add("Add", attended, graph.constant(value_bias))
    # q · W_k x = (W_kᵀ q) · x, and the weighted mean of W_v x is W_v times that of x: all heads
    # look at the states themselves, which are never projected.
    if heads == 1:
        product = key_weight.T @ query_weight
        against = graph.linear(queries, product, key_weight.T @ query_bias)
    else:
        projected = graph.linear(queries, query_weight, query_bias)
        against = graph.by_head(projected, key_weight.reshape(heads, size, width))
    means = graph.add("Attention", against, states, states, kv_num_heads=1, **options)
    if heads == 1:
        return graph.linear(means, value_weight, value_bias)
    attended = graph.by_head(means, value_weight.reshape(heads, size, width).transpose(0, 2, 1))
    return graph.add("Add", attended, graph.constant(value_bias))


# The graph ---------------------------------------------------------------------------------------


class _Graph:
    """Nodes and constants; what its methods take and return are names of values."""

    def __init__(self) -> None:
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

    def linear(self, inputs: str, weight: Float64Array, bias: Float64Array | None = None) -> str:
        """Multiply by a weight laid out as torch does, [out, in], and add the bias."""
        product = self.add("MatMul", inputs, self.constant(weight.T))
        return product if bias is None else self.add("Add", product, self.constant(bias))

    def layer(self, inputs: str, module: nn.Linear) -> str:
        return self.linear(inputs, _array(module.weight), _array(module.bias))

    def norm(self, states: str, module: nn.LayerNorm) -> str:
        scale, shift = self.constant(_array(module.weight)), self.constant(_array(module.bias))
        return self.add("LayerNormalization", states, scale, shift, axis=-1, epsilon=module.eps)

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

    def finished(self, length: int, width: int) -> bytes:
        """Return the checked model."""
        kind = onnx.TensorProto.FLOAT
        vectors = helper.make_tensor_value_info(_VECTORS, kind, ["batch", "length", width])
        embedding = helper.make_tensor_value_info(_SEQUENCE_EMBEDDING, kind, ["batch", width])
        graph = helper.make_graph(self._nodes, "encoder", [vectors], [embedding], self._constants)
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
