"""Watch: documents in collections, live queries over them, replication and sources of changes."""
