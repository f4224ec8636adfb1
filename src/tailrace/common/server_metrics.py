"""The metrics of a server: one table, and what holds its numbers. ``docs/metrics.md`` comes from it, too."""

from __future__ import annotations

from typing import Final

from tailrace.common.metrics import (
    SECONDS,
    Distribution,
    Distributions,
    Metric,
    Number,
    Numbers,
    counter,
    gauge,
    histogram,
    render,
)

MATCH_SECONDS: Final = (
    0.00001,
    0.000025,
    0.00005,
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.05,
    0.25,
)
JOB_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)

_COLLECTION: Final = ("database", "collection")  # `*` for all that have no labels of their own

TABLE: Final[dict[str, Metric]] = {
    metric.name: metric
    for metric in (
        gauge("info", "Always 1; the label is the server's version.", "version"),
        gauge("ready", "1 while appends and reads are served, else 0."),
        # The network.
        counter("requests", "Requests answered, by method and status.", "method", "status"),
        counter("refused", "Requests refused, by error code.", "code"),
        counter("malformed_requests", "Connections ended because what they sent was not HTTP."),
        counter("received_bytes", "Bytes received from clients."),
        counter("sent_bytes", "Bytes sent to clients."),
        gauge("connections", "Open connections."),
        gauge("connections_max", "Open connections at which further ones are refused."),
        counter("connections_refused", "Connections refused because there were too many."),
        counter("relayed_requests", "Requests passed on to the worker that owns what they are about."),
        counter("moved_connections", "Connections given to the worker that owns what they ask for."),
        gauge("live_connections", "Live readers, by mode.", "mode"),
        counter("live_demoted", "Live readers that were too slow and went back to catch-up reading."),
        counter("spark_reads", "Reads by the source for Spark, which can add nothing to its own metrics."),
        # Identities.
        gauge("api_keys", "API keys that there are."),
        gauge("revocations", "Tokens and subjects that are remembered as revoked."),
        counter("connections_revoked", "Connections ended because their token is good no more."),
        counter("identity_limited", "Requests refused because one identity asked too much."),
        # Appends.
        counter("append_entries", "Entries made durable."),
        counter("append_bytes", "Payload bytes made durable."),
        gauge("append_queue_bytes", "Bytes waiting for a commit."),
        gauge("append_waiting_requests", "Appends that wait for room in the log."),
        gauge("append_waiting_bytes", "Bodies of these appends."),
        counter("append_waits", "Appends that had to wait for room in the log."),
        histogram("commit_records", "Journal records that shared one sync.", SIZES),
        histogram("sync_seconds", "Time of one write and sync of the journal.", SECONDS),
        counter("journal_failures", "Writes or syncs of the journal that failed."),
        # State.
        gauge("streams", "Streams that exist."),
        gauge("streams_loaded", "Streams held in memory."),
        gauge("tail_memory_bytes", "Recent entries held in memory."),
        gauge("journal_bytes", "Size of the journal files."),
        gauge("checkpoint_lag_bytes", "Journal bytes that the hot store does not have yet."),
        counter("checkpoints", "Checkpoints written to the hot store."),
        gauge("disk_free_bytes", "Free space on the disk of the data directory."),
        # Traces.
        counter("trace_spans", "Spans of traces, by what became of them.", "outcome"),
        # Cold history.
        gauge("hot_bytes", "Payload in the hot store."),
        gauge("hot_free_bytes", "Free pages of the hot store: reused, or given back to the disk."),
        gauge("unsealed_bytes", "Payload that is not on the object store yet, wherever it is."),
        gauge("spooled_bytes", "Segments that are written and not yet uploaded."),
        gauge("seal_queue", "Streams that are due to be sealed."),
        counter("sealed_segments", "Segments recorded in a manifest."),
        counter("sealed_bytes", "Size of the segments recorded in a manifest."),
        counter("seal_failures", "Jobs of the sealer that failed and are repeated."),
        gauge("seal_conflicts", "Streams of which the object store has other entries than this server."),
        counter("trimmed_entries", "Entries that retention took away."),
        counter("trimmed_segments", "Segments that retention took away."),
        counter("trimmed_bytes", "Size of the segments that retention took away."),
        counter("sweeps", "Sweeps of the whole object store that came to the end."),
        counter("swept_objects", "Objects that sweeps looked at."),
        counter("swept_orphans", "Objects that sweeps deleted, since no manifest can name them any more."),
        counter("swept_orphan_bytes", "Size of the objects that sweeps deleted."),
        counter("swept_tombstones", "Tombstones of deleted streams that sweeps took off the object store."),
        gauge("object_store_ok", "1 while the object store can be used, else 0."),
        counter("object_requests", "Requests to the object store, by kind.", "kind"),
        counter("object_sent_bytes", "Bytes sent to the object store."),
        counter("object_received_bytes", "Bytes received from the object store."),
        gauge("cold_cache_bytes", "Local copies of what was read from the object store."),
        counter("cold_reads", "Stretches of segments read, by where they came from.", "source"),
        counter("cold_failures", "Reads of history that failed on a segment that is missing or damaged."),
        # The pipeline and its companions.
        gauge("pipeline_state", "1 for the state that the pipeline is in, 0 for the others.", "state"),
        counter("pipeline_restarts", "Starts of the pipeline after it had failed."),
        gauge("pipeline_backlog_segments", "Segments that lack companions."),
        gauge("pipeline_backlog_oldest_seconds", "Age of the oldest of these."),
        counter("pipeline_publish", "Publications, by job and what became of them.", "job", "outcome"),
        counter("pipeline_rows", "Entries that companions or joined segments were published for.", "job"),
        counter("compacted_segments", "Segments that became part of larger ones."),
        histogram("pipeline_segment_seconds", "Time to build a companion.", JOB_SECONDS, "family"),
        histogram(
            "pipeline_seal_to_published_seconds",
            "Time from a segment's record to the publication of its companions.",
            JOB_SECONDS,
        ),
        gauge("pipeline_rss_bytes", "Memory of the whole pipeline, as it says."),
        gauge("pipeline_quarantined_segments", "Segments of which no companions can be built."),
        gauge("companion_cache_bytes", "Local copies of companions, without lexicons."),
        gauge("lexicon_cache_bytes", "Local copies of lexicons of routing keys."),
        gauge("companion_opened_bytes", "Companions that are open in memory."),
        counter("companion_opens", "Companions fetched and opened for queries."),
        counter("companion_unusable", "Companions that were missing or damaged; queries decoded records."),
        # Bootstrap.
        counter("bootstraps", "1 if this server restored its disk from the object store when it started."),
        gauge("bootstrap_seconds", "Time the restoring took."),
        gauge("bootstrap_restored", "What was restored, by kind.", "kind"),
        gauge("bootstrap_problems", "What could not be restored as it was."),
        # Subscriptions.
        gauge("subscriptions", "Subscriptions that exist."),
        counter("webhook_deliveries", "Webhook calls, by outcome.", "outcome"),
        # Documents and live queries.
        counter(
            "watch_changes",
            "Changes of documents that were looked at, by what happened; by partition if that is set.",
            *_COLLECTION,
            "op",
            "partition",
        ),
        gauge(
            "watch_match_lag_changes",
            "Changes that are durable and not looked at yet; by partition if that is set.",
            *_COLLECTION,
            "partition",
        ),
        gauge(
            "watch_partition_state",
            "1 for the state that it is in, of others how many are; by partition if that is set.",
            *_COLLECTION,
            "state",
            "partition",
        ),
        gauge("watch_generation", "Generation, of all others together the highest.", *_COLLECTION),
        counter("watch_match_candidates", "Predicates that the index found for changes.", *_COLLECTION),
        counter("watch_match_hits", "Predicates that matched.", *_COLLECTION),
        gauge(
            "watch_match_hit_ratio", "Share of the candidates that matched, since the start.", *_COLLECTION
        ),
        histogram(
            "watch_match_latency_seconds", "Time to find whom a change concerns.", MATCH_SECONDS, *_COLLECTION
        ),
        counter("watch_match_fallback", "Predicates that the library evaluated.", *_COLLECTION),
        counter("watch_match_slow", "Changes that took longer than a millisecond to match."),
        gauge(
            "watch_index_predicates",
            "Different predicates that are watched, by what finds them.",
            *_COLLECTION,
            "kind",
        ),
        gauge("watch_scan_list_predicates", "Those of them that no index can help with.", *_COLLECTION),
        counter(
            "watch_dedup_dropped",
            "What came twice and was left out, by where that was seen.",
            *_COLLECTION,
            "stage",
        ),
        gauge(
            "watch_bloom_fp_ratio",
            "Answers of the Bloom filter that should be no and were not, when a job made it last.",
            *_COLLECTION,
        ),
        counter("watch_bloom_rebuilds", "Bloom filters that jobs have made and published.", *_COLLECTION),
        gauge("watch_connections", "Realtime connections, by transport.", "transport"),
        gauge("watch_subscriptions", "Subscriptions of realtime connections.", "state", "priority"),
        counter("watch_deliveries", "Events sent, by what happened to the document.", "op"),
        histogram(
            "watch_delivery_latency_seconds", "Time from a commit to the write to the sockets.", SECONDS
        ),
        gauge("watch_outbound_bytes", "Unsent bytes of realtime connections, a second ago."),
        gauge("watch_watermark_level", "Share of what may be unsent to all of them together."),
        counter("watch_demotions", "Subscriptions that were too slow and went back to the log."),
        counter(
            "watch_delivered_batches", "Deliveries of jobs that were read, by what became of them.", "result"
        ),
        counter("watch_delivered_skipped", "Changes that nobody had to read, since a job had examined them."),
        counter("watch_resync_required", "Subscriptions that had to be made again, by reason.", "reason"),
        counter("watch_resume", "Resumes, by result and by where they read.", "result", "path"),
        counter("watch_snapshots", "Snapshots begun."),
        histogram("watch_snapshot_seconds", "Time from the request of a snapshot to its end.", JOB_SECONDS),
        counter("watch_snapshot_documents", "Documents sent in snapshots."),
        gauge("watch_replication_connections", "Connections of replicating clients."),
        counter("watch_pull", "Pages that replicating clients have pulled."),
        counter("watch_push_rows", "Documents that they have pushed, by what became of them.", "result"),
        counter("watch_conflicts", "Documents that they have to look at before they push again."),
        counter("watch_resync", "Times that they were told to pull, since their stream could not go on."),
        counter("watch_auth_failures", "Realtime clients that could not say who they are, by code.", "code"),
        gauge(
            "watch_slo_burn", "How fast the worst collection uses up an allowance; 1 is allowed.", "objective"
        ),
        counter("watch_audit_dropped", "Audit events that could not be written."),
        counter("watch_purged_tombstones", "Deleted documents that are remembered no more."),
        counter("watch_published_views", "Views of collections that were written to the object store."),
        gauge("watch_sources", "Sources of changes, by phase.", "phase"),
        counter("watch_source_changes", "Changes that came from sources, by what happened.", "op"),
        counter("watch_source_repeats", "Changes of sources that were known already and left out."),
        counter("watch_source_restarts", "Sessions with sources that ended and were begun again."),
        counter("watch_source_gaps", "Times that a source could not go on from where it was."),
        gauge(
            "watch_source_lag_seconds",
            "Age of the newest change that was read while there is more, of its source.",
            *_COLLECTION,
        ),
        gauge(
            "watch_source_lag_changes",
            "Changes that its source has and that are not written down yet; of databases, at least.",
            *_COLLECTION,
        ),
        gauge("watch_source_retained_bytes", "Log that a database keeps for us, the most of all sources."),
        # The hub.
        gauge("hub_sessions", "Sessions of actors, detached ones included."),
        gauge("hub_detached_sessions", "Sessions whose client may come back."),
        gauge("hub_actors", "Registered addresses, by whether they are durable.", "durable"),
        gauge("hub_registry_fill_ratio", "Registered addresses over what the registry holds."),
        counter("hub_messages", "Messages of actors, by kind and by what became of each.", "kind", "result"),
        counter("hub_deliveries", "Copies of messages: to connections, from the log, kept.", "mode"),
        counter("hub_errors", "Errors told to actors, by code.", "code"),
        counter("hub_dead_letters", "Messages that could not be delivered, by reason.", "reason"),
        counter("hub_dropped", "Messages that a slow connection did not get."),
        counter("hub_duplicates", "Repeated messages, by how that was known.", "by"),
        counter("hub_from_rewritten", "Messages whose sender claimed to be somebody else."),
        counter("hub_rate_limited", "Messages refused for their rate, by kind.", "kind"),
        counter("hub_pauses", "Times that a sender was asked to pause."),
        gauge("hub_queue_messages", "Unsent messages of all sessions."),
        gauge("hub_queue_bytes", "Unsent bytes of all sessions."),
        gauge("hub_mailbox_lag", "Uncommitted messages in mailboxes whose owners are online."),
        gauge("hub_asks_open", "Asks that wait for an answer."),
        counter("hub_ws_closes", "Connections of the hub that ended, by code.", "code"),
        histogram(
            "hub_relay_seconds",
            "From a message of a socket to everything that it brings about, one of 16.",
            SECONDS,
        ),
        histogram("hub_commit_wait_seconds", "From an entry of the hub to its being durable.", SECONDS),
        histogram("hub_broadcast_seconds", "From a broadcast to its last delivery.", SECONDS),
    )
}


