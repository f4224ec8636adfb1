"""Slow, silent and greedy clients. Time is moved by calling the sweeper with a later `now`."""

from __future__ import annotations

import gc
import socket
import tracemalloc

from support.http_app import BIG_BYTES, RawClient, Site, chunked, get, on_loop, post, site, until


def _sweep(here: Site, ahead_s: float) -> None:
    here.server.sweep(here.server.loop.time() + ahead_s)


async def _sent(here: Site, client: RawClient, data: bytes) -> None:
    """Send, and wait until the server has read it."""
    before = here.server.bytes_in
    await client.send(data)
    await until(lambda: here.server.bytes_in == before + len(data))


def test_headers_that_do_not_come_are_given_up() -> None:
    async def main() -> None:
        async with site(header_ms=10_000) as here:
            client = await here.connect()
            await _sent(here, client, get("/")[:-4])
            _sweep(here, 5)
            assert here.server.parse_errors == 0
            # Further pieces do not buy more time.
            await _sent(here, client, b"\r\nX")
            _sweep(here, 11)
            answer = await client.answer()
            assert (answer.status, answer.code) == (408, "request_timeout")
            assert await client.rest() == b""

    on_loop(main)


def test_a_body_may_pause_but_not_stop() -> None:
    async def main() -> None:
        async with site(body_idle_ms=30_000) as here:
            client = await here.connect()
            await _sent(here, client, post("/", b"x" * 100)[:-50])
            _sweep(here, 20)
            await _sent(here, client, b"y")
            _sweep(here, 20)
            assert here.server.parse_errors == 0
            _sweep(here, 61)
            assert (await client.answer()).code == "request_timeout"

    on_loop(main)


def test_a_body_that_drips_forever_is_given_up() -> None:
    async def main() -> None:
        async with site(body_idle_ms=30_000) as here:
            client = await here.connect()
            await _sent(here, client, post("/", b"x" * 1000)[:-999])
            for elapsed in range(20, 200, 20):
                _sweep(here, elapsed)
                if here.server.parse_errors:
                    break
                await _sent(here, client, b"y")
            assert here.server.parse_errors == 1
            assert (await client.answer()).code == "request_timeout"

    on_loop(main)


def test_an_idle_connection_is_closed_without_a_word() -> None:
    async def main() -> None:
        async with site(idle_ms=75_000) as here:
            fresh, used = await here.connect(), await here.connect()
            await used.send(get("/"))
            assert (await used.answer()).status == 200
            await until(lambda: here.server.connections_open == 2)
            _sweep(here, 60)
            assert here.server.connections_open == 2
            _sweep(here, 76)
            assert await fresh.rest() == b""
            assert await used.rest() == b""
            await until(lambda: here.server.connections_open == 0)

    on_loop(main)


def test_a_request_being_handled_is_never_idle() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            await client.send(get("/hold"))
            await until(lambda: len(here.app.held) == 1)
            _sweep(here, 100_000)
            here.app.held[0].respond(200, b"", b"at last")
            assert (await client.answer()).body == b"at last"

    on_loop(main)


def test_an_exchange_deadline_is_called_once() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            await client.send(get("/hold"))
            await until(lambda: len(here.app.held) == 1)
            exchange = here.app.held[0]
            called: list[str] = []
            exchange.set_deadline(exchange.started + 3, lambda: called.append("late"))
            _sweep(here, 2)
            assert called == []
            _sweep(here, 4)
            _sweep(here, 10)
            assert called == ["late"]
            exchange.respond(408)
            assert (await client.answer()).status == 408
            await client.send(get("/hold"))
            await until(lambda: len(here.app.held) == 2)
            here.app.held[1].set_deadline(here.server.loop.time() + 3, lambda: called.append("never"))
            here.app.held[1].respond(200)
            _sweep(here, 10)
            assert called == ["late"]

    on_loop(main)


def test_a_client_that_does_not_read_is_cut_off() -> None:
    async def main() -> None:
        async with site(body_idle_ms=30_000) as here:
            raw = socket.socket()
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.setblocking(False)
            await here.server.loop.sock_connect(raw, ("127.0.0.1", here.port))
            await here.server.loop.sock_sendall(raw, get("/big") * 3)
            await until(lambda: len(here.app.seen) == 1)
            (connection,) = here.server._swept
            stuck = -1
            while connection.transport.get_write_buffer_size() != stuck:
                stuck = connection.transport.get_write_buffer_size()
                await until(lambda: here.server.loop.time() > 0)
            assert 0 < stuck < BIG_BYTES
            _sweep(here, 20)
            assert here.server.connections_open == 1
            _sweep(here, 31)
            await until(lambda: here.server.connections_open == 0)
            assert here.app.seen == [b"/big"]
            raw.close()

    on_loop(main)


