""".npy files: what opens, what is refused and how, boxes read and written, outputs that appear."""

from __future__ import annotations

import errno
import os
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.errors import DTypeError, FileError
from tilewise.outofcore import files, flat, npy
from tilewise.outofcore.files import Layout, Output, Target, open_matrix
from tilewise.outofcore.flat import FlatFile

DTYPES = [">f4", "<f8", "i1", ">u2", "<i8", "?", "c8", ">c16", "f2", "g"]


def save(path: Path, array: Any, version: tuple[int, int] | None = None) -> Path:
    with path.open("wb") as file:
        np.lib.format.write_array(file, array, version=version)
    return path


def read(file: FlatFile, *box: slice) -> Any:
    return file.read(box, np.full(file.nbytes + 8, 0xFF, np.uint8))


@contextmanager
def output(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[Output]:
    """An output that is gone after the block unless it was committed."""
    made = create(path, shape, dtype)
    try:
        yield made
    finally:
        made.close()
        Target.of(path).discard()


def create(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Output:
    layout = Layout(shape=shape, dtype=dtype, grid=shape, added=(), chunks=shape)
    return Target.of(path).create(layout, 1 << 20)


def everything(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_header_of_every_version_order_and_dtype(
    tmp_path: Path, dtype: str, order: Any, version: tuple[int, int]
) -> None:
    array = np.arange(42).reshape(6, 7).astype(dtype, order=order)
    with open_matrix(save(tmp_path / "a.npy", array, version), "a") as file:
        assert (file.shape, file.dtype, file.strides) == ((6, 7), array.dtype, array.strides)
        assert file.nbytes == array.nbytes
        assert np.array_equal(read(file, slice(1, 5), slice(2, 6)), array[1:5, 2:6])
        with file.unread(tmp_path, 100) as whole:
            assert np.array_equal(whole, array)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), order=st.sampled_from("CF"))
def test_any_box_of_any_array(
    tmp_path_factory: pytest.TempPathFactory, data: Any, order: Any
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    box = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        box.append(slice(start, data.draw(st.integers(start, size))))
    array = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape), order=order)
    path = tmp_path_factory.mktemp("box") / "a.npy"
    with open_matrix(save(path, array), "a") as file:
        part = read(file, *box)
    assert part.shape == array[tuple(box)].shape
    assert np.array_equal(part, array[tuple(box)])

    target = path.with_name("c.npy")
    with output(target, shape, array.dtype) as made:
        made.write(everything(shape), np.full(shape, -1))
        made.write(tuple(box), array[tuple(box)])
        made.commit()
    expected = np.full(shape, -1)
    expected[tuple(box)] = array[tuple(box)]
    assert np.array_equal(np.load(target), expected)


def test_reading_takes_the_runs_that_are_there_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    preadv = os.preadv

    def counting(fd: int, buffers: list[Any], offset: int) -> int:
        calls.append(sum(len(buffer) for buffer in buffers))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    for order, rows, expected in (
        ("C", slice(10, 20), [10 * 100]),
        ("F", slice(10, 20), [10] * 100),
        ("F", slice(0, 50), [50 * 100]),
    ):
        array = np.zeros((50, 100), np.int8, order=order)  # type: ignore[call-overload]
        with open_matrix(save(tmp_path / "a.npy", array), "a") as file:
            calls.clear()
            read(file, rows, slice(0, 100))
            assert calls == expected


def test_without_pread_one_position_is_shared_under_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat, "_HAS_PREAD", False)
    monkeypatch.setattr(flat, "_HAS_PWRITE", False)
    array = np.arange(30.0).reshape(5, 6)
    with open_matrix(save(tmp_path / "a.npy", array), "a") as file:
        assert np.array_equal(read(file, slice(1, 4), slice(2, 5)), array[1:4, 2:5])
        with output(tmp_path / "c.npy", (5, 6), array.dtype) as made:
            made.write(everything((5, 6)), read(file, *everything((5, 6))))
            made.commit()
    assert np.array_equal(np.load(tmp_path / "c.npy"), array)


def test_a_system_may_take_and_give_a_part_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pread, preadv, pwrite = os.pread, os.preadv, os.pwrite
    monkeypatch.setattr(os, "pread", lambda f, size, at: pread(f, min(size, 5), at))
    monkeypatch.setattr(os, "preadv", lambda f, into, at: preadv(f, [into[0][:7]], at))
    monkeypatch.setattr(os, "pwrite", lambda f, some, at: pwrite(f, some[:3], at))
    array = np.arange(30.0).reshape(5, 6)
    with (
        open_matrix(save(tmp_path / "a.npy", array), "a") as file,
        output(tmp_path / "c.npy", (5, 6), array.dtype) as made,
    ):
        made.write(everything((5, 6)), read(file, *everything((5, 6))))
        made.commit()
    assert np.array_equal(np.load(tmp_path / "c.npy"), array)