class Telemetry:
    """The numbers of one server; every attribute is a row of the table."""

    def __init__(self, version: str = "") -> None:
        self.info = Numbers()
        self.ready = Number()
        self.requests = Numbers()
        self.refused = Numbers()
        self.malformed_requests = Number()
        self.received_bytes = Number()
        self.sent_bytes = Number()
        self.connections = Number()
        self.relayed_requests = Number()
        self.moved_connections = Number()
        self.connections_max, self.connections_refused = Number(), Number()
        self.live_connections = Numbers()
        self.live_demoted = Number()
        self.spark_reads = Number()
        self.api_keys = Number()
        self.revocations = Number()
        self.connections_revoked = Number()
        self.identity_limited = Number()
        self.append_entries = Number()
        self.append_bytes = Number()
        self.append_queue_bytes = Number()
        self.commit_records = Distribution(TABLE["commit_records"].buckets)
        self.sync_seconds = Distribution(TABLE["sync_seconds"].buckets)
        self.journal_failures = Number()
        self.streams = Number()
        self.streams_loaded = Number()
        self.append_waiting_requests, self.append_waiting_bytes = Number(), Number()
        self.append_waits = Number()
        self.tail_memory_bytes = Number()
        self.journal_bytes = Number()
        self.checkpoint_lag_bytes = Number()
        self.checkpoints = Number()
        self.disk_free_bytes = Number()
        self.trace_spans = Numbers()
        self.hot_bytes = Number()
        self.hot_free_bytes = Number()
        self.unsealed_bytes = Number()
        self.spooled_bytes = Number()
        self.seal_queue = Number()
        self.sealed_segments = Number()
        self.sealed_bytes = Number()
        self.seal_failures = Number()
        self.seal_conflicts = Number()
        self.trimmed_entries = Number()
        self.trimmed_segments = Number()
        self.trimmed_bytes = Number()
        self.sweeps = Number()
        self.swept_objects = Number()
        self.swept_orphans = Number()
        self.swept_orphan_bytes = Number()
        self.swept_tombstones = Number()
        self.object_store_ok = Number()
        self.object_requests = Numbers()
        self.object_sent_bytes = Number()
        self.object_received_bytes = Number()
        self.cold_cache_bytes = Number()
        self.cold_reads = Numbers()
        self.cold_failures = Number()
        self.bootstraps = Number()
        self.bootstrap_seconds = Number()
        self.bootstrap_restored = Numbers()
        self.bootstrap_problems = Number()
        self.subscriptions = Number()
        self.webhook_deliveries = Numbers()
        self._count_companions()
        self._count_hub()
        self._count_watch()
        assert vars(self).keys() == TABLE.keys(), "the class and the table differ"
        self.info.values[(version,)] = 1

    def _count_companions(self) -> None:
        """Whoever builds companions, and whoever reads them."""
        self.pipeline_state = Numbers()
        self.pipeline_restarts = Number()
        self.pipeline_backlog_segments = Number()
        self.pipeline_backlog_oldest_seconds = Number()
        self.pipeline_publish = Numbers()
        self.pipeline_rows = Numbers()
        self.compacted_segments = Number()
        self.pipeline_segment_seconds = Distributions(JOB_SECONDS)
        self.pipeline_seal_to_published_seconds = Distribution(JOB_SECONDS)
        self.pipeline_rss_bytes = Number()
        self.pipeline_quarantined_segments = Number()
        self.companion_cache_bytes = Number()
        self.lexicon_cache_bytes = Number()
        self.companion_opened_bytes = Number()
        self.companion_opens = Number()
        self.companion_unusable = Number()

    def _count_watch(self) -> None:
        """Documents and live queries."""
        self.watch_changes = Numbers()
        self.watch_match_lag_changes = Numbers()
        self.watch_partition_state = Numbers()
        self.watch_generation = Numbers()
        self.watch_match_candidates = Numbers()
        self.watch_match_hits = Numbers()
        self.watch_match_hit_ratio = Numbers()
        self.watch_match_latency_seconds = Distributions(MATCH_SECONDS)
        self.watch_match_fallback = Numbers()
        self.watch_match_slow = Number()
        self.watch_index_predicates = Numbers()
        self.watch_scan_list_predicates = Numbers()
        self.watch_dedup_dropped = Numbers()
        self.watch_bloom_fp_ratio = Numbers()
        self.watch_bloom_rebuilds = Numbers()
        self.watch_connections = Numbers()
        self.watch_subscriptions = Numbers()
        self.watch_deliveries = Numbers()
        self.watch_push_rows = Numbers()
        self.watch_delivery_latency_seconds = Distribution(SECONDS)
        self.watch_outbound_bytes = Number()
        self.watch_watermark_level = Number()
        self.watch_demotions = Number()
        self.watch_delivered_batches = Numbers()
        self.watch_delivered_skipped = Number()
        self.watch_resync_required = Numbers()
        self.watch_resume = Numbers()
        self.watch_snapshots = Number()
        self.watch_snapshot_seconds = Distribution(JOB_SECONDS)
        self.watch_snapshot_documents = Number()
        self.watch_replication_connections = Number()
        self.watch_pull = Number()
        self.watch_conflicts = Number()
        self.watch_resync = Number()
        self.watch_auth_failures = Numbers()
        self.watch_slo_burn = Numbers()
        self.watch_audit_dropped = Number()
        self.watch_purged_tombstones = Number()
        self.watch_published_views = Number()
        self.watch_sources = Numbers()
        self.watch_source_changes = Numbers()
        self.watch_source_repeats = Number()
        self.watch_source_restarts = Number()
        self.watch_source_gaps = Number()
        self.watch_source_lag_seconds = Numbers()
        self.watch_source_lag_changes = Numbers()
        self.watch_source_retained_bytes = Number()

    def _count_hub(self) -> None:
        """Actors and their messages."""
        self.hub_sessions = Number()
        self.hub_detached_sessions = Number()
        self.hub_actors = Numbers()
        self.hub_registry_fill_ratio = Number()
        self.hub_messages = Numbers()
        self.hub_deliveries = Numbers()
        self.hub_errors = Numbers()
        self.hub_dead_letters = Numbers()
        self.hub_dropped = Number()
        self.hub_duplicates = Numbers()
        self.hub_from_rewritten = Number()
        self.hub_rate_limited = Numbers()
        self.hub_pauses = Number()
        self.hub_queue_messages = Number()
        self.hub_queue_bytes = Number()
        self.hub_mailbox_lag = Number()
        self.hub_asks_open = Number()
        self.hub_ws_closes = Numbers()
        self.hub_relay_seconds = Distribution(SECONDS)
        self.hub_commit_wait_seconds = Distribution(SECONDS)
        self.hub_broadcast_seconds = Distribution(SECONDS)

    def observe_sync(self, seconds: float, records: int) -> None:
        """One commit: how long it took and how many records shared it."""
        self.sync_seconds.observe(seconds)
        self.commit_records.observe(records)

    def render(self) -> bytes:
        """The text of ``/metrics``."""
        return render(self, TABLE)
