"""Every limit of the server, with its unit in its name.

The class is the table: each field carries its unit and its explanation, and the flags, the ``TAILRACE_*``
variables, ``docs/settings.md`` and ``/v1/server/_details`` are generated from it (see ``settings.py``).
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
            description="Largest body of other requests, and largest entry of a stream with a schema or "
            "profile, because these are decoded."
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
        Millis, Meta(description="How far a Stream-Timestamp may be ahead of the server's clock.")
    ] = 300_000

    # Identities.
    identity_ops_per_s: Annotated[
        int,
        Meta(
            ge=0,
            extra={"unit": "count"},
            description="Requests of one identity per second, with bursts of twice as many; 0 sets no limit.",
        ),
    ] = 0
    identity_bytes_per_s: Annotated[
        int,
        Meta(
            ge=0,
            extra={"unit": "bytes"},
            description="Body bytes of one identity per second, with bursts of twice as many; 0 sets no "
            "limit.",
        ),
    ] = 0

    # Responses.
    read_page_bytes: Annotated[
        Bytes, Meta(description="Payload of one read response; a single larger entry is still returned.")
    ] = MIB
    read_page_entries: Annotated[Count, Meta(description="Entries in one read response.")] = 10_000
    filter_scan_bytes: Annotated[
        Bytes, Meta(description="Payload that one read with a filter examines before it responds.")
    ] = 100 * MIB
    list_page: Annotated[Count, Meta(description="Streams in one page of a listing, by default.")] = 100
    list_page_max: Annotated[
        Count, Meta(description="Most streams that a client can request in one page of a listing.")
    ] = 1000

    # Time.
    request_ms: Annotated[Millis, Meta(description="Time for one request before it fails with 408.")] = 5000
    adopt_ms: Annotated[
        Millis,
        Meta(
            description="Time to check the entries of a stream that adopts a schema or profile, for "
            "clients that follow the progress."
        ),
    ] = 3_600_000
    append_ms: Annotated[Millis, Meta(description="Time an append may wait for its commit.")] = 3000
    append_wait_ms: Annotated[
        MillisOrNone,
        Meta(
            description="Time an append or another write waits for room in the log before it fails with "
            "429; 0 does not wait."
        ),
    ] = 2000
    header_ms: Annotated[Millis, Meta(description="Time a client has to send the request headers.")] = 10_000
    body_idle_ms: Annotated[Millis, Meta(description="Longest pause while a request body is received.")] = (
        30_000
    )
    idle_ms: Annotated[Millis, Meta(description="Time an idle keep-alive connection stays open.")] = 75_000
    drain_ms: Annotated[Millis, Meta(description="Time for running requests to finish on shutdown.")] = 10_000

    # Live readers.
    long_poll_default_ms: Annotated[
        Millis, Meta(description="Wait of a long-poll without a timeout parameter.")
    ] = 4000
    long_poll_max_ms: Annotated[Millis, Meta(description="Longest wait of a long-poll.")] = 4500
    details_max_wait_ms: Annotated[
        Millis, Meta(description="Longest wait for a change of _details or _index_status.")
    ] = 4500
    touch_max_waiters: Annotated[
        Count, Meta(description="Pending touch waits; more are refused with 429.")
    ] = 20_000
    touch_replay_max: Annotated[
        Count,
        Meta(description="Entries that are replayed for an old touch cursor; an older cursor is stale."),
    ] = 200_000
    sse_rotation_ms: Annotated[
        Millis,
        Meta(description="Duration of one server-sent events response, after which the client reconnects."),
    ] = 60_000
    sse_keep_alive_ms: Annotated[
        Millis, Meta(description="Idle time after which an SSE comment is sent.")
    ] = 15_000
    ws_ping_ms: Annotated[Millis, Meta(description="Time between pings on a WebSocket.")] = 15_000
    ws_dead_ms: Annotated[
        Millis, Meta(description="Time without data or pong after which a WebSocket is closed.")
    ] = 45_000
    ws_message_bytes: Annotated[Bytes, Meta(description="Largest WebSocket message from a client.")] = MIB
    ws_discard_bytes: Annotated[
        Bytes, Meta(description="Most bytes of an oversized WebSocket message that are read and discarded.")
    ] = 16 * MIB
    live_unsent_bytes: Annotated[
        Bytes, Meta(description="Unsent bytes at which a live reader is demoted to catch-up reading.")
    ] = MIB
    live_connections: Annotated[
        Count, Meta(description="Live readers at once; more are refused with 429.")
    ] = 10_000
    connections: Annotated[Count, Meta(description="Open connections at once.")] = 20_000

    # The log.
    append_queue_stream_bytes: Annotated[
        Bytes, Meta(description="Bytes of one stream that may wait for a commit.")
    ] = 64 * MIB
    append_queue_max_bytes: Annotated[
        Bytes, Meta(description="Bytes of all streams that may wait for a commit.")
    ] = 256 * MIB
    journal_file_bytes: Annotated[Bytes, Meta(description="Size at which a new journal file is started.")] = (
        64 * MIB
    )
    journal_syncs_in_flight: Annotated[Count, Meta(description="Journal syncs that may run at once.")] = 4
    tail_memory_max_bytes: Annotated[
        Bytes, Meta(description="Recent entries held in memory before they move to the hot store.")
    ] = 256 * MIB
    block_cache_bytes: Annotated[
        BytesOrNone, Meta(description="Cache of blocks read from the hot store.")
    ] = 64 * MIB
    sqlite_cache_bytes: Annotated[Bytes, Meta(description="Page cache of SQLite in the server.")] = 64 * MIB
    streams_loaded: Annotated[
        Count, Meta(description="Streams held in memory; idle ones beyond this number are unloaded.")
    ] = 50_000
    memory_limit_bytes: Annotated[
        BytesOrNone,
        Meta(
            description="Resident memory at which caches are evicted and large requests refused; 0 uses "
            "nine tenths of the control group's limit, if there is one."
        ),
    ] = 0
    disk_reserve_bytes: Annotated[
        BytesOrNone, Meta(description="Free disk space below which appends fail with 507.")
    ] = 256 * MIB
    tombstone_ms: Annotated[
        Millis,
        Meta(
            description="How long the name of a deleted stream is remembered, so that offsets never repeat."
        ),
    ] = 30 * DAY_MS
    helper_idle_ms: Annotated[
        Millis,
        Meta(description="How long an idle checkpointer or sealer process stays running."),
    ] = 15_000

    # Cold history.
    seal_bytes: Annotated[
        Bytes,
        Meta(description="Payload of a stream at which it is sealed, and largest payload of one segment."),
    ] = 16 * MIB
    seal_entries: Annotated[
        Count, Meta(description="Entries of a stream at which it is sealed, and most entries of one segment.")
    ] = 100_000
    seal_age_ms: Annotated[
        Millis, Meta(description="Age of a stream's oldest unsealed entry at which it is sealed.")
    ] = 900_000
    seal_interval_ms: Annotated[
        Millis,
        Meta(description="How often streams are checked for age and closing, and the journal is rotated."),
    ] = 60_000
    seal_pause_ms: Annotated[
        Millis, Meta(description="Longest pause between sealing attempts while the object store fails.")
    ] = 60_000
    sweep_interval_ms: Annotated[
        MillisOrNone,
        Meta(
            description="Time between sweeps that delete orphaned objects from the object store; 0 "
            "disables sweeps."
        ),
    ] = DAY_MS
    sweep_age_ms: Annotated[
        int,
        # Must exceed the longest time between creating an object and referencing it in a manifest.
        Meta(ge=HOUR_MS // 2, description="Age below which a sweep never deletes an object."),
        Meta(extra={"unit": "ms"}),
    ] = HOUR_MS
    spool_bytes: Annotated[
        Bytes,
        Meta(
            description="Entries that are not on the object store yet; beyond this size appends are refused."
        ),
    ] = 8192 * MIB
    registry_retention_ms: Annotated[
        MillisOrNone, Meta(description="Retention of __registry__ by age; 0 retains everything.")
    ] = 0
    registry_retention_bytes: Annotated[
        BytesOrNone, Meta(description="Retention of __registry__ by payload size; 0 retains everything.")
    ] = 0
    segments_retention_ms: Annotated[
        MillisOrNone, Meta(description="Retention of __segments__ by age; 0 retains everything.")
    ] = 7 * DAY_MS
    pipeline_heap: Annotated[Bytes, Meta(description="Heap size of the pipeline's JVM.")] = 1024 * MIB
    pipeline_task_memory: Annotated[Bytes, Meta(description="Memory budget of one pipeline task.")] = (
        400 * MIB
    )
    pipeline_batch_segments: Annotated[Count, Meta(description="Segments in one pipeline job.")] = 64
    pipeline_batch_bytes: Annotated[Bytes, Meta(description="Payload in one pipeline job.")] = 1024 * MIB
    pipeline_start_bytes: Annotated[
        Bytes, Meta(description="Payload without index files at which the pipeline is started.")
    ] = 8 * MIB
    pipeline_start_after: Annotated[
        Millis,
        Meta(
            description="Age of a segment without index files at which the pipeline is started, whatever "
            "its size."
        ),
    ] = 60_000
    pipeline_idle_stop: Annotated[
        Millis, Meta(description="Idle time after which the pipeline is stopped.")
    ] = 600_000
    index_check_ms: Annotated[
        Millis, Meta(description="How often the pipeline polls for work while there is some.")
    ] = 1000
    index_l0_span: Annotated[
        Count, Meta(description="Adjacent index files of single segments that are merged into one.")
    ] = 16
    index_compaction_fanout: Annotated[
        Count, Meta(description="Adjacent merged index files that are merged into one of the next level.")
    ] = 16
    index_max_level: Annotated[Count, Meta(description="Number of merge levels of index files.")] = 4
    compact_segments: Annotated[
        int,
        Meta(
            ge=2, extra={"unit": "count"}, description="Adjacent small segments that are compacted into one."
        ),
    ] = 16
    compact_small_bytes: Annotated[
        Bytes, Meta(description="Payload below which a segment is small and may be compacted.")
    ] = 4 * MIB
    compact_age_ms: Annotated[
        MillisOrNone, Meta(description="Age of a segment's newest entry below which it is not compacted.")
    ] = HOUR_MS
    gc_segment_grace: Annotated[
        int,
        # Must exceed the time for which a query holds the names of segments.
        Meta(
            ge=HOUR_MS,
            description="How long segments stay in the object store after compaction replaced them.",
        ),
        Meta(extra={"unit": "ms"}),
    ] = DAY_MS
    gc_orphan_age: Annotated[
        int,
        # Must exceed the time from a pipeline's first object to its publication.
        Meta(
            ge=HOUR_MS,
            description="Age at which index files and plans that no manifest references are deleted.",
        ),
        Meta(extra={"unit": "ms"}),
    ] = DAY_MS
    search_companion_batch_segments: Annotated[
        Count, Meta(description="Segments whose index files are published together.")
    ] = 4
    search_companion_file_cache_max_bytes: Annotated[
        BytesOrNone,
        Meta(description="Local disk cache of index files; evicted files are fetched again."),
    ] = 1024 * MIB
    search_companion_memory_max_bytes: Annotated[
        Bytes, Meta(description="Memory for open index files and their decoded parts.")
    ] = 256 * MIB
    lexicon_index_cache_max_bytes: Annotated[
        BytesOrNone,
        Meta(description="Local disk cache of routing key lexicons, separate from other index files."),
    ] = 64 * MIB
    metrics_flush_ms: Annotated[
        MillisOrNone, Meta(description="How often __stream_metrics__ is written; 0 disables it.")
    ] = 10_000
    metrics_retention: Annotated[
        MillisOrNone, Meta(description="Retention of __stream_metrics__ by age; 0 retains everything.")
    ] = 7 * DAY_MS
    metrics_max_series: Annotated[
        int,
        Meta(ge=2, extra={"unit": "count"}, description="Most series in one interval of stream metrics."),
    ] = 2000
    segment_cache_max_bytes: Annotated[
        BytesOrNone, Meta(description="Local disk cache of data read from the object store.")
    ] = 1024 * MIB

    bootstrap_requests: Annotated[
        Count, Meta(description="Concurrent requests to the object store during a bootstrap.")
    ] = 64
    bootstrap_settle_ms: Annotated[
        Millis,
        Meta(
            description="Time a bootstrap waits for the previous server to notice that it lost the object "
            "store."
        ),
    ] = 8000

    # Search.
    tail_index_max_bytes: Annotated[
        BytesOrNone, Meta(description="Memory for the index of recent entries; 0 scans them instead.")
    ] = 256 * MIB
    search_concurrency: Annotated[
        int,
        Meta(ge=0, description="Concurrent searches; 0 allows two per core."),
        Meta(extra={"unit": "count"}),
    ] = 0
    search_queue: Annotated[
        Count, Meta(description="Searches that may wait for a free slot; more are refused with 429.")
    ] = 256
    search_timeout_ms: Annotated[
        int,
        Meta(ge=1, le=3000, description="Longest time for one search."),
        Meta(extra={"unit": "ms"}),
    ] = 3000
    search_total_exact_limit: Annotated[
        Count, Meta(description="Number of matches up to which a search reports an exact total.")
    ] = 10_000

    # Documents and live queries.
    watch_partitions: Annotated[
        int,
        Meta(ge=1, le=256, extra={"unit": "count"}, description="Partitions of a new collection."),
    ] = 16
    watch_document_bytes: Annotated[Bytes, Meta(description="Largest document, as JSON.")] = MIB
    watch_push_bytes: Annotated[
        Bytes, Meta(description="Largest push of a replicating client, and its largest WebSocket message.")
    ] = 8 * MIB
    watch_batch_writes: Annotated[Count, Meta(description="Most writes in one batch of documents.")] = 500
    watch_message_bytes: Annotated[
        Bytes, Meta(description="Largest query, and largest message of a realtime client.")
    ] = 64 * KIB
    watch_connections: Annotated[
        Count, Meta(description="Realtime connections at once; more are refused with 429.")
    ] = 10_000
    watch_subscriptions: Annotated[Count, Meta(description="Subscriptions of one realtime connection.")] = 100
    watch_principal_subscriptions: Annotated[
        Count, Meta(description="Subscriptions of one token subject on all of its realtime connections.")
    ] = 1000
    watch_scan_predicates: Annotated[
        Count, Meta(description="Distinct predicates of one collection that no index supports.")
    ] = 1000
    watch_match_steps: Annotated[
        Count,
        Meta(
            description="Budget of live matching for expressions, in steps of about 0.5 us; subscriptions "
            "that exceed it read from the log instead."
        ),
    ] = 40_000
    watch_outbound_bytes: Annotated[
        Bytes,
        Meta(description="Unsent bytes of one realtime connection; beyond this size it reads from the log."),
    ] = 4 * MIB
    watch_outbound_total_bytes: Annotated[
        Bytes, Meta(description="Unsent bytes of all realtime connections together.")
    ] = 512 * MIB
    watch_stall_ms: Annotated[
        Millis, Meta(description="Time without progress after which a realtime connection is closed.")
    ] = 10_000
    watch_overflow_ms: Annotated[
        Millis,
        Meta(
            description="Time without progress after which a subscription that reads from the log is ended."
        ),
    ] = 30_000
    watch_heartbeat_ms: Annotated[
        Millis, Meta(description="Time between heartbeats to realtime clients.")
    ] = 30_000
    watch_auth_ms: Annotated[Millis, Meta(description="Time a realtime client has to authenticate.")] = 10_000
    watch_snapshot_documents: Annotated[Count, Meta(description="Documents in one page of a snapshot.")] = 500
    watch_snapshot_bytes: Annotated[
        Bytes, Meta(description="Size of one page of a snapshot; a single larger document is still sent.")
    ] = 256 * KIB
    watch_replays: Annotated[
        Count, Meta(description="Subscriptions that read from the log concurrently; others are queued.")
    ] = 4
    watch_snapshots: Annotated[
        Count, Meta(description="Snapshots that are sent concurrently; others are queued.")
    ] = 8
    watch_resume_changes: Annotated[
        Count,
        Meta(
            description="Most changes that a resume replays; beyond this number the client starts from a "
            "snapshot."
        ),
    ] = 1_000_000
    watch_window_ms: Annotated[
        Millis,
        Meta(
            description="How long previous versions of documents are remembered, for changes without a "
            "before image."
        ),
    ] = 3 * 60 * 1000
    watch_window_changes: Annotated[
        Count, Meta(description="Changes of a collection whose previous versions are remembered.")
    ] = 10_000
    watch_window_bytes: Annotated[Bytes, Meta(description="Memory per collection for previous versions.")] = (
        32 * MIB
    )
    watch_retention_ms: Annotated[
        MillisOrNone,
        Meta(description="Default retention of a collection's changes by age; 0 retains everything."),
    ] = 7 * DAY_MS
    watch_tombstone_ms: Annotated[
        MillisOrNone,
        Meta(description="How long deleted documents are remembered, by default; 0 means forever."),
    ] = 30 * DAY_MS
    watch_view_ms: Annotated[
        Millis,
        Meta(description="How often the documents of a changed collection are written to the object store."),
    ] = DAY_MS
    watch_care_ms: Annotated[
        Millis,
        Meta(description="Interval of realtime maintenance: tombstones, views and signing keys."),
    ] = 60_000
    watch_audit_retention_ms: Annotated[
        MillisOrNone, Meta(description="Retention of __audit__ by age; 0 disables the audit log.")
    ] = 30 * DAY_MS
    watch_key_ms: Annotated[
        Millis, Meta(description="Time a key signs realtime tokens before it is rotated.")
    ] = 90 * DAY_MS
    watch_key_verify_ms: Annotated[
        Millis, Meta(description="Time for which tokens of a rotated key are still accepted.")
    ] = 7 * DAY_MS
    watch_sources: Annotated[Count, Meta(description="Change sources that a server follows.")] = 32
    watch_source_idle_ms: Annotated[
        Millis, Meta(description="Poll interval of a source without new changes.")
    ] = 250
    watch_source_check_ms: Annotated[
        Millis, Meta(description="Interval of checks that a source can still continue from its position.")
    ] = 10_000
    watch_source_retry_ms: Annotated[
        Millis, Meta(description="Longest pause before a failed source is retried.")
    ] = 60_000
    watch_metrics_collections: Annotated[
        Count, Meta(description="Collections with their own metric labels; others share one row.")
    ] = 100
    watch_slo_delivery_ms: Annotated[
        Millis, Meta(description="Objective: 99 % of events are sent to the client within this time.")
    ] = 250
    watch_slo_lag_ms: Annotated[
        Millis, Meta(description="Objective: longest lag of a collection behind its source.")
    ] = 5000

    # The hub.
    hub_message_bytes: Annotated[Bytes, Meta(description="Largest hub message.")] = MIB
    hub_skip_bytes: Annotated[
        Bytes,
        Meta(description="A larger message is skipped up to this size; beyond it the connection is closed."),
    ] = 16 * MIB
    hub_connections: Annotated[
        Count,
        Meta(description="Concurrent hub connections; more are refused with `hub:rate_limited`."),
    ] = 10_000
    hub_connects_per_s: Annotated[
        int,
        Meta(
            ge=0,
            extra={"unit": "count"},
            description="New hub connections per second, and burst size; 0 sets no limit.",
        ),
    ] = 100
    hub_connections_per_identity: Annotated[
        Count, Meta(description="Sessions of one identity; another one closes the oldest.")
    ] = 1
    hub_connect_ms: Annotated[Millis, Meta(description="Time a connection has to send `hub:connect`.")] = 5000
    hub_heartbeat_ms: Annotated[
        Millis,
        Meta(description="Heartbeat interval of actors; a session ends after three missed heartbeats."),
    ] = 25_000
    hub_resume_window_ms: Annotated[
        Millis, Meta(description="Time in which a disconnected session can be resumed.")
    ] = 60_000
    hub_resume_messages: Annotated[
        Count, Meta(description="Messages buffered in memory for a disconnected session.")
    ] = 1000
    hub_resume_bytes: Annotated[
        Bytes, Meta(description="Bytes buffered in memory for a disconnected session.")
    ] = MIB
    hub_seen_ttl_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=300_000,
            extra={"unit": "ms"},
            description="How long message ids are remembered to detect duplicates.",
        ),
    ] = 60_000
    hub_seen_ids: Annotated[Count, Meta(description="Message ids remembered per identity.")] = 10_000
    hub_seen_answer_bytes: Annotated[
        Bytes, Meta(description="Responses stored per identity, to be sent again for duplicates.")
    ] = MIB
    hub_seen_bytes: Annotated[
        Bytes,
        Meta(description="Memory for message ids of all identities; beyond this size messages are refused."),
    ] = 512 * MIB
    hub_registry_actors: Annotated[Count, Meta(description="Most registered addresses.")] = 50_000
    hub_session_addresses: Annotated[Count, Meta(description="Addresses of one session.")] = 100
    hub_session_subscriptions: Annotated[Count, Meta(description="Subscriptions of one session.")] = 1000
    hub_session_watches: Annotated[Count, Meta(description="Presence watches of one session.")] = 20
    hub_session_asks: Annotated[Count, Meta(description="Pending asks of one session.")] = 1000
    hub_ask_ms: Annotated[Millis, Meta(description="Timeout of an ask without a ttl.")] = 30_000
    hub_token_age_ms: Annotated[
        int,
        Meta(
            ge=0,
            extra={"unit": "ms"},
            description="Maximum age of a token, by its `iat`, to open a session; 0 sets no limit.",
        ),
    ] = DAY_MS
    hub_sends_per_s: Annotated[
        Count, Meta(description="Sends, replies and publications of one identity per second.")
    ] = 1000
    hub_bytes_per_s: Annotated[Bytes, Meta(description="Bytes of these messages per second.")] = 8 * MIB
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
        Count, Meta(description="Unsent messages of a connection at which its senders are paused.")
    ] = 1000
    hub_pause_bytes: Annotated[
        Bytes, Meta(description="Unsent bytes of a connection at which its senders are paused.")
    ] = MIB
    hub_outbound_messages: Annotated[
        Count, Meta(description="Unsent messages of a connection beyond which nothing more is queued.")
    ] = 2000
    hub_outbound_bytes: Annotated[
        Bytes, Meta(description="Unsent bytes of a connection beyond which nothing more is queued.")
    ] = 2 * MIB
    hub_stall_ms: Annotated[
        Millis, Meta(description="Time after which a connection that stays above these limits is closed.")
    ] = 30_000
    hub_strikes: Annotated[
        Count, Meta(description="Malformed messages within a minute after which a connection is closed.")
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
        Millis, Meta(description="Time after which an empty, unused mailbox is deleted.")
    ] = 30 * DAY_MS
    hub_topic_ms: Annotated[
        Millis, Meta(description="Retention of durable topics and broadcasts by age.")
    ] = DAY_MS
    hub_topic_bytes: Annotated[
        Bytes, Meta(description="Retention of a durable topic, and of the broadcasts, by size.")
    ] = 1024 * MIB
    hub_cursor_ms: Annotated[
        Millis,
        Meta(
            description="How long the cursor of an inactive durable subscriber prevents deletion of unread "
            "messages."
        ),
    ] = 7 * DAY_MS
    hub_sweep_ms: Annotated[
        Millis,
        Meta(description="Time between sweeps that delete expired messages from mailboxes and topics."),
    ] = 600_000

    # The edge.
    edge_connections: Annotated[Count, Meta(description="Open connections of an edge at once.")] = 50_000
    edge_channels: Annotated[
        Count, Meta(description="Streams that an edge follows at once; more are refused with 429.")
    ] = 20_000
    edge_ring_bytes: Annotated[
        Bytes, Meta(description="Recent batches of one stream that an edge buffers for readers.")
    ] = 4 * MIB
    edge_ring_ms: Annotated[Millis, Meta(description="How long an edge buffers recent batches.")] = 60_000
    edge_rings_bytes: Annotated[Bytes, Meta(description="Recent batches of all streams together.")] = (
        256 * MIB
    )
    edge_linger_ms: Annotated[
        Millis, Meta(description="How long an edge follows a stream after its last reader disconnected.")
    ] = 10_000
    edge_hold_ms: Annotated[
        Millis,
        Meta(description="How long an edge holds live readers open while the upstream is unavailable."),
    ] = 30_000
    edge_private_sockets: Annotated[
        Count, Meta(description="Upstream sockets for readers that cannot share a channel.")
    ] = 256
    edge_upstream_connections: Annotated[
        Count, Meta(description="Connections of an edge to one upstream for requests.")
    ] = 64
    edge_upstream_queue: Annotated[
        Count, Meta(description="Requests that wait for an upstream connection; more are refused with 429.")
    ] = 1024
    edge_answer_ms: Annotated[
        Millis, Meta(description="Time an upstream has to start its response to an edge.")
    ] = 30_000
    edge_frame_bytes: Annotated[
        # One entry; escaping may expand each byte to six.
        Bytes,
        Meta(description="Largest message that an edge accepts from an upstream."),
    ] = 400 * MIB
    edge_memory_cache_bytes: Annotated[
        BytesOrNone, Meta(description="Memory cache of an edge for slices.")
    ] = 256 * MIB
    edge_disk_cache_bytes: Annotated[Bytes, Meta(description="Disk cache of an edge for slices.")] = (
        4096 * MIB
    )
    edge_slice_bytes: Annotated[Bytes, Meta(description="Largest slice that an edge caches.")] = 16 * MIB
    edge_recent_ms: Annotated[
        MillisOrNone,
        Meta(description="How long an edge reuses the response to a read at the tail; 0 disables reuse."),
    ] = 100
    edge_confirm_ms: Annotated[
        Millis,
        Meta(
            description="How long an edge assumes that a stream still exists, unless it is notified of "
            "deletions."
        ),
    ] = 10_000

    # The object store.
    object_ms: Annotated[
        Millis, Meta(description="Timeout of one object store operation, retries included.")
    ] = 30_000
    object_try_ms: Annotated[
        Millis, Meta(description="Timeout of one attempt of such an operation, to the last byte.")
    ] = 15_000
    object_tries: Annotated[Count, Meta(description="Attempts of one object store operation.")] = 8
    object_retry_ms: Annotated[
        Millis,
        Meta(description="Longest pause before the first retry; it doubles with each retry, up to 5 s."),
    ] = 200

    # Subscriptions.
    lease_default_ms: Annotated[Millis, Meta(description="Default lease of a wake.")] = 30_000
    lease_min_ms: Annotated[Millis, Meta(description="Shortest lease.")] = 1000
    lease_max_ms: Annotated[Millis, Meta(description="Longest lease.")] = 600_000
    webhook_ms: Annotated[Millis, Meta(description="Time a webhook has to respond.")] = 10_000
    webhook_key_ms: Annotated[
        int,
        Meta(ge=HOUR_MS, description="Time a key signs webhooks before it is rotated."),
        Meta(extra={"unit": "ms"}),
    ] = 90 * DAY_MS
    webhook_answer_bytes: Annotated[
        Bytes, Meta(description="Most bytes of a webhook's response that are read.")
    ] = 64 * KIB
