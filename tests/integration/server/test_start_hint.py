"""The command that a server prints at its start works when it is pasted into a shell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from support.calls import eventually
from support.cli import environment, tailrace
from support.server import ServerProcess

SECRET = "a secret that is long enough for the server to accept it"


def _hint(server: ServerProcess) -> str:
    log = eventually(lambda: server.log, lambda log: "\ntry " in log)
    match = re.search(r"^try +(.+)$", log, re.MULTILINE)
    assert match is not None
    return match[1]


def _paste(hint: str, directory: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """In a shell of a person who has `tailrace` on the path, and not in the directory of the server."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    elsewhere = directory / "elsewhere"
    elsewhere.mkdir()
    return subprocess.run(
        ["bash", "--norc", "-c", f"{hint} --fail --silent --show-error --include"],
        cwd=elsewhere,
        env=environment({"PATH": path, **env}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("auth", "tls", "workers"),
    [
        ("open", False, 1),
        ("open", True, 1),
        ("secret", False, 1),
        ("secret", True, 1),
        ("secret in a file", False, 1),
        ("keys", False, 1),
        ("keys", True, 2),
    ],
)
def test_the_hint_works_as_printed(tmp_path: Path, auth: str, tls: bool, workers: int) -> None:
    env: dict[str, str] = {}
    args = ["--workers", str(workers), *(["--tls-self-signed"] if tls else [])]
    if auth == "secret":
        env = {"TAILRACE_AUTH_JWT_SECRET": SECRET}
    elif auth == "secret in a file":
        config = tmp_path / "the settings.toml"
        config.write_text(f'auth_jwt_secret = "{SECRET}"\n')
        args += ["--config", str(config)]
    elif auth == "keys":
        keys = tmp_path / "the keys.json"
        assert tailrace("key", "create", "--file", str(keys), "--sub", "a", "--scope", "read").code == 0
        args += ["--auth-keys-file", str(keys)]
    server = ServerProcess(tmp_path / "the data", args=args, env=env).start()
    try:
        done = _paste(_hint(server), tmp_path, env)
        assert done.returncode == 0, f"{_hint(server)}\n{done.stderr}\n{server.log}"
        assert re.match(r"HTTP/\S+ 201 ", done.stdout), done.stdout
        assert SECRET not in server.log
    finally:
        server.stop()


def test_with_keys_of_another_issuer_the_hint_says_where_the_token_goes(tmp_path: Path) -> None:
    keys = tmp_path / "jwks.json"
    key = ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP256R1()).public_key(), as_dict=True)
    keys.write_text(json.dumps({"keys": [{**key, "kid": "a", "alg": "ES256"}]}))
    server = ServerProcess(tmp_path / "data", args=["--auth-jwks-file", str(keys)])
    try:
        assert '-H "Authorization: Bearer $TAILRACE_TOKEN"' in _hint(server.start())
    finally:
        server.stop()
