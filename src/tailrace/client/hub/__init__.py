"""The client of the hub: `Hub` for threads, `AsyncHub` for event loops, the same operations in both.

with Hub("http://127.0.0.1:4437", address="@(svc/price)") as hub:
    hub.register()
    for message in hub.messages():
        hub.reply(message, {"price": 12})
"""

from __future__ import annotations

from tailrace.client.hub.client import AsyncHub, Hub
from tailrace.client.hub.model import (
    Ack,
    Actor,
    Broadcast,
    Committed,
    MailboxPage,
    Message,
    Presence,
    Published,
    Registration,
    Runtime,
    Subscription,
    Timeouts,
    from_runtime,
    to_runtime,
)
from tailrace.client.hub.wire import SigningKey

__all__ = [
    "Ack",
    "Actor",
    "AsyncHub",
    "Broadcast",
    "Committed",
    "Hub",
    "MailboxPage",
    "Message",
    "Presence",
    "Published",
    "Registration",
    "Runtime",
    "SigningKey",
    "Subscription",
    "Timeouts",
    "from_runtime",
    "to_runtime",
]
