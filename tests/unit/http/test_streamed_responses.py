"""Streamed answers, shutdown and TLS."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from support.http_app import get, on_loop, post, site, until
from tailrace.http import chunk
from tailrace.http.exchange import unchunk
from tailrace.http.tls import server_context


def test_chunks() -> None:
    assert chunk(b"hello") == b"5\r\nhello\r\n"
    assert chunk(b"") == b""
    assert unchunk(chunk(b"a\r\n") + chunk(b"b" * 300)) == b"a\r\n" + b"b" * 300


def test_a_stream_is_written_in_chunks_and_the_connection_goes_on() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            await client.send(get("/stream") + get("/next"))
            status, headers = await client.head()
            assert (status, headers["transfer-encoding"]) == (200, "chunked")
            assert "content-length" not in headers
            (outlet,) = here.app.outlets
            outlet.write(b"one")
            outlet.write(b"")
            outlet.write_raw(chunk(b"two"))
            assert await client.chunk() == b"one"
            assert await client.chunk() == b"two"
            assert here.app.seen == [b"/stream"]
            outlet.end()
            outlet.end()
            outlet.write(b"never")
            assert outlet.closed
            assert await client.chunk() == b""
            assert (await client.answer()).json["path"] == "/next"

    on_loop(main)


def test_a_stream_for_http_1_0_ends_with_the_connection() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            await client.send(b"GET /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            _, headers = await client.head()
            assert headers["connection"] == "close"
            assert "transfer-encoding" not in headers
            here.app.outlets[0].write(b"plain ")
            here.app.outlets[0].write_raw(chunk(b"bytes"))
            here.app.outlets[0].end()
            assert await client.rest() == b"plain bytes"

    on_loop(main)


def test_head_of_a_stream_has_no_stream() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            await client.send(b"HEAD /stream HTTP/1.1\r\nHost: h\r\n\r\n" + get("/next"))
            assert (await client.answer(is_head=True)).status == 200
            assert here.app.outlets[0].closed
            assert (await client.answer()).json["path"] == "/next"

    on_loop(main)


def test_a_reader_that_leaves_is_noticed() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            await client.send(get("/stream"))
            await client.head()
            (outlet,) = here.app.outlets
            gone: list[int] = []
            outlet.on_gone = lambda: gone.append(1)
            await client.close()
            await until(lambda: here.server.connections_open == 0)
            assert gone == [1]
            assert outlet.closed
            outlet.write(b"into the void")
            outlet.end()
            assert outlet.unsent_bytes == 0

    on_loop(main)


def test_a_slow_reader_shows_as_unsent_bytes_and_drains() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            await client.send(get("/stream"))
            await client.head()
            (outlet,) = here.app.outlets
            drained: list[int] = []
            outlet.on_drain = lambda: drained.append(outlet.unsent_bytes)
            payload = b"x" * 100_000
            written = 0
            while outlet.unsent_bytes < 1_000_000:
                outlet.write(payload)
                written += 1
                await asyncio.sleep(0)
            assert drained == []
            for _ in range(written):
                assert await client.chunk() == payload
            await until(lambda: drained != [])

    on_loop(main)


def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    async def main() -> None:
        async with site() as here:
            idle, busy, streaming, sending = [await here.connect() for _ in range(4)]
            await idle.send(get("/"))
            await idle.answer()
            await busy.send(get("/hold"))
            await streaming.send(get("/stream"))
            await streaming.head()
            request = post("/upload", b"abc")
            sent = len(get("/") + get("/hold") + get("/stream") + request[:-1])
            await sending.send(request[:-1])
            await until(lambda: here.server.bytes_in == sent)
            here.server.on_drain = here.app.outlets[0].end
            draining = asyncio.ensure_future(here.server.drain(20_000))
            assert await idle.rest() == b""
            assert await streaming.chunk() == b""
            assert await streaming.rest() == b""
            await sending.send(request[-1:])
            uploaded = await sending.answer()
            assert (uploaded.json["body"], uploaded.headers["connection"]) == ("abc", "close")
            here.app.held[0].respond(200, b"", b"finished")
            answer = await busy.answer()
            assert (answer.body, answer.headers["connection"]) == (b"finished", "close")
            assert await draining is True
            with pytest.raises(ConnectionError):
                await here.connect()

    on_loop(main)


def test_draining_cuts_off_what_does_not_finish() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            await client.send(get("/hold/wait"))
            await until(lambda: len(here.app.held) == 1)
            assert await here.server.drain(1) is False
            assert await client.rest() == b""
            assert here.app.gone == [b"/hold/wait"]

    on_loop(main)


def _certificate(directory: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start)
        .not_valid_after(start.replace(year=2120))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = directory / "cert.pem", directory / "key.pem"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return cert_file, key_file


def test_tls(tmp_path: Path) -> None:
    cert_file, key_file = _certificate(tmp_path)
    trust = ssl.create_default_context(cafile=cert_file)
    trust.set_alpn_protocols(["h2", "http/1.1"])

    async def main() -> None:
        async with site(tls=server_context(cert_file, key_file)) as here:
            client = await here.connect(ssl=trust, server_hostname="localhost")
            assert client.writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
            await client.send(get("/hold") + post("/b", b"x" * 500_000))
            await until(lambda: len(here.app.held) == 1)
            assert here.app.held[0].scheme == b"https"
            here.app.held[0].respond(200, b"", b"y" * 500_000)
            assert len((await client.answer()).body) == 500_000
            assert len((await client.answer()).json["body"]) == 500_000
            await client.send(b"garbage\r\n\r\n")
            assert (await client.answer()).status == 400
            assert await client.rest() == b""

    on_loop(main)
