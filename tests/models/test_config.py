"""The sizes of a T5 are found in a checkpoint, whatever its format and names."""

import dataclasses
import subprocess
import sys

import jax
import numpy as np
import pytest

from orbax_t5x.errors import UnsupportedCheckpointError
from orbax_t5x.models import T5Config, config_of
from orbax_t5x.trees.flat import flatten
from tests.support import t5_model
from tests.support.memory_checkpoint import checkpoint
from tests.support.t5x_goldens import golden


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("tf_bundle/t5_1_1_f32", T5Config()),
        ("tf_bundle/t5_1_0_bf16", T5Config(gated=False, tied=True)),
        ("hf_logits/untied_relu", T5Config(32, 8, 3, 4, 16, encoder_layers=2, decoder_layers=3, gated=False)),
        ("flax_msgpack/t5_1_1", None),
    ],
)
def test_checkpoints_of_each_kind(goldens, path, expected):
    assert config_of(golden("d1_adafactor").step) == T5Config()
    found = config_of(goldens / path)
    assert found.encoder_layers and found.vocab
    if expected is not None:
        assert found == expected


@pytest.mark.parametrize("prefix", ["target/", "params/", ""])
@pytest.mark.parametrize(
    "layout",
    [{}, {"split_heads": True, "per_layer_bias": True}, {"scan_layers": True}],
    ids=["minimal", "unscanned", "scanned"],
)
def test_layouts_of_t5x(prefix, layout):
    config = T5Config(encoder_layers=3, decoder_layers=2, **layout)
    params = flatten(jax.eval_shape(lambda: t5_model.init(config)[1]["params"]))
    leaves = {prefix + name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in params.items()}
    expected = dataclasses.replace(config, scan_layers=False)
    if layout:
        expected = dataclasses.replace(expected, split_heads=True, per_layer_bias=True)
    assert config_of(checkpoint(leaves)) == expected


def test_what_is_no_t5_is_refused():
    with pytest.raises(UnsupportedCheckpointError, match="no T5 with an encoder and a decoder"):
        config_of(checkpoint({"dense/kernel": np.zeros((2, 2))}))


def test_importing_the_package_imports_no_model():
    code = "import sys, orbax_t5x; sys.exit(any(name.startswith(('orbax_t5x.models', 'flax')) for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
