"""Files of named arrays: whole, the same bytes every time, and refused when damaged."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from recprune import StorageError
from recprune.training.tensors import load_tensors, save_tensors

DTYPES = ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?")
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (0,), (3, 0, 2), (2, 3), (2, 1, 3, 2))


def examples() -> dict[str, NDArray[Any]]:
    """Every type in every shape, extreme values among them."""
    rng = np.random.default_rng(0)
    found: dict[str, NDArray[Any]] = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            raw = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8)
            array = (raw % 2).astype(bool)[..., 0] if dtype == "?" else raw.view(dtype)[..., 0]
            found[f"{dtype} {shape}"] = np.array(array)
    found["f4 extremes"] = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.4e38], np.float32)
    return found


def assert_same(first: dict[str, NDArray[Any]], second: dict[str, NDArray[Any]]) -> None:
    assert set(first) == set(second)
    for name, array in first.items():
        assert array.dtype == second[name].dtype, name
        assert array.shape == second[name].shape, name
        assert array.tobytes() == second[name].tobytes(), name


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "some.safetensors"
    tensors: dict[str, NDArray[Any]] = {
        "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "step": np.array(3.0, np.float32),
        "codes": np.arange(5, dtype=np.uint8),
    }
    save_tensors(path, tensors, {"settings": '{"a": "é"}'})
    return path


def header_of(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    found = json.loads(content[8 : 8 + length])
    assert isinstance(found, dict)
    return found


def write_with_header(path: Path, header: object, data: bytes) -> None:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def data_of(path: Path) -> bytes:
    content = path.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


def test_every_type_and_shape_comes_back(tmp_path: Path) -> None:
    saved = examples()
    save_tensors(tmp_path / "x", saved, {"name": "välue", "empty": ""})
    found, metadata = load_tensors(tmp_path / "x")
    assert_same(saved, found)
    assert metadata == {"name": "välue", "empty": ""}
    assert all(array.flags.writeable for array in found.values())


@given(
    arrays_of.arrays(
        st.sampled_from([np.dtype(dtype) for dtype in DTYPES]),
        arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    ),
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=8),
)
def test_any_array_under_any_name_comes_back(
    tmp_path_factory: pytest.TempPathFactory, array: NDArray[Any], name: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    save_tensors(path, {name: array, name + "2": array.T}, {})
    assert_same({name: array, name + "2": array.T}, load_tensors(path)[0])


def test_arrays_that_are_not_contiguous_are_written_as_they_look(tmp_path: Path) -> None:
    wide = np.arange(24, dtype=np.int32).reshape(4, 6)
    saved = {"turned": wide.T, "every other": wide[:, ::2], "backwards": wide[::-1]}
    save_tensors(tmp_path / "x", saved, {})
    assert_same(saved, load_tensors(tmp_path / "x")[0])
    assert_same(saved, load_file(tmp_path / "x"))


def test_no_arrays_and_no_text_is_a_file_too(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x", {}, {})
    assert load_tensors(tmp_path / "x") == ({}, {})


def test_the_safetensors_package_reads_what_we_write(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x", examples(), {"key": "value"})
    assert_same(examples(), load_file(tmp_path / "x"))


def test_we_read_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    save_file(examples(), tmp_path / "x", metadata={"key": "value"})
    found, metadata = load_tensors(tmp_path / "x")
    assert_same(examples(), found)
    assert metadata == {"key": "value"}
    save_file(examples(), tmp_path / "y")  # without any text
    assert load_tensors(tmp_path / "y")[1] == {}


def test_a_file_is_flushed_and_read_by_whom_the_mask_lets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, flush = [], os.fsync

    def noted(descriptor: int) -> None:
        flushed.append(os.fstat(descriptor).st_ino)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    before = os.umask(0o027)
    try:
        save_tensors(tmp_path / "some.safetensors", examples(), {})
    finally:
        os.umask(before)
    state = (tmp_path / "some.safetensors").stat()
    assert state.st_mode & 0o777 == 0o640
    assert state.st_ino in flushed


def test_the_same_arrays_give_the_same_bytes(tmp_path: Path) -> None:
    texts = {f"key {number}": "value" for number in range(6)}  # in whatever order they are hashed
    for name in ("x", "y", "z"):
        save_tensors(tmp_path / name, examples(), texts)
    assert len({(tmp_path / name).read_bytes() for name in ("x", "y", "z")}) == 1
    assert load_tensors(tmp_path / "x")[1] == texts


def test_text_in_an_entry_for_each_name_is_read_as_well(tmp_path: Path) -> None:
    """As earlier versions wrote it."""
    save_file({"a": np.zeros(3)}, tmp_path / "x", metadata={"settings": "{}", "prepared": "5"})
    assert load_tensors(tmp_path / "x")[1] == {"settings": "{}", "prepared": "5"}


# Damage ------------------------------------------------------------------------------------------


def test_a_file_cut_off_anywhere_is_refused(whole: Path) -> None:
    content = whole.read_bytes()
    for length in range(len(content)):
        whole.write_bytes(content[:length])
        with pytest.raises(StorageError, match="some.safetensors"):
            load_tensors(whole)


def test_a_flipped_bit_in_the_header_never_crashes(whole: Path) -> None:
    """Most flips break the header; one inside a name or a text cannot be told from the real one."""
    content = whole.read_bytes()
    refused = 0
    end = len(content) - len(data_of(whole))
    for place in range(end):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            whole.write_bytes(damaged)
            try:
                load_tensors(whole)
            except StorageError as error:
                assert "some.safetensors" in str(error)  # noqa: PT017
                refused += 1
    assert refused > end * 8 * 0.6


@pytest.mark.parametrize("length", [0, 1, 1 << 20, (1 << 63) - 1, (1 << 64) - 1])
def test_an_absurd_length_of_the_header_is_refused(whole: Path, length: int) -> None:
    whole.write_bytes(length.to_bytes(8, "little") + whole.read_bytes()[8:])
    with pytest.raises(StorageError, match="some.safetensors"):
        load_tensors(whole)


@pytest.mark.parametrize(
    "entry",
    [
        {"data_offsets": [0, 1 << 40]},
        {"data_offsets": [-24, 0]},
        {"data_offsets": [24, 0]},
        {"data_offsets": [0, 20]},
        {"data_offsets": [1 << 62, (1 << 62) + 24]},
        {"data_offsets": [0]},
        {"data_offsets": [0.0, 24.0]},
        {"data_offsets": ["0", "24"]},
        {"data_offsets": None},
        {"shape": [2, 4]},
        {"shape": [-2, -3]},
        {"shape": [1 << 70]},
        {"shape": "23"},
        {"shape": 6},
        {"shape": [0, 1 << 70], "data_offsets": [0, 0]},
        {"dtype": "F128"},
        {"dtype": "F64"},
        {"dtype": None},
        {"dtype": ["F32"]},
    ],
    ids=str,
)
def test_a_header_that_does_not_fit_the_file_is_refused(whole: Path, entry: dict[str, Any]) -> None:
    header, data = header_of(whole), data_of(whole)
    header["weight"] |= entry
    write_with_header(whole, header, data)
    with pytest.raises(StorageError, match="some.safetensors: damaged"):
        load_tensors(whole)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"3",
        b"null",
        b'"x"',
        b"{",
        b"\xff\xfe",
        b'{"x": 3}',
        b'{"x": {}}',
        b"[" * 100_000,
    ],
    ids=lambda header: repr(header[:10]),
)
def test_a_header_that_is_something_else_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "some.safetensors"
    write_with_header(path, header, b"")
    with pytest.raises(StorageError, match="some.safetensors: damaged"):
        load_tensors(path)


def test_arrays_that_share_bytes_are_refused(whole: Path) -> None:
    """Or a few bytes could stand for any number of arrays."""
    header, data = header_of(whole), data_of(whole)
    header["again"] = header["weight"]
    write_with_header(whole, header, data)
    with pytest.raises(StorageError, match="some.safetensors: damaged"):
        load_tensors(whole)
    del header["again"]
    write_with_header(whole, header, data + b"more")
    with pytest.raises(StorageError, match="some.safetensors: damaged"):
        load_tensors(whole)


def test_metadata_that_is_no_text_is_refused(whole: Path) -> None:
    for metadata in ({"a": 1}, [1], 5, "text"):
        write_with_header(whole, header_of(whole) | {"__metadata__": metadata}, data_of(whole))
        with pytest.raises(StorageError, match="some.safetensors: damaged"):
            load_tensors(whole)


@pytest.mark.parametrize("text", ["", "[]", "3", '{"a": 1}', "[" * 100_000])
def test_a_text_that_is_not_one_for_each_name_is_refused(tmp_path: Path, text: str) -> None:
    save_file({"a": np.zeros(3)}, tmp_path / "some.safetensors", metadata={"recprune": text})
    with pytest.raises(StorageError, match="some.safetensors: damaged"):
        load_tensors(tmp_path / "some.safetensors")


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nothing.safetensors: no such file"):
        load_tensors(tmp_path / "nothing.safetensors")
    with pytest.raises(StorageError, match=f"{tmp_path.name}: cannot be read"):
        load_tensors(tmp_path)


def test_a_write_that_breaks_off_leaves_the_old_file(whole: Path) -> None:
    before = whole.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # as on a full disk
    try:
        with pytest.raises((OSError, StorageError)):
            save_tensors(whole, {"small": np.zeros(4), "large": np.zeros(100_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert whole.read_bytes() == before
    assert [path.name for path in whole.parent.iterdir()] == [whole.name]  # no temporary file


def test_what_is_written_over_a_file_replaces_it_whole(whole: Path) -> None:
    save_tensors(whole, {"only": np.arange(3)}, {})
    found, metadata = load_tensors(whole)
    assert_same(found, {"only": np.arange(3)})
    assert metadata == {}
