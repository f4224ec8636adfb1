"""The hub: actors that find each other, send, publish and keep mailboxes, over WebSockets.

Nothing is imported here: the envelope, the addresses and the signatures serve clients too.
"""

from __future__ import annotations
