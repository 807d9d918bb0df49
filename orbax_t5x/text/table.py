"""Tables of text for terminals."""

from __future__ import annotations

import shutil

# Without a terminal, as in a log: two panes of an editor, one window of a browser.
_WIDTH_WITHOUT_TERMINAL = 120
_LEAST_WIDTH = 40


def terminal_width() -> int:
    """Columns to write for."""
    return max(_LEAST_WIDTH, shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns)
