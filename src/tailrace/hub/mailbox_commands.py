"""Handlers of `hub:mailbox_read` and `hub:mailbox_commit`, and deletion of mailboxes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import Raw

from tailrace.common.errors import TailraceError
from tailrace.common.timestamps import format_rfc3339
from tailrace.hub import requests
from tailrace.hub.addresses import mailbox_stream, parse_address, topic_stream
from tailrace.hub.dead_letters import after_all
from tailrace.hub.delivery_queues import (
    BROADCAST,
    BROADCAST_STREAM,
    MAILBOX,
    TOPIC,
    DeliveryQueue,
    Feed,
    GroupQueue,
    decode_broadcast,
    group_queue_path,
)
from tailrace.hub.effects import AppendOutcome, DeleteStream, Read, ReadResult
from tailrace.hub.envelope import parse_envelope
from tailrace.hub.errors import HubError, field_error, to_hub_error
from tailrace.hub.mailboxes import PAGE_BYTES, STORED_BYTES_MAX, TRACE_KIND_BY_FEED
from tailrace.hub.requests import HubRequest, parse_time_ns
from tailrace.hub.session import Session

if TYPE_CHECKING:
    from tailrace.hub.state import Hub

LIMIT_DEFAULT: Final = 100
READ_BYTES: Final = 512 * 1024
ENTRIES_MAX: Final = 1000  # of one commit
REMOVED_ENTRIES: Final = 100  # dead-lettered at once when a mailbox is deleted


def authorised_path(hub: Hub, session: Session, request: HubRequest, action: str, now_ms: int) -> str:
    """The address of a mailbox command: the caller's own, or any for an administrator."""
    text = request.payload.text("actorAddress")
    path = request.sender.path if text is None else parse_address(text)
    if path in session.addresses or (
        session.principal.has("mailbox") and hub.policy.may_register(session.principal, path)
    ):
        return path
    if session.principal.admin:
        hub.audit(session, "admin", f"@({path})", action, now_ms)
        return path
    raise hub.denied(session, action, "not your address", f"@({path})", now_ms)


def _find_feed(hub: Hub, session: Session, path: str, request: HubRequest) -> tuple[DeliveryQueue, Feed]:
    """The feed that the request names: the mailbox, or another one of the actor."""
    wanted = request.payload.text("stream")
    shared = _find_group_feed(hub, session, request.payload.text("subscriptionId"), wanted)
    if shared is not None:
        return shared
    own = mailbox_stream(path)
    queue = hub.mailboxes.open(path)
    if wanted is None or wanted == own:
        return queue, queue.feeds[own]
    if wanted == BROADCAST_STREAM:
        return queue, hub.mailboxes.feed(queue, wanted, BROADCAST, begin=hub.streams.tail(wanted) or 0)
    for stream, topic, subscription_id in hub.topics.durable_of(path):
        if stream == wanted:
            feed = hub.mailboxes.feed(queue, stream, TOPIC)
            feed.topic, feed.subscription_id = topic, subscription_id
            return queue, feed
    raise field_error("stream", "the actor does not read this stream")


def _find_group_feed(
    hub: Hub, session: Session, subscription_id: str | None, wanted: str | None
) -> tuple[DeliveryQueue, Feed] | None:
    """A feed of a durable group that the session is a member of."""
    mine = None if subscription_id is None else session.subscriptions.get(subscription_id)
    if mine is None or not mine.durable or mine.group is None:
        return None
    queue = hub.mailboxes.open_group(group_queue_path(mine.group, mine.filter.text))
    stream = topic_stream(mine.filter.text) if wanted is None else wanted
    feed = queue.feeds.get(stream)
    if feed is None:
        raise field_error("stream", "the group does not read this stream")
    return queue, feed


