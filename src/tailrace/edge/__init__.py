"""The edge: serves many clients of a server, so that the owner sends each batch once and is idle in between.

An edge has no journal; the owner of a stream is authoritative. Requests are forwarded (`forwarding`), live
readers of a stream share one upstream socket (`channels`), slices are cached (`slices`, `cache`), and streams
with a TTL are renewed for reads that were served from the cache (`ttl_renewal`).
"""

from __future__ import annotations
