"""What a restore says of arguments that are no transforms, and of functions that several leaves share."""

import flax.linen
import jax
import numpy as np
import pytest
import safetensors.numpy

import orbax_t5x as ot


@pytest.fixture
def path(tmp_path):
    safetensors.numpy.save_file({"a": np.arange(8, dtype=np.float32)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


TARGET = {"a": jax.ShapeDtypeStruct((8,), np.float32)}


@pytest.mark.parametrize(
    "transforms, text",
    [
        ("foo", "transforms='foo' is text; pass 'auto'"),
        ("hf_t5_to_t5x", r"is text; pass ot\.rules\.hf_t5_to_t5x\(\)$"),
        (["Translate"], r"'Translate' is no transform; pass ot\.transforms\.Translate\("),
        (["auto", ot.transforms.Drop(["b"])], r"'auto' stands alone, or is a source's: .* ot\.Source\(path, 'auto'\)"),
        (ot.rules.mesh_tf_to_t5x, r"mesh_tf_to_t5x is a function .* makes: ot\.rules\.mesh_tf_to_t5x\(\)$"),
        ([ot.rules.t5_minimal_to_scanned], r"makes: ot\.rules\.t5_minimal_to_scanned\(num_heads=…, head_dim=…\)$"),
        (ot.transforms.Translate, r"Translate is a class; pass an instance of it: Translate\("),
        ([ot.transforms.Intersect], r"Intersect is a class"),
        ([("a", "b")], r"\('a', 'b'\) is no transform"),
    ],
)
def test_what_is_no_transform_is_said_plainly(path, transforms, text):
    with pytest.raises(TypeError, match=text):
        ot.plan_restore(path, TARGET, transforms)


def test_a_model_is_no_target(path):
    for function in (flax.linen.Dense(3), flax.linen.Dense(3).init):
        with pytest.raises(ot.RestorePlanError) as caught:
            ot.plan_restore(path, {"a": function})
        assert "jax.eval_shape(model.init, …)" in caught.value.problems[0].fix


def test_the_function_of_an_array_that_two_leaves_share_is_called_once(path):
    calls = []

    def get():
        calls.append(None)
        return np.ones(8, np.float32)

    def share(state, target):
        array = ot.LazyThreadPoolArray((8,), np.float32, get)
        return {"a": array, "b": array}

    state = ot.restore(path, {**TARGET, "b": np.zeros(8, np.float32)}, share)
    assert len(calls) == 1
    np.testing.assert_array_equal(state["a"], np.ones(8))
    np.testing.assert_array_equal(state["b"], np.ones(8))


def test_a_checksum_that_nobody_asked_for_is_not_said_to_be_missing(goldens):
    with ot.plan_restore(goldens / "tf_bundle" / "t5_1_1_f32", None).checkpoints[""] as checkpoint:
        plan = ot.plan_restore(checkpoint, None)
        plan.execute(verify="off")
        assert plan.report.verified == plan.report.unverified == plan.report.without_checksum == ()
        plan.execute()
        assert plan.report.verified == tuple(checkpoint.leaves) and plan.report.unverified == ()
