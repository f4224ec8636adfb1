"""The edge: holds the clients of a server, so that its owner sends each batch once and sleeps in between.

It has no journal and no truth of its own. Requests are forwarded (`forward`, `tunnel`), live readers of one
stream share one upstream socket (`channel`), slices that hold for a while are kept (`slices`, `cache`,
`disk`), and streams with a TTL are renewed for reads that were answered from these (`renewals`).
"""

from __future__ import annotations
