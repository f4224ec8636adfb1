"""Methods of the public classes, made from operations that both the sync and the async client share.

`append = blocking(StreamOperations.append)` in a class body is a method with the parameters and the docstring
of the operation. Type checkers derive its signature; `help` shows it.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from tailrace.client.transport import AsyncTransport, ItemSteps, Steps, SyncTransport, next_items

P = ParamSpec("P")
T = TypeVar("T")
MethodT = TypeVar("MethodT", bound=Callable[..., Any])
OperationsT = TypeVar("OperationsT")
TransportT = TypeVar("TransportT", SyncTransport, AsyncTransport)
ResultT = TypeVar("ResultT")


class Handle(Generic[TransportT, OperationsT]):
    """Operations, and the transport that runs them. Both attributes are internal."""

    __slots__ = ("operations", "transport")

    def __init__(self, transport: TransportT, operations: OperationsT) -> None:
        self.transport = transport
        self.operations = operations


def blocking(
    operation: Callable[Concatenate[OperationsT, P], Steps[T]],
) -> Callable[Concatenate[Handle[SyncTransport, OperationsT], P], T]:
    """A method that blocks until the result of the operation is there."""

    def method(self: Handle[SyncTransport, OperationsT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.transport.run(operation(self.operations, *args, **kwargs))

    return present_as(method, operation, "{}")


def blocking_iterator(
    operation: Callable[Concatenate[OperationsT, P], ItemSteps[T]],
) -> Callable[Concatenate[Handle[SyncTransport, OperationsT], P], Iterator[T]]:
    """A method that returns a blocking iterator. It sends requests only as items are consumed."""

    def method(self: Handle[SyncTransport, OperationsT], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        steps = operation(self.operations, *args, **kwargs)
        while (items := self.transport.run(next_items(steps))) is not None:
            yield from items
            del items  # or two pages would be in memory while the next one is decoded

    return present_as(method, operation, "Iterator[{}]")


def awaiting(
    operation: Callable[Concatenate[OperationsT, P], Steps[T]],
) -> Callable[Concatenate[Handle[AsyncTransport, OperationsT], P], Coroutine[Any, Any, T]]:
    """A coroutine method with the result of the operation."""

    async def method(self: Handle[AsyncTransport, OperationsT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.transport.run(operation(self.operations, *args, **kwargs))

    return present_as(method, operation, "{}")


def awaiting_iterator(
    operation: Callable[Concatenate[OperationsT, P], ItemSteps[T]],
) -> Callable[Concatenate[Handle[AsyncTransport, OperationsT], P], AsyncIterator[T]]:
    """A method that returns an async iterator. It sends requests only as items are consumed."""

    async def method(
        self: Handle[AsyncTransport, OperationsT], /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncIterator[T]:
        steps = operation(self.operations, *args, **kwargs)
        while (items := await self.transport.run(next_items(steps))) is not None:
            for item in items:
                yield item
            del items

    return present_as(method, operation, "AsyncIterator[{}]")


def opening(
    operation: Callable[Concatenate[OperationsT, P], T], make: Callable[[TransportT, T], ResultT]
) -> Callable[Concatenate[Handle[TransportT, OperationsT], P], ResultT]:
    """A method without I/O that makes its result from the transport and the result of the operation."""

    def method(self: Handle[TransportT, OperationsT], /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        return make(self.transport, operation(self.operations, *args, **kwargs))

    return present_as(method, operation, make.__name__)


def present_as(method: MethodT, operation: Callable[..., Any], result: str | None = None) -> MethodT:
    """The method with name, docstring and signature of the operation.

    `result` is the annotation of the result, by default that of the operation. In it `{}` is the type in the
    brackets of the operation's annotation.
    """
    update_wrapper(method, operation)
    signature = inspect.signature(operation)
    returns: str = signature.return_annotation
    if result is not None:
        returns = result.format(returns.partition("[")[2].removesuffix("]"))
    method.__annotations__ = {**operation.__annotations__, "return": returns}
    setattr(method, "__signature__", signature.replace(return_annotation=returns))  # noqa: B010
    return method
