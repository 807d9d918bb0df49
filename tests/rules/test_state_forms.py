"""Train states of any form under other names: each leaf is right, or a problem says that it is not there."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax.serialization import to_state_dict

import orbax_t5x as ot
from orbax_t5x.rules.finding import find_rules
from orbax_t5x.testing.transform_suite import as_numpy
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.run import run_and_place
from orbax_t5x.trees.flat import flatten, unflatten

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")
OPTIMIZERS = {
    "adam": lambda: optax.adam(0.1),
    "chain": lambda: optax.chain(optax.clip(1.0), optax.adamw(optax.linear_schedule(0.1, 0.01, 5))),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2, momentum=0.9),
    "masked": lambda: optax.masked(optax.adam(0.1), lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
    "several": lambda: optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1, momentum=0.9)},
        lambda tree: jax.tree.map(lambda x: "ab"[x.ndim % 2], tree),
    ),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
}
# Root of parameters, and the optimizer's; a root between kind and parameter; an ending of all names.
FORMS = {
    "linen": ("params/", "opt_state/", "", ""),
    "nnx": ("model/", "opt/opt_state/", "", "/value"),
    "maxtext": ("params/params/", "opt_state/", "params/", ""),
    "plain": ("params/", "opt/", "", ""),
    "tuple": ("0/", "1/", "", ""),
}
SHAPES = {
    "dense/kernel": (4, 4),
    "head/kernel": (4, 4),
    "mlp/wi/kernel": (4, 6),
    "mlp/wi/bias": (6,),
    "norm/scale": (4,),
}
RENAMINGS = {
    "two change places": {"dense/kernel": "head/kernel", "head/kernel": "dense/kernel"},
    "a module": {name: name.replace("mlp", "ffn") for name in SHAPES},
    "below another": {name: f"inner/{name}" for name in SHAPES},
    "none": {},
}


def state(form, make, params):
    root, of_optimizer, inner, ending = FORMS[form]
    tree: Any = unflatten({inner + name: value for name, value in params.items()})
    slots = make().init(tree)
    _, slots = make().update(tree, slots, tree)
    found = {root + name: value for name, value in params.items()}
    found |= {of_optimizer + name: np.asarray(value) for name, value in flatten(to_state_dict(slots)).items()}
    return {name + ending: value for name, value in found.items()}


def assert_right(transforms, source, target, among, *, is_whole):
    """Each leaf has its values; what is missing in a result, a plan lists as missing."""
    diagnostics = Diagnostics()
    result = run_and_place(transforms, source, among, diagnostics=diagnostics)
    assert not diagnostics.problems
    assert not is_whole or result.keys() == target.keys()
    for name in target.keys() & result.keys():
        np.testing.assert_allclose(as_numpy(result[name]), target[name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("old", FORMS)
def test_moments_follow_in_states_of_any_form(old, optimizer):
    """With and without a target; into another form where the target shows it.

    Rules are found into every second other form: a test below finds them into each.
    """
    make = OPTIMIZERS[optimizer]
    params = {name: np.random.default_rng(at).normal(size=SHAPES[name]) for at, name in enumerate(SHAPES)}
    params = {name: value.astype(np.float32) for name, value in params.items()}
    source = state(old, make, params)
    for renaming, names in RENAMINGS.items():
        for at, new in enumerate(FORMS if renaming == "a module" else (old,)):
            target = state(new, make, {names.get(name, name): value for name, value in params.items()})
            ours, theirs = FORMS[old], FORMS[new]
            pairs = [(ours[0] + n + ours[3], theirs[0] + names.get(n, n) + theirs[3]) for n in SHAPES]
            rename = ot.transforms.Rename([pair for pair in pairs if pair[0] != pair[1]])
            assert_right([ot.transforms.FollowOptimizer(rename)], source, target, target, is_whole=new == old)
            if new == old:
                assert_right([ot.transforms.FollowOptimizer(rename)], source, target, {}, is_whole=True)
            if renaming != "two change places" and (new == old or (at + list(OPTIMIZERS).index(optimizer)) % 2):
                assert_right(find_rules(source, target).parts, source, target, target, is_whole=False)


# Names that packs know: nothing but roots and endings differ.
KNOWN = {
    "token_embedder/embedding": (9, 4),
    "decoder/layers_0/mlp/wo/kernel": (4, 4),
    "decoder/decoder_norm/scale": (4,),
}


@pytest.mark.parametrize("old", FORMS)
def test_auto_finds_every_leaf_of_a_known_model_in_states_of_other_forms(old):
    params = {name: np.random.default_rng(at).normal(size=shape) for at, (name, shape) in enumerate(KNOWN.items())}
    params = {name: value.astype(np.float32) for name, value in params.items()}
    source = {**state(old, OPTIMIZERS["adam"], params), f"step{FORMS[old][3]}": np.int32(2)}
    for new in FORMS:
        target = {**state(new, OPTIMIZERS["adam"], params), f"step{FORMS[new][3]}": np.int32(2)}
        found = find_rules(source, target)
        assert found.why.keys() == target.keys()
        assert_right(found.parts, source, target, target, is_whole=True)
