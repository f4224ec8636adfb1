"""Arguments that cannot be right are refused before anything is sent, and errors name their stream."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, assert_type

import pytest

from support.steps import Stage, answer
from tailrace.client import (
    AppendResult,
    AsyncClient,
    AsyncFollow,
    AsyncStream,
    Client,
    ClientError,
    Follow,
    Page,
    Retries,
    Stream,
    StreamInfo,
)
from tailrace.client.hub import AsyncHub, Hub, Message
from tailrace.client.operations import StreamOperations
from tailrace.client.producer import BatchSequencer, ProducerOptions
from tailrace.client.transport import BrokenConnectionError

# A port that nothing listens on: whatever is sent fails with `connect_failed`, which is no ValueError.
NOWHERE = "http://127.0.0.1:9"
ONCE = Retries(attempts_max=1)

Use = Callable[[Any], Any]

REFUSED: dict[str, tuple[str, Use]] = {
    "a negative epoch": ("epoch", lambda s: s.producer("p", epoch=-1)),
    "an epoch beyond 2**53-1": ("epoch", lambda s: s.producer("p", epoch=2**53)),
    "an epoch that is no integer": ("epoch", lambda s: s.producer("p", epoch=1.5)),
    "an empty producer id": ("producer_id", lambda s: s.producer("")),
    "a long producer id": ("producer_id", lambda s: s.producer("p" * 257)),
    "a producer id that forges a header": ("Producer-Id", lambda s: s.producer("p\r\nX: y")),
    "no time to deliver": ("delivery_s_max", lambda s: s.producer(delivery_s_max=0)),
    "a batch of nothing": ("batch_count_max", lambda s: s.producer(batch_count_max=0)),
    "a negative linger": ("linger_s", lambda s: s.producer(linger_s=-1)),
    "a producer's key": ("Stream-Key", lambda s: s.producer().append(1, key="a\nb")),
    "a producer's malformed JSON": ("JSON", lambda s: s.producer().append(b"{")),
    "a producer's empty list": ("empty list", lambda s: s.producer().append([])),
    "a key": ("Stream-Key", lambda s: s.append(1, key="a\nb")),
    "a sequence": ("Stream-Seq", lambda s: s.append(1, seq="")),
    "a negative time": ("timestamp", lambda s: s.append(1, timestamp=-1)),
    "a negative since": ("since", lambda s: s.read(since=-1)),
    "a negative ttl": ("ttl", lambda s: s.create(ttl=-1)),
    "a negative ttl as a duration": ("ttl", lambda s: s.create(ttl=timedelta(seconds=-1))),
    "a negative retention": ("retention", lambda s: s.create(retention=-1)),
    "a negative retention in bytes": ("retention_bytes", lambda s: s.create(retention_bytes=-1)),
    "a negative sub-offset": ("sub_offset", lambda s: s.fork("t", sub_offset=-1)),
    "an unknown mode": ("mode", lambda s: s.follow(mode="push")),
    "no time to follow": ("give_up_s", lambda s: s.follow(give_up_s=-1)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_argument_that_cannot_be_right_is_refused_at_once(case: str) -> None:
    name, use = REFUSED[case]
    with (
        Client(NOWHERE, retries=ONCE) as client,
        pytest.raises(ValueError, match=name),
    ):
        use(client.stream("s", content_type="application/json"))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("timeout_s", lambda: Client(NOWHERE, timeout_s=0)),
        ("connect_timeout_s", lambda: Client(NOWHERE, connect_timeout_s=-1)),
        ("attempts_max", lambda: Retries(attempts_max=0)),
        ("delay_s_first", lambda: Retries(delay_s_first=-1)),
        ("page_size", lambda: list(Client(NOWHERE).streams(page_size=0))),
        ("Content-Type", lambda: Client(NOWHERE).stream("s", content_type="a\nb")),
    ],
)
def test_settings_of_a_client_are_checked_at_once(name: str, make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=name):
        make()


# -- errors name the stream ----------------------------------------------------------------------------------


def refused(status: int) -> Any:
    return answer(status, b'{"error":{"code":"content_type_mismatch","message":"the type differs"}}')


def operations() -> StreamOperations:
    return StreamOperations("shop/orders", ONCE, "application/json")


@pytest.mark.parametrize(
    "steps",
    [
        lambda: operations().append(1),
        lambda: operations().append_many([1]),
        lambda: operations().close(),
        lambda: operations().head(),
        lambda: operations().delete(),
        lambda: operations().read(),
        lambda: operations().create(),
    ],
)
@pytest.mark.parametrize("reply", [refused(409), BrokenConnectionError("refused", sent=False)])
def test_an_error_names_its_stream(steps: Callable[[], Any], reply: Any) -> None:
    with pytest.raises(ClientError) as raised:
        Stage(reply).run(steps())
    assert raised.value.stream == "shop/orders"
    assert "shop/orders" in str(raised.value)


def test_a_failed_batch_names_its_stream() -> None:
    steps = BatchSequencer(operations(), ProducerOptions()).deliver([b"1"], None)
    with pytest.raises(ClientError) as raised:
        Stage(refused(409)).run(steps)
    assert raised.value.stream == "shop/orders"


def test_a_failed_fork_names_the_stream_that_was_to_be_made() -> None:
    steps = operations().fork("draft")
    with pytest.raises(ClientError) as raised:
        Stage(refused(409)).run(steps)
    assert raised.value.stream == "draft"


def test_an_error_that_is_about_no_stream_names_none() -> None:
    error = ClientError("overloaded", "too many", status=429)
    assert error.stream is None
    assert str(error) == "too many (overloaded, HTTP 429)"


# -- signatures ----------------------------------------------------------------------------------------------

PAIRS = [(Client, AsyncClient), (Stream, AsyncStream), (Follow, AsyncFollow), (Hub, AsyncHub)]
METHODS = [
    pytest.param(sync, asynchronous, name, id=f"{sync.__name__}.{name}")
    for sync, asynchronous in PAIRS
    for name, member in vars(sync).items()
    if inspect.isfunction(member) and not name.startswith("_") and hasattr(asynchronous, name)
]


@pytest.mark.parametrize(("sync", "asynchronous", "name"), METHODS)
def test_a_method_of_both_clients_has_one_signature_and_docstring(
    sync: type, asynchronous: type, name: str
) -> None:
    blocking, awaiting = getattr(sync, name), getattr(asynchronous, name)
    blocking_signature, awaiting_signature = inspect.signature(blocking), inspect.signature(awaiting)
    assert list(blocking_signature.parameters.values()) == list(awaiting_signature.parameters.values())
    assert not any(p.kind is p.VAR_POSITIONAL for p in blocking_signature.parameters.values())
    assert blocking.__doc__ == awaiting.__doc__
    result = str(awaiting_signature.return_annotation)
    assert blocking_signature.return_annotation == result.removeprefix("Async")


SIGNATURES = [
    (
        Stream.append,
        """(self, data: 'model.Data', *, key: 'str | None' = None, seq: 'str | None' = None,
        timestamp: 'wire.Time | None' = None, close: 'bool' = False) -> 'AppendResult'""",
    ),
    (
        AsyncStream.pages,
        """(self, offset: 'str | None' = None, **options: 'Unpack[wire.ReadOptions]')
        -> 'AsyncIterator[Page]'""",
    ),
    (
        Stream.follow,
        """(self, offset: 'str' = '-1', *, mode: 'Mode' = 'long-poll', give_up_s: 'float | None' = None,
        **options: 'Unpack[wire.ReadOptions]') -> 'Follow'""",
    ),
    (Hub.next_message, "(self, timeout_s: 'float | None' = None) -> 'Message | None'"),
]


@pytest.mark.parametrize(("method", "signature"), SIGNATURES)
def test_help_shows_the_signature_of_a_method(method: Callable[..., Any], signature: str) -> None:
    expected = method.__name__ + " ".join(signature.split())
    assert expected in pydoc.plain(pydoc.render_doc(method))


def test_async_methods_are_coroutine_functions() -> None:
    assert inspect.iscoroutinefunction(AsyncStream.append)
    assert not inspect.iscoroutinefunction(Stream.append)
    assert inspect.isasyncgenfunction(AsyncStream.entries)


if TYPE_CHECKING:

    async def _types_that_a_checker_derives(sync: Stream, asynchronous: AsyncStream, hub: Hub) -> None:
        assert_type(sync.append(1, key="k"), AppendResult)
        assert_type(sync.create(ttl=1), StreamInfo)
        assert_type(sync.pages(key="k"), Iterator[Page])
        assert_type(sync.follow(mode="sse"), Follow)
        assert_type(await asynchronous.append_many([1]), AppendResult | None)
        assert_type(asynchronous.pages(), AsyncIterator[Page])
        assert_type(asynchronous.follow(), AsyncFollow)
        assert_type(hub.next_message(1.0), Message | None)
        sync.append(1, unknown=1)  # pyright: ignore[reportCallIssue]
        sync.create(ttl=1.5)  # pyright: ignore[reportArgumentType]
        hub.send(1, "type")  # pyright: ignore[reportArgumentType]
