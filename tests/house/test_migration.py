"""The migration page names every public name of T5X's modules and nothing that is not there; its examples run."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import orbax_t5x as ot

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from" / "t5x.md").read_text()
MODULES = ["state_utils", "checkpoint_importer", "optimizers", "adafactor", "train_state"]


def section(module):
    return PAGE.split(f"\n## `{module}`\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_there(module):
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", section(module)))))
    assert set(importlib.import_module(f"orbax_t5x.{module}").__all__) - named == set()


@pytest.mark.parametrize("module", MODULES)
def test_every_name_in_the_first_column_exists(module):
    rows = re.findall(r"^\| (`.*?) \| ", section(module), re.MULTILINE)
    assert rows
    found = importlib.import_module(f"orbax_t5x.{module}")
    for row in rows:
        names = [re.match(r"\.?\w+", quoted)[0] for quoted in re.findall(r"`([^`]+)`", row)]
        owners = [getattr(found, name) for name in names if not name.startswith(".") and name != "amos"]
        for name in names:
            if name.startswith("."):
                members = owners or [found.FlaxOptimTrainState, found.InferenceState]
                assert any(hasattr(member, name[1:]) or name[1:] in ("step", "params") for member in members), name


def test_what_stands_on_our_side_exists():
    for name in sorted(set(re.findall(r"`ot((?:\.\w+)+)", PAGE))):
        value = ot
        for part in name[1:].split("."):
            value = getattr(value, part)


@pytest.mark.slow
def test_the_examples_run(goldens):
    bundle = goldens / "tf_bundle" / "t5_1_1_f32"
    names = {"ids": jnp.ones((1, 4), jnp.int32), "bundle": bundle}
    for example in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(example, "migration.md", "exec"), names)
    with np.load(bundle / "expected.npz") as expected:
        embedding = expected["shared/embedding"]
    np.testing.assert_array_equal(names["rows"], embedding[:4])
    np.testing.assert_array_equal(names["inference"].params["token_embedder"]["embedding"], embedding)
    np.testing.assert_array_equal(names["state"].params["token_embedder"]["embedding"], embedding)
    assert int(names["state"].step) == int(names["inference"].step) == 1_000_000
    assert names["state"].params["token_embedder"]["embedding"].sharding.num_devices == 8
