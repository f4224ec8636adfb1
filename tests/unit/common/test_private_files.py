"""Files that are replaced as a whole."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tailrace.common.private_files import FILE_MODE, replace_file


def test_a_file_is_replaced_and_private(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.with_name("file.tmp").write_bytes(b"left by a crash")
    for content in (b"one", b"two"):
        replace_file(path, content)
        assert path.read_bytes() == content
        assert stat.S_IMODE(path.stat().st_mode) == FILE_MODE
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_file_stays_as_it_is_if_the_new_one_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")

    def refuse(_: int) -> None:
        raise PermissionError("not the owner")

    with pytest.raises(PermissionError):
        replace_file(path, b"new", prepare=refuse)
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
