"""The Python client: `Client` for threads, `AsyncClient` for event loops, the same operations in both.

with Client("http://127.0.0.1:4437") as client:
    events = client.stream("events/orders", content_type="application/json")
    events.create()
    events.append({"id": 1})
    for page in events.follow():
        print(page.entries, page.next_offset)
"""

from __future__ import annotations

from tailrace.client.client import AsyncClient, AsyncFollow, AsyncStream, Client, Follow, Stream
from tailrace.client.errors import ClientError
from tailrace.client.model import AppendResult, Page, StreamDescriptor, StreamInfo
from tailrace.client.producer import AsyncProducer, Producer, Receipt
from tailrace.client.transport import Retries

__all__ = [
    "AppendResult",
    "AsyncClient",
    "AsyncFollow",
    "AsyncProducer",
    "AsyncStream",
    "Client",
    "ClientError",
    "Follow",
    "Page",
    "Producer",
    "Receipt",
    "Retries",
    "Stream",
    "StreamDescriptor",
    "StreamInfo",
]
