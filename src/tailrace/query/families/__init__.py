"""Readers of the files that the pipeline builds: they narrow down, and decide where they know everything.

Nothing here is needed for an answer. A file that is missing, damaged or of another plan is left out, and the
rows it stands for are decoded instead.
"""

from __future__ import annotations