def _resolve_offset(hub: Hub, stream: str, text: str) -> int:
    try:
        return hub.streams.resolve(stream, text)
    except TailraceError as error:
        details: dict[str, object] = {}
        if "earliest_offset" in error.extra:
            details["earliestOffset"] = error.extra["earliest_offset"]
        raise HubError(to_hub_error(error).code, error.message, details) from None


def read_mailbox(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> None:
    """Reading does not move the cursor, but what was read may be committed."""
    path = authorised_path(hub, session, request, "mailbox_read", now_ms)
    queue, feed = _find_feed(hub, session, path, request)
    hub.mailboxes.release(queue)
    if feed.kind == TOPIC and not hub.policy.may_topic(session.principal, "subscribe", feed.topic):
        raise hub.denied(session, "mailbox_read", "denied by policy", feed.topic, now_ms)
    limit = request.payload.integer("limit")
    entries_max = max(1, min(LIMIT_DEFAULT if limit is None else limit, LIMIT_DEFAULT))
    asked = request.payload.integer("maxBytes")
    bytes_max = max(1, min(READ_BYTES if asked is None else asked, READ_BYTES))
    text = request.payload.text("offset") or "committed"
    stream = feed.stream
    tail = hub.streams.tail(stream) or 0
    if text == "committed":
        after = feed.cursor.committed
    elif text == "-1":
        after = hub.streams.earliest(stream)
    elif text == "now":
        after = tail
    elif not tail:
        raise HubError("invalid_offset", "the stream has no entries")
    else:
        after = _resolve_offset(hub, stream, text)
    since = _since_ns(request)

    def then(found: ReadResult, now_ms: int) -> None:
        if found.error is not None:
            error = to_hub_error(found.error)
            earliest = hub.streams.offset(stream, hub.streams.earliest(stream))
            response = HubError(error.code, error.message, {"earliestOffset": earliest})
            hub.send_request_error(session, request, response, now_ms)
            return
        cursor = feed.cursor
        if found.next_entry > max(cursor.read_upto, cursor.delivered):
            # Stored with the cursor, so that it can be committed after a restart too.
            cursor.read_upto = found.next_entry
            hub.mailboxes.cursors.mark_dirty(queue.path, stream)
        _send_messages(hub, session, request, path, feed, found, now_ms)

    if not tail:
        _send_messages(hub, session, request, path, feed, ReadResult(next_entry=after), now_ms)
        return
    hub.effects.append(Read(stream, after, entries_max, bytes_max, then, since))


def _since_ns(request: HubRequest) -> int | None:
    found = request.payload.value("since")
    if found is None:
        return None
    since_ns = parse_time_ns(found)
    if since_ns is None:
        raise field_error(
            "since", "since must be Unix milliseconds or an RFC 3339 timestamp with a time zone"
        )
    return since_ns


def _send_messages(
    hub: Hub, session: Session, request: HubRequest, path: str, feed: Feed, found: ReadResult, now_ms: int
) -> None:
    streams, stream = hub.streams, feed.stream
    known = streams.tail(stream)
    tail = known or 0
    messages: list[dict[str, Any]] = []
    for number, time_ns, body in found.entries:
        message = Raw(body)
        if feed.kind == BROADCAST:
            entry = decode_broadcast(body)
            if path not in entry.recipients:
                continue
            message = entry.message
        offset = streams.offset(stream, number)
        messages.append({"offset": offset, "appendTime": format_rfc3339(time_ns), "message": message})
    payload = {
        "actorAddress": f"@({path})",
        "stream": stream,
        "messages": messages,
        "nextOffset": streams.offset(stream, found.next_entry),
        # Null if there is no such stream, which differs from an empty mailbox.
        "committed": None if known is None else streams.offset(stream, feed.cursor.committed),
        "earliestOffset": None if known is None else streams.offset(stream, streams.earliest(stream)),
        "upToDate": found.next_entry >= tail,
        "lag": None if known is None else tail - feed.cursor.committed,
    }
    hub.send_reply(session, request, "hub:mailbox_messages", payload, now_ms)


class RejectedEntry(msgspec.Struct):
    offset: str
    reason: str = ""


_rejects_decoder: Final = msgspec.json.Decoder(list[RejectedEntry])


class CommitRequest(NamedTuple):
    """A commit: everything up to an entry, single entries, and rejected ones."""

    upto: int
    entries: set[int]
    rejected: set[int]


def _read_commit(hub: Hub, queue: DeliveryQueue, feed: Feed, request: HubRequest) -> CommitRequest:
    text, texts = request.payload.text("offset"), request.payload.texts("offsets") or []
    raw = request.payload.raw.get("reject")
    try:
        rejects = _rejects_decoder.decode(b"[]" if raw is None or bytes(raw) == b"null" else raw)
    except msgspec.MsgspecError:
        raise field_error("reject", "reject must be a list of objects with offset and reason") from None
    if len(rejects) > ENTRIES_MAX or len(texts) > ENTRIES_MAX:
        raise field_error("offsets", f"offsets and reject must have at most {ENTRIES_MAX} entries")
    if text is None and not rejects and not texts:
        raise field_error("offset", "offset is missing")
    if texts and not queue.commits_single:
        raise field_error("offsets", "offsets needs commit manual or a durable group")
    bound = max(feed.cursor.delivered, feed.cursor.read_upto, feed.sent)
    if isinstance(queue, GroupQueue) and text is not None:
        text, texts = None, [*texts, text]  # each member commits for itself
    upto = feed.cursor.committed if text is None else _resolve_delivered(hub, feed, text, bound)
    entries = {_resolve_delivered(hub, feed, one, bound) for one in texts}
    return CommitRequest(upto, entries, {_resolve_delivered(hub, feed, one.offset, bound) for one in rejects})


def commit_mailbox(hub: Hub, session: Session, request: HubRequest, now_ms: int) -> None:
    """Never moves back or past what was delivered or read; the response follows when it is durable."""
    path = authorised_path(hub, session, request, "mailbox_commit", now_ms)
    queue, feed = _find_feed(hub, session, path, request)
    given = _read_commit(hub, queue, feed, request)
    # Entries are not committed while their letters are being written: those that expired, or are rejected.
    letters = hub.entry_dead_letters
    waits = {entry for entry in letters.entries(feed.cursor) if entry <= given.upto or entry in given.entries}
    waits |= {entry for entry in given.rejected if not feed.cursor.has_passed(entry)}

    def buried(error: TailraceError | None, now_ms: int) -> None:
        if error is not None:
            hub.send_request_error(session, request, to_hub_error(error), now_ms)
            return
        _apply_commit(hub, queue, feed, given, now_ms)
        hub.mailboxes.cursors.commit(
            queue.path, feed.stream, _commit_callback(hub, session, request, path, feed)
        )
        hub.mailboxes.deliver_next(queue, now_ms)
        hub.mailboxes.release(queue)

    letters.reject(queue, feed, waits, buried, now_ms)


def _apply_commit(hub: Hub, queue: DeliveryQueue, feed: Feed, given: CommitRequest, now_ms: int) -> None:
    """Moves the cursor, and removes committed entries from flight. It has passed rejected ones already."""
    upto, entries, _ = given
    for entry, flight in feed.in_flight.items():
        if entry <= upto or entry in entries:
            offset = hub.streams.offset(feed.stream, entry)
            kind = TRACE_KIND_BY_FEED[feed.kind]
            hub.trace.record("processed", flight.copy, now_ms, kind=kind, stream=feed.stream, offset=offset)
    feed.cursor.commit_upto(upto)
    if entries:
        hub.mailboxes.mark_done(queue, feed, entries)
    feed.commit_upto(feed.cursor.committed)


def _commit_callback(
    hub: Hub, session: Session, request: HubRequest, path: str, feed: Feed
) -> Callable[[AppendOutcome, int], None]:
    committed = feed.cursor.committed

    def then(settled: AppendOutcome, now_ms: int) -> None:
        if settled.error is not None:
            hub.send_request_error(session, request, to_hub_error(settled.error), now_ms)
            return
        if feed.kind == MAILBOX:
            hub.pending.on_committed(feed.stream, committed, now_ms)
        if request.is_ask or session.on_http_answer is not None:
            payload = {
                "actorAddress": f"@({path})",
                "stream": feed.stream,
                "committed": hub.streams.offset(feed.stream, feed.cursor.committed),
                "lag": (hub.streams.tail(feed.stream) or 0) - feed.cursor.committed,
            }
            hub.send_reply(session, request, "hub:mailbox_committed", payload, now_ms)

    return then


def _resolve_delivered(hub: Hub, feed: Feed, text: str, bound: int) -> int:
    if hub.streams.tail(feed.stream) is None:
        raise HubError("invalid_offset", "the stream has no entries")
    entry = _resolve_offset(hub, feed.stream, text)
    if entry > bound:
        raise HubError("invalid_offset", "the offset is past what was delivered or read")
    return entry


def remove_mailbox(hub: Hub, path: str, then: Callable[[int], None], now_ms: int) -> None:
    """Deletes a mailbox, after dead-lettering what is left in it.

    Calls `then` when it is deleted; or when that has to wait, because letters cannot be written.
    """
    stream = mailbox_stream(path)
    if hub.streams.tail(stream) is None:
        then(now_ms)
        return
    after = hub.mailboxes.open(path).feeds[stream].cursor.committed
    waiting = [then]

    def respond(now_ms: int) -> None:
        if waiting:
            waiting.pop()(now_ms)

    def read_next(_: object = None, __: int = 0) -> None:
        hub.effects.append(Read(stream, after, REMOVED_ENTRIES, PAGE_BYTES, found))

    def found(page: ReadResult, now_ms: int) -> None:
        nonlocal after
        if hub.streams.tail(stream) is None or path in hub.registry.by_path:
            respond(now_ms)  # deleted meanwhile, or the address is registered again and keeps its mailbox
        elif page.error is not None and page.error.code == "offset_gone":
            after = hub.streams.earliest(stream)
            read_next()
        elif page.error is not None:
            respond(now_ms)  # the mailbox stays; its messages expire
        elif page.entries:
            write_letters(page, now_ms)
        elif hub.mailboxes.open(path).appends:
            # Messages that are being stored are durable before this cursor is.
            hub.mailboxes.cursors.commit(path, stream, read_next)
        else:
            _delete_mailbox(hub, path, stream)
            respond(now_ms)

    def write_letters(page: ReadResult, now_ms: int) -> None:
        queue = hub.mailboxes.open(path)

        def written(error: TailraceError | None, now_ms: int) -> None:
            nonlocal after
            if error is None:
                after = page.next_entry
            else:
                respond(now_ms)
            read_next()  # failed letters are written again every second, and waited for

        one_done = after_all(len(page.entries), written)
        for number, time_ns, body in page.entries:
            copy = requests.outgoing_from_envelope(parse_envelope(body, STORED_BYTES_MAX))
            hub.entry_dead_letters.write(
                queue,
                queue.feeds[stream],
                number,
                copy,
                "mailbox_expired",
                0,
                time_ns,
                now_ms,
                then=one_done,
            )

    read_next()


def _delete_mailbox(hub: Hub, path: str, stream: str) -> None:
    hub.effects.append(DeleteStream(stream))
    hub.mailboxes.cursors.delete(path, stream)
    hub.mailboxes.cursors.delete(path, BROADCAST_STREAM)
    queue = hub.mailboxes.open(path)
    queue.feeds.pop(stream, None)
    queue.feeds.pop(BROADCAST_STREAM, None)
    queue.mailbox = None
    hub.mailboxes.release(queue)
