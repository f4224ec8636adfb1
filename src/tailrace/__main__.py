"""``python -m tailrace`` is the ``tailrace`` command."""

from __future__ import annotations

from tailrace.cli import main

if __name__ == "__main__":
    main()
