"""``tailrace inspect``: print the contents of data directory and object store files, without a server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter

from tailrace.cli.errors import RefusedError
from tailrace.cli.object_store import DEFAULT_STORE, StoreOptions, open_store
from tailrace.cli.session import flush_output, print_json, write_output

_HELP: Final = """Print the contents of the files of a data directory or an object store.

Nothing is changed, and no server is needed.

For example:

    tailrace inspect journal --data-dir ./tailrace-data

    tailrace inspect hot --json

    tailrace inspect manifest orders --segments

    tailrace inspect segment streams/3f/3f…/segments/0000000000-….parquet --entries
"""

DataDir = Annotated[Path, Parameter(env_var="TAILRACE_DATA_DIR", help="The data directory.")]
ObjectStore = Annotated[
    str,
    Parameter(
        env_var="TAILRACE_OBJECT_STORE",
        help="The object store: file:///directory, s3://bucket/prefix; by default in the data directory.",
    ),
]
AsJson = Annotated[bool, Parameter(negative="", help="Print JSON, one object per line.")]
_HERE: Final = Path("./tailrace-data")

command = App(name="inspect", help=_HELP, help_format="markdown")


@command.command
def journal(*, data_dir: DataDir = _HERE, json: AsJson = False) -> None:
    """Print every record of the journal, in order, and its end; for each worker if there are several.

    The exit code is 1 if the journal is damaged, so that a server would refuse to start. A last record that
    was truncated by a crash is not damage.
    """
    from tailrace.log.journal_check import inspect_journal
    from tailrace.storage.verify import check_directory

    damage: list[str] = []
    for worker, path in _workers(data_dir):
        for record in inspect_journal(path):
            if json:
                print_json(worker | record)
            else:
                write_output(_pairs(worker | record).encode() + b"\n")
        problems = check_directory(path, deep=False)[0].problems
        damage += [f"{path / 'journal' / file}: {problem}" for file, problem in problems]
    flush_output()
    if damage:
        raise RefusedError("the journal is damaged: " + "; ".join(damage))


@command.command
def hot(*, data_dir: DataDir = _HERE, json: AsJson = False) -> None:
    """Print the contents of the hot store: its position in the journal, its tables and their sizes.

    The exit code is 1 if it cannot be read. `tailrace verify` checks all of its pages.
    """
    from tailrace.storage.hot_store.database import inspect_hot_store
    from tailrace.storage.verify import check_hot_store

    damage: list[str] = []
    for worker, path in _workers(data_dir):
        described = worker | inspect_hot_store(path)
        if json:
            print_json(described)
        else:
            _put_table(described)
        damage += [problem for _, problem in check_hot_store(path / "hot.db", deep=False).problems]
    flush_output()
    if damage:
        raise RefusedError("cannot read the hot store: " + "; ".join(damage))


@command.command
def segment(
    where: Annotated[str, Parameter(help="A file, or the key of an object in the object store.")],
    /,
    *,
    data_dir: DataDir = _HERE,
    object_store: ObjectStore = "",
    entries: Annotated[bool, Parameter(negative="", help="Also print every entry.")] = False,
    json: AsJson = False,
) -> None:
    """Print the metadata and row groups of a segment, and check all of its checksums."""
    from tailrace.storage.segments.reader import describe_entries, describe_segment

    raw = _segment_bytes(where, object_store or (data_dir.absolute() / "objects").as_uri())
    described = describe_segment(raw, where)
    if json:
        print_json(described)
    else:
        groups = described.pop("row_groups", [])
        _put_table(described)
        for number, group in enumerate(groups):
            write_output(f"row group {number}  {_pairs(group)}\n".encode())
    if entries and "problem" not in described:
        for entry in describe_entries(raw):
            if json:
                print_json(entry)
            else:
                write_output(_pairs(entry).encode() + b"\n")
    flush_output()
    if problem := described.get("problem"):
        raise RefusedError(f"{where} is not a valid segment: {problem}")


@command.command
def manifest(
    stream: Annotated[str, Parameter(help="The name of a stream, or its id of 32 hex digits.")],
    /,
    *,
    segments: Annotated[bool, Parameter(negative="", help="Also print every segment.")] = False,
    bucket: StoreOptions = DEFAULT_STORE,
) -> None:
    """Print the manifests of a stream, for every incarnation of its name."""
    asyncio.run(_manifest(stream, bucket, segments))


async def _manifest(stream: str, bucket: StoreOptions, with_segments: bool) -> None:
    from msgspec.structs import asdict

    from tailrace.storage.manifests.model import ManifestError
    from tailrace.storage.manifests.store import ManifestStore, describe_head, find_heads

    async with open_store(bucket.settings()) as objects:
        manifests = ManifestStore(objects, 0)
        try:
            heads = await find_heads(objects, stream)
            if not heads:
                raise RefusedError(f"no manifest of {stream} in {objects.url}")
            for head in heads:
                described = describe_head(head, await manifests.producers(head))
                if bucket.json:
                    print_json(described)
                else:
                    _put_table(described)
                if with_segments:
                    async for info in manifests.segments(head):
                        if bucket.json:
                            print_json(asdict(info))
                        else:
                            write_output(f"segment  {_pairs(asdict(info))}\n".encode())
                    async for index_file in manifests.index_files(head):
                        if bucket.json:
                            print_json(asdict(index_file))
                        else:
                            write_output(f"companion  {_pairs(asdict(index_file))}\n".encode())
        except ManifestError as error:
            raise RefusedError(str(error)) from None
    flush_output()


@command.command
def token(
    text: Annotated[str, Parameter(help="A resume token of a live query.")], /, *, json: AsJson = False
) -> None:
    """Print the collection, generation and position of a resume token. The signature is not checked."""
    from tailrace.watch.resume_tokens import describe_token

    found = describe_token(text)
    if found is None:
        raise RefusedError("not a resume token")
    if json:
        print_json(found)
    else:
        _put_table(found)
    flush_output()


def _segment_bytes(where: str, url: str) -> bytes:
    if Path(where).is_file():
        return Path(where).read_bytes()
    from tailrace.storage.object_store.interface import (
        ObjectMissingError,
        ObjectStoreError,
        open_object_store,
    )

    async def fetch() -> bytes:
        objects = open_object_store(url)
        try:
            return (await objects.get(where))[0]
        finally:
            await objects.close()

    try:
        return asyncio.run(fetch())
    except (ObjectMissingError, ValueError):
        raise RefusedError(f"no file {where} and no object of that name in {url}") from None
    except ObjectStoreError as error:
        raise RefusedError(f"cannot read {url}: {error}") from None


def _put_table(described: dict[str, object]) -> None:
    width = max((len(name) for name in described), default=0)
    for name, value in described.items():
        write_output(f"{name:<{width}}  {_shown(value)}\n".encode())


def _pairs(record: dict[str, object]) -> str:
    return "  ".join(f"{name}={_shown(value)}" for name, value in record.items())


def _workers(data_dir: Path) -> list[tuple[dict[str, object], Path]]:
    """The directory of each worker, with the prefix of its lines if there are several."""
    from tailrace.cluster.layout import worker_paths

    if not data_dir.is_dir():
        raise RefusedError(f"data directory {data_dir} not found")
    paths = worker_paths(data_dir)
    return [({"worker": index} if len(paths) > 1 else {}, path) for index, path in enumerate(paths)]


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        import orjson

        return orjson.dumps(value, default=str).decode()
    return str(value)
