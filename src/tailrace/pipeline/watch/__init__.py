"""Watch on Spark: matching, rescans, statistics, captures and shadow validation over change streams.

The matcher is the server's own, found by name in the package. Jobs keep nothing they could not lose.
"""

from __future__ import annotations
