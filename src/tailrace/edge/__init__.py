"""The edge: holds the clients of a server, so that its owner sends each batch once and sleeps in between.

It has no journal and no truth of its own. Requests are forwarded (`forward`, `tunnel`), live readers of one
stream share one upstream socket (`channel`), immutable slices are kept (`slices`, `cache`, `disk`).
"""

from __future__ import annotations
