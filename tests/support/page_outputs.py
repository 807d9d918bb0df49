"""Outputs that pages of the documentation show: compared with the real ones, or written with `make outputs`."""

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

# An output's columns on a page: what a code block of the site shows without scrolling.
COLUMNS = 88
_LEFT_OUT = "…"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n(?:\n```output\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code, and the output that the page shows below it, if any."""

    code: str
    line: int
    output: str | None
    span: tuple[int, int]


def blocks(page: Path, language: str) -> Iterator[Block]:
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        if found[1] == language:
            yield Block(found[2], text[: found.start()].count("\n") + 1, found[3], found.span(3))


def cleaned(output: str, paths: Mapping[str, str]) -> str:
    """Returns what was printed without what differs between two runs, or two versions of JAX: paths, seconds, `P`."""
    for path, shown in paths.items():
        output = output.replace(path, shown)
    output = re.sub(r"\b\d+\.\d+ s\b", "0.1 s", output).replace("PartitionSpec(", "P(")
    return "".join(line.rstrip() + "\n" for line in output.splitlines())


def is_shown(shown: str, real: str) -> bool:
    """Tests whether the page shows the output, however its lines break; a line of an ellipsis stands for any lines."""
    pattern = "".join(
        r"(?:\S+\s)*?" if line.strip() == _LEFT_OUT else "".join(re.escape(word) + r"\s" for word in line.split())
        for line in shown.splitlines()
    )
    return re.fullmatch(pattern, "".join(f"{word} " for word in real.split())) is not None


def compare(page: Path, outputs: Iterable[tuple[Block, str]]) -> None:
    """Asserts that the page shows the outputs, or, where `WRITE_OUTPUTS` is set, writes those that differ."""
    wrong = [(block, real) for block, real in outputs if block.output is not None and not is_shown(block.output, real)]
    if os.environ.get("WRITE_OUTPUTS"):
        text = page.read_text()
        for block, real in reversed(wrong):
            text = text[: block.span[0]] + real + text[block.span[1] :]
        page.write_text(text)
    else:
        report = "\n".join(f"{page}:{block.line} prints (`make outputs` writes it):\n{real}" for block, real in wrong)
        assert not wrong, report
