"""Shared by commands that work on an object store: options, opening it, and a progress bar."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import unquote, urlsplit

from cyclopts import Group, Parameter

from tailrace.cli.errors import UnreadableError, UsageError

if TYPE_CHECKING:
    from tailrace.common.settings import Settings
    from tailrace.storage.object_store.interface import ObjectStore

_GROUP: Final = Group("Object store and output", sort_key=9)
_REDRAW_S: Final = 0.2


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Flags of commands that work on an object store; settings files and variables are read as by `serve`."""

    object_store: Annotated[
        str | None,
        Parameter(
            group=_GROUP,
            help="The object store: file:///directory, s3://bucket/prefix, gs://, az://. "
            "[env: TAILRACE_OBJECT_STORE]",
        ),
    ] = None
    data_dir: Annotated[
        str | None,
        Parameter(
            group=_GROUP,
            help="The data directory; its objects/ is the default store. [env: TAILRACE_DATA_DIR]",
        ),
    ] = None
    json: Annotated[bool, Parameter(group=_GROUP, negative="", help="Print JSON, one object per line.")] = (
        False
    )

    def settings(self) -> Settings:
        from tailrace.common.settings_loading import load_settings

        given = {"object_store": self.object_store, "data_dir": self.data_dir}
        return load_settings({name: value for name, value in given.items() if value is not None})


DEFAULT_STORE: Final = StoreOptions()


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncGenerator[ObjectStore]:
    """Open the store; its errors become an `UnreadableError`."""
    from tailrace.storage.object_store.interface import ObjectStoreError, open_object_store

    url = settings.object_store_url
    _check_directory(url, settings)
    try:
        objects = open_object_store(url, limits=settings.limits)
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        yield objects
    except ObjectStoreError as error:
        raise UnreadableError(f"cannot read {url}: {error}") from None
    finally:
        await objects.close()


def _check_directory(url: str, settings: Settings) -> None:
    """Refuse a missing directory, probably a typo, unless it is that of a server that has sealed nothing."""
    parts = urlsplit(url)
    directory = settings.data_dir if not settings.object_store else Path(unquote(parts.path))
    if parts.scheme == "file" and not directory.is_dir():
        raise UnreadableError(f"directory {directory} not found")


@asynccontextmanager
async def progress_bar(label: str, state: Callable[[], tuple[int, int | None, str]]) -> AsyncGenerator[None]:
    """A progress bar on a terminal: done, total (None if unknown) and a text. Nothing in a pipe."""
    import sys

    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None, words="")

        async def redraw() -> None:
            while True:
                done, total, words = state()
                bar.update(task, completed=done, total=total, words=words)
                await asyncio.sleep(_REDRAW_S)

        drawing = asyncio.ensure_future(redraw())
        try:
            yield
        finally:
            drawing.cancel()
