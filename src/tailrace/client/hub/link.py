"""One WebSocket to the hub: opened, written, read, closed."""

from __future__ import annotations

from typing import Final

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.typing import Subprotocol

from tailrace.client.error import CONNECT_FAILED, ClientError, error_from
from tailrace.client.hub.wire import connection_lost

# Larger than anything the hub sends, with room for its envelope.
_FRAME_BYTES_MAX: Final = 20 * 1024 * 1024
_CLOSE_S_MAX: Final = 2.0
_SUBPROTOCOL: Final = Subprotocol("signal-hub")


class HubConnection:
    """Errors of the socket become those of the client here, and nowhere else."""

    __slots__ = ("_socket",)

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket

    async def send(self, frame: bytes) -> None:
        try:
            await self._socket.send(frame.decode())
        except ConnectionClosed as error:
            raise connection_lost(f"the connection to the hub was lost: {error}", sent=True) from error

    async def receive(self) -> bytes:
        try:
            text = await self._socket.recv()
        except ConnectionClosed as error:
            raise connection_lost(f"the connection to the hub was lost: {error}", sent=True) from error
        return text.encode() if isinstance(text, str) else text

    async def close(self) -> None:
        await self._socket.close()

    def abort(self) -> None:
        """The end without a goodbye, for a peer that does not answer."""
        self._socket.transport.abort()


async def open_connection(url: str, timeout_s: float) -> HubConnection:
    """A new socket. An answer that is no upgrade is the error that it tells."""
    try:
        socket = await connect(
            url,
            subprotocols=[_SUBPROTOCOL],
            compression=None,
            open_timeout=timeout_s,
            close_timeout=_CLOSE_S_MAX,
            # The heartbeat of the protocol tells more: that somebody reads what is sent.
            ping_interval=None,
            max_size=_FRAME_BYTES_MAX,
        )
    except InvalidStatus as error:
        answer = error.response
        headers = {name.lower(): value for name, value in answer.headers.raw_items()}
        raise error_from(answer.status_code, headers, bytes(answer.body or b"")) from error
    except (OSError, TimeoutError, InvalidHandshake, ConnectionClosed) as error:
        raise ClientError(CONNECT_FAILED, f"no hub answers at {url}: {error}") from error
    except InvalidURI as error:
        raise ValueError(str(error)) from error
    return HubConnection(socket)
