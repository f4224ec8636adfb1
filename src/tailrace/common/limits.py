"""Every bound of the server, with its unit in its name.

The class is the table: each field carries its unit and its explanation, and the flags, the ``TAILRACE_*``
variables, ``docs/settings.md`` and ``/v1/server/_details`` are all made from it (see ``settings.py``).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

KIB = 1024
MIB = 1024 * KIB
HOUR_MS = 60 * 60 * 1000
DAY_MS = 24 * HOUR_MS

Bytes = Annotated[int, Meta(ge=1, extra={"unit": "bytes"})]
BytesOrNone = Annotated[int, Meta(ge=0, extra={"unit": "bytes"})]
Millis = Annotated[int, Meta(ge=1, extra={"unit": "ms"})]
MillisOrNone = Annotated[int, Meta(ge=0, extra={"unit": "ms"})]
Count = Annotated[int, Meta(ge=1, extra={"unit": "count"})]


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the server accepts, holds and waits for, at most."""

    # Requests.
    append_body_bytes: Annotated[Bytes, Meta(description="Largest body of one append or create.")] = 64 * MIB
    append_entries: Annotated[Count, Meta(description="Most messages in the JSON array of one append.")] = (
        1_000_000
    )
    request_body_bytes: Annotated[
        Bytes,
        Meta(
            description="Largest body of any other request, and largest entry of a stream with a schema or a "
            "profile: these are decoded."
        ),
    ] = 10 * MIB
    header_bytes: Annotated[Bytes, Meta(description="Largest request line and header block together.")] = (
        64 * KIB
    )
    name_bytes: Annotated[Bytes, Meta(description="Longest stream name, in UTF-8.")] = 1024
    key_bytes: Annotated[Bytes, Meta(description="Longest routing key.")] = 1024
    stream_seq_bytes: Annotated[Bytes, Meta(description="Longest Stream-Seq value.")] = 1024
    producer_id_bytes: Annotated[Bytes, Meta(description="Longest Producer-Id value.")] = 256
    json_depth: Annotated[Count, Meta(description="Deepest nesting of a JSON message.")] = 512
    timestamp_ahead_ms: Annotated[
        Millis, Meta(description="How far a Stream-Timestamp may lie ahead of the server's clock.")
    ] = 300_000

    # Identities.
    identity_ops_per_s: Annotated[
        int,
        Meta(
            ge=0,
            extra={"unit": "count"},
            description="Requests of one identity per second, twice as many at once; 0 sets no limit.",
        ),
    ] = 0
    identity_bytes_per_s: Annotated[
        int,
        Meta(
            ge=0,
            extra={"unit": "bytes"},
            description="Bytes that one identity may send in bodies per second, twice as many at once; 0 "
            "sets no limit.",
        ),
    ] = 0

    # Answers.
    read_page_bytes: Annotated[
        Bytes, Meta(description="Payload of one read answer; one larger entry still fits.")
    ] = MIB
    read_page_entries: Annotated[Count, Meta(description="Entries in one read answer.")] = 10_000
    filter_scan_bytes: Annotated[
        Bytes, Meta(description="Payload that one read with a filter examines before it answers.")
    ] = 100 * MIB
    list_page: Annotated[
        Count, Meta(description="Streams in one page of a listing, unless asked otherwise.")
    ] = 100
    list_page_max: Annotated[Count, Meta(description="Most streams one page of a listing may ask for.")] = (
        1000
    )

    # Time.
    request_ms: Annotated[
        Millis, Meta(description="Time for one request before it is answered with 408.")
    ] = 5000
    adopt_ms: Annotated[
        Millis,
        Meta(
            description="Time to check the entries of a stream that adopts a schema or profile, for a client "
            "that follows the progress."
        ),
    ] = 3_600_000
    append_ms: Annotated[Millis, Meta(description="Time an append may wait for its commit.")] = 3000
    append_wait_ms: Annotated[
        MillisOrNone,
        Meta(description="Time an append waits for room in the log before it is refused with 429; 0: none."),
    ] = 2000
    header_ms: Annotated[Millis, Meta(description="Time a client has to send a request's headers.")] = 10_000
    body_idle_ms: Annotated[Millis, Meta(description="Longest silence inside a request body.")] = 30_000
    idle_ms: Annotated[Millis, Meta(description="Time a kept-alive connection may stay silent.")] = 75_000
    drain_ms: Annotated[Millis, Meta(description="Time running requests have to finish on shutdown.")] = (
        10_000
    )

    # Live readers.
    long_poll_default_ms: Annotated[
        Millis, Meta(description="Wait of a long-poll that names no timeout.")
    ] = 4000
    long_poll_max_ms: Annotated[Millis, Meta(description="Longest wait of a long-poll.")] = 4500
    details_max_wait_ms: Annotated[
        Millis, Meta(description="Longest wait for a change of what _details or _index_status shows.")
    ] = 4500
    touch_max_waiters: Annotated[
        Count, Meta(description="Open waits for touches; beyond, they are refused with 429.")
    ] = 20_000
    touch_replay_max: Annotated[
        Count, Meta(description="Entries read again for an old touch cursor; beyond, it is stale.")
    ] = 200_000
    sse_rotation_ms: Annotated[Millis, Meta(description="Life of one server-sent-events answer.")] = 60_000
    sse_keep_alive_ms: Annotated[Millis, Meta(description="Silence after which an SSE comment is sent.")] = (
        15_000
    )
    ws_ping_ms: Annotated[Millis, Meta(description="Time between pings on a WebSocket.")] = 15_000
    ws_dead_ms: Annotated[Millis, Meta(description="Silence after which a WebSocket is given up.")] = 45_000
    ws_message_bytes: Annotated[Bytes, Meta(description="Largest WebSocket message from a client.")] = MIB
    ws_discard_bytes: Annotated[
        Bytes, Meta(description="Most bytes of an over-long WebSocket message that are read and thrown away.")
    ] = 16 * MIB
    live_unsent_bytes: Annotated[
        Bytes, Meta(description="Unsent bytes after which a live reader is demoted to catch-up reading.")
    ] = MIB
    live_connections: Annotated[
        Count, Meta(description="Live readers at once; more are answered with 429.")
    ] = 10_000
    connections: Annotated[Count, Meta(description="Open connections at once.")] = 20_000

    # The log.
    append_queue_stream_bytes: Annotated[
        Bytes, Meta(description="Appends of one stream that may wait for a commit.")
    ] = 64 * MIB
    append_queue_max_bytes: Annotated[
        Bytes, Meta(description="Appends of all streams that may wait for a commit.")
    ] = 256 * MIB
    journal_file_bytes: Annotated[Bytes, Meta(description="Size at which a new journal file is begun.")] = (
        64 * MIB
    )
    journal_syncs_in_flight: Annotated[Count, Meta(description="Journal syncs that may run at once.")] = 4
    tail_memory_max_bytes: Annotated[
        Bytes, Meta(description="Recent entries kept in memory before they move to the hot store.")
    ] = 256 * MIB
    block_cache_bytes: Annotated[
        BytesOrNone, Meta(description="Cache of blocks read from the hot store.")
    ] = 64 * MIB
    sqlite_cache_bytes: Annotated[
        Bytes, Meta(description="Memory that SQLite holds in the server before it uses its pages again.")
    ] = 64 * MIB
    streams_loaded: Annotated[
        Count, Meta(description="Streams kept in memory; idle ones beyond are put away.")
    ] = 50_000
    memory_limit_bytes: Annotated[
        BytesOrNone,
        Meta(
            description="Resident memory at which caches are shed and large work is refused; 0 takes nine "
            "tenths of the control group's limit, or none."
        ),
    ] = 0
    disk_reserve_bytes: Annotated[
        BytesOrNone, Meta(description="Free disk space below which appends are answered with 507.")
    ] = 256 * MIB
    tombstone_ms: Annotated[
        Millis, Meta(description="How long a deleted name is remembered, so that offsets never repeat.")
    ] = 30 * DAY_MS
    helper_idle_ms: Annotated[
        Millis,
        Meta(description="How long the checkpointer or sealer process is kept when it has nothing to do."),
    ] = 15_000

    # Cold history.
    seal_bytes: Annotated[
        Bytes, Meta(description="Payload of a stream after which it is sealed, and of one segment.")
    ] = 16 * MIB
    seal_entries: Annotated[
        Count, Meta(description="Entries of a stream after which it is sealed, and of one segment.")
    ] = 100_000
    seal_age_ms: Annotated[
        Millis, Meta(description="Age of a stream's oldest entry at which it is sealed.")
    ] = 900_000
    seal_interval_ms: Annotated[
        Millis, Meta(description="How often age and closed streams are looked at, and the journal moved on.")
    ] = 60_000
    seal_pause_ms: Annotated[
        Millis, Meta(description="Longest pause between two tries to seal while the object store fails.")
    ] = 60_000
    sweep_interval_ms: Annotated[
        MillisOrNone,
        Meta(description="Time between two sweeps of the object store for leftovers; 0 never sweeps."),
    ] = DAY_MS
    sweep_age_ms: Annotated[
        int,
        # Longer than anything takes that makes an object and names it afterwards.
        Meta(ge=HOUR_MS // 2, description="Age below which a sweep leaves an object alone, whatever it is."),
        Meta(extra={"unit": "ms"}),
    ] = HOUR_MS
    spool_bytes: Annotated[
        Bytes, Meta(description="Entries that are not on the object store yet; beyond, appends are refused.")
    ] = 8192 * MIB
    registry_retention_ms: Annotated[
        MillisOrNone, Meta(description="Age up to which __registry__ is kept; 0 keeps all of it.")
    ] = 0
    registry_retention_bytes: Annotated[
        BytesOrNone, Meta(description="Payload up to which __registry__ is kept; 0 keeps all of it.")
    ] = 0
    segments_retention_ms: Annotated[
        MillisOrNone, Meta(description="Age up to which __segments__ is kept; 0 keeps all of it.")
    ] = 7 * DAY_MS
    pipeline_heap: Annotated[Bytes, Meta(description="Memory of the pipeline's JVM.")] = 1024 * MIB
    pipeline_task_memory: Annotated[
        Bytes, Meta(description="Memory that one task of the pipeline plans with.")
    ] = 400 * MIB
    pipeline_batch_segments: Annotated[Count, Meta(description="Segments in one job of the pipeline.")] = 64
    pipeline_batch_bytes: Annotated[Bytes, Meta(description="Payload in one job of the pipeline.")] = (
        1024 * MIB
    )
    pipeline_start_bytes: Annotated[
        Bytes, Meta(description="Payload without companions that is worth starting the pipeline for.")
    ] = 8 * MIB
    pipeline_start_after: Annotated[
        Millis, Meta(description="Age of a segment without companions that starts it, however small.")
    ] = 60_000
    pipeline_idle_stop: Annotated[
        Millis, Meta(description="Time without work after which the pipeline is stopped.")
    ] = 600_000
    index_check_ms: Annotated[
        Millis, Meta(description="How often the pipeline looks for work while there is some.")
    ] = 1000
    index_l0_span: Annotated[
        Count, Meta(description="Adjacent companions of single segments that are merged into one.")
    ] = 16
    index_compaction_fanout: Annotated[
        Count, Meta(description="Adjacent merged companions that are merged into one of the next level.")
    ] = 16
    index_max_level: Annotated[Count, Meta(description="How often companions are merged again.")] = 4
    compact_segments: Annotated[
        int,
        Meta(ge=2, extra={"unit": "count"}, description="Adjacent small segments that are joined into one."),
    ] = 16
    compact_small_bytes: Annotated[
        Bytes, Meta(description="Payload below which a segment is small and may be joined with others.")
    ] = 4 * MIB
    compact_age_ms: Annotated[
        MillisOrNone, Meta(description="Age of its newest entry below which a segment is not joined yet.")
    ] = HOUR_MS
    gc_segment_grace: Annotated[
        int,
        # Longer than a query holds the names of segments.
        Meta(ge=HOUR_MS, description="How long segments stay in the store after others took their place."),
        Meta(extra={"unit": "ms"}),
    ] = DAY_MS
    gc_orphan_age: Annotated[
        int,
        # Longer than a pipeline takes from its first object to the publication of all.
        Meta(
            ge=HOUR_MS,
            description="Age at which companions and plans go that nothing in the store names.",
        ),
        Meta(extra={"unit": "ms"}),
    ] = DAY_MS
    search_companion_batch_segments: Annotated[
        Count, Meta(description="Segments whose companions are published together.")
    ] = 4
    search_companion_file_cache_max_bytes: Annotated[
        BytesOrNone,
        Meta(description="Local disk cache of companions; they can be fetched again at any time."),
    ] = 1024 * MIB
    search_companion_memory_max_bytes: Annotated[
        Bytes, Meta(description="Memory for open companions and what was decoded of them.")
    ] = 256 * MIB
    lexicon_index_cache_max_bytes: Annotated[
        BytesOrNone,
        Meta(description="Local disk cache of the lexicons of routing keys, apart from other companions."),
    ] = 64 * MIB
    metrics_flush_ms: Annotated[
        MillisOrNone, Meta(description="How often __stream_metrics__ is written; 0 never.")
    ] = 10_000
    metrics_retention: Annotated[
        MillisOrNone, Meta(description="Age up to which __stream_metrics__ is kept; 0 keeps all of it.")
    ] = 7 * DAY_MS
    metrics_max_series: Annotated[
        int,
        Meta(ge=2, extra={"unit": "count"}, description="Series that one interval of metrics may hold."),
    ] = 2000
    segment_cache_max_bytes: Annotated[
        BytesOrNone, Meta(description="Local disk cache of what was read from the object store.")
    ] = 1024 * MIB

    bootstrap_requests: Annotated[
        Count, Meta(description="Requests to the object store that a bootstrap makes at once.")
    ] = 64
    bootstrap_settle_ms: Annotated[
        Millis,
        Meta(description="Time a bootstrap gives the server before it to notice that it lost the bucket."),
    ] = 8000

    # Search.
    tail_index_max_bytes: Annotated[
        BytesOrNone, Meta(description="Memory for the index of recent rows; 0 leaves them to scans.")
    ] = 256 * MIB
    search_concurrency: Annotated[
        int,
        Meta(ge=0, description="Searches that run at once; 0 is twice the number of cores."),
        Meta(extra={"unit": "count"}),
    ] = 0
    search_queue: Annotated[
        Count, Meta(description="Searches that may wait for their turn; more are answered with 429.")
    ] = 256
    search_timeout_ms: Annotated[
        int,
        Meta(ge=1, le=3000, description="Longest time for one search."),
        Meta(extra={"unit": "ms"}),
    ] = 3000
    search_total_exact_limit: Annotated[
        Count, Meta(description="Matches up to which a search counts them all.")
    ] = 10_000

    # Documents and live queries.
    watch_partitions: Annotated[
        int,
        Meta(ge=1, le=256, extra={"unit": "count"}, description="Partitions of a new collection."),
    ] = 16
    watch_document_bytes: Annotated[Bytes, Meta(description="Largest document, as JSON.")] = MIB
    watch_push_bytes: Annotated[
        Bytes, Meta(description="Largest push of a replicating client, and largest frame it sends.")
    ] = 8 * MIB
    watch_batch_writes: Annotated[Count, Meta(description="Most writes in one batch of documents.")] = 500
    watch_message_bytes: Annotated[
        Bytes, Meta(description="Largest query, and largest message of a realtime client.")
    ] = 64 * KIB
    watch_connections: Annotated[
        Count, Meta(description="Realtime connections at once; more are answered with 429.")
    ] = 10_000
    watch_subscriptions: Annotated[Count, Meta(description="Subscriptions of one realtime connection.")] = 100
    watch_principal_subscriptions: Annotated[
        Count, Meta(description="Subscriptions of one token subject, on all its realtime connections.")
    ] = 1000
    watch_scan_predicates: Annotated[
        Count, Meta(description="Different predicates of one collection that no index can help with.")
    ] = 1000
    watch_match_steps: Annotated[
        Count,
        Meta(
            description="Steps that live matching spends on expressions at once, about 0.5 us each; "
            "subscriptions that need more than is left read the log instead."
        ),
    ] = 40_000
    watch_outbound_bytes: Annotated[
        Bytes, Meta(description="Unsent bytes of one realtime connection; beyond, it reads from the log.")
    ] = 4 * MIB
    watch_outbound_total_bytes: Annotated[
        Bytes, Meta(description="Unsent bytes of all realtime connections together.")
    ] = 512 * MIB
    watch_stall_ms: Annotated[
        Millis, Meta(description="Time after which a realtime connection that takes nothing is closed.")
    ] = 10_000
    watch_overflow_ms: Annotated[
        Millis,
        Meta(
            description="Time after which a subscription that reads from the log without progress is ended."
        ),
    ] = 30_000
    watch_heartbeat_ms: Annotated[
        Millis, Meta(description="Time between heartbeats to realtime clients.")
    ] = 30_000
    watch_auth_ms: Annotated[Millis, Meta(description="Time a realtime client has to say who it is.")] = (
        10_000
    )
    watch_snapshot_documents: Annotated[Count, Meta(description="Documents in one page of a snapshot.")] = 500
    watch_snapshot_bytes: Annotated[
        Bytes, Meta(description="Size of one page of a snapshot; one larger document still fits.")
    ] = 256 * KIB
    watch_replays: Annotated[
        Count, Meta(description="Subscriptions that read from the log at once; others wait for their turn.")
    ] = 4
    watch_snapshots: Annotated[
        Count, Meta(description="Snapshots that are sent at once; others wait for their turn.")
    ] = 8
    watch_resume_changes: Annotated[
        Count, Meta(description="Most changes that a resume reads again; beyond, the client starts anew.")
    ] = 1_000_000
    watch_window_ms: Annotated[
        Millis,
        Meta(description="Age up to which it is remembered what was before a change that does not say so."),
    ] = 3 * 60 * 1000
    watch_window_changes: Annotated[
        Count, Meta(description="Changes of a collection of which that is remembered.")
    ] = 10_000
    watch_window_bytes: Annotated[
        Bytes, Meta(description="Memory of a collection in which that is remembered.")
    ] = 32 * MIB
    watch_retention_ms: Annotated[
        MillisOrNone,
        Meta(description="Age up to which changes are kept, unless their collection says; 0 keeps all."),
    ] = 7 * DAY_MS
    watch_tombstone_ms: Annotated[
        MillisOrNone,
        Meta(
            description="How long deleted documents are remembered, unless their collection says; 0 always."
        ),
    ] = 30 * DAY_MS
    watch_view_ms: Annotated[
        Millis, Meta(description="How often the documents of a changed collection go to the object store.")
    ] = DAY_MS
    watch_care_ms: Annotated[
        Millis,
        Meta(description="How often tombstones, views and keys of the realtime gateway are looked at."),
    ] = 60_000
    watch_audit_retention_ms: Annotated[
        MillisOrNone, Meta(description="Age up to which __audit__ is kept; 0 writes no audit.")
    ] = 30 * DAY_MS
    watch_key_ms: Annotated[
        Millis, Meta(description="Time a key signs realtime tokens before the next one takes over.")
    ] = 90 * DAY_MS
    watch_key_verify_ms: Annotated[
        Millis, Meta(description="Time for which tokens of an older key are still good.")
    ] = 7 * DAY_MS
    watch_sources: Annotated[Count, Meta(description="Sources of changes that a server follows.")] = 32
    watch_source_idle_ms: Annotated[
        Millis, Meta(description="Time between two looks at a source that had nothing new.")
    ] = 250
    watch_source_check_ms: Annotated[
        Millis, Meta(description="Time between two looks at whether a source can go on from where it is.")
    ] = 10_000
    watch_source_retry_ms: Annotated[
        Millis, Meta(description="Longest pause before a source that failed is tried again.")
    ] = 60_000
    watch_metrics_collections: Annotated[
        Count, Meta(description="Collections with labels of their own; the metrics of others are one row.")
    ] = 100
    watch_slo_delivery_ms: Annotated[
        Millis, Meta(description="Time in which 99 of 100 events should be on their way to the client.")
    ] = 250
    watch_slo_lag_ms: Annotated[
        Millis, Meta(description="How far a collection may be behind its source.")
    ] = 5000

    # The hub.
    hub_message_bytes: Annotated[Bytes, Meta(description="Largest message of an actor.")] = MIB
    hub_skip_bytes: Annotated[
        Bytes, Meta(description="A larger message is skipped up to this size; beyond, its connection ends.")
    ] = 16 * MIB
    hub_connections: Annotated[
        Count,
        Meta(description="Connections to the hub at once; one more is refused with `hub:rate_limited`."),
    ] = 10_000
    hub_connects_per_s: Annotated[
        int,
        Meta(
            ge=0,
            extra={"unit": "count"},
            description="New connections per second, and at once; 0 is no limit.",
        ),
    ] = 100
    hub_connections_per_identity: Annotated[
        Count, Meta(description="Sessions of one identity; one more ends the oldest.")
    ] = 1
    hub_connect_ms: Annotated[Millis, Meta(description="Time a connection has to say `hub:connect`.")] = 5000
    hub_heartbeat_ms: Annotated[
        Millis, Meta(description="Heartbeat of actors; after three of them in silence a session ends.")
    ] = 25_000
    hub_resume_window_ms: Annotated[
        Millis, Meta(description="Time a session that lost its connection can be resumed.")
    ] = 60_000
    hub_resume_messages: Annotated[Count, Meta(description="Messages that wait for it in memory.")] = 1000
    hub_resume_bytes: Annotated[Bytes, Meta(description="Bytes that wait for it in memory.")] = MIB
    hub_seen_ttl_ms: Annotated[
        int,
        Meta(ge=1, le=300_000, extra={"unit": "ms"}, description="Time a message is known by its id."),
    ] = 60_000
    hub_seen_ids: Annotated[Count, Meta(description="Messages of one identity that are known by id.")] = (
        10_000
    )
    hub_seen_answer_bytes: Annotated[
        Bytes, Meta(description="Answers of one identity that are kept for repeats.")
    ] = MIB
    hub_seen_bytes: Annotated[
        Bytes,
        Meta(description="Memory for messages known by id, of all identities; beyond it none is taken."),
    ] = 512 * MIB
    hub_registry_actors: Annotated[Count, Meta(description="Addresses that can be registered.")] = 50_000
    hub_session_addresses: Annotated[Count, Meta(description="Addresses of one session.")] = 100
    hub_session_subscriptions: Annotated[Count, Meta(description="Subscriptions of one session.")] = 1000
    hub_session_watches: Annotated[Count, Meta(description="Presence watches of one session.")] = 20
    hub_session_asks: Annotated[Count, Meta(description="Open asks of one session.")] = 1000
    hub_ask_ms: Annotated[Millis, Meta(description="Time for an ask that has no ttl.")] = 30_000
    hub_token_age_ms: Annotated[
        int,
        Meta(
            ge=0,
            extra={"unit": "ms"},
            description="Age by its `iat` at which a token no longer opens a session; 0 sets no limit.",
        ),
    ] = DAY_MS
    hub_sends_per_s: Annotated[
        Count, Meta(description="Sends, replies and publications of one identity per second.")
    ] = 1000
    hub_bytes_per_s: Annotated[Bytes, Meta(description="Bytes of these per second.")] = 8 * MIB
    hub_broadcasts_per_s: Annotated[Count, Meta(description="Broadcasts of one identity per second.")] = 5
    hub_registers_per_s: Annotated[
        Count, Meta(description="Registrations, renewals and subscriptions of one identity per second.")
    ] = 100
    hub_recipients_per_s: Annotated[
        Count, Meta(description="Recipients of the broadcasts of one identity per second.")
    ] = 200_000
    hub_reads_per_s: Annotated[
        Count, Meta(description="Discoveries, lists and mailbox reads of one identity per second.")
    ] = 100
    hub_pause_messages: Annotated[
        Count, Meta(description="Unsent messages of a connection at which its senders are asked to pause.")
    ] = 1000
    hub_pause_bytes: Annotated[Bytes, Meta(description="Unsent bytes at which they are.")] = MIB
    hub_outbound_messages: Annotated[
        Count, Meta(description="Unsent messages of a connection beyond which nothing is queued.")
    ] = 2000
    hub_outbound_bytes: Annotated[Bytes, Meta(description="Unsent bytes beyond which nothing is.")] = 2 * MIB
    hub_stall_ms: Annotated[
        Millis, Meta(description="Time after which a connection that stays beyond them is closed.")
    ] = 30_000
    hub_strikes: Annotated[
        Count, Meta(description="Malformed messages within a minute that end a connection.")
    ] = 20
    hub_mailbox_entries: Annotated[Count, Meta(description="Uncommitted messages of a mailbox.")] = 100_000
    hub_mailbox_bytes: Annotated[Bytes, Meta(description="Uncommitted bytes of a mailbox.")] = 256 * MIB
    hub_mailbox_ms: Annotated[
        Millis, Meta(description="Time a message waits in a mailbox before it becomes a dead letter.")
    ] = 7 * DAY_MS
    hub_mailbox_kept_ms: Annotated[
        Millis, Meta(description="Time a message stays readable in a mailbox after it was committed.")
    ] = 7 * DAY_MS
    hub_mailbox_unused_ms: Annotated[
        Millis, Meta(description="Time after which a mailbox that is empty and not used is deleted.")
    ] = 30 * DAY_MS
    hub_topic_ms: Annotated[
        Millis, Meta(description="Time the messages of durable topics, and broadcasts, are kept.")
    ] = DAY_MS
    hub_topic_bytes: Annotated[
        Bytes, Meta(description="Bytes of a durable topic, or of the broadcasts, beyond which the oldest go.")
    ] = 1024 * MIB
    hub_cursor_ms: Annotated[
        Millis,
        Meta(
            description="Time for which a durable subscriber that reads nothing holds back what it has not "
            "read."
        ),
    ] = 7 * DAY_MS
    hub_sweep_ms: Annotated[
        Millis, Meta(description="Pause between two looks at all mailboxes and topics for what can go.")
    ] = 600_000

    # The edge.
    edge_connections: Annotated[Count, Meta(description="Open connections of an edge at once.")] = 50_000
    edge_channels: Annotated[
        Count, Meta(description="Streams that an edge follows at once; more are answered with 429.")
    ] = 20_000
    edge_ring_bytes: Annotated[
        Bytes, Meta(description="Recent batches of one stream that an edge keeps for readers.")
    ] = 4 * MIB
    edge_ring_ms: Annotated[Millis, Meta(description="How long it keeps them.")] = 60_000
    edge_rings_bytes: Annotated[Bytes, Meta(description="Recent batches of all streams together.")] = (
        256 * MIB
    )
    edge_linger_ms: Annotated[
        Millis, Meta(description="How long an edge follows a stream after its last reader has left.")
    ] = 10_000
    edge_hold_ms: Annotated[
        Millis, Meta(description="How long an edge keeps live readers while their upstream is lost.")
    ] = 30_000
    edge_private_sockets: Annotated[
        Count, Meta(description="Upstream sockets of single readers that do not fit into a shared one.")
    ] = 256
    edge_upstream_connections: Annotated[
        Count, Meta(description="Connections of an edge to one upstream, for requests.")
    ] = 64
    edge_upstream_queue: Annotated[
        Count, Meta(description="Requests that wait for one of them; more are answered with 429.")
    ] = 1024
    edge_answer_ms: Annotated[
        Millis, Meta(description="Time an upstream has to begin its answer to an edge.")
    ] = 30_000
    edge_frame_bytes: Annotated[
        # One entry, in which every byte may have to be escaped by six.
        Bytes,
        Meta(description="Largest message that an edge takes from an upstream."),
    ] = 400 * MIB
    edge_memory_cache_bytes: Annotated[
        BytesOrNone, Meta(description="Slices that an edge keeps in memory.")
    ] = 256 * MIB
    edge_disk_cache_bytes: Annotated[Bytes, Meta(description="Slices that an edge keeps on disk.")] = (
        4096 * MIB
    )
    edge_slice_bytes: Annotated[Bytes, Meta(description="Largest slice that an edge keeps.")] = 16 * MIB
    edge_recent_ms: Annotated[
        MillisOrNone,
        Meta(description="How long an edge gives the answer to a read at the tail again; 0 never does."),
    ] = 100
    edge_confirm_ms: Annotated[
        Millis,
        Meta(description="How long an edge trusts that a stream still exists, unless it would be told."),
    ] = 10_000

    # The object store.
    object_ms: Annotated[
        Millis, Meta(description="Time for one call to the object store, with all its retries.")
    ] = 30_000
    object_try_ms: Annotated[
        Millis, Meta(description="Time for one try of such a call, to the last byte.")
    ] = 15_000
    object_tries: Annotated[Count, Meta(description="Tries of one call to the object store.")] = 8
    object_retry_ms: Annotated[
        Millis, Meta(description="Longest pause before the first retry; it doubles with each, up to 5 s.")
    ] = 200

    # Subscriptions.
    lease_default_ms: Annotated[Millis, Meta(description="Lease of a wake when none is asked for.")] = 30_000
    lease_min_ms: Annotated[Millis, Meta(description="Shortest lease.")] = 1000
    lease_max_ms: Annotated[Millis, Meta(description="Longest lease.")] = 600_000
    webhook_ms: Annotated[Millis, Meta(description="Time a webhook has to answer.")] = 10_000
    webhook_key_ms: Annotated[
        int,
        Meta(ge=HOUR_MS, description="Time a key signs webhooks before the next one takes over."),
        Meta(extra={"unit": "ms"}),
    ] = 90 * DAY_MS
    webhook_answer_bytes: Annotated[Bytes, Meta(description="Most of a webhook's answer that is read.")] = (
        64 * KIB
    )
