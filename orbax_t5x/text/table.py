"""Tables of text for terminals: names, short cells, origins.

No name is ever cut; a name that is longer than a line goes on below, after a '/'. A table has one line a row where
nearly all rows fit; else the long texts of a row stand below its name. Whatever the width, the short cells stay in
columns.
"""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Sequence

# Without a terminal, as in a log: two panes of an editor, one window of a browser.
_WIDTH_WITHOUT_TERMINAL = 120
_LEAST_WIDTH = 40
# With more rows broken than this share, a table of one line a row is harder to read than one with texts below names.
_LEAST_ON_ONE_LINE = 0.75
_GAP = "  "
INDENT = "  "
"""Text before the label of a row for each level of a tree."""


def terminal_width() -> int:
    """Returns the columns to write for."""
    return max(_LEAST_WIDTH, shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns)


def wrapped(text: str, width: int | None, first: str = "", rest: str = "") -> list[str]:
    """Breaks text at spaces into lines of `width`."""
    if width is None:
        return [first + text]
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


@dataclasses.dataclass(frozen=True, slots=True)
class TableRow:
    """Row of a table: a leaf's name and its cells.

    The cells are array, sharding, bytes, source (or a remark in its place) and operations.
    """

    label: str
    array: str = ""
    placing: str = ""
    size: str = ""
    source: str = ""
    how: str = ""
    has_remark: bool = False

    @property
    def origin(self) -> str:
        """The source of the row's leaf, and the operations on it."""
        return " · ".join(part for part in (self.source, self.how) if part)


class _Columns:
    """Cells beside a label, padded to a width per column.

    A column without any text takes no room.
    """

    def __init__(self, rows: Sequence[TableRow], names: Sequence[str], heads: TableRow | None = None):
        self._names = [name for name in names if any(getattr(row, name) for row in rows)]
        shown = [*rows, heads] if heads else rows
        self._widths = [max(len(getattr(row, name)) for row in shown) for name in self._names]
        self.width = sum(self._widths) + len(_GAP) * len(self._widths)

    def text(self, row: TableRow) -> str:
        """Returns the cells of a row, with a gap before each."""
        cells = [
            getattr(row, name).rjust(width) if name == "size" else getattr(row, name).ljust(width)
            for name, width in zip(self._names, self._widths, strict=True)
        ]
        return "".join(_GAP + cell for cell in cells)


def table_lines(rows: Sequence[TableRow], width: int, heads: TableRow | None = None) -> list[str]:
    """Returns the lines of a table."""
    if not rows:
        return []
    return _one_line_each(rows, width, heads) or _stacked_lines(rows, width)


def _one_line_each(rows: Sequence[TableRow], width: int, heads: TableRow | None) -> list[str]:
    """Formats each row as a line, its long origin below."""
    columns = _Columns(rows, ("array", "placing", "size"), heads)
    left = max(len(row.label) for row in rows)
    room = width - left - columns.width - len(_GAP)
    if sum(len(row.origin) <= room for row in rows) < _LEAST_ON_ONE_LINE * len(rows):
        return []
    lines: list[str] = []
    for row in [heads, *rows] if heads else rows:
        fits = len(row.origin) <= room
        line = row.label.ljust(left) + columns.text(row) + (_GAP + row.origin if fits else "")
        lines.append(line.rstrip())
        lines += [] if fits else _origin_lines(row, row.origin, width)
    return lines


def _stacked_lines(rows: Sequence[TableRow], width: int) -> list[str]:
    """Formats a name with its cells, and its origin below."""
    columns = _Columns(rows, ("array", "size"))
    blocks: list[list[str]] = []
    most = width - columns.width
    for row in rows:
        # A no-break space keeps `P('data', None)` in one piece.
        origin = " ·\xa0".join(part for part in (row.origin, row.placing.replace(" ", "\xa0")) if part)
        remark = f"{row.label}{_GAP}· {origin}"
        if row.has_remark and len(remark) <= most:
            blocks.append([remark.replace("\xa0", " ")])
        else:
            blocks.append([*name_lines(row.label, width), *_origin_lines(row, origin, width)])
    left = min(most, max(len(block[0]) for block in blocks))
    for row, block in zip(rows, blocks, strict=True):
        cells = columns.text(row)
        if not cells.strip():
            continue
        place = next((at for at, line in enumerate(block) if len(line) <= left), len(block))
        block[place:] = block[place:] or [""]
        block[place] = (block[place].ljust(left) + cells).rstrip()
    return [line for block in blocks for line in block]


def name_lines(name: str, width: int, rest: str = INDENT) -> list[str]:
    """Breaks a long name after a '/'."""
    lines: list[str] = []
    while len(name) > width and (end := name.rfind("/", len(rest), width) + 1) > len(rest) + 1:
        lines.append(name[:end])
        name = rest + name[end:]
    return [*lines, name]


def _origin_lines(row: TableRow, origin: str, width: int) -> list[str]:
    first = "    · " if row.has_remark else "    ← "
    lines = wrapped(origin, width, first, "      ") if origin else []
    return [line.replace("\xa0", " ") for whole in lines for line in name_lines(whole, width, "      ")]
