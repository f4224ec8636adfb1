"""What the server expects of the application behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tailrace.common.errors import TailraceError
    from tailrace.http.exchange import Exchange


class App(Protocol):
    """The application: answers requests, and gives refusals and responses their house form."""

    # What `common_headers` gives for every request alike; None if it depends on the request.
    fixed_headers: bytes | None

    def handle(self, exchange: Exchange) -> None:
        """Answer a complete request, now or later. A `TailraceError` raised here is answered by net."""
        ...

    def handler_for(self, exchange: Exchange) -> Callable[[Exchange], None]:
        """What to call for every later request with this very head: `handle`, or a shorter way to the same.

        The body is the only thing such requests differ in.
        """
        ...

    def refuse(self, exchange: Exchange | None, error: TailraceError) -> tuple[int, bytes, bytes]:
        """Status, head lines and body for an error; `exchange` is None when no request could be read."""
        ...

    def common_headers(self, exchange: Exchange | None) -> bytes:
        """Head lines, each ending in CRLF, that every response carries."""
        ...
