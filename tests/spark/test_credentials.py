"""Source and sink at a server with TLS and tokens: the options that hold credentials."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from support.calls import eventually
from support.server import ServerProcess
from support.spark_rows import reader_of, rows_of
from tailrace.auth import create_token
from tailrace.client import ClientError
from tailrace.http.tls import self_signed_certificate
from tailrace.spark.options import parse_write_options
from tailrace.spark.sink import PartitionWriter

SECRET = "a-secret-of-thirty-two-characters"
VALUES = pa.record_batch({"value": ['{"n":1}', '{"n":2}']})


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    return self_signed_certificate(tmp_path / "tls", "localhost")


@pytest.fixture
def url(tmp_path: Path, certificate: tuple[Path, Path]) -> Iterator[str]:
    cert, key = map(str, certificate)
    server = ServerProcess(
        tmp_path / "data",
        args=("--tls-cert", cert, "--tls-key", key),
        env={"TAILRACE_AUTH_JWT_SECRET": SECRET},
    ).start(ready=False)
    eventually(lambda: server.log, lambda log: "tailrace ready  https://" in log)
    yield f"https://localhost:{server.port}"
    server.stop()


def test_credentials_are_options(url: str, certificate: tuple[Path, Path], tmp_path: Path) -> None:
    kept = tmp_path / "token"
    kept.write_text("not-yet-one")
    trust = {"tls.caFile": str(certificate[0])}
    given = {"endpoint": url, "stream": "guarded", "delivery": "direct", "retries": "0", **trust}
    writing = parse_write_options({**given, "tokenFile": str(kept)}, streaming=True)
    with pytest.raises(ClientError) as caught:
        PartitionWriter(writing, "q", 0, 0).write(iter([VALUES]))
    assert caught.value.status == 401
    # A file is read for each request: tokens are replaced while a query runs.
    kept.write_text(create_token(SECRET, sub="tests", scopes=("read", "write")))
    PartitionWriter(writing, "q", 0, 0).write(iter([VALUES]))
    for credentials in ({"tokenFile": str(kept)}, {"token": kept.read_text()}):
        rows = rows_of(reader_of(url, stream="guarded", **trust, **credentials))
        assert [row["value"] for row in rows] == VALUES["value"].to_pylist()
    with pytest.raises(ClientError) as caught:
        rows_of(reader_of(url, stream="guarded", retries="0", **trust))
    assert caught.value.status == 401
    with pytest.raises(ClientError, match="CERTIFICATE_VERIFY_FAILED"):
        rows_of(reader_of(url, stream="guarded", retries="0", token=kept.read_text()))
