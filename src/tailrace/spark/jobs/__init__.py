"""The pipeline: index builds, index merges and compaction, run by Spark beside the server."""
