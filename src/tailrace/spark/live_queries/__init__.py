"""Live queries on Spark: matching, rescans, statistics, captures and shadow validation."""
