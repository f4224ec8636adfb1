"""Watch on the server: collections over change streams, the document API, and the realtime gateway."""

from __future__ import annotations
