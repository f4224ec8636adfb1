"""Search: the query language, index files, the tail index, scans, ranking, aggregates and routes."""
