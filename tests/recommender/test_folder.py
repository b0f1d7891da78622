"""A saved recommender answers as before, without torch, and a damaged one is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recprune import Index, InputError, MissingExtraError, StorageError
from recprune.data.identifiers import IntegerIds
from recprune.models.architectures import build_model
from recprune.models.embedding import RecJPQEmbedding
from recprune.models.inference import TorchEncoder
from recprune.models.onnx_export import export_encoder
from recprune.models.repeats import num_buckets
from recprune.models.settings import ModelSettings, Settings
from recprune.models.situations import NUM_SITUATIONS
from recprune.models.transitions import BUCKETS
from recprune.preparation.prepared import Prepared
from recprune.recommender.recommender import EncoderKind, Recommendations, Recommender
from recprune.recommender.saving import KIND
from recprune.storage import Saved, load_folder, save_folder
from recprune.training.checkpoint import MODEL, model_arrays
from recprune.types import Float32Array
from tests.support.small_models import LENGTH, SMALL
from tests.support.trainings import Trained, assert_same_answers, histories_of, questions


@pytest.mark.parametrize("encoder", ["auto", "onnx", "torch"])
def test_a_saved_recommender_gives_the_same_answers(trained: Trained, encoder: Any) -> None:
    loaded = Recommender.load(trained.saved, encoder=encoder, verify=True)
    for exclude_seen in (True, False):
        expected = trained.recommender.recommend(questions(trained), 10, exclude_seen=exclude_seen)
        found = loaded.recommend(questions(trained), 10, exclude_seen=exclude_seen)
        assert_same_answers(found, expected)
    histories = [np.array(history) for history in histories_of(trained.prepared.num_items)]
    difference = loaded.encoder.encode(histories) - trained.recommender.encoder.encode(histories)
    assert np.abs(difference).max() < 1e-4
    assert type(loaded.encoder).__name__ == (
        "TorchEncoder" if encoder == "torch" else "OnnxEncoder"
    )
    assert loaded.encoder.length == LENGTH
    assert loaded.settings == trained.recommender.settings
    assert repr(loaded) == repr(trained.recommender)
    assert np.array_equal(loaded.popularity, trained.recommender.popularity)


def test_a_loaded_recommender_can_be_saved_again_even_over_itself(
    trained: Trained, tmp_path: Path
) -> None:
    trained.recommender.save(tmp_path / "saved")
    loaded = Recommender.load(tmp_path / "saved")
    expected = loaded.recommend(questions(trained), 10)
    loaded.save(tmp_path / "saved")
    assert_same_answers(loaded.recommend(questions(trained), 10), expected)
    kinds: tuple[EncoderKind, ...] = ("onnx", "torch")
    for encoder in kinds:
        again = Recommender.load(tmp_path / "saved", encoder=encoder, verify=True)
        assert_same_answers(again.recommend(questions(trained), 10), expected)


def test_a_saved_recommender_needs_no_torch(trainings: dict[str, Trained]) -> None:
    code = """
import json, sys
for name in ("torch", "onnx", "polars", "scipy", "rich", "pyarrow", "matplotlib"):
    sys.modules[name] = None
from recprune.recommender.recommender import Recommender
for folder, histories in json.load(sys.stdin):
    found = Recommender.load(folder).recommend(histories, 10)
    print(json.dumps([found.items, found.unknown, found.by_popularity.tolist()]))
