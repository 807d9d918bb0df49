"""Packs into every kind of target: below any prefix, into T5X's, Flax's and NNX's states; found by infer and by hand.

The parameters are those that T5X's importer made of the bundle; other layouts of them are by the table of `t5_model`.
"""

from functools import cache

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x import transforms as tr
from orbax_t5x.adafactor import Adafactor, standard_logical_factor_rules
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.optimizers import adamw
from orbax_t5x.testing.transform_suite import as_numpy, assert_same, run
from orbax_t5x.trees.named_leaves import named_leaves
from tests.support.memory_checkpoint import checkpoint
from tests.support.prefixed_models import (
    BUNDLE,
    CONFIGS,
    T5X_OPTIMIZERS,
    TREES,
    check_parameters,
    parameters,
    source,
    t5x_state,
    target_of,
)

HEADS = (4, 4)


SOURCES = ("bundle", "hugging face", "hugging face flax", *CONFIGS)


@cache
def tree(kind, layout):
    return target_of(kind, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", CONFIGS)
@pytest.mark.parametrize("kind", [*TREES, *T5X_OPTIMIZERS])
def test_what_infer_finds_works_on_that_very_target(kind, layout):
    """Each kind of target meets each source in one layout, and each layout each source in some kinds."""
    target, prefix = tree(kind, layout)
    first = [*TREES, *T5X_OPTIMIZERS].index(kind) + 2 * list(CONFIGS).index(layout)
    for name in (SOURCES[first % 6], SOURCES[(first + 3) % 6]):
        with source(name) as opened:
            pack = rules.infer(opened, target)
            # The target's own values are what no checkpoint of these has: moments, and what else is in the tree.
            plan = ot.plan_restore(opened, target, pack, fallback=target)
            check_parameters(plan, prefix, layout)
            missing = {entry.name for entry in plan.entries if entry.action == "fallback"}
            assert not any(entry.startswith(prefix + "encoder/") for entry in missing), (name, missing)
            # What infer found is what its parts do.
            by_parts = ot.plan_restore(opened, target, pack.parts, fallback=target)
            check_parameters(by_parts, prefix, layout)


# Adafactor keeps the second moment of small parameters whole.
SLOTS = "state/param_states/.*"
BY_HAND = {
    "mesh_tf_to_t5x": lambda: [rules.mesh_tf_to_t5x(), rules.t5_minimal_to_scanned(*HEADS)],
    "Translate": lambda: [tr.Translate(), rules.t5_minimal_to_scanned(*HEADS)],
}


@pytest.mark.slow
@pytest.mark.parametrize("chain", BY_HAND)
def test_packs_by_hand_do_what_infer_does_into_adafactors_state(chain):
    target = t5x_state("scanned", Adafactor(1e-3, logical_factor_rules=standard_logical_factor_rules()))
    with ot.open_checkpoint(BUNDLE) as opened:
        expected = ot.plan_restore(opened, target, rules.infer(opened, target), fallback=target, fallback_for=[SLOTS])
        plan = ot.plan_restore(opened, target, BY_HAND[chain](), fallback=target, fallback_for=[SLOTS])
        assert [entry.name for entry in plan.entries] == [entry.name for entry in expected.entries]
        for entry, other in zip(plan.entries, expected.entries, strict=True):
            assert (entry.action, entry.fidelity, entry.how) == (other.action, other.fidelity, other.how), entry.name
        check_parameters(plan, "target/", "scanned")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["minimal", "scanned"])
def test_the_momenta_of_t5x_go_to_flax_and_back(layout):
    """T5X's own optax state below `state/param_states` has the names of Flax's `opt_state`."""
    t5x = t5x_state("minimal", adamw(1e-3))
    rng = np.random.default_rng(0)
    values = {
        name: rng.standard_normal(leaf.shape).astype(leaf.dtype) if leaf.ndim else np.asarray(7, leaf.dtype)
        for name, leaf in named_leaves(t5x).items()
    }
    target, _ = tree("flax train state", layout)
    opened = checkpoint(values)
    plan = ot.plan_restore(opened, target, rules.infer(opened, target))
    got = {entry.name: entry.view.get() for entry in plan.entries}
    assert got["step"] == 7 and got["opt_state/0/count"] == 7
    to_scanned = rules.t5_minimal_to_scanned(*HEADS)
    for root, ours in (("target/", "params/"), ("state/param_states/0/mu/", "opt_state/0/mu/")):
        below = {f"params/{name.removeprefix(root)}": value for name, value in values.items() if name.startswith(root)}
        expected = below if layout == "minimal" else run(to_scanned, below)[0]
        assert_same(
            {name.removeprefix(ours): value for name, value in got.items() if name.startswith(ours)},
            {name.removeprefix("params/"): as_numpy(value) for name, value in expected.items()},
        )
    back = ot.plan_restore(checkpoint(got), t5x, rules.infer(got, t5x))
    assert_same({entry.name: entry.view.get() for entry in back.entries}, values)


# -- MaxText


@pytest.mark.parametrize("layout", ["minimal", "scanned"])
def test_what_infer_finds_for_a_bundle_has_no_way_back(layout):
    """Neither alone, nor before another pack, and in each case before what drops the optimizer's leaves."""
    target = {f"target/{name}": value for name, value in parameters(layout).items()}
    pack = rules.infer(source("bundle"), target)
    assert any(isinstance(part, tr.Drop) for part in pack.parts)
    with pytest.raises(RestorePlanError, match=r"mesh_tf_to_t5x\(\) has no inverse"):
        pack.inverse()


@pytest.mark.slow
def test_the_way_back_of_what_infer_drops_is_that_of_the_rest():
    target = {f"target/{name}": value for name, value in parameters("minimal").items()}
    scanned = {f"target/{name}": value for name, value in parameters("scanned").items()}
    pack = rules.infer(checkpoint(scanned | {"state/step": np.int32(3)}), target)
    assert any(isinstance(part, tr.Drop) for part in pack.parts)
    result, _ = run(pack.inverse(), target, scanned)
    assert_same({name: as_numpy(value) for name, value in result.items()}, scanned)
