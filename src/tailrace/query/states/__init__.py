"""Partial states of measures as arrays: thousands of groups are added up, merged and shown in a few steps.

What a state is, `query.measures` says. Here are the same states, many at a time, and the answers are the
same to the last digit: sums are exact, buckets are those of `query.sketch`. Builders and readers share it.
"""

from __future__ import annotations
