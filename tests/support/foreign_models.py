"""An encoder that recprune does not know: weighted sums of its own vectors, as NumPy and as ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from recprune.types import Float32Array, Int64Array


def position_weights(length: int) -> Float32Array:
    """Return 1/length, 2/length … 1: the last position counts most, so that order matters."""
    return np.arange(1, length + 1, dtype=np.float32) / np.float32(length)


def as_function(table: Float32Array, length: int) -> Callable[[Int64Array], Float32Array]:
    """Return the encoder as a function, with a vector for every number [numbers, d]."""
    weights = position_weights(length)

    def encode(rows: Int64Array) -> Float32Array:
        assert rows.dtype == np.int64
        assert rows.shape[1] == length
        found: Float32Array = (table[rows] * weights[:, None]).sum(axis=1)
        return found

    return encode


def as_onnx(
    table: Float32Array,
    length: int,
    *,
    histories: int | str = "histories",
    kind: int = onnx.TensorProto.INT64,
    second_input: bool = False,
) -> bytes:
    """Return the same as an ONNX model, as other people's exporters write it."""
    nodes = [
        helper.make_node("Gather", ["table", "history"], ["vectors"], axis=0),
        helper.make_node("Mul", ["vectors", "weights"], ["weighted"]),
        helper.make_node("ReduceSum", ["weighted", "axis"], ["embedding"], keepdims=0),
    ]
    inputs = [helper.make_tensor_value_info("history", kind, [histories, length])]
    if second_input:
        inputs.append(helper.make_tensor_value_info("mask", kind, [histories, length]))
    output = helper.make_tensor_value_info(
        "embedding", onnx.TensorProto.FLOAT, [histories, table.shape[1]]
    )
    constants: dict[str, Any] = {
        "table": table,
        "weights": position_weights(length)[:, None],
        "axis": np.array([1]),
    }
    stored = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "elsewhere", inputs, [output], stored)
    opset = [helper.make_opsetid("", 18)]
    content: bytes = helper.make_model(
        graph, opset_imports=opset, ir_version=10
    ).SerializeToString()
    return content
