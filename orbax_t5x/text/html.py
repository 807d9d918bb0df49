"""Text as HTML for notebooks."""

from __future__ import annotations

from html import escape

from orbax_t5x.text.wording import plain


def html_text(text: str) -> str:
    """Returns text as an escaped block that keeps its lines and columns."""
    lines = "\n".join(map(plain, text.split("\n")))
    return f"<pre>{escape(lines)}</pre>"
