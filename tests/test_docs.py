"""Every example in docs/ runs, page by page, in order; every page of the index exists and every page is in it."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
# The migration page has a test of its own, which gives it a model.
PAGES = sorted(page for page in DOCS.glob("*.md") if page.name != "migration.md" and "```python" in page.read_text())


def test_pages_and_index_agree():
    named = set(re.findall(r"\]\((\w+\.md)\)", (DOCS / "index.md").read_text()))
    assert named == {page.name for page in DOCS.glob("*.md")} - {"index.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page, goldens, tmp_path):
    text = page.read_text()
    names = {"bundle": goldens / "tf_bundle" / "t5_1_1_f32", "directory": tmp_path / "steps"}
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], str(page), "exec"), names)
