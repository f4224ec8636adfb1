"""The metrics of a server: one table, and what holds its numbers. ``docs/metrics.md`` comes from it, too."""

from __future__ import annotations

from typing import Final

from tailrace.common.metrics import (
    LATENCY_BUCKETS_S,
    Histogram,
    LabeledHistograms,
    LabeledValues,
    MetricDefinition,
    MetricValue,
    counter,
    gauge,
    histogram,
    render_prometheus,
)

MATCH_BUCKETS_S: Final = (
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
JOB_BUCKETS_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
BATCH_SIZE_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)

_COLLECTION_LABELS: Final = ("database", "collection")  # `*` for all that have no labels of their own

SERVER_METRICS: Final[dict[str, MetricDefinition]] = {
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
        histogram("commit_records", "Journal records that shared one sync.", BATCH_SIZE_BUCKETS),
        histogram("sync_seconds", "Time of one write and sync of the journal.", LATENCY_BUCKETS_S),
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
        histogram("pipeline_segment_seconds", "Time to build a companion.", JOB_BUCKETS_S, "family"),
        histogram(
            "pipeline_seal_to_published_seconds",
            "Time from a segment's record to the publication of its companions.",
            JOB_BUCKETS_S,
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
            *_COLLECTION_LABELS,
            "op",
            "partition",
        ),
        gauge(
            "watch_match_lag_changes",
            "Changes that are durable and not looked at yet; by partition if that is set.",
            *_COLLECTION_LABELS,
            "partition",
        ),
        gauge(
            "watch_partition_state",
            "1 for the state that it is in, of others how many are; by partition if that is set.",
            *_COLLECTION_LABELS,
            "state",
            "partition",
        ),
        gauge("watch_generation", "Generation, of all others together the highest.", *_COLLECTION_LABELS),
        counter(
            "watch_match_candidates", "Predicates that the index found for changes.", *_COLLECTION_LABELS
        ),
        counter("watch_match_hits", "Predicates that matched.", *_COLLECTION_LABELS),
        gauge(
            "watch_match_hit_ratio",
            "Share of the candidates that matched, since the start.",
            *_COLLECTION_LABELS,
        ),
        histogram(
            "watch_match_latency_seconds",
            "Time to find whom a change concerns.",
            MATCH_BUCKETS_S,
            *_COLLECTION_LABELS,
        ),
        counter("watch_match_fallback", "Predicates that the library evaluated.", *_COLLECTION_LABELS),
        counter("watch_match_slow", "Changes that took longer than a millisecond to match."),
        gauge(
            "watch_index_predicates",
            "Different predicates that are watched, by what finds them.",
            *_COLLECTION_LABELS,
            "kind",
        ),
        gauge(
            "watch_scan_list_predicates", "Those of them that no index can help with.", *_COLLECTION_LABELS
        ),
        counter(
            "watch_dedup_dropped",
            "What came twice and was left out, by where that was seen.",
            *_COLLECTION_LABELS,
            "stage",
        ),
        gauge(
            "watch_bloom_fp_ratio",
            "Answers of the Bloom filter that should be no and were not, when a job made it last.",
            *_COLLECTION_LABELS,
        ),
        counter(
            "watch_bloom_rebuilds", "Bloom filters that jobs have made and published.", *_COLLECTION_LABELS
        ),
        gauge("watch_connections", "Realtime connections, by transport.", "transport"),
        gauge("watch_subscriptions", "Subscriptions of realtime connections.", "state", "priority"),
        counter("watch_deliveries", "Events sent, by what happened to the document.", "op"),
        histogram(
            "watch_delivery_latency_seconds",
            "Time from a commit to the write to the sockets.",
            LATENCY_BUCKETS_S,
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
        histogram("watch_snapshot_seconds", "Time from the request of a snapshot to its end.", JOB_BUCKETS_S),
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
            *_COLLECTION_LABELS,
        ),
        gauge(
            "watch_source_lag_changes",
            "Changes that its source has and that are not written down yet; of databases, at least.",
            *_COLLECTION_LABELS,
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
            LATENCY_BUCKETS_S,
        ),
        histogram(
            "hub_commit_wait_seconds", "From an entry of the hub to its being durable.", LATENCY_BUCKETS_S
        ),
        histogram("hub_broadcast_seconds", "From a broadcast to its last delivery.", LATENCY_BUCKETS_S),
    )
}