"""
    asked = [(str(trained.saved), questions(trained)) for trained in trainings.values()]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        input=json.dumps(asked), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(trainings)
    for trained, (items, unknown, by_popularity) in zip(trainings.values(), answers, strict=True):
        expected = trained.recommender.recommend(questions(trained), 10)
        assert items == expected.items
        assert unknown == expected.unknown
        assert by_popularity == expected.by_popularity.tolist()


def test_torch_steps_in_where_there_is_no_onnx_runtime(
    sasrec: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sasrec.recommender.recommend(questions(sasrec), 10)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert_same_answers(Recommender.load(sasrec.saved).recommend(questions(sasrec), 10), expected)
    with pytest.raises(MissingExtraError, match=r"recprune\[onnx\]"):
        Recommender.load(sasrec.saved, encoder="onnx")


def test_an_encoder_that_does_not_exist_is_refused(sasrec: Trained) -> None:
    wrong: Any = "onyx"
    with pytest.raises(InputError, match="encoder is 'onyx'"):
        Recommender.load(sasrec.saved, encoder=wrong)


@pytest.mark.parametrize("threads", [0, -1, True, 1.5])
def test_an_encoder_runs_on_one_thread_or_more(sasrec: Trained, threads: Any) -> None:
    with pytest.raises(InputError, match=f"threads is {threads}"):
        Recommender.load(sasrec.saved, threads=threads)


@pytest.mark.parametrize("encoder", ["onnx", "torch"])
def test_threads_share_one_recommender(trained: Trained, encoder: Any) -> None:
    recommender = Recommender.load(trained.saved, encoder=encoder)
    asked = questions(trained)
    expected = [recommender.recommend([history], 10) for history in asked]

    def ask(_: int) -> Iterator[tuple[int, Recommendations]]:
        for turn in range(5):
            for place, history in enumerate(asked):
                yield place, recommender.recommend([history], 10, threads=1 + turn % 2)

    with ThreadPoolExecutor(8) as pool:
        for answers in pool.map(lambda number: list(ask(number)), range(8)):
            assert len(answers) == 5 * len(asked)
            for place, found in answers:
                assert_same_answers(found, expected[place])


def test_nobody_can_change_a_recommender(sasrec: Trained) -> None:
    for recommender in (sasrec.recommender, Recommender.load(sasrec.saved)):
        with pytest.raises(ValueError, match="read-only"):
            recommender.popularity[0] = 100


def test_a_folder_of_version_3_is_still_read(trained: Trained, tmp_path: Path) -> None:
    """Its index had no version of its own: settings and arrays lay among those of the whole."""
    trained.recommender.save(tmp_path / "new")
    new = load_folder(tmp_path / "new", kind=KIND, version=5)
    index = new.parts["index"]
    settings = {"index": index.settings, "recommender": new.settings}
    arrays = {**new.arrays, **{f"index_{name}": array for name, array in index.arrays.items()}}
    save_folder(tmp_path / "old", Saved(KIND, 3, settings, arrays))
    histories = [trained.external([5, 17, 3]), []]
    found = Recommender.load(tmp_path / "old").recommend(histories, 5)
    expected = Recommender.load(tmp_path / "new").recommend(histories, 5)
    assert found.items == expected.items
    assert np.array_equal(found.scores.view(np.uint32), expected.scores.view(np.uint32))


def test_what_an_encoder_looks_up_is_saved_with_it(tmp_path: Path) -> None:
    codes = np.random.default_rng(0).integers(0, 16, (50, 2), np.uint8)
    settings = Settings(ModelSettings(width=64, length=8))
    model = build_model(settings.model, codes, 16)
    assert isinstance(model.embedding, RecJPQEmbedding)
    recommender = Recommender(
        Index.build(codes, model.embedding.sub_item_embeddings.detach().numpy()),
        TorchEncoder(model, 8),
        IntegerIds(np.arange(50)),
        np.zeros(50, np.int64),
        settings.to_json(),
        model_arrays(model),
        lambda: export_encoder(model),
    )
    recommender.save(tmp_path / "first")
    first = load_folder(tmp_path / "first", kind=KIND, version=5)
    tables = [name for name in first.arrays if name.startswith("encoder_table_")]
    assert len(tables) == 3
    loaded = Recommender.load(tmp_path / "first", encoder="onnx")
    histories = [[5, 17, 3], list(range(20))]
    assert_same_answers(loaded.recommend(histories, 5), recommender.recommend(histories, 5))
    loaded.save(tmp_path / "second")
    second = load_folder(tmp_path / "second", kind=KIND, version=5)
    assert all(np.array_equal(second.arrays[name], first.arrays[name]) for name in tables)
    for name in tables:
        damaged = np.array(first.arrays[name])
        damaged[3, 3] = np.nan
        arrays = {**first.arrays, name: damaged}
        save_folder(tmp_path / "wrong", Saved(KIND, 5, first.settings, arrays, first.parts))
        with pytest.raises(StorageError, match=f"{name} is not all finite"):
            Recommender.load(tmp_path / "wrong")
        del arrays[name]
        save_folder(tmp_path / "wrong", Saved(KIND, 5, first.settings, arrays, first.parts))
        with pytest.raises(StorageError, match="not an encoder"):
            Recommender.load(tmp_path / "wrong", encoder="onnx")


# What is no recommender --------------------------------------------------------------------------


@pytest.fixture
def copy(sasrec: Trained, tmp_path: Path) -> Path:
    """A recommender of one's own to damage."""
    sasrec.recommender.save(tmp_path / "mine")
    return tmp_path / "mine"


