"""Optimizers' states are found by structure: states of real libraries whose every leaf tells what it is of."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import orbax_t5x as ot
from orbax_t5x import transforms as tr
from orbax_t5x.optimizers import OptaxWrapper
from orbax_t5x.testing.transform_suite import run
from orbax_t5x.train_state import FlaxOptimTrainState
from orbax_t5x.trees.flat import unflatten
from orbax_t5x.trees.named_leaves import named_leaves

pytestmark = pytest.mark.slow

PLAIN = {
    "tok/w": (30, 8),
    "enc/0/up/w": (8, 12),
    "enc/0/down/w": (12, 8),
    "enc/1/up/w": (8, 12),
    "enc/1/down/w": (12, 8),
    "norm/s": (8,),
}
STACKED = {"tok/w": (30, 8), "layers/up/w": (3, 8, 12), "layers/down/w": (3, 12, 8), "layers/s": (3, 8)}
# Modules that are called as moments and counts are.
WORDS = {"mu/w": (8, 8), "nu/w": (8, 8), "count": (8,), "v/w": (8, 8)}
RENAMINGS = [
    (PLAIN, {}),
    (PLAIN, {r"enc/(\d+)/(up|down)/w": r"blk/\1/\2/kernel"}),
    (PLAIN, {"enc/0/(.*)": r"enc/1/\1", "enc/1/(.*)": r"enc/0/\1"}),
    (STACKED, {"layers/(.*)": r"body/\1", "tok/w": "e/w"}),
    (WORDS, {"mu/w": "nu/w", "nu/w": "mu/w"}),
    (WORDS, {"v/w": "mu/w", "mu/w": "nu/w", "nu/w": "v/w"}),
]


def labels(params):
    return jax.tree.map(lambda leaf: "ab"[np.ndim(leaf) % 2], params)


OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1, 0, 9))),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=8, momentum=0.9),
    "masked": lambda: optax.masked(optax.adam(1e-3), lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
    "several": lambda: optax.multi_transform({"a": optax.adam(1e-3), "b": optax.sgd(1e-3, momentum=0.9)}, labels),
}


def with_keys(tree, convert):
    if not isinstance(tree, dict):
        return tree
    return convert({name: with_keys(child, convert) for name, child in tree.items()})


def as_lists(tree):
    return [tree[str(i)] for i in range(len(tree))] if tree and all(key.isdigit() for key in tree) else tree


def int_keys(tree):
    return {int(key) if key.isdigit() else key: child for key, child in tree.items()}


def module(tree):
    made = nnx.Module()
    for key, child in tree.items():
        setattr(
            made, f"x{key}" if key.isdigit() else key, module(child) if isinstance(child, dict) else nnx.Param(child)
        )
    return made


def linen(params, tx):
    return TrainState.create(apply_fn=None, params=params, tx=tx).replace(step=jnp.int32(0))


def with_nnx(params, tx):
    model = module(params)
    return nnx.state({"model": model, "optimizer": nnx.Optimizer(model, tx, wrt=nnx.Param)})


# How a state is made, the root of its parameters, and the end of its names in a file.
STATES = {
    "linen": (linen, "params/", ""),
    "linen of lists": (lambda params, tx: linen(with_keys(params, as_lists), tx), "params/", ""),
    "linen of numbers": (lambda params, tx: linen(with_keys(params, int_keys), tx), "params/", ""),
    "maxtext": (lambda params, tx: linen({"params": params}, tx), "params/params/", ""),
    "t5x": (lambda params, tx: FlaxOptimTrainState.create(OptaxWrapper(tx), {"params": params}), "target/", ""),
    "optax": (lambda params, tx: {"weights": params, "opt": tx.init(params)}, "weights/", ""),
    "wrapped": (
        lambda params, tx: {"model": params, "optimizer": {"state": tx.init(params), "step": jnp.int32(0)}},
        "model/",
        "",
    ),
    "no word": (lambda params, tx: {"net": params, "training": tx.init(params), "step": jnp.int32(0)}, "net/", ""),
    "params inside": (lambda params, tx: {"w": params, "opt_state": tx.init({"params": params})}, "w/", ""),
    "nnx": (with_nnx, "model/", ""),
    "nnx in a file": (with_nnx, "model/", "/value"),
}


def parameter(state, path):
    _, root, end = STATES[state]
    return root + (re.sub(r"(^|/)(\d+)(?=/)", r"\1x\2", path) if state.startswith("nnx") else path) + end


def renamed(path, rules):
    found = next((match.expand(new) for old, new in rules.items() if (match := re.fullmatch(old, path))), None)
    return path if found is None else found


class Truth:
    """States filled with a number for each kind and parameter: the same in every layout."""

    def __init__(self):
        self._numbers = {}

    def state(self, which, optimizer, shapes, rules):
        make, root, end = STATES[which]
        params = {renamed(path, rules): shape for path, shape in shapes.items()}
        old = {parameter(which, renamed(path, rules))[len(root) :].removesuffix(end): path for path in shapes}
        zeros = {path: jnp.zeros(shape) for path, shape in params.items()}
        leaves = {}
        for name, leaf in named_leaves(make(unflatten(zeros), OPTIMIZERS[optimizer]())).items():
            if not hasattr(leaf, "shape"):  # Optax's node of what is masked
                continue
            parts = name.split("/")
            at = next((at for at in range(len(parts)) if "/".join(parts[at:]) in old), None)
            of = None if at is None or (leaf.shape == () and "count" in parts[-1]) else old["/".join(parts[at:])]
            above = [part for part in parts[:at] if part in ("mu", "nu", "v_row", "v_col", "v", "trace", "ema")]
            key = (above[-1] if above and not name.startswith(root) else "parameter", of) if of else parts[-1]
            number = self._numbers.setdefault(key, len(self._numbers) + 1)
            leaves[name + end] = np.full(leaf.shape, number, leaf.dtype)
        return leaves


def follow(old, new, shapes, rules):
    names = {parameter(old, path): parameter(new, renamed(path, rules)) for path in shapes}
    return tr.FollowOptimizer(tr.Rename([(re.escape(one), other) for one, other in names.items()]))


def values(leaves):
    return sorted(float(np.asarray(leaf).ravel()[0]) for leaf in leaves.values())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("old", STATES)
def test_states_become_those_of_other_loops(old, optimizer):
    """Each optimizer from each state to each other; renamings take turns, and each meets each of the three."""
    truth = Truth()
    targets = [new for new in STATES if "file" not in new]
    first = list(STATES).index(old) + list(OPTIMIZERS).index(optimizer)
    renamings = itertools.islice(itertools.cycle(RENAMINGS), first, None)
    for new, (shapes, rules) in zip(targets, renamings, strict=False):
        source, wanted = truth.state(old, optimizer, shapes, {}), truth.state(new, optimizer, shapes, rules)
        result, diagnostics = run(follow(old, new, shapes, rules), source, wanted)
        assert diagnostics.problems == [] and diagnostics.warnings == []
        case = f"{new}: {rules}"
        wrong = [name for name, leaf in wanted.items() if name in result and not np.array_equal(result[name], leaf)]
        assert wrong == [], case
        # A plain Optax state has no step of its own, and T5X's wrapper has another one.
        found = {name.removesuffix("/value") for name in result}
        missing = {name for name in wanted.keys() - found if "step" not in name.split("/")}
        assert missing == set(), case
        # Without a target nothing is lost either.
        alone, diagnostics = run(follow(old, new, shapes, rules), source)
        assert diagnostics.problems == [] and values(alone) == values(source), case


def test_modules_of_nnx_that_change_places_take_their_moments_along(tmp_path):
    truth = Truth()
    shapes, rules = PLAIN, {"enc/0/(.*)": r"enc/1/\1", "enc/1/(.*)": r"enc/0/\1"}
    source, wanted = (truth.state("nnx in a file", "adam", shapes, one) for one in ({}, rules))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", unflatten(source))
    params = unflatten({path: jnp.zeros(shape) for path, shape in shapes.items()})
    target = nnx.eval_shape(lambda: with_nnx(params, optax.adam(1e-3)))
    for new in ("nnx", "nnx in a file"):
        transforms = follow("nnx in a file", new, shapes, rules)
        restored = named_leaves(ot.restore(tmp_path / "state", target, transforms))
        for name, leaf in wanted.items():
            np.testing.assert_array_equal(restored[name.removesuffix("/value")], leaf, err_msg=name)


def test_slots_of_a_bundle_are_moments():
    leaves = {"enc/w": (8, 12), "enc/w_slot_vr": (8,), "enc/w_slot_vc": (12,), "b": (8,), "b_slot_v": (8,)}
    source = {name: np.full(shape, number) for number, (name, shape) in enumerate(leaves.items())}
    result, diagnostics = run(tr.FollowOptimizer(tr.Rename([("enc/(.*)", r"dec/\1"), ("b", "c")])), source)
    assert diagnostics.problems == [] and len(result) == len(source)
    for name, leaf in source.items():
        np.testing.assert_array_equal(result[re.sub("^b", "c", name.replace("enc", "dec"))], leaf)


def test_slots_that_cannot_follow_are_named_in_a_warning_without_a_target():
    source = {"params/w": np.ones((2, 3)), "opt_state/0/mu/w": np.ones((2, 3)), "opt_state/0/nu/w": np.ones((2, 3))}
    result, diagnostics = run(tr.Affine("params/w", 2.0), source)
    assert result.keys() == {"params/w"} and diagnostics.lost.keys() == {"opt_state/0/mu/w", "opt_state/0/nu/w"}
    (warning,) = diagnostics.warnings
    assert "2 leaves of the optimizer cannot follow" in warning and "computed anew" in warning


def test_a_masked_number_by_itself_has_its_moments():
    """Numbers in a tree of parameters only, beside fields and hyperparameters with the name of such a number."""
    source = {"params/scale": np.float32(1), "params/w": np.ones(2), "opt_state/b/scale": np.float32(4)}
    source |= {f"opt_state/b/{name}": np.float32(5) for name in ("best_value", "hyperparams/scale")}
    moments = {"opt_state/a/mu/w": np.ones(2), "opt_state/b/inner_state/mu/scale": np.float32(2)}
    result, _ = run(tr.FollowOptimizer(tr.Rename([("params/scale", "params/temperature")])), {**source, **moments})
    assert result.keys() - source.keys() == {
        *("params/temperature", "opt_state/a/mu/w", "opt_state/b/inner_state/mu/temperature")
    }
    assert {"opt_state/b/scale", "opt_state/b/hyperparams/scale"} <= result.keys()
