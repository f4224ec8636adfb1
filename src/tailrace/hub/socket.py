"""One WebSocket of the hub: frames in, one by one."""

from __future__ import annotations

from time import perf_counter
from typing import Final

from tailrace.http.websocket import WebSocketConnection
from tailrace.hub import decide
from tailrace.hub.ids import new_id
from tailrace.hub.runner import EffectRunner
from tailrace.hub.session import Session

MEASURE_INTERVAL: Final = 16
CLOSE_HEARTBEAT_TIMEOUT: Final = 4408


class HubSocket:
    """What the WebSocket layer calls."""

    __slots__ = ("_runner", "_unmeasured", "session")

    def __init__(self, runner: EffectRunner, upgrade_token: str | None) -> None:
        self._runner = runner
        self._unmeasured = 0
        now_ms = runner.now_ms()
        self.session = Session(f"session-{new_id(now_ms)}", now_ms)
        self.session.upgrade_token = upgrade_token

    def opened(self, connection: WebSocketConnection) -> None:
        limits = self._runner.hub.limits
        connection.ping_s = limits.hub_heartbeat_ms / 1000
        connection.dead_s = 3 * connection.ping_s
        # The first look was set for the usual pause between pings, by which a shorter one would be over.
        connection.deadline = connection.server.now + connection.ping_s
        connection.silence_code = CLOSE_HEARTBEAT_TIMEOUT
        connection.drains_itself = True
        session = self.session
        session.peer = connection.peer
        session.outbox.wire = connection
        self._runner.wires[session] = connection
        self._runner.hub.count("connections", "opened")
        decide.on_opened(self._runner.hub, session)

    def on_message(self, data: bytes, is_text: bool) -> None:
        """Binary messages of UTF-8 JSON are as good as text; answers are always text."""
        runner, session = self._runner, self.session
        hub = runner.hub
        self._unmeasured += 1
        if self._unmeasured < MEASURE_INTERVAL:
            runner.run(decide.decide(hub, session, data, runner.now_ns() // 1_000_000))
        else:
            self._unmeasured = 0
            begun_s = perf_counter()
            runner.run(decide.decide(hub, session, data, runner.now_ms()))
            runner.relay_seconds.observe(perf_counter() - begun_s)
        # Whoever sends faster than it takes its answers is not read from for a while.
        outbox, bytes_max = session.outbox, hub.limits.hub_pause_bytes
        if session.frames_held or (outbox.wire.unsent_bytes_most > bytes_max and outbox.bytes > bytes_max):
            wire = runner.wires.get(session)
            if wire is not None:
                wire.pause_reading()

    def on_too_large(self, prefix: bytes, size_bytes: int) -> None:
        runner = self._runner
        runner.run(decide.on_too_large(runner.hub, self.session, prefix, size_bytes, runner.now_ms()))

    def on_drain(self) -> None:
        runner, session = self._runner, self.session
        runner.run(decide.on_drained(runner.hub, session, runner.now_ms()))
        wire = runner.wires.get(session)
        if wire is not None and not session.frames_held:
            wire.resume_reading()

    def on_silence(self) -> None:
        """Whoever is given up is told why, and has left: the socket may stay open for a while, but what comes
        for its session from now on is not written to it."""
        runner = self._runner
        runner.run(decide.on_silence(runner.hub, self.session, runner.now_ms()))
        self.on_close(CLOSE_HEARTBEAT_TIMEOUT, "")

    def on_close(self, code: int, reason: str) -> None:
        runner = self._runner
        if runner.wires.pop(self.session, None) is None:
            return
        runner.hub.count("connections", "closed")
        runner.run(decide.on_closed(runner.hub, self.session, code, runner.now_ms()))


class RefusedSocket:
    """A WebSocket that was opened to say why it is refused. What comes over it is ignored."""

    __slots__ = ()

    def on_message(self, data: bytes, is_text: bool) -> None:
        return

    def on_too_large(self, prefix: bytes, size_bytes: int) -> None:
        return

    def on_drain(self) -> None:
        return

    def on_silence(self) -> None:
        return

    def on_close(self, code: int, reason: str) -> None:
        return
