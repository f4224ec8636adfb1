"""The client of the hub where tokens say who somebody is."""

from __future__ import annotations

import time
from collections.abc import Iterator

import jwt
import pytest

from support.cli import tailrace
from support.hub_clients import QUICK, next_of
from support.server import ServerProcess
from tailrace.client import ClientError
from tailrace.client.hub import Hub

SECRET = "a secret that is long enough for the server to accept it"


def token(sub: str, **claims: object) -> str:
    now_s = int(time.time())
    return jwt.encode(
        {"sub": sub, "scope": "read write", "iat": now_s, "exp": now_s + 3600, **claims},
        SECRET,
        algorithm="HS256",
    )


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("guarded") / "data"
    process = ServerProcess(directory, env={"TAILRACE_AUTH_JWT_SECRET": SECRET}).start()
    yield process
    process.stop()


def opened(guarded: ServerProcess, given: str, address: str | None = None) -> Hub:
    return Hub(guarded.base_url, token=given, address=address, retries=QUICK)


@pytest.mark.parametrize("given", [None, "nonsense", token("a", exp=1)])
def test_without_a_good_token_there_is_no_session(guarded: ServerProcess, given: str | None) -> None:
    with pytest.raises(ClientError) as refused:
        Hub(guarded.base_url, token=given, retries=QUICK).__enter__()
    assert refused.value.code == "unauthorized"


def test_h9_the_token_says_who_one_is(guarded: ServerProcess) -> None:
    with opened(guarded, token("svc/one"), "@(svc/other)") as one, opened(guarded, token("svc/two")) as two:
        assert (one.identity, two.identity) == ("@(svc/one)", "@(svc/two)")
        one.register()
        two.register("@(svc/two/below)")
        with pytest.raises(ClientError) as stolen:
            one.register("@(svc/two)")
        assert stolen.value.code == "unauthorized"
        one.send("@(svc/two/below)", "t", 1, sender="@(svc/two)")
        assert next_of(two).sender == "@(svc/one)"
        with pytest.raises(ClientError) as loud:
            one.broadcast("news")
        assert loud.value.code == "unauthorized"


def test_a_token_is_replaced_by_another_of_the_same_identity(guarded: ServerProcess) -> None:
    with opened(guarded, token("svc/fresh")) as hub:
        expires_s = int(time.time()) + 7200
        assert hub.refresh_token(token("svc/fresh", exp=expires_s)) == expires_s * 1000
    with opened(guarded, token("svc/fresh2")) as hub:
        with pytest.raises(ClientError) as refused:
            hub.refresh_token(token("svc/somebody"))
        assert refused.value.code == "unauthorized"
        assert list(hub.discover("@(nobody)")) == []


def test_an_operator_kicks_and_others_do_not(guarded: ServerProcess) -> None:
    with opened(guarded, token("svc/kicked")) as hub:
        hub.register()
        env = {"TAILRACE_ENDPOINT": guarded.base_url}
        refused = tailrace("hub", "kick", "@(svc/kicked)", env={**env, "TAILRACE_TOKEN": token("svc/rival")})
        assert refused.code == 1
        assert len(list(hub.discover("@(svc/kicked)"))) == 1
        operator = token("ops", scope="read write manage")
        assert tailrace("hub", "kick", "@(svc/kicked)", env={**env, "TAILRACE_TOKEN": operator}).code == 0
        assert list(hub.discover("@(svc/kicked)")) == []
