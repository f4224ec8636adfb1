"""Aggregates: groups, mergeable measures, rollup files and array states."""
