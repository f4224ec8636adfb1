"""Index files built by Spark: format, cache, catalogue and readers."""
