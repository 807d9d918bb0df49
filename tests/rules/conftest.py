"""T5 networks in each layout, and files of Hugging Face."""

import jax
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.trees.flat import flatten
from tests.conftest import GOLDENS
from tests.support import t5_model
from tests.support.rule_networks import LAYOUTS


@pytest.fixture(scope="module")
def networks():
    return {name: t5_model.init(config) for name, config in LAYOUTS.items()}


@pytest.fixture(scope="module")
def shapes(networks):
    """Flat abstract state dicts by layout, below `target/`."""
    return {
        name: flatten({"target": jax.eval_shape(lambda tree=variables["params"]: tree)})
        for name, (_, variables) in networks.items()
    }


@pytest.fixture(scope="module")
def expected_hf():
    with np.load(GOLDENS / "safetensors" / "t5_1_1_expected.npz") as file:
        return dict(file)


@pytest.fixture
def hf():
    with ot.open_checkpoint(GOLDENS / "safetensors" / "t5_1_1") as checkpoint:
        yield dict(checkpoint.leaves)


@pytest.fixture(params=["t5_1_1", "t5_1_0"])
def hf_flax(request):
    with ot.open_checkpoint(GOLDENS / "flax_msgpack" / request.param) as checkpoint:
        yield dict(checkpoint.leaves)