def test_one_damaged_byte_anywhere_is_found(copy: Path) -> None:
    files = sorted(copy.iterdir())
    assert len(files) > 10
    for path in files:
        content = path.read_bytes()
        damaged = bytearray(content)
        damaged[len(content) * 3 // 4] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match=f"mine/{path.name}"):
            Recommender.load(copy)
        path.write_bytes(content)
    Recommender.load(copy)


def test_a_missing_file_is_named(copy: Path) -> None:
    for path in sorted(copy.iterdir()):
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(StorageError, match="mine") as refused:
            Recommender.load(copy)
        assert path.name in str(refused.value)
        path.write_bytes(content)


def resaved(folder: Path, changes: dict[str, NDArray[Any] | None]) -> None:
    """Save a recommender again with some arrays replaced or left out, checksums and all."""
    saved = load_folder(folder, kind=KIND, version=5)
    index = saved.parts["index"]

    def changed(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
        new = {name: changes.get(prefix + name, np.array(array)) for name, array in arrays.items()}
        return {name: array for name, array in new.items() if array is not None}

    parts = {"index": replace(index, arrays=changed(index.arrays, "index_"))}
    save_folder(folder, replace(saved, arrays=changed(saved.arrays, ""), parts=parts))


@pytest.mark.parametrize(
    ("changes", "encoder"),
    [
        ({"popularity": None}, "auto"),
        ({"item_ids_offsets": None}, "auto"),
        ({"item_ids_pool": None}, "auto"),
        ({"index_transposed_embeddings": None}, "auto"),
        ({"encoder_onnx": None}, "auto"),
        ({"encoder_onnx": np.zeros(100, np.uint8)}, "auto"),
        ({"weights_norm.weight": None}, "torch"),
        ({"weights_norm.weight": np.zeros(3, np.float32)}, "torch"),
    ],
)
def test_a_folder_that_lacks_a_part_or_has_a_useless_one_is_named(
    copy: Path, changes: dict[str, Any], encoder: Any
) -> None:
    resaved(copy, changes)
    with pytest.raises(StorageError, match="mine"):
        Recommender.load(copy, encoder=encoder)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("popularity", lambda a: a[:-1], r"popularity is int64\[89\], expected int64\[90\]"),
        ("popularity", lambda a: a.astype(np.int32), r"popularity is int32\[90\]"),
        ("popularity", lambda a: a - 10**6, "popularity is -.* somewhere, expected 0 or more"),
        ("item_ids_offsets", lambda a: a[::-1].copy(), "item_ids_offsets does not go from 0"),
        ("item_ids_pool", lambda a: np.full_like(a, 255), "item_ids_pool is not text"),
        ("item_ids_pool", lambda a: np.full_like(a, 97), "item_ids: id 1 is 'a', out of order"),
        ("weights_norm.weight", lambda a: np.full_like(a, np.nan), "weights_norm.weight is not all"),
        ("index_list_items", lambda a: a + np.uint32(1), "list_items"),
        ("index_codes", lambda a: a[::-1].copy(), "list_items.* is not that in codes"),
    ],
)  # fmt: skip
def test_a_wrong_array_is_named_with_its_folder(
    copy: Path, name: str, change: Any, message: str
) -> None:
    saved = load_folder(copy, kind=KIND, version=5)
    is_index = name.startswith("index_")
    arrays = saved.parts["index"].arrays if is_index else saved.arrays
    resaved(copy, {name: change(np.array(arrays[name.removeprefix("index_")]))})
    with pytest.raises(StorageError, match=f"^.*/mine: {message}"):
        Recommender.load(copy)


def spoilt(number: float, place: int, *shape: int) -> Float32Array:
    array = np.zeros(shape, np.float32)
    array[place] = number
    return array


