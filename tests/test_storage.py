"""One saved thing is one folder: whole, checked, and never in the way of anybody's files."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recprune import StorageError, storage
from recprune.storage import (
    Saved,
    json_checksum,
    load_folder,
    read_manifest,
    save_folder,
    saved_kind,
)
from recprune.types import Json

ARRAYS: dict[str, NDArray[Any]] = {
    "numbers": np.arange(12, dtype=np.int64).reshape(3, 4),
    "nothing": np.empty((0, 3), np.uint8),
    "big_endian": np.array([1, 2, 3], ">u2"),
}


def save(folder: Path, value: int = 1) -> None:
    save_folder(folder, Saved("thing", 2, {"value": value}, ARRAYS))


def load(folder: Path, *, verify: bool = True) -> tuple[Json, Mapping[str, Any]]:
    saved = load_folder(folder, kind="thing", version=2, verify=verify)
    return saved.settings, saved.arrays


def test_what_is_saved_is_loaded_as_read_only_memory_maps(tmp_path: Path) -> None:
    save(tmp_path / "deep" / "thing")
    settings, arrays = load(tmp_path / "deep" / "thing")
    assert settings == {"value": 1}
    assert set(arrays) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert np.array_equal(arrays[name], array)
        assert arrays[name].dtype.newbyteorder("=") == array.dtype.newbyteorder("=")
    assert not arrays["numbers"].flags.writeable
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["thing"]


def test_a_memory_map_shows_the_file_and_keeps_no_descriptor(tmp_path: Path) -> None:
    """Else a process could hold the arrays of some sixty segments of a live index."""
    save(tmp_path / "thing")
    before = len(list(Path("/dev/fd").iterdir()))
    _, arrays = load(tmp_path / "thing")
    assert len(list(Path("/dev/fd").iterdir())) == before
    with (tmp_path / "thing" / "numbers.npy").open("r+b") as file:
        file.seek(-arrays["numbers"].itemsize, os.SEEK_END)
        file.write(bytes(arrays["numbers"].itemsize))
    assert arrays["numbers"].ravel()[-1] == 0  # it was 11


def test_a_folder_of_the_same_kind_is_replaced_and_an_old_map_stays_readable(
    tmp_path: Path,
) -> None:
    save(tmp_path / "thing", 1)
    _, old = load(tmp_path / "thing")
    save(tmp_path / "thing", 2)
    assert load(tmp_path / "thing")[0] == {"value": 2}
    assert old["numbers"].sum() == 66
    assert [entry.name for entry in tmp_path.iterdir()] == ["thing"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "thing").mkdir()
    save(tmp_path / "thing")
    assert load(tmp_path / "thing")[0] == {"value": 1}


def test_other_people_s_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    (tmp_path / "file").write_text("text")
    save_folder(tmp_path / "other", Saved("other", 2, {}, {}))
    for name, what in [
        ("home", "something else"),
        ("file", "something else"),
        ("other", "saved other"),
    ]:
        with pytest.raises(StorageError, match=f"{name}: already exists and is (a )?{what}"):
            save(tmp_path / name)
    with pytest.raises(
        StorageError, match="home: .* something else, not an index; not overwritten"
    ):
        save_folder(tmp_path / "home", Saved("index", 1, {}, {}))
    assert (tmp_path / "home" / "letter.txt").read_text() == "dear"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "home", "other"]


def test_a_swap_without_system_support_still_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "thing", 1)
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
    save(tmp_path / "thing", 2)
    assert load(tmp_path / "thing")[0] == {"value": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["thing"]


def test_others_may_read_what_was_saved(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save(tmp_path / "thing")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "thing").stat().st_mode) == 0o755


# Damage ------------------------------------------------------------------------------------------


def sealed(folder: Path, change: Any) -> None:
    """Change a manifest and give it the right checksum, as a stranger can."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    manifest.pop("sha256", None)
    manifest["sha256"] = json_checksum(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def rewrite(folder: Path, content: bytes) -> None:
    """Replace a file of numbers, and say so in the manifest."""
    (folder / "numbers.npy").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    change = {"bytes": len(content), "sha256": digest}
    sealed(folder, lambda manifest: manifest["arrays"]["numbers"].update(change))


def with_header(folder: Path, header: bytes, *, begin: int = 128) -> None:
    numbers = (folder / "numbers.npy").read_bytes()[128:]
    length = (begin - 10).to_bytes(2, "little")
    rewrite(folder, b"\x93NUMPY\x01\0" + length + header.ljust(begin - 11) + b"\n" + numbers)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: sealed(d, lambda m: m.update(version=2.0)), "format version 2.0"),
        (lambda d: sealed(d, lambda m: m.update(version=True)), "format version True"),
        (lambda d: sealed(d, lambda m: m.update(settings=[])), "an incomplete manifest"),
        (lambda d: sealed(d, lambda m: m.update(arrays=[])), "an incomplete manifest"),
        (lambda d: sealed(d, lambda m: m.update(parts=3)), "an incomplete manifest"),
        (lambda d: sealed(d, lambda m: m.update(parts={"x": 3})), "an incomplete part 'x'"),
        (lambda d: sealed(d, lambda m: m["arrays"].update(numbers={})), "incomplete array 'numbers'"),
        (lambda d: sealed(d, lambda m: m["arrays"].update({"../numbers": m["arrays"]["numbers"]})), "'../numbers' is no name"),
        (lambda d: sealed(d, lambda m: m["arrays"]["numbers"].update(shape=[2, 6])), r"holds <i8\[3, 4\], expected <i8\[2, 6\]"),
        (lambda d: (d / "manifest.json").write_text('{"kind": "\\ud800", "version": 2, "sha256": ""}'), "not a recprune manifest"),
        (lambda d: rewrite(d, b""), "numbers.npy: cannot be read: not an array"),
        (lambda d: rewrite(d, b"PK" * 100), "numbers.npy: cannot be read: not an array"),
        (lambda d: with_header(d, b"{'descr': '|O', 'fortran_order': False, 'shape': (3, 4), }"), "not an array"),
        (lambda d: with_header(d, b"{'descr': '<i8', 'fortran_order': True, 'shape': (3, 4), }"), "not an array"),
        (lambda d: with_header(d, b"{'descr': '<i8', 'fortran_order': False, 'shape': (3, 4), }", begin=129), "not an array"),
        (lambda d: with_header(d, b"{'descr': '<i8', 'fortran_order': False, 'shape': (3, 5), }"), r"holds <i8\[3, 5\], expected"),
        (lambda d: with_header(d, b"("*110), "not an array"),
    ],
)  # fmt: skip
def test_right_checksums_do_not_make_a_folder_right(
    tmp_path: Path, change: Any, message: str, verify: bool
) -> None:
    save(tmp_path / "thing")
    change(tmp_path / "thing")
    with pytest.raises(StorageError, match=message) as error:
        load(tmp_path / "thing", verify=verify)
    assert str(tmp_path / "thing") in str(error.value)