class ServerMetrics:
    """The numbers of one server; every attribute is a row of the table."""

    def __init__(self, version: str = "") -> None:
        self.info = LabeledValues()
        self.ready = MetricValue()
        self.requests = LabeledValues()
        self.refused = LabeledValues()
        self.malformed_requests = MetricValue()
        self.received_bytes = MetricValue()
        self.sent_bytes = MetricValue()
        self.connections = MetricValue()
        self.relayed_requests = MetricValue()
        self.moved_connections = MetricValue()
        self.connections_max, self.connections_refused = MetricValue(), MetricValue()
        self.live_connections = LabeledValues()
        self.live_demoted = MetricValue()
        self.spark_reads = MetricValue()
        self.api_keys = MetricValue()
        self.revocations = MetricValue()
        self.connections_revoked = MetricValue()
        self.identity_limited = MetricValue()
        self.append_entries = MetricValue()
        self.append_bytes = MetricValue()
        self.append_queue_bytes = MetricValue()
        self.commit_records = Histogram(SERVER_METRICS["commit_records"].buckets)
        self.sync_seconds = Histogram(SERVER_METRICS["sync_seconds"].buckets)
        self.journal_failures = MetricValue()
        self.streams = MetricValue()
        self.streams_loaded = MetricValue()
        self.append_waiting_requests, self.append_waiting_bytes = MetricValue(), MetricValue()
        self.append_waits = MetricValue()
        self.tail_memory_bytes = MetricValue()
        self.journal_bytes = MetricValue()
        self.checkpoint_lag_bytes = MetricValue()
        self.checkpoints = MetricValue()
        self.disk_free_bytes = MetricValue()
        self.trace_spans = LabeledValues()
        self.hot_bytes = MetricValue()
        self.hot_free_bytes = MetricValue()
        self.unsealed_bytes = MetricValue()
        self.spooled_bytes = MetricValue()
        self.seal_queue = MetricValue()
        self.sealed_segments = MetricValue()
        self.sealed_bytes = MetricValue()
        self.seal_failures = MetricValue()
        self.seal_conflicts = MetricValue()
        self.trimmed_entries = MetricValue()
        self.trimmed_segments = MetricValue()
        self.trimmed_bytes = MetricValue()
        self.sweeps = MetricValue()
        self.swept_objects = MetricValue()
        self.swept_orphans = MetricValue()
        self.swept_orphan_bytes = MetricValue()
        self.swept_tombstones = MetricValue()
        self.object_store_ok = MetricValue()
        self.object_requests = LabeledValues()
        self.object_sent_bytes = MetricValue()
        self.object_received_bytes = MetricValue()
        self.cold_cache_bytes = MetricValue()
        self.cold_reads = LabeledValues()
        self.cold_failures = MetricValue()
        self.bootstraps = MetricValue()
        self.bootstrap_seconds = MetricValue()
        self.bootstrap_restored = LabeledValues()
        self.bootstrap_problems = MetricValue()
        self.subscriptions = MetricValue()
        self.webhook_deliveries = LabeledValues()
        self._count_companions()
        self._count_hub()
        self._count_watch()
        assert vars(self).keys() == SERVER_METRICS.keys(), "the class and the table differ"
        self.info.values[(version,)] = 1

    def _count_companions(self) -> None:
        """Whoever builds companions, and whoever reads them."""
        self.pipeline_state = LabeledValues()
        self.pipeline_restarts = MetricValue()
        self.pipeline_backlog_segments = MetricValue()
        self.pipeline_backlog_oldest_seconds = MetricValue()
        self.pipeline_publish = LabeledValues()
        self.pipeline_rows = LabeledValues()
        self.compacted_segments = MetricValue()
        self.pipeline_segment_seconds = LabeledHistograms(JOB_BUCKETS_S)
        self.pipeline_seal_to_published_seconds = Histogram(JOB_BUCKETS_S)
        self.pipeline_rss_bytes = MetricValue()
        self.pipeline_quarantined_segments = MetricValue()
        self.companion_cache_bytes = MetricValue()
        self.lexicon_cache_bytes = MetricValue()
        self.companion_opened_bytes = MetricValue()
        self.companion_opens = MetricValue()
        self.companion_unusable = MetricValue()

    def _count_watch(self) -> None:
        """Documents and live queries."""
        self.watch_changes = LabeledValues()
        self.watch_match_lag_changes = LabeledValues()
        self.watch_partition_state = LabeledValues()
        self.watch_generation = LabeledValues()
        self.watch_match_candidates = LabeledValues()
        self.watch_match_hits = LabeledValues()
        self.watch_match_hit_ratio = LabeledValues()
        self.watch_match_latency_seconds = LabeledHistograms(MATCH_BUCKETS_S)
        self.watch_match_fallback = LabeledValues()
        self.watch_match_slow = MetricValue()
        self.watch_index_predicates = LabeledValues()
        self.watch_scan_list_predicates = LabeledValues()
        self.watch_dedup_dropped = LabeledValues()
        self.watch_bloom_fp_ratio = LabeledValues()
        self.watch_bloom_rebuilds = LabeledValues()
        self.watch_connections = LabeledValues()
        self.watch_subscriptions = LabeledValues()
        self.watch_deliveries = LabeledValues()
        self.watch_push_rows = LabeledValues()
        self.watch_delivery_latency_seconds = Histogram(LATENCY_BUCKETS_S)
        self.watch_outbound_bytes = MetricValue()
        self.watch_watermark_level = MetricValue()
        self.watch_demotions = MetricValue()
        self.watch_delivered_batches = LabeledValues()
        self.watch_delivered_skipped = MetricValue()
        self.watch_resync_required = LabeledValues()
        self.watch_resume = LabeledValues()
        self.watch_snapshots = MetricValue()
        self.watch_snapshot_seconds = Histogram(JOB_BUCKETS_S)
        self.watch_snapshot_documents = MetricValue()
        self.watch_replication_connections = MetricValue()
        self.watch_pull = MetricValue()
        self.watch_conflicts = MetricValue()
        self.watch_resync = MetricValue()
        self.watch_auth_failures = LabeledValues()
        self.watch_slo_burn = LabeledValues()
        self.watch_audit_dropped = MetricValue()
        self.watch_purged_tombstones = MetricValue()
        self.watch_published_views = MetricValue()
        self.watch_sources = LabeledValues()
        self.watch_source_changes = LabeledValues()
        self.watch_source_repeats = MetricValue()
        self.watch_source_restarts = MetricValue()
        self.watch_source_gaps = MetricValue()
        self.watch_source_lag_seconds = LabeledValues()
        self.watch_source_lag_changes = LabeledValues()
        self.watch_source_retained_bytes = MetricValue()

    def _count_hub(self) -> None:
        """Actors and their messages."""
        self.hub_sessions = MetricValue()
        self.hub_detached_sessions = MetricValue()
        self.hub_actors = LabeledValues()
        self.hub_registry_fill_ratio = MetricValue()
        self.hub_messages = LabeledValues()
        self.hub_deliveries = LabeledValues()
        self.hub_errors = LabeledValues()
        self.hub_dead_letters = LabeledValues()
        self.hub_dropped = MetricValue()
        self.hub_duplicates = LabeledValues()
        self.hub_from_rewritten = MetricValue()
        self.hub_rate_limited = LabeledValues()
        self.hub_pauses = MetricValue()
        self.hub_queue_messages = MetricValue()
        self.hub_queue_bytes = MetricValue()
        self.hub_mailbox_lag = MetricValue()
        self.hub_asks_open = MetricValue()
        self.hub_ws_closes = LabeledValues()
        self.hub_relay_seconds = Histogram(LATENCY_BUCKETS_S)
        self.hub_commit_wait_seconds = Histogram(LATENCY_BUCKETS_S)
        self.hub_broadcast_seconds = Histogram(LATENCY_BUCKETS_S)

    def observe_sync(self, seconds: float, records: int) -> None:
        """One commit: how long it took and how many records shared it."""
        self.sync_seconds.observe(seconds)
        self.commit_records.observe(records)

    def render(self) -> bytes:
        """The text of ``/metrics``."""
        return render_prometheus(self, SERVER_METRICS)
