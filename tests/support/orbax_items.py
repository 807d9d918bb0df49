"""One saved Orbax item in several layouts, and the outcomes that an opening may have."""

import os

import numpy as np

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError

RNG = np.random.default_rng(3)


# Too large to be stored inside a node of the OCDBT tree, and incompressible.
TREE = {"a": RNG.random((64, 64)), "b": {"c": RNG.random((64, 64)), "small": np.arange(3)}}


FLAT = {"a": TREE["a"], "b/c": TREE["b"]["c"], "b/small": TREE["b"]["small"]}


def outcome(path, **kwargs):
    """Name -> value or error of every leaf; an error of the checkpoint as a whole under None."""
    try:
        with ot.open_checkpoint(path, **kwargs) as checkpoint:
            result = {}
            for name, lazy in checkpoint.leaves.items():
                try:
                    result[name] = lazy.get()
                except CheckpointError as error:
                    assert error.leaf == name
                    assert error.path is not None and error.path.startswith(str(path))
                    result[name] = error
            return result
    except CheckpointError as error:
        assert str(path) in str(error)
        return {None: error}


def right_or(kinds, result, expected=FLAT):
    """Every leaf is right or an error of these kinds; returns the names that are errors."""
    wrong = set()
    if None in result:
        assert isinstance(result[None], kinds), result[None]
        return {None}
    assert result.keys() == expected.keys()
    for name, value in result.items():
        if isinstance(value, Exception):
            assert isinstance(value, kinds), value
            wrong.add(name)
        else:
            np.testing.assert_array_equal(value, expected[name])
    return wrong


def files_of(directory):
    return sorted(os.path.join(parent, name) for parent, _, names in os.walk(directory) for name in names)
