"""Tables of text for terminals."""

import os

from orbax_t5x.text.table import terminal_width


def test_width_without_a_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: (_ for _ in ()).throw(OSError()))
    assert terminal_width() == 120
