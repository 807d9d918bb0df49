"""Runs the recipes of docs/examples: `python docs/run_examples.py [NAME …]` writes what they print into their pages.

A recipe is a Python file and a page of its name, whose first block of text is what the file prints. A file with cells
(`# %%`, and `# %% [markdown]` before text) is a notebook, too, which is made from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
import tempfile
import tomllib
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

EXAMPLES = Path(__file__).parent / "examples"
_CELL = re.compile(r"^# %%(?P<text> \[markdown\])?\n", re.MULTILINE)
_OUTPUT = re.compile(r"^```output\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Lines of Gloo, which processes write word by word at the same time: the last of them are numbers and ends of lines.
_GLOO = re.compile(r"\[Gloo\] Rank .*peer ranks is : [\d\n]*", re.DOTALL)
_INSTALL = "# On a machine of your own: once, in its environment.\n%pip install --quiet orbax-t5x"
# pyproject.toml has the address of the repository.
_URLS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["urls"]
_REPOSITORY = _URLS["Source"].removeprefix("https://github.com/")
_ELSEWHERE = f"https://colab.research.google.com/github/{_REPOSITORY}/blob/main/docs/examples/notebooks"
# Drawn here: a page of the site loads nothing from elsewhere.
_BADGE = "[![Open in Colab](open-in-colab.svg)]"


@dataclasses.dataclass(frozen=True)
class Cell:
    """A part of a recipe: code, or Markdown, and the line of the file before it."""

    is_text: bool
    source: str
    line: int


def recipes() -> list[Path]:
    """Returns the files of all recipes."""
    return sorted(EXAMPLES.glob("*.py"))


def cells(recipe: Path) -> list[Cell]:
    """Splits a recipe at its markers; without any it is one cell."""
    source = recipe.read_text()
    marks = list(_CELL.finditer(source))
    if not marks:
        return [Cell(False, source, 0)]
    ends = [*(mark.start() for mark in marks[1:]), len(source)]
    return [
        Cell(mark["text"] is not None, source[mark.end() : end].strip("\n"), source[: mark.end()].count("\n"))
        for mark, end in zip(marks, ends, strict=True)
    ]


@contextlib.contextmanager
def printed() -> Iterator[list[str]]:
    """Keeps what this process and its children print."""
    sys.stdout.flush()
    before, held, out = sys.stdout, os.dup(1), []
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        sys.stdout = open(os.dup(1), "w", buffering=1)
        try:
            yield out
        finally:
            sys.stdout.close()
            sys.stdout = before
            os.dup2(held, 1)
            os.close(held)
            file.seek(0)
            out.append(_GLOO.sub("", file.read()))


def run(recipe: Path) -> list[str]:
    """Runs a recipe as `python` does, and returns what each of its cells prints."""
    module = types.ModuleType("__main__")
    module.__file__ = str(recipe)  # from which its child processes begin
    before, sys.modules["__main__"] = sys.modules["__main__"], module
    outputs = []
    try:
        for cell in cells(recipe):
            with printed() as out:
                exec(compile("\n" * cell.line + cell.source, str(recipe), "exec"), vars(module))
            outputs.append("" if cell.is_text else out[0])
    finally:
        sys.modules["__main__"] = before
    return outputs


def shown(recipe: Path) -> str:
    """Returns what the page of a recipe shows as printed."""
    return _OUTPUT.search(recipe.with_suffix(".md").read_text())[1]


def page(recipe: Path, outputs: list[str]) -> str:
    """Returns the page of a recipe with other outputs."""
    return _OUTPUT.sub(lambda _: f"```output\n{''.join(outputs)}```", recipe.with_suffix(".md").read_text(), count=1)


def notebook_path(recipe: Path) -> Path:
    """Returns the file of a recipe's notebook; its name is none of a page beside it."""
    return EXAMPLES / "notebooks" / f"{recipe.stem}.ipynb"


def notebook(recipe: Path, outputs: list[str]) -> str | None:
    """Returns the executed notebook of a recipe as JSON; None where it has no cells."""
    parts = cells(recipe)
    if len(parts) == 1:
        return None
    first, *rest = zip(parts, outputs, strict=True)
    title, _, text = first[0].source.strip('"\n').partition("\n")
    badge = f"{_BADGE}({_ELSEWHERE}/{recipe.stem}.ipynb)"
    made = [_markdown(f"# {title.removesuffix('.')}\n\n{badge}\n{text}"), _code(_INSTALL, "", None)]
    count = 0
    for cell, output in rest:
        if cell.is_text:
            made.append(_markdown(re.sub(r"^# ?", "", cell.source, flags=re.MULTILINE)))
        else:
            count += 1
            made.append(_code(cell.source, output, count))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    for index, cell in enumerate(made):
        cell["id"] = f"{recipe.stem.replace('_', '-')}-{index}"
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps({"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def _markdown(source: str) -> dict[str, object]:
    return {"cell_type": "markdown", "metadata": {}, "source": source.splitlines(keepends=True)}


def _code(source: str, output: str, count: int | None) -> dict[str, object]:
    stream = {"name": "stdout", "output_type": "stream", "text": output.splitlines(keepends=True)}
    return {
        "cell_type": "code",
        "execution_count": count,
        "metadata": {},
        "outputs": [stream] if output else [],
        "source": source.splitlines(keepends=True),
    }


def main(names: list[str]) -> None:
    """Runs recipes, and writes their pages and notebooks."""
    os.environ["JAX_NUM_CPU_DEVICES"] = "4"  # as the recipes set it, before JAX begins in this process
    warnings.simplefilter("ignore")
    for recipe in recipes():
        if names and recipe.stem not in names:
            continue
        outputs = run(recipe)
        print(f"{recipe.name}\n{''.join(outputs)}", flush=True)
        if recipe.with_suffix(".md").exists():
            recipe.with_suffix(".md").write_text(page(recipe, outputs))
        made = notebook(recipe, outputs)
        if made is not None:
            notebook_path(recipe).write_text(made)


if __name__ == "__main__":
    main(sys.argv[1:])