def test_an_array_that_its_file_cannot_hold_is_not_mapped(tmp_path: Path) -> None:
    """Both say the same, and the file is too short for it: to read it would end the process."""
    save(tmp_path / "thing")
    with_header(tmp_path / "thing", b"{'descr': '<i8', 'fortran_order': False, 'shape': (9, 4), }")
    sealed(tmp_path / "thing", lambda m: m["arrays"]["numbers"].update(shape=[9, 4]))
    with pytest.raises(StorageError, match=r"numbers.npy: 224 bytes, too few or too many for"):
        load(tmp_path / "thing")


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    save(tmp_path / "thing")
    (tmp_path / "thing" / "numbers.npy").unlink()
    os.mkfifo(tmp_path / "thing" / "numbers.npy")
    with pytest.raises(StorageError, match="numbers.npy: cannot be read: .*not a plain file"):
        load(tmp_path / "thing")


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def change_manifest(path: Path, **changes: object) -> None:
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "numbers.npy").write_bytes((d / "numbers.npy").read_bytes()[:-5]), "numbers.npy: 219 bytes, expected 224: truncated"),
        (lambda d: flip_a_bit(d / "numbers.npy"), "numbers.npy: checksum does not match"),
        (lambda d: (d / "numbers.npy").unlink(), "numbers.npy: missing"),
        (lambda d: (d / "manifest.json").unlink(), "it has no manifest.json"),
        (lambda d: (d / "manifest.json").write_text("{"), "not a recprune manifest, or a truncated one"),
        (lambda d: (d / "manifest.json").write_text("[]"), "not a recprune manifest"),
        (lambda d: (d / "manifest.json").write_bytes(b"\xff"), "manifest.json: cannot be read"),
        (lambda d: change_manifest(d / "manifest.json", settings={"value": 9}), "checksum does not match"),
        (lambda d: change_manifest(d / "manifest.json", version=3), "format version 3, this recprune reads 2"),
        (lambda d: change_manifest(d / "manifest.json", kind="cake"), "holds a saved cake, not a thing"),
    ],
)  # fmt: skip
def test_damage_is_named(tmp_path: Path, damage: Any, message: str) -> None:
    folder = tmp_path / "thing"
    save(folder)
    damage(folder)
    with pytest.raises(StorageError, match=message) as error:
        load(folder)
    assert str(folder) in str(error.value)


