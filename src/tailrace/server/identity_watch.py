"""Sees to it that whoever loses their right loses their open connections, too."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from tailrace.auth import TokenVerifier
from tailrace.common.server_metrics import ServerMetrics
from tailrace.server.app import TailraceApp

auth_logger = logging.getLogger("tailrace.auth")

CREDENTIAL_POLL_S: Final = 1.0


class CredentialWatch:
    """Looks every second whether keys are others or something was revoked, here or by another process."""

    def __init__(self, loop: asyncio.AbstractEventLoop, verifier: TokenVerifier, app: TailraceApp) -> None:
        self._loop = loop
        self._verifier = verifier
        self._app = app
        self._timer: asyncio.TimerHandle | None = None
        self.ended = 0  # connections, so far

    def start(self) -> None:
        self._verifier.start()
        self._timer = self._loop.call_later(CREDENTIAL_POLL_S, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._verifier.close()

    def connect(self, telemetry: ServerMetrics) -> None:
        book = self._verifier.book
        telemetry.api_keys.read = lambda: len(book.keys)
        telemetry.revocations.read = lambda: len(book.revocations)
        telemetry.connections_revoked.read = lambda: self.ended

    def _tick(self) -> None:
        self._timer = self._loop.call_later(CREDENTIAL_POLL_S, self._tick)
        self.look()

    def look(self) -> None:
        if not self._verifier.changed():
            return
        ended = self._app.recheck(self._verifier.stands)
        self.ended += ended
        if ended:
            auth_logger.info("%d connections ended, whose tokens are good no more", ended)

    def reload(self) -> None:
        """SIGHUP: also what would be looked for only in a while is looked for now."""
        self._verifier.reload()
        self.look()
