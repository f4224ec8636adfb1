"""`python -m bench`: the same as `make bench`."""

from __future__ import annotations

import sys

from bench.run import main

sys.exit(main())
