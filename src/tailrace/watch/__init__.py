"""Watch: documents in collections, queries that stay true, and the changes between the two.

What is in this room runs without a server, too: names, changes, the language, the index, the view.
"""

from __future__ import annotations