def test_arrays_swapped_between_folders_are_refused_even_without_checksums(tmp_path: Path) -> None:
    save(tmp_path / "thing")
    data = np.zeros((4, 3), np.int64)  # as many bytes, another shape
    np.save(tmp_path / "thing" / "numbers.npy", data)
    with pytest.raises(StorageError, match=r"holds <i8\[4, 3\], expected <i8\[3, 4\]"):
        load(tmp_path / "thing", verify=False)


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    save(tmp_path / "thing")
    path = tmp_path / "thing" / "numbers.npy"
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    entry = {
        "dtype": "|O",
        "shape": [1],
        "bytes": path.stat().st_size,
        "sha256": "",
    }
    manifest = {"kind": "thing", "version": 2, "settings": {}, "arrays": {"numbers": entry}}
    manifest["sha256"] = json_checksum(manifest)
    (tmp_path / "thing" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StorageError, match="numbers.npy: cannot be read"):
        load(tmp_path / "thing", verify=False)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere: not a saved thing: no such folder"):
        load(tmp_path / "nowhere")


def test_a_full_disk_leaves_the_old_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "thing", 1)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage, "_flush_to_disk", full)
    with pytest.raises(StorageError, match="thing: cannot be written: No space left on device"):
        save(tmp_path / "thing", 2)
    assert load(tmp_path / "thing")[0] == {"value": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["thing"]


def test_a_reader_never_sees_half_of_two_folders(tmp_path: Path) -> None:
    """One process keeps replacing the folder, this one keeps loading it."""
    folder = tmp_path / "thing"
    program = textwrap.dedent(
        """
        import itertools, sys
        import numpy as np
        from recprune.storage import Saved, save_folder
        for value in itertools.count():
            arrays = {name: np.full(2000, value) for name in "abc"}
            save_folder(sys.argv[1], Saved("thing", 2, {"value": value}, arrays))
        """
    )
    writer = subprocess.Popen([sys.executable, "-c", program, folder])
    try:
        while not folder.exists():
            time.sleep(0.01)
        values = set()
        for number in range(1500):
            settings, arrays = load(folder, verify=number % 2 == 0)
            assert {int(array[0]) for array in arrays.values()} == {settings["value"]}
            values.add(settings["value"])
        assert len(values) > 10
    finally:
        writer.kill()
        writer.wait()


def test_a_link_stays_and_its_folder_is_replaced(tmp_path: Path) -> None:
    save(tmp_path / "v1", 1)
    (tmp_path / "current").symlink_to("v1")
    save(tmp_path / "current", 2)
    assert (tmp_path / "current").is_symlink()
    assert load(tmp_path / "v1")[0] == {"value": 2}


def test_a_kill_in_the_midst_of_saving_leaves_the_old_one_whole(tmp_path: Path) -> None:
    save(tmp_path / "thing", 1)
    program = textwrap.dedent(
        """
        import os, signal, sys
        import numpy as np
        from recprune import storage
        storage.put_in_place = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        thing = storage.Saved("thing", 2, {"value": 2}, {"numbers": np.arange(3)})
        storage.save_folder(sys.argv[1], thing)
        """
    )
    killed = subprocess.run([sys.executable, "-c", program, tmp_path / "thing"], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert load(tmp_path / "thing")[0] == {"value": 1}


def nested(version: int = 7) -> Saved:
    part = Saved("engine", version, {"cylinders": 4}, {"numbers": np.arange(5)})
    return Saved("car", 1, {"doors": 2}, {"numbers": np.arange(3)}, {"engine": part})


def test_a_part_has_a_kind_and_a_version_of_its_own(tmp_path: Path) -> None:
    save_folder(tmp_path / "car", nested())
    loaded = load_folder(tmp_path / "car", kind="car", version=1)
    part = loaded.part("engine", "here")
    assert (part.kind, part.version, part.settings) == ("engine", 7, {"cylinders": 4})
    assert part.arrays["numbers"].tolist() == [0, 1, 2, 3, 4]
    assert loaded.arrays["numbers"].tolist() == [0, 1, 2]
    part.check(kind="engine", version=7, source="here")
    part.check(kind="engine", version=9, oldest=7, source="here")
    with pytest.raises(StorageError, match="here: engine format version 7, this recprune reads 8"):
        part.check(kind="engine", version=8, source="here")
    with pytest.raises(StorageError, match="this recprune reads 8 to 9"):
        part.check(kind="engine", version=9, oldest=8, source="here")
    with pytest.raises(StorageError, match="here: holds a saved engine, not a wheel"):
        part.check(kind="wheel", version=7, source="here")
    with pytest.raises(StorageError, match="here: the car has no wheel"):
        loaded.part("wheel", "here")


def test_a_damaged_part_is_noticed(tmp_path: Path) -> None:
    save_folder(tmp_path / "car", nested())
    path = tmp_path / "car" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["parts"]["engine"]["settings"], manifest["sha256"]
    path.write_text(json.dumps(manifest | {"sha256": json_checksum(manifest)}))
    with pytest.raises(StorageError, match="an incomplete part 'engine'"):
        load_folder(tmp_path / "car", kind="car", version=1)


def test_an_older_version_is_read_where_that_is_said(tmp_path: Path) -> None:
    save(tmp_path / "thing")
    assert load_folder(tmp_path / "thing", kind="thing", version=3, oldest=2).version == 2
    with pytest.raises(StorageError, match="thing format version 2, this recprune reads 3"):
        load_folder(tmp_path / "thing", kind="thing", version=3)


def test_a_manifest_can_be_read_alone(tmp_path: Path) -> None:
    save(tmp_path / "thing")
    assert saved_kind(tmp_path / "thing") == "thing"
    assert saved_kind(tmp_path) is saved_kind(tmp_path / "nowhere") is None
    first = read_manifest(tmp_path / "thing")
    save(tmp_path / "thing", 2)
    assert read_manifest(tmp_path / "thing")["sha256"] != first["sha256"]
    path = tmp_path / "thing" / "manifest.json"
    path.write_text(path.read_text().replace('"value": 2', '"value": 3'))
    with pytest.raises(StorageError, match="checksum does not match"):
        read_manifest(tmp_path / "thing")
    assert saved_kind(tmp_path / "thing") == "thing", "what is replaced need not be whole"
