"""Sender identity: the only module that decides and writes the `from` of a hub message.

A client may claim any `from`. `identity_path` turns a verified token into the path of a session, and
`stamp_sender` turns the claim of one message into a `Sender`: the session's own path or one of its registered
addresses, else the session's path. Every encoder of the hub takes a `Sender`, never text from a client.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw

from tailrace.auth import Identity
from tailrace.hub.addresses import parse_address
from tailrace.hub.envelope import SharedEnvelope, encode_envelope, encode_shared
from tailrace.hub.errors import HubError

if TYPE_CHECKING:
    from tailrace.hub.requests import OutgoingMessage
    from tailrace.hub.session import Session
    from tailrace.hub.state import Hub

SENDER_CACHE_MAX: Final = 8192


class Sender(msgspec.Struct, frozen=True, gc=False):
    """A verified sender in the forms that messages, entry keys and records need. Built only here."""

    path: str
    address: str  # `@(path)`
    quoted: bytes  # the address as a JSON string

    @property
    def from_member(self) -> bytes:
        return b'"from":%b' % self.quoted

    @property
    def original_from_member(self) -> bytes:
        return b'"originalFrom":%b' % self.quoted


@lru_cache(SENDER_CACHE_MAX)
def _sender(address: str) -> Sender:
    return Sender(address[2:-1], address, msgspec.json.encode(address))


NO_SENDER: Final = Sender("", "", b'""')  # of a request that is not stamped yet


# -- deciding --------------------------------------------------------------------------------------------


def identity_path(identity: Identity | None, claimed: str | None, fallback: str) -> str:
    """The path of a session: what its token names. Without a token (None), what it claims, if valid."""
    if identity is None:
        try:
            return parse_address(claimed or "")
        except HubError:
            return parse_address(f"@({fallback})")
    return parse_address(f"@({identity.actor_id})")


def rename_session(hub: Hub, session: Session, path: str) -> None:
    """Changes the identity of a session, which only a server without authentication allows."""
    assert hub.is_open
    hub.remove_identity(session)
    session.principal = msgspec.structs.replace(session.principal, path=path)
    hub.add_identity(session)


def may_send_as(session: Session, path: str) -> bool:
    return path == session.principal.path or path in session.addresses


def stamp_sender(hub: Hub, session: Session, claimed: str | None) -> Sender:
    """The sender of one message. A claim that was not verified is replaced by the session's identity."""
    if claimed is not None:
        if may_send_as(session, claimed[2:-1]):
            return _sender(f"@({claimed[2:-1]})")
        hub.count("from_rewritten")
    return _sender(f"@({session.path})")


def stamp_reply(session: Session, recipient: str, recipient_session: Session | None) -> Sender | None:
    """The sender of a reply: the actor that got the request. None if that is not this session."""
    if recipient in session.addresses or recipient_session is session:
        return _sender(f"@({recipient})")
    return None


def unverified_sender(claimed: str) -> Sender:
    """For frames that are prepared before the check: the caller must call `may_send_as` before sending."""
    return _sender(f"@({claimed[2:-1]})")


def stored_sender(address: str) -> Sender:
    """The sender of a message read from a stream, which was stamped when it was stored."""
    return _sender(address)


def hub_sender(address: str) -> Sender:
    return _sender(address)


# -- writing ---------------------------------------------------------------------------------------------


def encode_message(message: OutgoingMessage, more: bytes) -> bytes:
    """The frame for one recipient; `more` are further members of the metadata, each with a leading comma."""
    return encode_envelope(
        id=message.id,
        from_=message.sender.address,
        to=message.to,
        type=message.type,
        payload=message.payload,
        timestamp=message.timestamp,
        pattern=message.pattern,
        correlation_id=message.correlation_id,
        metadata=message.metadata + more + b"}",
        ttl=message.ttl,
    )


def encode_shared_message(message: OutgoingMessage) -> SharedEnvelope:
    """The part of the frame that is the same for all recipients."""
    return encode_shared(
        from_=message.sender.address,
        type=message.type,
        payload=message.payload,
        timestamp=message.timestamp,
        correlation_id=message.correlation_id,
        metadata=message.metadata + b"}",
        ttl=message.ttl,
    )


def encode_hub_message(
    sender: Sender,
    to: str,
    kind: str,
    payload: bytes,
    now_ms: int,
    identifier: str,
    correlation_id: str | None = None,
    metadata: bytes | Raw = b"{}",
) -> bytes:
    """A message of the hub itself: a reply, an acknowledgement, an error or a notice."""
    return encode_envelope(
        id=identifier,
        from_=sender.address,
        to=to,
        type=kind,
        payload=payload,
        timestamp=now_ms,
        correlation_id=correlation_id,
        metadata=metadata,
    )