def test_connections_over_the_limit_are_told_so() -> None:
    async def main() -> None:
        async with site(connections=2) as here:
            first, _second = await here.connect(), await here.connect()
            await until(lambda: here.server.connections_open == 2)
            third = await here.connect()
            refused = await third.answer()
            assert (refused.status, refused.code) == (429, "overloaded")
            assert await third.rest() == b""
            await third.close()
            await first.close()
            await until(lambda: here.server.connections_open == 1)
            assert (await here.exchange(get("/"))).status == 200
            assert here.server.connections_refused == 1

    on_loop(main)


def test_unfinished_bodies_share_one_budget() -> None:
    async def main() -> None:
        async with site(append_queue_max_bytes=300_000) as here:
            clients = [await here.connect() for _ in range(4)]
            for client in clients:
                await client.send(post("/", b"x" * 200_000)[:-1])
            await until(lambda: here.server.bytes_in > 4 * 190_000 or here.server.parse_errors > 1)
            await until(lambda: here.server.body_bytes_held <= 300_000)
            assert here.server.parse_errors >= 2
            for client in clients:
                client.writer.transport.abort()
            await until(lambda: here.server.connections_open == 0)
            assert here.server.body_bytes_held == 0

    on_loop(main)


def test_large_bodies_wait_for_memory_and_all_of_them_are_received() -> None:
    async def main() -> None:
        async with site(append_queue_max_bytes=1_000_000, append_wait_ms=60_000) as here:
            request = post("/", b"x" * 600_000)
            clients = [await here.connect() for _ in range(4)]
            for client in clients:
                await client.send(request[:10_000])
            await until(lambda: len(here.server.bodies_waiting) == 3)
            held: list[int] = []
            for client in clients:
                client.writer.write(request[10_000:])
            for client in clients:
                held.append(here.server.body_bytes_held)
                assert (await client.answer()).status == 200
            assert max(held) <= 1_000_000
            assert here.server.body_bytes_held == here.server.bodies_reserved == here.server.parse_errors == 0

    on_loop(main)


def test_a_body_that_waited_too_long_for_memory_is_refused() -> None:
    async def main() -> None:
        async with site(append_queue_max_bytes=1_000_000, append_wait_ms=100) as here:
            request = post("/", b"x" * 600_000)
            first, second, third = [await here.connect() for _ in range(3)]
            for client in (first, second, third):
                await client.send(request[:10_000])
            assert (await second.answer()).code == (await third.answer()).code == "overloaded"
            await first.send(request[10_000:])
            assert (await first.answer()).status == 200
            await until(lambda: here.server.body_bytes_held == here.server.bodies_reserved == 0)
            assert (await here.exchange(request)).status == 200, "those that were refused hold up no others"

    on_loop(main)


def test_the_sweeper_runs_only_while_there_are_connections() -> None:
    async def main() -> None:
        async with site() as here:
            assert here.server._sweep_timer is None
            client = await here.connect()
            await until(lambda: here.server._sweep_timer is not None)
            await client.close()
            await until(lambda: here.server._sweep_timer is None)
            assert here.server.connections_open == 0

    on_loop(main)


def test_memory_returns_to_where_it_was() -> None:
    async def round_of_abuse(here: Site) -> None:
        for _ in range(20):
            client = await here.connect()
            await client.send(
                get("/hold/wait") + post("/x", b"y" * 100_000) + chunked("/z", b"a" * 50_000)[:-9]
            )
            await until(lambda: len(here.app.held) == 1)
            client.writer.transport.abort()
            await until(lambda: here.server.connections_open == 0)
            here.app.held.clear()
        await here.exchange(post("/", b"z" * 1_000_000))
        await here.exchange(b"\x00 garbage \r\n\r\n")
        await until(lambda: here.server.connections_open == 0)
        here.app.seen.clear()
        here.app.gone.clear()
        here._clients.clear()

    async def main() -> None:
        async with site() as here:
            await round_of_abuse(here)
            # Connections free themselves; collecting first makes the figures exact, not the code correct.
            gc.collect()
            tracemalloc.start()
            try:
                await round_of_abuse(here)
                gc.collect()
                baseline, _ = tracemalloc.get_traced_memory()
                for _ in range(3):
                    await round_of_abuse(here)
                gc.collect()
                after, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert after - baseline < 100_000
            assert here.server.body_bytes_held == 0

    on_loop(main)
