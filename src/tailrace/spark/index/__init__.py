"""Building and merging index files: functions over Arrow that need no Spark, no server and no HTTP."""
