"""Files of an edge's cache: whole and of the right stream, or not there at all."""

from __future__ import annotations

import os
import time
from pathlib import Path

import orjson
import pytest

from tailrace.common.errors import TailraceError
from tailrace.edge.cache import lock_directory, read_slice, write_slice

KEY = ("orders", "-1")
SERVER = "the deployment"
EPOCH = 3
BODY = b'[{"id":1},{"id":2}]'


def written(path: Path, at_s: float) -> bytes:
    head = {"key": KEY, "deployment": SERVER, "epoch": EPOCH, "at_s": at_s, "fields": [["etag", '"x"']]}
    assert write_slice(path, orjson.dumps(head), BODY) == path.stat().st_size
    return path.read_bytes()


def test_e15_whatever_byte_is_flipped_the_file_is_not_there(tmp_path: Path) -> None:
    """E-15."""
    path = tmp_path / "slice"
    data = written(path, time.time())
    found = read_slice(path, KEY, SERVER, EPOCH)
    assert found is not None
    assert found[1] == BODY
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            path.write_bytes(changed)
            assert read_slice(path, KEY, SERVER, EPOCH) is None, (position, bit)


def test_e15_a_file_that_is_not_whole_is_not_there(tmp_path: Path) -> None:
    """E-15: cut at any place, or with more behind it."""
    path = tmp_path / "slice"
    data = written(path, time.time())
    for cut in (*(data[:length] for length in range(len(data))), data + b"\0", data + data):
        path.write_bytes(cut)
        assert read_slice(path, KEY, SERVER, EPOCH) is None
    path.unlink()
    assert read_slice(path, KEY, SERVER, EPOCH) is None


def test_a_file_of_something_else_is_not_there(tmp_path: Path) -> None:
    """Of another read, server or life of the stream, or too long ago to say whose life it was."""
    path = tmp_path / "slice"
    written(path, time.time())
    assert read_slice(path, ("orders", "-2"), SERVER, EPOCH) is None
    assert read_slice(path, KEY, "another deployment", EPOCH) is None
    assert read_slice(path, KEY, SERVER, EPOCH + 1) is None
    assert read_slice(path, KEY, SERVER, EPOCH - 1) is None
    written(path, time.time() - 8 * 86_400)
    assert read_slice(path, KEY, SERVER, EPOCH) is None
    assert [one.name for one in tmp_path.iterdir()] == ["slice"], "nothing unfinished stays"


def test_a_directory_of_another_user_that_is_open_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    tmp_path.chmod(0o775)
    with pytest.raises(TailraceError, match=f"belongs to another user; give the edge .* {tmp_path}/edge"):
        lock_directory(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o775
    tmp_path.chmod(0o700)
    lock_directory(tmp_path).close()
