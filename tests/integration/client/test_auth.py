"""Tokens: sent with every request, renewed by the caller, refused in words."""

from __future__ import annotations

import time
from collections.abc import Callable

import jwt
import pytest

from support.clients import OpenClient, name, open_client
from support.server import ServerProcess
from tailrace.client import ClientError

__all__ = ["name", "open_client"]

SECRET = "a secret that is long enough for the server to accept it"


def token(**claims: object) -> str:
    claims.setdefault("exp", int(time.time()) + 3600)
    return jwt.encode({"sub": "tests", "scope": "read write manage", **claims}, SECRET, algorithm="HS256")


@pytest.fixture
def guarded(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    return start_server(env={"TAILRACE_AUTH_JWT_SECRET": SECRET})


def test_tokens(guarded: ServerProcess, open_client: OpenClient, name: str) -> None:
    asked: list[int] = []

    def fresh() -> str:
        asked.append(1)
        return token()

    for given in (token(), fresh):
        stream = open_client(guarded.base_url, token=given).stream(name, content_type="application/json")
        stream.create()
        with stream.producer() as producer:
            producer.append(1)
        stream.append(2)
    assert list(stream.entries()) == [1, 2, 1, 2]
    assert len(asked) > 3


def test_refusals(guarded: ServerProcess, open_client: OpenClient, name: str) -> None:
    for given, status, code in (
        (None, 401, "unauthorized"),
        (token(exp=1), 401, "unauthorized"),
        (token(scope="read"), 403, "forbidden"),
    ):
        with pytest.raises(ClientError) as caught:
            open_client(guarded.base_url, token=given).stream(name).create()
        assert (caught.value.status, caught.value.code) == (status, code)
        assert not caught.value.outcome_unknown
