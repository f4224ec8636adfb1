"""The query language of filters, searches and rollups: text to tree, tree to decisions on records.

Pure, without I/O: the same code decides in the server and in the jobs that build indexes.
"""

from __future__ import annotations
