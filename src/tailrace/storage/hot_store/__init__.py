"""The hot store: a SQLite checkpoint of the journal. Knows rows and blobs, nothing of the log."""
