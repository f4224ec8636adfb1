"""The data pipeline: companions, merges and compaction, built by Spark beside the server.

Server and pipeline meet in the object store and in three HTTP routes; nothing here is imported by the server.
"""
