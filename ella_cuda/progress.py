"""Progress bars that fit a terminal."""

from __future__ import annotations

import os
import sys
from typing import Any


def bar_size() -> dict[str, Any]:
    """tqdm's options for a bar as wide as the terminal of stderr, and 80 columns where that says it has none, as the terminals of
    ``script`` and of some containers do: tqdm takes it at its word and shows nothing."""
    try:
        known = os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (AttributeError, OSError):  # no terminal: a file, or a notebook's stream
        known = True
    return {"dynamic_ncols": True} if known else {"ncols": 80, "nrows": 24}
