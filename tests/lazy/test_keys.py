"""Keys and their data: views of keys have the keys' shape, and moving keys moves their data whole."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.lazy.keys import as_keys, is_keys, key_data
from orbax_t5x.lazy.several import stack

T = ot.transforms


@pytest.fixture(scope="module")
def keys():
    return jax.random.split(jax.random.key(5), (2, 3))


@pytest.fixture(scope="module")
def saved(tmp_path_factory, keys):
    path = tmp_path_factory.mktemp("keys") / "item"
    tree = {
        "layers_0": {"rng": keys[0]},
        "layers_1": {"rng": keys[1]},
        "all": keys,
        "rbg": jax.random.key(1, impl="rbg"),
    }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
    return path


@pytest.mark.slow
def test_views_of_keys_have_the_shape_of_the_keys(saved, keys):
    with ot.open_checkpoint(saved) as opened:
        view = opened.leaves["all"]
        assert is_keys(as_keys(view)) and as_keys(view).shape == keys.shape
        assert key_data(as_keys(view)).node is view.node
        data = key_data(stack([as_keys(view)[1].T, as_keys(view)[0, ::-1]], 1))
        wanted = jnp.stack([keys[1].T, keys[0, ::-1]], 1)
        assert np.array_equal(data.get(), jax.random.key_data(wanted))
        assert np.array_equal(data[2:, :, 1:].get(), jax.random.key_data(wanted)[2:, :, 1:])
        assert as_keys(data).shape == wanted.shape


def test_arrays_that_are_no_keys_stay_as_they_are():
    view = ot.stack([np.zeros((2, 2), np.uint32)], 0)
    assert as_keys(view) is view and key_data(view) is view


# Transforms, what they make of the keys, and the name of the result.
MOVED = {
    "stack on axis 0": (T.StackLayers(r"layers_(\d+)/(.*)", r"layers/\2", 0), "layers/rng", lambda keys: keys),
    "stack on axis 1": (T.StackLayers(r"layers_(\d+)/(.*)", r"layers/\2", 1), "layers/rng", lambda keys: keys.T),
    "stack on the last": (T.StackLayers(r"layers_(\d+)/(.*)", r"layers/\2", -1), "layers/rng", lambda keys: keys.T),
    "transpose": (T.Transpose("all"), "all", lambda keys: keys.T),
    "slice": (T.Slice("all", np.s_[..., ::-1]), "all", lambda keys: keys[..., ::-1]),
    "reshape": (T.Reshape("all", (3, 2)), "all", lambda keys: keys.reshape(3, 2)),
    "repeat on the last": (T.Repeat("all", 2, -1), "all", lambda keys: jnp.stack([keys, keys], -1)),
    "unstack on the last": (T.UnstackLayers("all", "one_{i}", -1), "one_2", lambda keys: keys[:, 2]),
    "rename": (T.Rename([("all", "other")]), "other", lambda keys: keys),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MOVED)
def test_transforms_move_keys_whole(saved, keys, name):
    transform, leaf, moved = MOVED[name]
    wanted = moved(keys)
    target = jax.eval_shape(lambda: wanted)
    for part in reversed(leaf.split("/")):
        target = {part: target}
    restored = jax.tree.leaves(ot.restore(saved, target, [transform], strict=False))[0]
    assert restored.dtype == wanted.dtype and jnp.array_equal(restored, wanted)


@pytest.mark.parametrize("name", [name for name in MOVED if name != "rename"])
def test_without_a_target_the_data_of_moved_keys_come_back(saved, keys, name):
    transform, leaf, moved = MOVED[name]
    restored = ot.restore(saved, None, [transform])
    for part in leaf.split("/"):
        restored = restored[part]
    assert np.array_equal(restored, jax.random.key_data(moved(keys)))


@pytest.mark.parametrize(
    "transform",
    [
        T.StackLayers(r"layers_(\d+)/(.*)", r"layers/\2", 2),
        T.Cast("all", "float32"),
        T.Pad("all", (3, None)),
        T.Slice("rbg", np.s_[:2]),
        T.Transpose("all", (2, 1, 0)),
        T.UnstackLayers("all", "one_{i}", 2),
    ],
    ids=repr,
)
def test_no_transform_reaches_into_a_key(saved, transform):
    with pytest.raises(RestorePlanError) as raised:
        ot.restore(saved, None, [transform])
    assert {problem.kind for problem in raised.value.problems} == {"shape"}
