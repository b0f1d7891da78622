"""Sequence embeddings for serving: ONNX Runtime and torch agree, with each other and the model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from recprune import Index, InputError, StorageError
from recprune.models.architectures import ARCHITECTURES, SequenceModel, build_model
from recprune.models.embedding import FullEmbedding, RecJPQEmbedding
from recprune.models.inference import Encoder, ItemVectors, OnnxEncoder, TorchEncoder
from recprune.models.onnx_export import EncoderPrecision, export_encoder, quantised
from recprune.models.ranking import encode_histories
from recprune.models.settings import Architecture, EmbeddingKind, ModelSettings
from recprune.models.timelines import gap_and_age_buckets
from recprune.types import CodeArray, Float32Array, Int32Array, MissingExtraError, Timeline

NUM_ITEMS = 300
NUM_SUB_ITEMS = 16
LENGTH = 24
WIDTH = 64
WIDE = 256  # enough that products of sub-items are looked up


def some_codes(num_items: int = NUM_ITEMS) -> CodeArray:
    return np.random.default_rng(0).integers(0, NUM_SUB_ITEMS, (num_items, 8)).astype(np.uint8)


def some_model(settings: ModelSettings, codes: CodeArray | None = None) -> SequenceModel:
    """Return a model in which no bias is zero and no scale is one."""
    torch.manual_seed(1)
    model = build_model(settings, some_codes() if codes is None else codes, NUM_SUB_ITEMS).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def settings_of(
    architecture: Architecture = "sasrec",
    num_heads: int = 1,
    embedding: EmbeddingKind = "recjpq",
    num_blocks: int = 2,
    inner_share: float = 1.0,
    width: int = WIDTH,
) -> ModelSettings:
    shape = (width, num_blocks, num_heads, LENGTH)
    return ModelSettings(architecture, embedding, *shape, inner_share=inner_share)


def vectors_of(model: SequenceModel) -> ItemVectors:
    if isinstance(model.embedding, RecJPQEmbedding):
        sub_items = model.embedding.sub_item_embeddings.detach().numpy()
        return ItemVectors.from_codes(model.embedding.codes.numpy(), sub_items)
    table = cast(FullEmbedding, model.embedding).item_embeddings
    return ItemVectors.from_table(table.detach().numpy())


def onnx_encoder(
    model: SequenceModel,
    length: int = LENGTH,
    threads: int = 1,
    precision: EncoderPrecision = "float32",
) -> OnnxEncoder:
    exported = export_encoder(model, precision)
    return OnnxEncoder(
        exported.onnx, vectors_of(model), length, tables=exported.tables, threads=threads
    )


def some_histories(*lengths: int, num_items: int = NUM_ITEMS) -> list[Int32Array]:
    rng = np.random.default_rng(2)
    return [rng.integers(0, num_items, length).astype(np.int32) for length in lengths]


def some_timelines(histories: list[Int32Array]) -> list[Timeline]:
    """Return gaps from below a second to years, and requests a while after the last event."""
    rng = np.random.default_rng(6)
    timelines = []
    for history in histories:
        times = 10**9 + np.cumsum(np.exp(rng.uniform(-1, 18, len(history))).astype(np.int64))
        timelines.append(Timeline(times, int(times[-1]) + int(rng.integers(0, 10**6))))
    return timelines


def largest_difference(first: Float32Array, second: Float32Array) -> float:
    assert first.dtype == second.dtype == np.float32
    assert first.shape == second.shape
    return float(np.abs(first - second).max())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So small a model gains nothing from more, and loses much where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> SequenceModel:
    return some_model(settings_of())


@pytest.fixture(scope="module", params=["onnx", "torch"])
def encoder(request: pytest.FixtureRequest, model: SequenceModel) -> Encoder:
    return onnx_encoder(model) if request.param == "onnx" else TorchEncoder(model, LENGTH)


# Agreement ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "num_heads", "embedding", "num_blocks", "inner_share"),
    [
        *product(ARCHITECTURES, (1, 2, 4), ("recjpq", "full"), (2,), (1.0,)),
        *product(ARCHITECTURES, (1, 2), ("recjpq",), (1, 3), (1.0,)),
        *product(("esasrec", "timed"), (1, 2), ("recjpq",), (2,), (0.25, 1.5)),
    ],
)
def test_onnx_torch_and_the_whole_model_agree(
    architecture: Architecture,
    num_heads: int,
    embedding: EmbeddingKind,
    num_blocks: int,
    inner_share: float,
) -> None:
    model = some_model(settings_of(architecture, num_heads, embedding, num_blocks, inner_share))
    fast, plain = onnx_encoder(model), TorchEncoder(model, LENGTH)
    for length in (1, 2, 7, LENGTH - 1, LENGTH):
        histories = some_histories(length, length, length)
        for timelines in (None, [*some_timelines(histories[:2]), None]):
            found = fast.encode(histories, timelines)
            # Padded, and every position.
            states = encode_histories(model, LENGTH, histories, timelines=timelines).numpy()
            assert largest_difference(found, plain.encode(histories, timelines)) < 1e-5
            assert largest_difference(found, states) < 1e-5


@pytest.mark.parametrize(
    ("architecture", "num_blocks", "num_tables"),
    [("sasrec", 1, 0), ("sasrec", 2, 3), ("sasrec", 3, 3), ("timed", 2, 3), ("esasrec", 2, 0)],
)
def test_what_is_looked_up_is_what_would_be_multiplied(
    architecture: Architecture, num_blocks: int, num_tables: int
) -> None:
    model = some_model(settings_of(architecture, num_blocks=num_blocks, width=WIDE))
    fast, plain = onnx_encoder(model), TorchEncoder(model, LENGTH)
    exported = export_encoder(model)
    assert len(exported.tables) == num_tables
    assert all(table.dtype == np.float32 for table in exported.tables.values())
    for length in (1, 2, 7, LENGTH):
        histories = some_histories(length, length, length)
        for timelines in (None, [*some_timelines(histories[:2]), None]):
            found = fast.encode(histories, timelines)
            assert largest_difference(found, plain.encode(histories, timelines)) < 2e-5


def test_tables_are_kept_where_they_are_small_and_save_much() -> None:
    few = some_codes()[:, :2]
    for settings, codes, num_tables in (
        (settings_of(width=WIDE), some_codes(), 3),
        (settings_of(width=WIDE // 2), some_codes(), 0),  # eight rows are added instead of 128
        (settings_of(), few, 3),
        (settings_of(num_heads=2), few, 0),
        (settings_of(embedding="full"), few, 0),
    ):
        assert len(export_encoder(some_model(settings, codes)).tables) == num_tables
    torch.manual_seed(1)
    many = build_model(settings_of(), few, 4 * WIDTH + 1)
    assert not export_encoder(many).tables


def test_tables_of_another_encoder_are_refused() -> None:
    model = some_model(settings_of(width=WIDE))
    content, tables = export_encoder(model)
    wrong: list[dict[str, Any]] = [
        {},
        {**tables, "more": tables["scores"]},
        {**tables, "scores": tables["scores"][:-1]},
        {**tables, "scores": tables["scores"].astype(np.float64)},
        {**tables, "scores": tables["values"]},
    ]
    for given in wrong:
        with pytest.raises(StorageError, match=r"not an encoder|table scores is float"):
            OnnxEncoder(content, vectors_of(model), LENGTH, tables=given)


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
@pytest.mark.parametrize("num_heads", [1, 4])
def test_the_graph_means_the_same_to_the_reference_implementation(
    architecture: Architecture, num_heads: int
) -> None:
    """The file says by itself what is computed; it needs nothing that only one runtime does."""
    model = some_model(settings_of(architecture, num_heads))
    history = some_histories(9)[0]
    inputs: dict[str, Any] = {"vectors": vectors_of(model)(history)[None]}
    timelines = some_timelines([history])
    if model.reads_times:
        inputs["gaps"], inputs["ages"] = gap_and_age_buckets(timelines, 9)
    reference = ReferenceEvaluator(onnx.load_from_string(export_encoder(model).onnx))
    found = cast(list[Float32Array], reference.run(None, inputs))[0]
    expected = TorchEncoder(model, LENGTH).encode([history], timelines)
    assert largest_difference(found, expected) < 1e-5


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("width", [WIDTH, WIDE, 40])  # the last is not of whole blocks
def test_weights_of_8_bits_move_what_is_encoded_a_little(
    architecture: Architecture, num_heads: int, width: int
) -> None:
    model = some_model(settings_of(architecture, num_heads, width=width))
    exact, fast = onnx_encoder(model), onnx_encoder(model, precision="int8")
    content = export_encoder(model, "int8").onnx
    assert content == export_encoder(model, "int8").onnx  # the same bytes every time
    assert width == 40 or len(content) < 0.7 * len(export_encoder(model).onnx)
    histories = some_histories(1, 2, 7, 7, LENGTH - 1, LENGTH)
    timelines = some_timelines(histories)
    expected, found = exact.encode(histories, timelines), fast.encode(histories, timelines)
    moved = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert (moved < 0.1).all()
    assert width == 40 or (moved > 0).all()


def test_a_weight_of_8_bits_is_off_by_half_a_scale_at_most() -> None:
    weight = np.random.default_rng(4).normal(0, 1, (96, 5)) * 10.0 ** np.arange(-2, 3)
    weight[32:64, 1] = 0.0
    whole, scales = quantised(weight)
    assert whole.dtype == np.int8
    assert scales.dtype == np.float32
    assert whole.shape == weight.shape
    assert scales.shape == (3, 5)
    meant = whole * np.repeat(scales, 32, axis=0)
    assert (np.abs(meant - weight) <= 0.5001 * np.repeat(scales, 32, axis=0)).all()
    assert (meant[32:64, 1] == 0).all()


def test_another_precision_is_refused(model: SequenceModel) -> None:
    with pytest.raises(InputError, match="encoder_precision is 'int4', expected float32 or int8"):
        export_encoder(model, cast(EncoderPrecision, "int4"))


def test_lengths_may_be_mixed_and_results_keep_their_order(encoder: Encoder) -> None:
    lengths = np.random.default_rng(3).integers(1, 40, 150)
    histories = some_histories(*lengths)
    one_by_one = np.concatenate([encoder.encode([history]) for history in histories])
    assert largest_difference(encoder.encode(histories), one_by_one) < 1e-5


def test_only_the_last_items_of_a_long_history_count(encoder: Encoder) -> None:
    long = some_histories(3 * LENGTH)
    cut = [history[-LENGTH:] for history in long]
    assert np.array_equal(encoder.encode(long), encoder.encode(cut))
    assert largest_difference(encoder.encode(long), encoder.encode([long[0][-LENGTH + 1 :]])) > 1e-3


def test_an_encoder_may_look_at_less_than_the_model_can(model: SequenceModel) -> None:
    history = some_histories(LENGTH)[0]
    for whole, short in (
        (onnx_encoder(model), onnx_encoder(model, 5)),
        (TorchEncoder(model, LENGTH), TorchEncoder(model, 5)),
    ):
        assert short.length == 5
        assert np.array_equal(short.encode([history]), whole.encode([history[-5:]]))


def test_no_histories_give_no_rows(encoder: Encoder) -> None:
    assert encoder.encode([]).shape == (0, WIDTH)
    assert (encoder.length, encoder.width) == (LENGTH, WIDTH)


def test_dropout_is_off_even_in_a_model_that_was_being_trained() -> None:
    model = some_model(settings_of()).train()
    encoder = TorchEncoder(model, LENGTH)
    histories = some_histories(LENGTH)
    assert np.array_equal(encoder.encode(histories), encoder.encode(histories))


def test_several_threads_may_share_an_encoder(encoder: Encoder) -> None:
    histories = some_histories(*range(1, 65))
    expected = [encoder.encode([history]) for history in histories]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda history: encoder.encode([history]), histories))
    assert all(map(np.array_equal, found, expected))


def test_several_threads_in_one_encoder_change_nothing(model: SequenceModel) -> None:
    histories = some_histories(LENGTH, 3)
    found = onnx_encoder(model, threads=2).encode(histories)
    assert largest_difference(found, onnx_encoder(model).encode(histories)) < 1e-5


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_the_top_ten_is_the_same(architecture: Architecture) -> None:
    codes = some_codes(5000)
    model = some_model(settings_of(architecture, num_heads=2), codes)
    assert isinstance(model.embedding, RecJPQEmbedding)
    index = Index.build(codes, model.embedding.sub_item_embeddings.detach().numpy())
    lengths = np.random.default_rng(4).integers(1, LENGTH, 1000)
    histories = some_histories(*lengths, num_items=5000)
    fast = index.search(onnx_encoder(model).encode(histories), 10).ids
    plain = index.search(TorchEncoder(model, LENGTH).encode(histories), 10).ids
    assert (fast == plain).all(axis=1).mean() >= 0.999


# Item vectors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("embedding", ["recjpq", "full"])
def test_item_vectors_are_those_of_the_model(embedding: EmbeddingKind) -> None:
    model = some_model(settings_of(embedding=embedding))
    items = np.arange(NUM_ITEMS, dtype=np.int32)[::-1]
    expected = model.embedding.vectors(torch.from_numpy(items.copy())).detach().numpy()
    vectors = vectors_of(model)
    assert np.array_equal(vectors(items), expected)
    assert vectors(items[:0]).shape == (0, WIDTH)
    assert (vectors.num_items, vectors.width) == (NUM_ITEMS, WIDTH)


def test_sub_items_may_be_many_and_laid_out_as_in_an_index(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 1000, (50, 4)).astype(np.uint16)
    transposed = rng.standard_normal((4, 8, 1000)).astype(np.float32)
    np.save(tmp_path / "codes.npy", codes)
    mapped = np.load(tmp_path / "codes.npy", mmap_mode="r")
    sub_items = transposed.transpose(0, 2, 1)
    found = ItemVectors.from_codes(mapped, sub_items)(np.array([49, 7], np.int32))
    expected = [[sub_items[m, codes[item, m]] for m in range(4)] for item in (49, 7)]
    assert np.array_equal(found, np.array(expected).reshape(2, 32))
    assert type(found) is np.ndarray


def test_tables_of_another_shape_are_refused() -> None:
    codes, sub_items = some_codes(), np.zeros((8, 16, 8), np.float32)
    with pytest.raises(InputError, match=r"codes is uint8\[300, 7\], expected integers \[n, 8\]"):
        ItemVectors.from_codes(codes[:, :7], sub_items)
    with pytest.raises(InputError, match=r"codes is float32\[300, 8\]"):
        ItemVectors.from_codes(codes.astype(np.float32), sub_items)
    with pytest.raises(InputError, match=r"sub_item_embeddings is float64\[8, 16, 8\]"):
        ItemVectors.from_codes(codes, sub_items.astype(np.float64))
    with pytest.raises(InputError, match=r"item_embeddings is float32\[8, 16, 8\]"):
        ItemVectors.from_table(sub_items)


# Errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("history", "message"),
    [
        (np.empty(0, np.int32), r"histories\[1\] is empty"),
        (np.array([1, 2, NUM_ITEMS], np.int32), r"histories\[1\]\[2\] is 300, expected 0 to 299"),
        (np.array([-1, 2], np.int32), r"histories\[1\]\[0\] is -1, expected 0 to 299"),
        (np.array([1.0, 2.0]), r"histories\[1\] is float64\[2\], expected item ids"),
        (np.array([[1, 2]]), r"histories\[1\] is int64\[1, 2\], expected item ids"),
        (np.array([2**64 - 1], np.uint64), r"histories\[1\]\[0\] is 18446744073709551615"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_history_that_cannot_be_encoded_is_named(
    encoder: Encoder, history: Int32Array, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        encoder.encode([np.array([5], np.int32), history])


def test_timelines_of_other_histories_are_refused(encoder: Encoder) -> None:
    histories = some_histories(3, 4)
    timelines = some_timelines(histories)
    with pytest.raises(InputError, match="1 timelines for 2 histories"):
        encoder.encode(histories, timelines[:1])
    with pytest.raises(InputError, match=r"timelines\[0\] has 4 times for a history of 3"):
        encoder.encode(histories, timelines[::-1])


def test_items_without_a_vector_are_named(model: SequenceModel) -> None:
    with pytest.raises(InputError, match=r"items\[1\] is 300, expected 0 to 299"):
        vectors_of(model)(np.array([299, 300], np.int32))


def test_lengths_and_threads_must_be_possible(model: SequenceModel) -> None:
    for length, message in ((0, "length is 0"), (LENGTH + 1, f"at most the model's {LENGTH}")):
        with pytest.raises(InputError, match=message):
            onnx_encoder(model, length)
        with pytest.raises(InputError, match=message):
            TorchEncoder(model, length)
    with pytest.raises(InputError, match="threads is 0"):
        onnx_encoder(model, threads=0)


def test_vectors_of_another_width_are_refused(model: SequenceModel) -> None:
    narrow = ItemVectors.from_table(np.zeros((3, WIDTH - 1), np.float32))
    with pytest.raises(InputError, match="takes vectors of 64, those of items 63"):
        OnnxEncoder(export_encoder(model).onnx, narrow, LENGTH)


def test_a_damaged_file_is_refused(model: SequenceModel) -> None:
    content, vectors = export_encoder(model).onnx, vectors_of(model)
    for damaged in (b"", b"not a model", bytes(100), content[1:], content[: len(content) // 2]):
        with pytest.raises(StorageError, match="not a usable ONNX model"):
            OnnxEncoder(damaged, vectors, LENGTH)
    for end in range(0, len(content), len(content) // 50):
        with pytest.raises(StorageError):
            OnnxEncoder(content[:end], vectors, LENGTH)


def test_a_foreign_model_is_refused(model: SequenceModel) -> None:
    foreign = onnx.load_from_string(export_encoder(model).onnx)
    del foreign.metadata_props[:]
    with pytest.raises(StorageError, match="not an encoder"):
        OnnxEncoder(foreign.SerializeToString(), vectors_of(model), LENGTH)


# What it needs -----------------------------------------------------------------------------------


def test_the_file_is_whole_and_its_axes_are_free(model: SequenceModel) -> None:
    content = export_encoder(model).onnx
    assert content == export_encoder(model).onnx  # the same model gives the same bytes
    graph = onnx.load_from_string(content).graph
    external = onnx.TensorProto.EXTERNAL
    assert all(constant.data_location != external for constant in graph.initializer)
    [vectors], [embedding] = graph.input, graph.output
    shapes = [
        [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in (vectors, embedding)
    ]
    assert shapes == [["batch", "length", WIDTH], ["batch", WIDTH]]
    assert "Transpose" not in {node.op_type for node in graph.node}


def test_encoding_needs_neither_torch_nor_onnx(model: SequenceModel, tmp_path: Path) -> None:
    assert isinstance(model.embedding, RecJPQEmbedding)
    (tmp_path / "encoder.onnx").write_bytes(export_encoder(model).onnx)
    np.save(tmp_path / "codes.npy", model.embedding.codes.numpy())
    np.save(tmp_path / "sub_items.npy", model.embedding.sub_item_embeddings.detach().numpy())
    code = """
import sys
for name in ("torch", "onnx", "onnxscript"):
    sys.modules[name] = None
from pathlib import Path
import numpy as np
from recprune.models.inference import ItemVectors, OnnxEncoder
folder = Path(sys.argv[1])
vectors = ItemVectors.from_codes(*(
    np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("codes", "sub_items")
))
encoder = OnnxEncoder((folder / "encoder.onnx").read_bytes(), vectors, 24)
np.save(folder / "found.npy", encoder.encode([np.arange(10, dtype=np.int32)]))
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(tmp_path)], check=True)
    expected = TorchEncoder(model, LENGTH).encode([np.arange(10, dtype=np.int32)])
    assert largest_difference(np.load(tmp_path / "found.npy"), expected) < 1e-5


def test_without_onnx_runtime_there_is_advice(
    model: SequenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = export_encoder(model).onnx
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"recprune\[onnx\]"):
        OnnxEncoder(content, vectors_of(model), LENGTH)
