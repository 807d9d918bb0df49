"""Docstrings in reStructuredText's form: the package writes code between single backticks, as Markdown does."""

from __future__ import annotations

import re
from collections.abc import Iterator

import orbax_t5x as ot

_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)(?=(\w?))")
_PUBLIC_NAME = re.compile(r"(?:orbax_t5x|ot)\.([\w.]+)(?:\(\))?")


def reference(code: str) -> str:
    """Returns a link to a public name's entry, or the code as it is."""
    found = _PUBLIC_NAME.fullmatch(code)
    if found and found[1].split(".")[0] in ot.__all__:
        return f":py:obj:`{code} <orbax_t5x.{found[1]}>`"
    return f"``{code}``"


def converted(lines: list[str]) -> Iterator[str]:
    """Yields the lines with code in double backticks; those of examples stay."""
    in_example = False
    text = []
    for line in lines:
        in_example = bool(line.strip()) and (in_example or line.lstrip().startswith(">>>"))
        text.append("\0" + line if in_example else line)

    def code(match: re.Match[str]) -> str:
        # In reStructuredText a letter may not follow directly.
        return reference(re.sub(r"\s*\n\s*", " ", match[1])) + ("\\ " if match[2] else "")

    yield from _CODE.sub(code, "\n".join(text)).replace("\0", "").split("\n")


def convert(app, what, name, obj, options, lines: list[str]) -> None:
    if (getattr(obj, "__module__", None) or "orbax_t5x").startswith("orbax_t5x"):
        lines[:] = converted(lines)
    else:  # of another package, whose own pages have the rest
        lines[:] = [*lines[: lines.index("")], "", f"Its arguments are those of ``{obj.__module__.split('.')[0]}``'s."]


def readable(app, what, name, obj, options, signature: str | None, returns: str | None):
    """Returns the signature with functions that are defaults by their names, without which Sphinx cannot read it."""
    return re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", signature or "") or None, returns


def setup(app) -> dict[str, bool]:
    # Before napoleon, which turns sections into fields.
    app.connect("autodoc-process-docstring", convert, priority=100)
    app.connect("autodoc-process-signature", readable)
    return {"parallel_read_safe": True}
