"""Every example in docs/ runs, page by page, in order, and prints what the page shows. `make docs` builds the pages."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import page_outputs

DOCS = Path(__file__).parents[2] / "docs"
# Pages that show how to extend the package are test files: their examples are run by pytest.
GUIDES = sorted(DOCS.rglob("adding-a-*.md"))
FIRST = DOCS / "start" / "first-script.md"
# The page on T5X's modules has a test of its own, which gives it a model; recipes are run as the files that they show.
_ELSEWHERE = {DOCS / "coming-from" / "t5x.md", FIRST, *GUIDES, *(DOCS / "examples").rglob("*.md")}
PAGES = sorted(page for page in set(DOCS.rglob("*.md")) - _ELSEWHERE if "```python" in page.read_text())


# Readers have JAX's own promotion, which Optax's Adam needs.
@pytest.mark.usefixtures("standard_dtype_promotion")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_examples_run(page, goldens, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(page_outputs.COLUMNS))
    names = {
        "bundle": goldens / "tf_bundle" / "t5_1_1_f32",
        "hugging_face": goldens / "safetensors" / "t5_1_1",
        "pytorch": goldens / "torch" / "t5_1_1",
        "directory": tmp_path / "steps",
    }
    paths = {f"{path}/": "" for path in (names["bundle"], goldens, tmp_path, DOCS.parent)}
    outputs = []
    for block in page_outputs.blocks(page, "python"):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("\n" * block.line + block.code, str(page), "exec"), names)
        outputs.append((block, page_outputs.cleaned(printed.getvalue(), paths)))
    page_outputs.compare(page, outputs)


@pytest.mark.slow
def test_the_first_script_is_killed_and_goes_on(tmp_path):
    """The page's blocks are one file, which one process runs until it is killed, and another to its end."""
    python, shell = ([*page_outputs.blocks(FIRST, language)] for language in ("python", "sh"))
    mark = "end of a block\n"
    file = tmp_path / "first_script.py"
    file.write_text(f"\nprint({mark!r}, end='')\n".join(block.code for block in python))
    # The second process finds what the first one compiled.
    environment = {"PYTHONPATH": str(DOCS.parent), "COLUMNS": str(page_outputs.COLUMNS)}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    runs = [
        subprocess.run(
            [sys.executable, str(file), *arguments],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        for arguments in (["2"], [])
    ]
    assert [run.returncode for run in runs] == [-signal.SIGKILL, 0], [run.stderr for run in runs]
    printed = [(block, text) for block, text in zip(python, runs[1].stdout.split(mark), strict=True)]
    printed += [(block, run.stdout.replace(mark, "")) for block, run in zip(shell, runs, strict=True)]
    outputs = [(block, page_outputs.cleaned(text, {f"{DOCS.parent}/": ""})) for block, text in printed]
    page_outputs.compare(FIRST, sorted(outputs, key=lambda output: output[0].line))


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_guides_pass_their_own_tests(page, tmp_path):
    module = tmp_path / "test_guide.py"
    module.write_text("".join(block.code for block in page_outputs.blocks(page, "python")))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(module)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(DOCS.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_other_outputs_are_found(tmp_path, monkeypatch):
    monkeypatch.delenv("WRITE_OUTPUTS", raising=False)
    page = tmp_path / "page.md"
    text = "```python\nprint(1)\n```\n\n```output\n{}```\n\ntext\n\n```output\nalone\n```\n"
    for shown, fits in [("1\n2\n3\n", True), ("1\n…\n", True), ("1\n…\n3\n", True), ("1\n", False), ("…\n4\n", False)]:
        page.write_text(text.format(shown))
        (block,) = page_outputs.blocks(page, "python")
        assert (block.code, block.line, block.output) == ("print(1)\n", 1, shown)
        with contextlib.nullcontext() if fits else pytest.raises(AssertionError, match="prints"):
            page_outputs.compare(page, [(block, "1\n2\n3\n")])
    monkeypatch.setenv("WRITE_OUTPUTS", "1")
    page_outputs.compare(page, [(block, "1\n2\n3\n")])
    assert page.read_text() == text.format("1\n2\n3\n")
