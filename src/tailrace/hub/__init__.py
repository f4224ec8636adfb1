"""The hub: actors with addresses, messages, topics and durable mailboxes, over WebSockets.

Nothing is imported here: the envelope, the addresses and the signatures serve clients too.
"""

from __future__ import annotations
