"""TLS while a server runs: certificates that are replaced, and one that it makes for itself."""

from __future__ import annotations

import hashlib
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from support.calls import eventually
from support.cli import environment, tailrace
from support.server import ServerProcess
from tailrace.http.tls import self_signed_certificate


def start(directory: Path, *args: str) -> ServerProcess:
    """Ready as its log says; `/readyz` is asked over TLS by whoever wants to know."""
    server = ServerProcess(directory / "data", args=args).start(ready=False)
    eventually(lambda: server.log, lambda log: "tailrace ready  https://" in log)
    return server


def presented(server: ServerProcess) -> str:
    """The fingerprint of the certificate that a new connection gets."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", server.port), 20) as plain,
        context.wrap_socket(plain) as secure,
    ):
        raw = secure.getpeercert(binary_form=True)
    assert raw is not None
    return hashlib.sha256(raw).hexdigest()


def fingerprint(cert_file: Path) -> str:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(cert_file.read_text())).hexdigest()


def test_a_new_certificate_is_used_after_sighup(tmp_path: Path) -> None:
    cert, key = self_signed_certificate(tmp_path / "old", "localhost")
    new_cert, new_key = self_signed_certificate(tmp_path / "new", "localhost")
    server = start(tmp_path, "--tls-cert", str(cert), "--tls-key", str(key))
    first = presented(server)
    assert first == fingerprint(cert)
    # A certificate without its key cannot be used: the old one stays.
    shutil.copy(new_cert, cert)
    server.signal(signal.SIGHUP)
    eventually(lambda: server.log, lambda log: "TLS certificate not reloaded, keeping the old one" in log)
    assert presented(server) == first
    shutil.copy(new_key, key)
    server.signal(signal.SIGHUP)
    assert eventually(lambda: presented(server), lambda seen: seen != first) == fingerprint(new_cert)
    server.stop()


def test_a_server_makes_its_own_certificate_and_keeps_it(tmp_path: Path) -> None:
    server = start(tmp_path, "--tls-self-signed")
    made = server.data_dir / "tls"
    assert {file.name: file.stat().st_mode & 0o777 for file in made.iterdir()} == {
        "cert.pem": 0o600,
        "key.pem": 0o600,
    }
    trusting = ssl.create_default_context(cafile=str(made / "cert.pem"))
    for name in ("localhost", "127.0.0.1"):
        with socket.create_connection(("127.0.0.1", server.port), 20) as plain:
            trusting.wrap_socket(plain, server_hostname=name).close()
    first = presented(server)
    server.stop()
    server.start(ready=False)
    eventually(lambda: server.log.count("tailrace ready"), lambda count: count == 2)
    assert presented(server) == first
    server.stop()


def test_a_server_with_tls_is_ready_for_tests_and_healthy_for_containers(tmp_path: Path) -> None:
    """The check of a container goes by the settings of its server."""
    server = ServerProcess(tmp_path / "data", args=["--tls-self-signed"]).start()
    assert server.status("/healthz") == 200
    env = {"TAILRACE_PORT": str(server.port), "TAILRACE_HOST": "0.0.0.0"}
    assert checked(tmp_path, {**env, "TAILRACE_TLS_SELF_SIGNED": "yes"}) == 0
    assert checked(tmp_path, env) == 1, "not spoken to in the clear"
    server.stop()
    assert checked(tmp_path, {**env, "TAILRACE_TLS_SELF_SIGNED": "yes"}) == 1
    plain = ServerProcess(tmp_path / "plain").start()
    assert checked(tmp_path, {"TAILRACE_PORT": str(plain.port)}) == 0
    plain.stop()


def checked(directory: Path, env: dict[str, str]) -> int:
    command = [sys.executable, "-m", "tailrace.healthcheck"]
    done = subprocess.run(command, env=environment(env), cwd=directory, capture_output=True, check=False)
    return done.returncode


def test_another_host_gets_another_certificate(tmp_path: Path) -> None:
    first = fingerprint(self_signed_certificate(tmp_path, "localhost")[0])
    assert fingerprint(self_signed_certificate(tmp_path, "127.0.0.1")[0]) == first
    assert fingerprint(self_signed_certificate(tmp_path, "dev.test")[0]) != first
    (tmp_path / "cert.pem").write_text("damaged")
    cert, key = self_signed_certificate(tmp_path, "dev.test")
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    assert {file.name for file in tmp_path.iterdir()} == {"cert.pem", "key.pem"}


def test_a_certificate_is_named_or_made(tmp_path: Path) -> None:
    cert, key = self_signed_certificate(tmp_path, "localhost")
    both = ["--tls-self-signed", "--tls-cert", str(cert), "--tls-key", str(key)]
    done = tailrace("serve", "--data-dir", str(tmp_path / "data"), *both)
    assert done.code == 2
    assert "tls_self_signed" in done.err


@pytest.mark.parametrize("verb", [("ls",), ("details",), ("hub", "ls"), ("watch", "default/orders")])
def test_who_cannot_use_the_certificate_is_told_so(tmp_path: Path, verb: tuple[str, ...]) -> None:
    """ "No server answers" would send people to look for a server that is there."""
    server = start(tmp_path, "--tls-self-signed")
    url = f"https://localhost:{server.port}"
    untrusted = tailrace(*verb, env={"TAILRACE_ENDPOINT": url})
    assert (untrusted.code, "no server responds" in untrusted.err) == (4, False), untrusted.err
    assert f"the certificate of {url} is not trusted" in untrusted.err
    assert "SSL_CERT_FILE" in untrusted.err
    nowhere = str(tmp_path / "missing.pem")
    missing = tailrace(*verb, env={"TAILRACE_ENDPOINT": url, "SSL_CERT_FILE": nowhere})
    assert (missing.code, missing.err) == (2, f"tailrace: SSL_CERT_FILE: file {nowhere} not found (usage)\n")
    server.stop()


@pytest.mark.parametrize("verb", [("ls",), ("details",), ("hub", "ls"), ("watch", "default/orders")])
def test_who_expects_tls_where_there_is_none_is_told_so(tmp_path: Path, verb: tuple[str, ...]) -> None:
    server = ServerProcess(tmp_path / "data").start()
    done = tailrace(*verb, env={"TAILRACE_ENDPOINT": f"https://127.0.0.1:{server.port}"})
    assert (done.code, f"127.0.0.1:{server.port} does not speak TLS" in done.err) == (4, True), done.err
    server.stop()
