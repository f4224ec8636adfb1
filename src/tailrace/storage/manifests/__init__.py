"""Manifests: what a bucket records about each stream. Knows nothing of the log."""
