"""Every example in docs/ runs, page by page, in order. `make docs` checks that every page is in the site."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
# Pages that show how to extend the package are test files: their examples are run by pytest.
GUIDES = sorted(DOCS.rglob("adding-a-*.md"))
# The migration page has a test of its own, which gives it a model.
PAGES = sorted(
    page
    for page in set(DOCS.rglob("*.md")) - set(GUIDES)
    if page != DOCS / "coming-from" / "t5x.md" and "```python" in page.read_text()
)
_EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page, goldens, tmp_path):
    text = page.read_text()
    names = {
        "bundle": goldens / "tf_bundle" / "t5_1_1_f32",
        "hugging_face": goldens / "safetensors" / "t5_1_1",
        "pytorch": goldens / "torch" / "t5_1_1",
        "directory": tmp_path / "steps",
    }
    for block in _EXAMPLE.finditer(text):
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], str(page), "exec"), names)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_guides_pass_their_own_tests(page, tmp_path):
    module = tmp_path / "test_guide.py"
    module.write_text("".join(_EXAMPLE.findall(page.read_text())))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(module)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(DOCS.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
