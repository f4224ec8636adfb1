"""The object store: interface, local files, cloud buckets, cache, listing. Knows nothing of the log."""
