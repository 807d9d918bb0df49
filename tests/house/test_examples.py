"""The recipes of the cookbook run; their pages and notebooks show what they print, and the index has all of them."""

import json
import random
import re
import sys
from pathlib import Path

import pytest

from tests.support.jax_job import run_processes
from tests.support.xla import compiler_flags

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))
import run_examples

sys.path.remove(str(DOCS))

RECIPES = run_examples.recipes()
# As a user's process is: JAX as it is by default, and four devices.
_RUN = """
import json, sys
import jax
for name, value in {"numpy_dtype_promotion": "standard", "numpy_rank_promotion": "allow", "num_cpu_devices": 4}.items():
    jax.config.update(f"jax_{name}", value)
sys.path.insert(0, sys.argv[1])
import run_examples
print(json.dumps({recipe.name: run_examples.run(recipe) for recipe in run_examples.recipes()}))
"""
_ENVIRONMENT = {
    "XLA_FLAGS": compiler_flags(),
    "JAX_NUM_CPU_DEVICES": "4",
    "JAX_NUMPY_DTYPE_PROMOTION": "standard",
    "JAX_NUMPY_RANK_PROMOTION": "allow",
}


@pytest.mark.slow
def test_pages_and_notebooks_show_what_recipes_print():
    """All in one process, but for the processes that they start; `python docs/run_examples.py` writes them anew."""
    (printed,) = run_processes(lambda index, coordinator: (_RUN, [DOCS]), 1, environment=_ENVIRONMENT)
    # JAX 0.9 writes the whole name.
    outputs = json.loads(printed.splitlines()[-1].replace("PartitionSpec(", "P("))
    for recipe in RECIPES:
        assert run_examples.shown(recipe) == "".join(outputs[recipe.name]), recipe.name
        made = run_examples.notebook(recipe, outputs[recipe.name])
        written = run_examples.notebook_path(recipe)
        assert made == (written.read_text() if written.exists() else None), recipe.name


def test_each_recipe_has_a_page_that_the_index_names():
    pages = {page.stem for page in run_examples.EXAMPLES.glob("*.md")} - {"index"}
    index = (run_examples.EXAMPLES / "index.md").read_text()
    assert {recipe.stem for recipe in RECIPES} == pages == set(re.findall(r"\]\((\w+)\.md\)", index))
    for recipe in RECIPES:
        assert f"```{{literalinclude}} {recipe.name}\n" in recipe.with_suffix(".md").read_text()
    notebooks = {path.stem for path in run_examples.EXAMPLES.rglob("*.ipynb")}
    assert notebooks == set(re.findall(r"\]\(notebooks/(\w+)\.ipynb\)", index)) and len(notebooks) == 3


def test_recipes_are_short_say_what_they_show_and_use_public_names_only():
    for recipe in RECIPES:
        text = recipe.read_text()
        assert len(text.splitlines()) <= 100
        assert len(re.search(r'"""(.*?)"""', text, re.DOTALL)[1].strip().splitlines()) == 4
        assert not re.search(r"\b_[a-z]\w*\(|\._[a-z]|from tests|import tests", text), recipe.name


def test_cells_of_a_notebook_are_those_of_the_file(tmp_path):
    recipe = tmp_path / "adds.py"
    recipe.write_text(
        '# %% [markdown]\n"""Add.\n\nText.\n"""\n\n# %%\nx = 1\n\n# %% [markdown]\n# Then:\n\n# %%\nprint(x)\n'
    )
    outputs = run_examples.run(recipe)
    assert outputs == ["", "", "", "1\n"]
    cells = json.loads(run_examples.notebook(recipe, outputs))["cells"]
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code", "code", "markdown", "code"]
    assert ["".join(cell["source"]) for cell in cells[2:]] == ["x = 1", "Then:", "print(x)"]
    assert cells[-1]["outputs"][0]["text"] == ["1\n"] and "colab" in "".join(cells[0]["source"])
    assert "pip install" in "".join(cells[1]["source"])


def test_lines_of_gloo_are_left_out_however_processes_mix_them(tmp_path):
    """Each word is a write of its own; the orders are drawn."""
    words = [
        "[Gloo] Rank ",
        "{}",
        " is connected to ",
        "1",
        " peer ranks. ",
        "Expected number of connected peer ranks is : ",
    ]
    recipe = tmp_path / "mixed.py"
    draw = random.Random(0)
    for _ in range(50):
        writers = [[word.format(rank) for word in [*words, "1", "\n"] * 2] for rank in range(2)]
        mixed = "".join(draw.choice([w for w in writers if w]).pop(0) for _ in range(sum(map(len, writers))))
        recipe.write_text(f"print('before')\nprint({mixed!r}, end='')\nprint('after')\n")
        assert run_examples.run(recipe) == ["before\nafter\n"], mixed