@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_a_disk_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = save(tmp_path / "a.npy", np.ones((3, 3)))
    monkeypatch.setattr(os, call, refuse)
    message = r"a \(.*a\.npy\) cannot be read.*Input/output error"
    with pytest.raises(FileError, match=message), open_matrix(path, "a") as file:
        read(file, *everything((3, 3)))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_raw_floats_say_what_they_are_in_the_path(tmp_path: Path, name: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(getattr(ml_dtypes, name))
    path = tmp_path / "a.npy"
    np.save(path, array)
    with pytest.raises(DTypeError, match=r"at the end of its name, as in .*a\.npy:"):
        open_matrix(path, "a")
    with open_matrix(f"{path}:{name}", "a") as file:
        assert file.dtype == array.dtype
        assert np.array_equal(read(file, slice(0, 3), slice(0, 4)), array)
    with output(tmp_path / "c.npy", (3, 4), array.dtype) as made:
        made.write(everything((3, 4)), array)
        made.commit()
    assert np.array_equal(np.load(tmp_path / "c.npy").view(array.dtype), array)


def test_only_raw_elements_of_the_same_size_are_taken_for_raw_floats(tmp_path: Path) -> None:
    bits = save(tmp_path / "bits.npy", np.ones((2, 2), np.uint16))
    with open_matrix(f"{bits}:bfloat16", "a") as file:
        assert file.dtype == ml_dtypes.bfloat16
    for array in (np.ones((2, 2), np.float16), np.ones((2, 2), np.uint8)):
        path = save(tmp_path / "a.npy", array)
        with pytest.raises(DTypeError, match="not raw bfloat16"):
            open_matrix(f"{path}:bfloat16", "a")


def _header(text: str, version: int = 1) -> bytes:
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text.encode()


def _npy(array: Any) -> bytes:
    file = BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"a \(.*x\.npy\) is empty \(0 bytes\)"),
        (b"1.0,2.0\n3.0,4.0\n", r"is not a \.npy file \(it begins with b'1\.0,2\.0\\n'\)"),
        (b"PK\x03\x04rest of an archive", r"is a \.npz or zip archive"),
        (b"\x89HDF\r\n\x1a\n and so on", "cannot be opened as HDF5: "),
        (_npy(np.zeros((9, 9)))[:-1], r"is truncated: \(9, 9\) float64 takes 648 bytes after"),
        (_npy(np.zeros((9, 9)))[:128], "is truncated"),
        (_npy(np.zeros((9, 9)))[:100], "has a broken .npy header"),
        (_npy(np.zeros((9, 9)))[:9], "has a broken .npy header"),
        (_npy(np.array([{}, []], object)), "holds pickled Python objects, which are never loaded"),
        (b"\x93NUMPY\x04\x00" + bytes(200), r"has \.npy format version 4, and 1 to 3 are known"),
        (_header("not a dict"), "has a broken .npy header"),
        (_header("{'descr': '<f4'}"), "has a broken .npy header"),
        (_header("(" * 5000), "has a broken .npy header"),
        (
            _header("{'descr': (), 'fortran_order': False, 'shape': (1, 4)}"),
            "has a broken .npy header",
        ),
        (
            _header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 4)}"),
            "has a broken .npy header",
        ),
        (
            _header("{'descr': '<q9', 'fortran_order': False, 'shape': (1, 4)}"),
            "has a broken .npy header",
        ),
        (
            _header("{'descr': '|a8', 'fortran_order': False, 'shape': (1, 4)}"),
            "has a broken .npy header",
        ),
        (
            _header("{'descr': '<f4', 'fortran_order': False, 'shape': (10**9, 10**9)}"),
            "has a broken .npy header",
        ),
        (
            _header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 1000000000)}"),
            "is truncated: .* takes 4000000000000000000 bytes",
        ),
    ],
)
def test_what_is_not_a_whole_matrix_is_refused_by_name(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    with pytest.raises(FileError, match=message):
        open_matrix(path, "a")
    assert path.read_bytes() == content


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_a_damaged_header_is_an_error_of_ours_or_still_a_matrix(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    content = bytearray(_npy(np.arange(12.0).reshape(3, 4)))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 127))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.npy"
    path.write_bytes(content)
    try:
        with open_matrix(path, "a") as file:
            read(file, *everything(file.shape))
    except (FileError, DTypeError):
        pass


@pytest.mark.parametrize("dtype", ["S3", "U3", "M8[s]", [("re", "f4"), ("im", "f4")], "V3"])
def test_elements_that_are_no_numbers_are_refused(tmp_path: Path, dtype: Any) -> None:
    path = save(tmp_path / "a.npy", np.zeros((2, 2), dtype))
    with pytest.raises(DTypeError, match=r"b \(.*a\.npy\) has dtype .*cannot be multiplied"):
        open_matrix(path, "b")


