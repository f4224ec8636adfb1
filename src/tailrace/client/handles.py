"""What the handles of both shells share: everything that needs no I/O, and leaving a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Generic, Self, TypeVar

from tailrace.client.follow import Follower
from tailrace.client.operations import StreamOperations

PortT = TypeVar("PortT")


class StreamHandle(Generic[PortT]):
    """One stream of the server, and the port that reaches it."""

    __slots__ = ("_operations", "_port")

    def __init__(self, port: PortT, operations: StreamOperations) -> None:
        self._port = port
        self._operations = operations

    @property
    def name(self) -> str:
        return self._operations.name

    @property
    def content_type(self) -> str | None:
        """The content type as far as this handle knows it."""
        return self._operations.content_type


class FollowHandle(Generic[PortT]):
    """A reader that keeps up, and a port of its own."""

    __slots__ = ("_follower", "_port")

    def __init__(self, port: PortT, follower: Follower) -> None:
        self._port = port
        self._follower = follower

    @property
    def offset(self) -> str:
        """The position after everything handed out; also moves past entries that a key left out."""
        return self._follower.offset

    @property
    def up_to_date(self) -> bool:
        return self._follower.up_to_date

    @property
    def closed(self) -> bool:
        """Whether the stream is closed and everything of it was handed out."""
        return self._follower.closed


class ContextManaged(ABC):
    """Closed at the end of a `with` block."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncContextManaged(ABC):
    """Closed at the end of an `async with` block."""

    __slots__ = ()

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
