"""A real S3 server for tests: SeaweedFS, started once per session, on free ports and in its own directory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from obstore.exceptions import BaseError
from obstore.store import S3Store

from support.ports import KeptPort

BUCKET = "tailrace"
START_S_MAX = 60.0
STOP_S_MAX = 20.0
_PORTS = (
    "master",
    "master.grpc",
    "volume",
    "volume.grpc",
    "filer",
    "filer.grpc",
    "s3",
    "s3.grpc",
    "admin",
    "admin.grpc",
)


class S3Server:
    """One bucket, `BUCKET`, for everybody; tests keep apart by prefixes (`url`)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._log = directory / "weed.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = {name: KeptPort() for name in _PORTS}
        self.port = self._ports["s3"].number

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}"

    def env(self, endpoint: str = "") -> dict[str, str]:
        """What a client needs to get in; `endpoint` may name a proxy in front."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": "tailrace-tests",
            "AWS_SECRET_ACCESS_KEY": "tailrace-tests-secret",
            "AWS_REGION": "us-east-1",
        }

    def start(self) -> S3Server:
        """Again, it comes back at the same ports with what it had."""
        data = self._directory / "data"
        data.mkdir(parents=True, exist_ok=True)
        arguments = [
            # A test run that is killed must not leave a server behind.
            *(("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()),
            str(Path(sys.executable).with_name("weed")),
            "mini",
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-bucket={BUCKET}",
            "-admin.ui=false",
            "-webdav=false",
            "-master.telemetry=false",
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]
        for name, port in self._ports.items():
            server, _, kind = name.partition(".")
            arguments.append(f"-{server}.port{'.' * bool(kind)}{kind}={port.number}")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                arguments,
                cwd=self._directory,
                env={**os.environ, **self.env(), "HOME": str(self._directory)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._wait_until_ready()
        return self

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _wait_until_ready(self) -> None:
        """Ready means that the bucket answers: the listener is there well before."""
        deadline = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                break
            if self._answers():
                store = S3Store(
                    BUCKET,
                    endpoint=self.endpoint,
                    access_key_id=self.env()["AWS_ACCESS_KEY_ID"],
                    secret_access_key=self.env()["AWS_SECRET_ACCESS_KEY"],
                    region="us-east-1",
                    client_options={"allow_http": True},
                    retry_config={"max_retries": 0},
                )
                try:
                    store.put("ready", b"yes", mode="overwrite")
                except (BaseError, FileNotFoundError):
                    time.sleep(0.1)
                    continue
                return
            time.sleep(0.1)
        log = self._log.read_text(errors="replace")[-5000:]
        self.stop()
        raise AssertionError(f"the S3 server did not start:\n{log}")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.endpoint, timeout=1):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
