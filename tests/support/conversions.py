"""What tests of conversions write, replace and compare."""

import json
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

import orbax_t5x as ot
from tests.support.bundle_writer import bundle_of

GOLDENS = Path(__file__).parents[1] / "goldens"
BUNDLES = ["t5_1_1_f32", "t5_1_0_bf16", "t5_1_1_bf16_snappy", "t5_1_1_perlayer_rel", "lm_transformer"]
OLD, NEW = {"a": np.zeros(3, np.float32)}, {"b": np.ones(5, np.float32)}


def old_destination(parent: Path) -> Path:
    """Makes a destination that holds a checkpoint of `OLD`."""
    parent.mkdir()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(parent / "c", args=ocp.args.PyTreeSave(OLD))
    return parent / "c"


def new_source(directory: Path) -> Path:
    """Makes a bundle of `NEW`."""
    directory.mkdir()
    return bundle_of(NEW).write(directory)


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def record_of(directory: Path):
    return json.loads((directory / "_METADATA").read_text())["custom_metadata"]


def flat(tree):
    return ot.state_utils.flatten_state_dict(tree)


def assert_equals(restored, expected):
    assert restored.keys() == expected.keys()
    for name, array in expected.items():
        assert restored[name].dtype == array.dtype, name
        np.testing.assert_array_equal(np.asarray(restored[name]), array, err_msg=name)
