"""What the README shows runs, prints what stands there, and leads to pages that exist."""

import contextlib
import io
import re
import shlex
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

from orbax_t5x.cli.main import make_parser
from orbax_t5x.trees.flat import unflatten
from tests.support import page_outputs

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
# What T5X makes of the bundle that the package carries.
EXPECTED = ROOT / "tests" / "goldens" / "importer" / "t5_1_1_f32.npz"


@pytest.fixture(scope="module")
def ran():
    """The example's names, and what it printed."""
    (example,) = page_outputs.blocks(README, "python")
    found = {}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setenv("COLUMNS", str(page_outputs.COLUMNS))
        exec(compile(example.code, "README.md", "exec"), found)
    return found, page_outputs.cleaned(printed.getvalue(), {f"{ROOT}/orbax_t5x/cli/demo_data/": ""})


@pytest.mark.slow
def test_the_example_restores_what_t5x_imports_and_computes_with_it(ran):
    found, _ = ran
    embedding = found["params"]["token_embedder"]["embedding"]
    with np.load(EXPECTED) as values:
        params = unflatten(
            {name.removeprefix("target/"): values[name] for name in values if name.startswith("target/")}
        )
    np.testing.assert_array_equal(np.asarray(embedding), params["token_embedder"]["embedding"])
    assert len(embedding.sharding.device_set) == jax.device_count() == 8
    assert embedding.sharding.spec == jax.P("data")
    logits = found["model"].apply({"params": params}, found["tokens"], found["tokens"])
    np.testing.assert_allclose(found["logits"], logits, rtol=1e-4, atol=1e-4)
    (axis_type,) = found["mesh"].axis_types
    assert axis_type == jax.sharding.AxisType.Auto and "`Auto`" in README.read_text()


@pytest.mark.slow
def test_the_plan_is_the_real_one(ran):
    text = README.read_text()
    shown = re.search(r"^```output\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (example,) = page_outputs.blocks(README, "python")
    block = page_outputs.Block(example.code, example.line, shown[1], shown.span(1))
    page_outputs.compare(README, [(block, ran[1])])


def test_the_example_is_short():
    (example,) = page_outputs.blocks(README, "python")
    assert len([line for line in example.code.splitlines() if line.strip()]) <= 14


def test_the_commands_parse():
    lines = [
        line.partition("#")[0].strip()
        for block in page_outputs.blocks(README, "sh")
        for line in block.code.splitlines()
    ]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("orbax-t5x")]
    assert {command[0] for command in commands} == {"inspect", "plan", "convert"}
    for command in commands:
        make_parser().parse_args(command)


def test_targets_of_make_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = [
        name for block in page_outputs.blocks(README, "sh") for name in re.findall(r"^make (\w+)", block.code, re.M)
    ]
    assert targets and all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_links_are_absolute_and_lead_to_pages():
    """On a package index nothing relative leads anywhere."""
    for link in re.findall(r"\]\(([^)]*)\)", README.read_text()):
        assert link.startswith("https://")
        page = re.fullmatch(rf"{re.escape(URLS['Documentation'])}/en/latest/(?:(.+)\.html)?(?:#.*)?", link)
        file = re.fullmatch(rf"{re.escape(URLS['Source'])}/blob/main/(.+)", link)
        assert page or file, link
        path = ROOT / "docs" / f"{page[1] or 'index'}.md" if page else ROOT / file[1]
        assert path.exists(), link
