"""Responses from coroutines, behind a real HTTP server: every request gets exactly one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from support.http_app import Answer, TestApp, get, on_loop, site
from tailrace.common.errors import TailraceError
from tailrace.http import Exchange
from tailrace.routing.deferred_responses import DeferredResponses, Response

Work = Callable[[Exchange], Coroutine[Any, Any, Response | None]]


class DeferringApp(TestApp):
    def __init__(self, work: Work, timeout_ms: int | None = None) -> None:
        super().__init__()
        self.deferred = DeferredResponses(timeout_ms)
        self._work = work

    def handle(self, exchange: Exchange) -> None:
        self.deferred.respond(exchange, self._work(exchange), timeout_message="took too long")


def answer_of(work: Work, timeout_ms: int | None = None) -> Answer:
    found: list[Answer] = []

    async def main() -> None:
        app = DeferringApp(work, timeout_ms)
        async with site(app) as here:
            found.append(await here.exchange(get("/later")))
        await app.deferred.close()

    on_loop(main)
    return found[0]


def test_the_result_is_the_response() -> None:
    async def work(_: Exchange) -> Response:
        await asyncio.sleep(0)
        return 201, b"X-Made: 1\r\n", b"done"

    answer = answer_of(work)
    assert (answer.status, answer.headers["x-made"], answer.body) == (201, "1", b"done")


def test_work_may_respond_itself() -> None:
    async def work(exchange: Exchange) -> None:
        exchange.respond(202, b"", b"accepted")

    assert answer_of(work).status == 202


def test_an_error_is_the_response() -> None:
    async def work(_: Exchange) -> Response:
        raise TailraceError("conflict", "changed concurrently")

    assert (answer_of(work).status, answer_of(work).code) == (409, "conflict")


def test_work_that_takes_too_long_is_cancelled() -> None:
    cancelled: list[bool] = []

    async def work(_: Exchange) -> Response:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)
        raise AssertionError

    answer = answer_of(work, timeout_ms=20)
    assert (answer.status, answer.code, cancelled) == (408, "request_timeout", [True])
    assert answer.json["error"]["message"] == "took too long"


def test_a_time_out_inside_the_work_is_a_failure_of_the_server() -> None:
    async def work(_: Exchange) -> Response:
        raise TimeoutError

    assert answer_of(work).status == answer_of(work, timeout_ms=60_000).status == 500


def test_an_unexpected_exception_is_logged_once_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    async def work(_: Exchange) -> Response:
        raise ValueError("a secret of the handler")

    answer = answer_of(work)
    assert (answer.status, answer.code) == (500, "internal")
    assert b"secret" not in answer.body
    (logged,) = [record for record in caplog.records if record.exc_info is not None]
    assert logged.message == "request handler failed"


def test_a_failure_after_the_response_sends_no_second_one() -> None:
    async def work(exchange: Exchange) -> None:
        exchange.respond(200, b"", b"first")
        raise TailraceError("internal", "too late")

    answer = answer_of(work)
    assert (answer.status, answer.body) == (200, b"first")
