"""One chain of the transforms of each source, and of the rules that are found."""

import jax
import numpy as np

import orbax_t5x as ot
from orbax_t5x.provenance.chains import record_rules
from orbax_t5x.testing.transform_suite import as_numpy, run
from orbax_t5x.trees.flat import flatten
from tests.support import t5_model
from tests.support.memory_checkpoint import checkpoint
from tests.support.pytrees import assert_trees_equal

T, R = ot.transforms, ot.rules
SWAP = T.Rename([("a", "b"), ("b", "a")])


def double(state_dict, target_state_dict):
    """A function of T5X's protocol, of this module."""
    assert set(target_state_dict) == {"x", "y"}
    return {name: np.asarray(leaf) * 2 for name, leaf in state_dict.items()}


def arrays(**values):
    return checkpoint({name: np.full((2,), value, np.float32) for name, value in values.items()})


def test_each_of_several_sources_has_its_own_transforms():
    both = {"one": ot.Source(arrays(a=1, b=2), [SWAP]), "two": ot.Source(arrays(a=3), double), "three": arrays(a=4)}
    target = {"x": np.zeros(2, np.float32), "y": np.zeros(2, np.float32)}
    plan = ot.plan_restore(both, target, T.AssignmentMap([("x", "one/a"), ("y", "two/a")]), strict=False)
    got = plan.execute()
    assert (got["x"][0], got["y"][0]) == (2, 6)
    everything = ot.restore({**both, "two": arrays(a=3)}, None)
    assert {name: leaf[0] for name, leaf in flatten(everything).items()} == {
        "one/a": 2,
        "one/b": 1,
        "two/a": 3,
        "three/a": 4,
    }
    (entry,) = plan.provenance
    assert entry["source"] == dict.fromkeys(both, "/memory")
    assert entry["transforms"][0].startswith("one: Rename")
    assert any("double" in rule for rule in entry["transforms"])


def test_a_sources_transforms_count_in_the_digest():
    def digest(**sources):
        plan = ot.plan_restore(sources, None)
        return plan.provenance[0]["digest"]

    swapped, kept = ot.Source(arrays(a=1, b=2), SWAP), ot.Source(arrays(a=1, b=2), T.Keep(["a"]))
    plain = arrays(a=1, b=2)
    digests = [
        digest(x=swapped, y=plain),
        digest(x=plain, y=swapped),
        digest(x=kept, y=plain),
        digest(x=plain, y=plain),
    ]
    assert len(set(digests)) == 4 and digests[-1] is None and None not in digests[:-1]
    assert digest(x=swapped, y=plain) == digests[0]
    assert digest(x=ot.Source(plain, lambda state, target: state), y=plain) is None
    only = ot.plan_restore({"x": kept, "y": plain}, None)
    assert record_rules([T.Keep("a")])[0].only_selects and only.provenance[0]["transforms"]


def test_a_pack_after_a_sources_own_transforms():
    """ "auto" sees what the source's transforms leave."""
    source, _ = run(
        R.hf_t5_to_t5x().inverse(), {f"target/{n}": v for n, v in flatten(t5_model.init()[1]["params"]).items()}
    )
    named = checkpoint({f"model.{name}": as_numpy(value) for name, value in source.items()})
    target = {"params": jax.eval_shape(lambda: t5_model.init()[1]["params"])}
    got = ot.restore(ot.Source(named, [T.Rename([(r"model\.(.*)", r"\1")])]), target, "auto")
    assert_trees_equal(got["params"], t5_model.init()[1]["params"])


def test_a_function_that_no_module_has_is_a_transform():
    """As one that `exec` made is."""
    names = {"np": np}
    exec("def double(state, target, *, is_resuming=False):\n    return {'x': np.asarray(state['x']) * 2}", names)
    np.testing.assert_array_equal(ot.restore(arrays(x=1), {"x": np.zeros(2, np.float32)}, names["double"])["x"], [2, 2])
