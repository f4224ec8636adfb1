"""Segments and index files: names, formats, reading and writing. Knows nothing of the log."""
