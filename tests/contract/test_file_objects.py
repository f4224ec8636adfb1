"""What only the store of files must stand: several processes, and being killed in the middle."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support import object_writer
from support.object_writer import content, head_content
from tailrace.storage.object_store.interface import (
    PRIVATE_DIRECTORY,
    ObjectExistsError,
    ObjectMissingError,
    ObjectStoreUnavailableError,
    open_object_store,
)

OBJECT_BYTES = 2 * 1024 * 1024


def writer(url: str, mode: str, number: int, name: str) -> subprocess.Popen[str]:
    assert object_writer.__file__ is not None
    return subprocess.Popen(
        [sys.executable, object_writer.__file__, url, mode, str(number), name],
        stdout=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> list[str]:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return output.split()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "objects"


def test_processes_that_race_to_create_win_each_object_once(root: Path) -> None:
    names = [f"writer-{index}" for index in range(4)]
    processes = [writer(f"file://{root}", "race", 60, name) for name in names]
    wins = {name: finished(process) for name, process in zip(names, processes, strict=True)}
    won = [key for keys in wins.values() for key in keys]
    assert sorted(won) == [f"race/{number:06d}" for number in range(60)]
    for name, keys in wins.items():
        assert {(root / key).read_text() for key in keys} <= {name}


def test_processes_that_race_to_replace_lose_nothing(root: Path) -> None:
    processes = [writer(f"file://{root}", "count", 25, f"writer-{index}") for index in range(4)]
    for process in processes:
        finished(process)
    assert (root / "count").read_text() == "100"
    assert leftovers(root) == []


def test_killed_writers_leave_whole_objects_only(root: Path) -> None:
    """Every acknowledged object is there, every object there is whole, and the litter goes away."""
    chance = random.Random(20260101)
    acknowledged: list[str] = []
    heads: dict[str, int] = {}
    for turn in range(12):
        process = writer(f"file://{root}", "fill", OBJECT_BYTES, f"turn-{turn}")
        assert process.stdout is not None
        lines: list[str] = []
        for _ in range(chance.randrange(1, 8)):
            lines.append(process.stdout.readline().strip())
        process.send_signal(signal.SIGKILL)
        # What was said before the signal arrived counts as well, if it was said to the end.
        lines += [
            line.strip() for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")
        ]
        process.wait()
        process.stdout.close()
        for line in lines:
            if line.startswith("head "):
                heads[f"turn-{turn}/head"] = int(line.split()[1])
            else:
                acknowledged.append(line)

    async def look() -> None:
        objects = open_object_store(f"file://{root}")
        listed = [info.key for info in await objects.list_after("", limit=10_000)]
        assert set(acknowledged) | heads.keys() <= set(listed)
        for key in listed:
            data, _ = await objects.get(key)
            if key.endswith("/head"):
                number = int(data.split(b":")[0])
                assert data == head_content(number)
                # The last replacement may have happened without having been acknowledged.
                assert number - heads.get(key, 0) in (0, 1)
            else:
                assert data == content(key, OBJECT_BYTES)
        await objects.create("after", b"")
        assert leftovers(root) == []
        await objects.close()

    asyncio.run(look())


def leftovers(root: Path) -> list[Path]:
    return list((root / PRIVATE_DIRECTORY).glob("new-*"))


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_sweep_spares_what_is_being_written(root: Path) -> None:
    (root / PRIVATE_DIRECTORY).mkdir(parents=True)
    dead, living = root / PRIVATE_DIRECTORY / "new-dead", root / PRIVATE_DIRECTORY / "new-living"
    dead.write_bytes(b"half")
    fd = os.open(living, os.O_WRONLY | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)

    async def write() -> None:
        objects = open_object_store(f"file://{root}")
        await objects.create("a", b"")
        await objects.close()

    asyncio.run(write())
    os.close(fd)
    assert leftovers(root) == [living]


def test_deleting_leaves_no_empty_directories(root: Path) -> None:
    async def scenario() -> None:
        objects = open_object_store(f"file://{root}")
        await objects.create("streams/ab/1/segments/x", b"")
        await objects.create("streams/ab/2/segments/x", b"")
        await objects.delete(["streams/ab/1/segments/x"])
        assert names_in(root / "streams/ab") == ["2"]
        await objects.delete(["streams/ab/2/segments/x"])
        assert names_in(root) == [PRIVATE_DIRECTORY]
        await objects.close()

    asyncio.run(scenario())


def test_creating_beside_deletions_of_the_same_directory(root: Path) -> None:
    """Directories come and go below a creator, which must not be seen in what it answers."""

    async def scenario() -> None:
        one, other = open_object_store(f"file://{root}"), open_object_store(f"file://{root}")

        async def churn(objects_name: str) -> None:
            objects = one if objects_name == "one" else other
            for turn in range(60):
                key = f"a/b/c/{objects_name}-{turn}"
                await objects.create(key, b"x")
                await objects.delete([key])

        await asyncio.gather(churn("one"), churn("other"))
        assert await one.list_after("") == []
        await one.close()
        await other.close()

    asyncio.run(scenario())


def test_what_is_no_object_is_left_alone(root: Path) -> None:
    async def scenario() -> None:
        objects = open_object_store(f"file://{root}")
        await objects.create("a/b", b"x")
        with pytest.raises(ObjectStoreUnavailableError):
            await objects.create("a", b"")
        with pytest.raises(ObjectStoreUnavailableError):
            await objects.create("a/b/c", b"")
        with pytest.raises(ObjectMissingError):
            await objects.get("a")
        with pytest.raises(ObjectExistsError):
            await objects.create("a/b", b"y")
        await objects.delete(["a", "a/b/c"])
        assert [info.key for info in await objects.list_after("")] == ["a/b"]
        await objects.close()

    asyncio.run(scenario())


def test_a_directory_that_cannot_be_used_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    async def scenario() -> None:
        objects = open_object_store(f"file://{tmp_path}/file/objects")
        with pytest.raises(ObjectStoreUnavailableError, match="is unavailable"):
            await objects.create("a", b"")
        assert objects.requests["error"] == 1
        await objects.close()

    asyncio.run(scenario())


def test_importing_the_interface_imports_no_library() -> None:
    module = "tailrace.storage.object_store.interface"
    code = f"import sys, {module}; assert not {{'obstore', 'pyarrow'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = f"import sys; from {module} import open_object_store; open_object_store('file:///nowhere')"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'obstore' not in sys.modules"], check=True)
