"""What other tools rely on when they start, watch and stop a server."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from conftest import StartServer
from support.cli import tailrace
from support.ports import free_port
from support.server import ServerProcess


def _json(url: str) -> dict[str, object]:
    with urllib.request.urlopen(url) as answer:
        return json.load(answer)


def test_it_announces_itself_serves_and_leaves_with_zero(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data").start()
    assert f"tailrace ready  http://127.0.0.1:{server.port}" in server.log
    assert _json(f"{server.base_url}/healthz") == {"status": "ok"}
    assert _json(f"{server.base_url}/readyz")["status"] == "ready"
    server.stop()
    assert server.status("/readyz") is None


def test_variables_do_what_flags_do(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", env={"TAILRACE_RESOURCE_POLICY": "same-site"}).start()
    try:
        with urllib.request.urlopen(f"{server.base_url}/v1/streams") as answer:
            assert answer.headers["Cross-Origin-Resource-Policy"] == "same-site"
    finally:
        server.stop()


def test_a_settings_file_in_the_current_directory_is_used(tmp_path: Path) -> None:
    (tmp_path / "tailrace.toml").write_text("append_body_bytes = 10\n")
    server = ServerProcess(tmp_path / "data").start()
    try:
        assert server.status("/v1/stream/file", "PUT") == 201
        small = tailrace("append", "file", "123456789012", "--url", server.base_url)
        assert small.code == 1
        assert "payload_too_large" in small.err
    finally:
        server.stop()


def test_the_deployment_keeps_its_id_over_restarts(start_server: StartServer) -> None:
    server = start_server()
    first = _json(f"{server.base_url}/readyz")["deployment"]
    server.restart()
    server.restart(kill=True)
    assert _json(f"{server.base_url}/readyz")["deployment"] == first


def test_a_data_directory_has_one_server(start_server: StartServer) -> None:
    server = start_server()
    second = tailrace("serve", "--port", "0", "--data-dir", str(server.data_dir))
    assert second.code == 1
    assert str(server.data_dir) in second.err
    assert server.status("/readyz") == 200


def test_a_port_in_use_is_named(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server()
    second = tailrace("serve", "--port", str(server.port), "--data-dir", str(tmp_path / "other"))
    assert second.code == 1
    assert str(server.port) in second.err


def test_ctrl_c_stops_as_gently_as_sigterm(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data").start()
    server.signal(signal.SIGINT)
    assert server.wait_exit() == 0


def test_metrics_may_have_a_listener_of_their_own(start_server: StartServer) -> None:
    port = free_port()
    server = start_server("--metrics-port", str(port))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        assert b"tailrace_ready 1.0" in answer.read()
    assert server.status("/readyz") == 200
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/streams")


def test_logs_are_json_lines_beside_the_announcement(start_server: StartServer) -> None:
    server = start_server("--log-format", "json", "--log-level", "debug")
    server.stop()
    events = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    assert "stopping" in {event["event"] for event in events}
