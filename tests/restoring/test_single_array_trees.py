"""A target or a checkpoint that is a single array, which has no name."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.experimental import v1

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.trees.flat import flatten

VALUES = np.arange(4, dtype=np.float32)
ALONE = jax.ShapeDtypeStruct((4,), np.float32)


@pytest.fixture
def alone(tmp_path):
    """A checkpoint that stock Orbax wrote of an array."""
    v1.save(tmp_path / "alone", jnp.asarray(VALUES))
    return tmp_path / "alone" / "state"


@pytest.fixture
def named(tmp_path):
    """A checkpoint of one array with a name."""
    v1.save(tmp_path / "named", {"w": VALUES})
    return tmp_path / "named" / "state"


def mapping(problem):
    """The transform that a fix says to map with."""
    (transform,) = problem.fix.transforms
    return transform


def load_with_v1(path, target):
    with ot.v1.context():
        return v1.load(path.parent, ot.v1.AbstractTrainState(target))


def restore_with_a_handler(path, target):
    return ocp.Checkpointer(ot.TrainStateHandler()).restore(path, args=ot.args.TrainStateRestore(target))


WAYS = [ot.restore, ot.plan_restore, ot.v1.load_and_transform, load_with_v1, restore_with_a_handler]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("target", [ALONE, np.zeros(4, np.float32), jnp.zeros(4)], ids=["abstract", "numpy", "jax"])
def test_a_target_without_a_name_and_a_checkpoint_with_names_are_a_problem(named, way, target):
    path = named.parent if way is ot.v1.load_and_transform else named
    with pytest.raises(RestorePlanError, match="the target is a single array, which has no name") as caught:
        way(path, target)
    missing, leftover = caught.value.problems
    assert str(named) in str(caught.value.path)
    assert (missing.kind, missing.leaf, leftover.kind, leftover.leaf) == ("missing", "", "leftover", "w")


def test_a_target_with_names_and_a_checkpoint_without_are_a_problem(alone):
    with pytest.raises(RestorePlanError, match="a single array, which has no name") as caught:
        ot.restore(alone, {"w": ALONE})
    missing, leftover = caught.value.problems
    assert (missing.kind, missing.leaf, leftover.kind, leftover.leaf) == ("missing", "w", "leftover", "")
    with pytest.raises(RestorePlanError) as caught:
        ot.restore(alone, {"w": ALONE, "v": ALONE})
    assert [problem.kind for problem in caught.value.problems] == ["missing", "missing", "leftover"]


@pytest.mark.parametrize(
    "target, kind",
    [
        (jax.ShapeDtypeStruct((5,), np.float32), "shape"),
        (jax.ShapeDtypeStruct((4,), np.int32), "dtype"),
        (jax.ShapeDtypeStruct((4,), jnp.bfloat16), "dtype"),
        (3, "shape"),
    ],
)
def test_an_array_alone_that_does_not_fit_is_a_problem(alone, target, kind):
    for strict in (True, False):
        with pytest.raises(RestorePlanError) as caught:
            ot.restore(alone, target, strict=strict)
        assert [(problem.kind, problem.leaf) for problem in caught.value.problems] == [(kind, "")]


def test_no_rule_is_proposed_where_shapes_differ_or_several_leaves_may_be_meant(named, tmp_path):
    v1.save(tmp_path / "several", {"v": VALUES, "w": VALUES})
    for path, target in ((named, jax.ShapeDtypeStruct((5,), np.float32)), (tmp_path / "several" / "state", ALONE)):
        with pytest.raises(RestorePlanError) as caught:
            ot.restore(path, target, strict=False)
        (problem,) = caught.value.problems
        assert problem.leaf == "" and not any(way.transforms or way.arguments for way in problem.fix.ways)


def test_auto_between_an_array_alone_and_names_is_a_problem(named, alone):
    for path, target in ((named, ALONE), (alone, {"w": ALONE})):
        with pytest.raises(RestorePlanError) as caught:
            ot.restore(path, target, "auto")
        assert [problem.kind for problem in caught.value.problems] == ["rule"]
        with ot.open_checkpoint(path) as checkpoint, pytest.raises(RestorePlanError, match="no rule pack leads from"):
            ot.rules.infer(checkpoint, target)
    np.testing.assert_array_equal(ot.restore(alone, ALONE, "auto"), VALUES)


# -- kept alone


def test_an_array_alone_is_in_the_tree_of_a_checkpoint(alone):
    with ot.open_checkpoint(alone) as checkpoint:
        assert flatten(checkpoint.tree()) == dict(checkpoint.leaves)
        np.testing.assert_array_equal(checkpoint.tree()[""], VALUES)


@pytest.mark.parametrize("transforms", [(), ot.transforms.Cast("", "float64")], ids=["as it is", "cast"])
def test_a_conversion_of_an_array_alone_is_one(alone, tmp_path, transforms):
    report = ot.convert(alone, tmp_path / "converted", transforms)
    assert report.leaves == 1
    for read in (ocp.PyTreeCheckpointer().restore, lambda path: ot.restore(path, np.zeros(4))):
        np.testing.assert_array_equal(read(tmp_path / "converted"), VALUES)
    assert ot.verify(tmp_path / "converted").status == "ok"
    assert ot.diff(alone, tmp_path / "converted", transforms).equal


def test_an_array_alone_that_is_transformed_while_saving_is_saved_alone(tmp_path):
    args = ot.args.TrainStateSave(jnp.asarray(VALUES), transforms=[ot.transforms.Cast("", "bfloat16")])
    ocp.Checkpointer(ot.TrainStateHandler()).save(tmp_path / "saved", args=args)
    for read in (ocp.PyTreeCheckpointer().restore, lambda path: ot.restore(path, jnp.zeros(4, jnp.bfloat16))):
        got = read(tmp_path / "saved")
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got, VALUES.astype(jnp.bfloat16))


def test_an_array_alone_among_several_sources_has_its_sources_name(alone, named):
    got = ot.restore({"x": alone, "y": named}, {"x": ALONE, "y": {"w": ALONE}})
    np.testing.assert_array_equal(got["x"], VALUES)
    np.testing.assert_array_equal(got["y"]["w"], VALUES)
    own = {"x": ot.Source(alone, ot.transforms.Cast("", "float64")), "y": named}
    plan = ot.plan_restore(own, {"x": np.zeros(4), "y": {"w": ALONE}})
    assert str(alone) in plan.explain("x") and plan.execute()["x"].dtype == np.float64
    renamed = {"x": ot.Source(alone, ot.transforms.Rename([("", "v")])), "y": named}
    assert sorted(flatten(ot.restore(renamed, None))) == ["x/v", "y/w"]
    with pytest.raises(RestorePlanError, match="source 'x'") as caught:
        ot.restore({"x": ot.Source(alone, ot.transforms.Transpose("", (1,))), "y": named}, None)
    assert caught.value.problems[0].leaf == "x"
