"""What the README shows runs."""

import re
import shlex
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np

from orbax_t5x.cli.main import make_parser

# What T5X makes of the bundle that the package carries.
EXPECTED = Path(__file__).parents[1] / "goldens" / "importer" / "t5_1_1_f32.npz"
README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_example_runs(capsys):
    (example,) = blocks("python")
    found = {}
    exec(compile(example, "README.md", "exec"), found)
    embedding = found["state"]["target"]["token_embedder"]["embedding"]
    with np.load(EXPECTED) as values:
        np.testing.assert_array_equal(np.asarray(embedding), values["target/token_embedder/embedding"])
    assert len(embedding.sharding.device_set) == jax.device_count() == 8
    assert "shared/embedding" in capsys.readouterr().out


def test_an_ordinary_linen_model_runs_on_what_the_example_restored():
    """The lookup of embeddings is what fails on a mesh whose axes are Explicit."""
    (example,) = blocks("python")
    found = {}
    exec(compile(example, "README.md", "exec"), found)
    embed = nn.Embed(128, 16)
    params = {"params": found["state"]["target"]["token_embedder"]}
    tokens = np.arange(12).reshape(3, 4) * 10
    with np.load(EXPECTED) as values:
        table = values["target/token_embedder/embedding"]
    for apply in (embed.apply, jax.jit(embed.apply)):
        np.testing.assert_array_equal(apply(params, tokens), table[tokens])
    logits = jax.jit(lambda params, x: embed.apply(params, x, method="attend"))(params, table[tokens])
    np.testing.assert_allclose(logits, table[tokens] @ table.T, rtol=1e-4, atol=1e-4)
    (axis_type,) = found["mesh"].axis_types
    assert axis_type == jax.sharding.AxisType.Auto and "`Auto`" in README


def test_the_example_is_short():
    (example,) = blocks("python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 14


def test_the_commands_parse():
    lines = [line.partition("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("orbax-t5x")]
    assert {command[0] for command in commands} == {"inspect", "plan", "convert"}
    for command in commands:
        make_parser().parse_args(command)


def test_targets_of_make_exist():
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", "\n".join(blocks("sh")), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
