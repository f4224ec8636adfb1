"""Sources of changes: PostgreSQL, MongoDB and streams, followed into collections."""
