"""What the README shows runs, prints what stands there, and leads to pages that exist."""

import contextlib
import functools
import io
import re
import shlex
import tomllib
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.cli.main import make_parser
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support import page_outputs

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
# What T5X makes of the bundle that the package carries.
EXPECTED = ROOT / "tests" / "goldens" / "importer" / "t5_1_1_f32.npz"


@pytest.fixture(scope="module")
def ran():
    """The example's names, and what it printed."""
    example, *_ = page_outputs.blocks(README, "python")
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
    example, *_ = page_outputs.blocks(README, "python")
    block = page_outputs.Block(example.code, example.line, shown[1], shown.span(1))
    page_outputs.compare(README, [(block, ran[1])])


@pytest.mark.usefixtures("standard_dtype_promotion")
def test_a_run_goes_on_after_a_rename_as_by_hand(tmp_path):
    """The call and the lines on stock Orbax give one state, with the moments of the renamed parameters."""
    _, call, by_hand = page_outputs.blocks(README, "python")
    bundle = ROOT / "orbax_t5x" / "cli" / "demo_data" / "model.ckpt-1000000"
    optimizer = optax.adam(1e-3)
    params = flatten(ot.restore(bundle, None, ot.transforms.Translate())["target"])
    names = {"re": re, "functools": functools, "jax": jax, "ocp": ocp, "ot": ot, "bundle": bundle}

    def create(module):
        values = unflatten({name.replace("/mlp/", f"/{module}/"): leaf for name, leaf in params.items()})
        return {"params": values, "opt_state": optimizer.init(values), "step": 0}

    def manager():
        return ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler())

    with manager() as first:
        state, *_ = ot.restore_or_initialize(
            first, jax.eval_shape(lambda: create("mlp")), init_from=bundle, transforms="auto",
            init_fn=lambda: create("mlp"), fallback_for=["opt_state/.*", "step"],
        )  # fmt: skip
        _, moments = optimizer.update(state["params"], state["opt_state"])
        first.save(1, args=ot.args.TrainStateSave({**state, "opt_state": moments}))
    names["create"] = lambda: create("ffn")
    names["target"] = jax.eval_shape(names["create"])
    with manager() as names["manager"]:
        exec(call.code, names)
    restored = names["state"]
    assert names["how"] == "resumed" and restored["opt_state"][0].count == 1
    np.testing.assert_array_equal(
        restored["opt_state"][0].mu["encoder"]["layers_0"]["ffn"]["wo"]["kernel"],
        moments[0].mu["encoder"]["layers_0"]["mlp"]["wo"]["kernel"],
    )
    with ocp.CheckpointManager(tmp_path) as names["manager"]:
        exec(by_hand.code, names)
    jax.tree.map(np.testing.assert_array_equal, names["state"], restored)


def test_the_example_is_short():
    example, *_ = page_outputs.blocks(README, "python")
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