def test_places_without_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"a \(.*none\.npy\) does not exist"):
        open_matrix(tmp_path / "none.npy", "a")
    with pytest.raises(FileError, match="is a directory"):
        open_matrix(tmp_path, "a")
    with pytest.raises(FileError, match="cannot be opened: embedded null byte"):
        open_matrix("a\0b.npy", "a")
    with pytest.raises(
        FileError, match=r"a is list, neither a path nor a store; matmul multiplies"
    ):
        open_matrix([[1]], "a")  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npy")
    with pytest.raises(FileError, match="is a device or pipe"):
        open_matrix(tmp_path / "pipe.npy", "a")
    with pytest.raises(FileError, match="is a device or pipe"):
        create(tmp_path / "pipe.npy", (2, 2), np.dtype("f4"))


def test_a_file_without_permission_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    path = save(tmp_path / "a.npy", np.zeros((2, 2)))

    def forbid(*_: object) -> None:  # root may read everything, so permissions alone do not do
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(files, "FileIO", forbid)
    monkeypatch.setattr(npy, "FileIO", forbid)
    with pytest.raises(FileError, match=r"a \(.*\) cannot be opened: Permission denied"):
        open_matrix(path, "a")
    with pytest.raises(FileError, match=r"out \(.*\) cannot be created: Permission denied"):
        create(tmp_path / "c.npy", (2, 2), np.dtype("f4"))


def test_a_file_cut_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npy", np.zeros((100, 100)))
    with open_matrix(path, "a") as file:
        os.truncate(path, 1000)
        with pytest.raises(FileError, match=r"a \(.*\) ends at byte 1000: it was cut"):
            read(file, slice(0, 100), slice(0, 100))
        with pytest.raises(FileError, match="was changed while it was read"):
            file.check_unchanged()


def test_a_folder_that_cannot_be_made_durable_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refuse)
    with output(tmp_path / "c.npy", (3,), np.dtype("f4")) as made:
        made.write((slice(0, 3),), np.ones(3, "f4"))
        made.commit()
    assert np.load(tmp_path / "c.npy").sum() == 3


def test_an_output_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "c.npy"
    path.write_bytes(b"what was there")
    with output(path, (3, 4), np.dtype(">i4")) as made:
        assert path.read_bytes() == b"what was there"
        made.write((slice(0, 3), slice(0, 4)), np.zeros((3, 4), ">i4"))
    assert [p.name for p in tmp_path.iterdir()] == ["c.npy"]
    assert path.read_bytes() == b"what was there"

    path.chmod(0o640)
    with output(path, (3, 4), np.dtype("f4")) as made:
        made.write((slice(0, 3), slice(0, 4)), np.ones((3, 4), "f4"))
        made.commit()
    assert np.array_equal(np.load(path), np.ones((3, 4), "f4"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["c.npy"]


def test_a_new_output_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    with output(tmp_path / "c.npy", (), np.dtype("f4")) as made:
        made.commit()
    assert (tmp_path / "c.npy").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_an_output_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "c.npy").symlink_to(tmp_path / "real" / "x.npy")
    with output(tmp_path / "c.npy", (1,), np.dtype("f4")) as made:
        made.write((slice(0, 1),), np.ones(1, "f4"))
        made.commit()
    assert (tmp_path / "c.npy").is_symlink()
    assert np.load(tmp_path / "real" / "x.npy") == [1]


def test_places_where_no_output_can_be_are_refused(tmp_path: Path) -> None:
    dtype = np.dtype("f4")
    with pytest.raises(FileError, match="is a directory; name a file in it"):
        create(tmp_path, (2, 2), dtype)
    with pytest.raises(FileError, match=r"end its name in \.npy, \.zarr or"):
        create(tmp_path / "c.txt", (2, 2), dtype)
    with pytest.raises(FileError, match="none is not a directory"):
        create(tmp_path / "none" / "c.npy", (2, 2), dtype)
    with pytest.raises(FileError, match="out is int, neither a path nor"):
        create(3, (2, 2), dtype)  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


def test_a_full_disk_shows_when_the_output_is_created(tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("posix_fallocate", "none"):  # with and without the system's help
        if name == "none":
            monkeypatch.delattr(os, "posix_fallocate", raising=False)
        with (
            pytest.raises(
                FileError,
                match=r"out \(.*\) needs 4\.00 PiB and .* has .* free: (No space|File too)",
            ),
            output(tmp_path / "c.npy", (1 << 25, 1 << 25), np.dtype("f4")),
        ):
            pass
        assert not any(tmp_path.iterdir())


def test_a_disk_that_fills_up_says_what_was_needed(tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with output(tmp_path / "c.npy", (64, 64), np.dtype("f8")) as made:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(FileError, match=r"needs 32\.00 KiB and .* free: No space left"):
            made.write(everything((64, 64)), np.zeros((64, 64)))
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="resource is Unix's")
def test_a_limit_on_file_sizes_is_an_error_and_no_signal(tmp_path: Path) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(FileError, match=r"needs 1\.00 MiB and .* free: File too large"):
            create(tmp_path / "c.npy", (512, 512), np.dtype("f4"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not any(tmp_path.iterdir())
