"""Checks the types of every Python block of the documentation's pages and of its examples: a part of `make lint`.

The blocks of a page become one file, at the lines of the page, so that an error names the line.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support import page_outputs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# What the tests of pages give them, on the first line; Orbax v1 takes no pathlib.Path by its types.
_NAMES = (
    "from etils import epath; from typing import Any; ids: Any = 0; "
    "bundle = hugging_face = pytorch = directory = epath.Path()"
)
# Flax types each item of a state as a state, which cannot be called: `state["kernel"].get_value()`.
_REMARKS = {"guides/nnx.md": "# pyright: reportCallIssue=false"}
_SETTINGS = {
    "pythonVersion": "3.11",
    "typeCheckingMode": "standard",
    "reportMissingTypeStubs": False,
    "disableBytesTypePromotions": False,  # epath's `write_bytes` takes a bytearray
}


def page_code(page: Path) -> str:
    """Returns the blocks of a page at their lines, below the names that a page has; empty without any."""
    lines: list[str] = []
    for block in page_outputs.blocks(page, "python"):
        lines += [""] * (block.line - len(lines)) + block.code.splitlines()
    remark = _REMARKS.get(page.relative_to(DOCS).as_posix(), "")
    return "\n".join([_NAMES, remark, *lines[2:], ""]) if lines else ""


def main() -> int:
    """Runs pyright once, and returns its exit code."""
    with tempfile.TemporaryDirectory() as directory:
        for page in DOCS.rglob("*.md"):
            if code := page_code(page):
                name = "_".join(page.relative_to(DOCS).with_suffix("").parts).replace("-", "_")
                (Path(directory) / f"{name}.py").write_text(code)
        settings = {
            **_SETTINGS,
            "include": [".", os.path.relpath(DOCS / "examples", directory)],
            "extraPaths": [str(ROOT)],
        }
        (Path(directory) / "pyrightconfig.json").write_text(json.dumps(settings))
        pyright = Path(sys.executable).with_name("pyright")
        command = [pyright, "--pythonpath", sys.executable, "-p", directory]
        return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode


if __name__ == "__main__":
    sys.exit(main())