OWN, NEXT, WIDTH = num_buckets(True), 2 * BUCKETS, SMALL["width"]
BOTH = WIDTH + NUM_SITUATIONS


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("repeats.weight", np.zeros((OWN, 16), np.float32), f"float32[{OWN}, 16], expected float32[{OWN}, {BOTH}]"),
        ("repeats.weight", np.zeros((OWN - 1, BOTH), np.float32), f"float32[{OWN - 1}, {BOTH}], expected"),
        ("repeats.bias", np.zeros(OWN), f"float64[{OWN}], expected float32[{OWN}]"),
        ("repeats.bias", spoilt(np.inf, 2, OWN), "repeats.bias has inf at [2], expected numbers"),
        ("transitions.weight", spoilt(np.nan, 7, NEXT, WIDTH), "transitions.weight has nan at [7, 0]"),
        ("transitions.bias", np.zeros(BUCKETS, np.float32), f"float32[{BUCKETS}], expected"),
        ("transitions.weight", None, "the recommender has no transitions.weight"),
    ],
)  # fmt: skip
def test_a_head_that_does_not_fit_or_is_no_number_is_named(
    trainings: dict[str, Trained], tmp_path: Path, name: str, array: Any, message: str
) -> None:
    trainings["repeats"].recommender.save(tmp_path / "mine")
    resaved(tmp_path / "mine", {f"weights_{name}": array})
    with pytest.raises(StorageError, match="mine: ") as refused:
        Recommender.load(tmp_path / "mine")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (None, "the recommender has no activity"),
        (np.zeros(3, np.uint8), "activity is uint8[3], expected uint8["),
        (np.full(90, 200, np.uint8), "activity has a bucket 200, expected less than"),
    ],
)
def test_activity_that_does_not_fit_is_named(
    trainings: dict[str, Trained], tmp_path: Path, array: Any, message: str
) -> None:
    trainings["repeats"].recommender.save(tmp_path / "mine")  # of 90 items
    resaved(tmp_path / "mine", {"activity": array})
    with pytest.raises(StorageError, match="mine: ") as refused:
        Recommender.load(tmp_path / "mine")
    assert message in str(refused.value)


def test_other_folders_are_not_recommenders(sasrec: Trained, tmp_path: Path) -> None:
    sasrec.prepared.save(tmp_path / "prepared")
    with pytest.raises(StorageError, match="prepared: holds a saved prepared log, not a recomm"):
        Recommender.load(tmp_path / "prepared")
    for wrong in (tmp_path / "nowhere", sasrec.folder, sasrec.folder / MODEL):
        with pytest.raises(StorageError, match=f"{wrong.name}: not a saved recommender"):
            Recommender.load(wrong)


def test_an_encoder_with_weights_of_8_bits_is_saved_and_says_so(
    sasrec: Trained, tmp_path: Path
) -> None:
    exact = sasrec.recommender
    small = Recommender.from_training(sasrec.prepared, sasrec.folder, encoder_precision="int8")
    small.save(tmp_path / "small")
    loaded = Recommender.load(tmp_path / "small", encoder="onnx")
    assert loaded.settings == exact.settings | {"encoder_precision": "int8"}
    assert "int8 encoder" in repr(loaded)
    assert "int8" not in repr(exact)
    assert len(loaded.export().onnx) < len(exact.export().onnx)
    histories = [np.array(history, np.int32) for history in histories_of(exact.index.num_items)]
    found = loaded.encoder.encode(histories)
    plain = Recommender.load(sasrec.saved, encoder="onnx").encoder.encode(histories)
    moved = np.linalg.norm(found - plain, axis=1) / np.linalg.norm(plain, axis=1)
    assert (moved > 0).all()
    assert (moved < 0.1).all()
    # The search is as exact as ever for the sequence embeddings that it is given.
    top, oracle = loaded.rank(histories, 5), loaded.index.search(found, 5, method="default")
    assert np.array_equal(top.ids, oracle.ids)
    assert np.array_equal(top.scores.view(np.uint32), oracle.scores.view(np.uint32))


def test_nothing_else_is_overwritten_by_saving(sasrec: Trained, tmp_path: Path) -> None:
    sasrec.prepared.save(tmp_path / "prepared")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary")
    for name in ("prepared", "mine", "mine/diary.txt"):
        with pytest.raises(StorageError, match=f"{name}: already exists"):
            sasrec.recommender.save(tmp_path / name)
    assert (tmp_path / "mine" / "diary.txt").read_text() == "dear diary"
    Prepared.load(tmp_path / "prepared")


def test_a_training_on_another_codebook_makes_no_recommender(
    trainings: dict[str, Trained],
) -> None:
    with pytest.raises(InputError, match="trained on another prepared log"):
        Recommender.from_training(trainings["sasrec"].prepared, trainings["bert4rec"].folder)
    with pytest.raises(StorageError, match=f"{MODEL}: no such file"):
        Recommender.from_training(trainings["sasrec"].prepared, trainings["sasrec"].saved)
