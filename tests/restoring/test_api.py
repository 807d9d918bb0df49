"""What a restore says of arguments that are no transforms, and of functions that several leaves share."""

import re

import flax.linen
import flax.nnx
import jax
import numpy as np
import orbax.checkpoint as ocp
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
        (["auto", ot.transforms.Drop(["b"]), "auto"], "'auto' stands twice in a list"),
        (ot.rules.mesh_tf_to_t5x, r"mesh_tf_to_t5x is a function .* makes: ot\.rules\.mesh_tf_to_t5x\(\)$"),
        ([ot.rules.t5_minimal_to_scanned], r"makes: ot\.rules\.t5_minimal_to_scanned\(num_heads=…, head_dim=…\)$"),
        (ot.transforms.Translate, r"Translate is a class; pass an instance of it: Translate\("),
        ([ot.transforms.Intersect], r"Intersect is a class"),
        ([("a", "b")], r"\('a', 'b'\) is no transform"),
        (5, "transforms is an int; pass a list of transforms"),
        ((one for one in ()), "transforms is a generator; pass a list"),
        ({ot.transforms.Translate()}, "transforms is a set; pass a list"),
    ],
)
def test_what_is_no_transform_is_said_plainly(path, transforms, text):
    with pytest.raises(TypeError, match=text):
        ot.plan_restore(path, TARGET, transforms)


def test_a_generator_is_no_source_s_transforms_either(path):
    """It could be gone through but once: what was checked would be gone when it is applied."""
    with pytest.raises(TypeError, match="transforms is a generator"):
        ot.Source(path, (one for one in [ot.transforms.Drop(["b"])]))


def ways_to_restore(path, **keywords):
    """Every call that takes the keywords of a restore, as far as it takes these."""
    given = set(keywords)
    ways = [
        lambda: ot.restore(path, TARGET, **keywords),
        lambda: ot.v1.load_and_transform(path, TARGET, **keywords),
        lambda: ot.v1.AbstractTrainState(TARGET, **keywords),
        lambda: ocp.Checkpointer(ot.TrainStateHandler()).restore(
            path.parent, args=ot.args.TrainStateRestore(TARGET, source=path, **keywords)
        ),
    ]
    if not given & {"memory_limit_bytes", "broadcast"}:
        ways.append(lambda: ot.plan_restore(path, TARGET, **keywords))
    else:
        ways.append(lambda: ot.plan_restore(path, TARGET).execute(**keywords))
    if given <= {"is_resuming", "strict", "memory_limit_bytes", "limits"}:
        ways.append(lambda: ot.convert(path, path.parent / "converted", **keywords))
    if given <= {"is_resuming", "memory_limit_bytes", "limits"}:
        ways.append(lambda: ot.diff(path, path, **keywords))
    if given == {"limits"}:
        ways += [lambda: ot.open_checkpoint(path, **keywords), lambda: ot.verify(path, **keywords)]
    return ways


@pytest.mark.parametrize("keyword", ["is_resuming", "strict", "allow_lossy_cast"])
@pytest.mark.parametrize("value", ["no", "False", 0, 1, ()])
def test_a_flag_is_true_or_false(path, keyword, value):
    for restore in ways_to_restore(path, **{keyword: value}):
        with pytest.raises(TypeError, match=rf"{keyword} is True or False, not {re.escape(repr(value))}$"):
            restore()
    for restore in ways_to_restore(path, **{keyword: np.True_}):
        restore()


@pytest.mark.parametrize("value", ["no", "True", 0, 1, None, ()])
def test_broadcast_is_one_of_three(path, value):
    for restore in ways_to_restore(path, broadcast=value):
        with pytest.raises(
            ValueError, match=rf"broadcast must be 'auto', True or False, not {re.escape(repr(value))}$"
        ):
            restore()
    for given in ("auto", True, False, np.True_):
        for restore in ways_to_restore(path, broadcast=given):
            restore()


def test_flags_of_a_conversion_and_of_a_call_by_hand(path, tmp_path):
    with pytest.raises(TypeError, match="overwrite is True or False, not 'no'"):
        ot.convert(path, tmp_path / "converted", overwrite="no")
    with pytest.raises(TypeError, match="is_resuming is True or False, not 'no'"):
        ot.transforms.Drop("a")({"a": np.zeros(2)}, {}, is_resuming="no")
    with pytest.raises(TypeError, match="is_resuming is True or False, not 'no'"):
        ot.state_utils.apply_assignment_map({}, {}, [], is_resuming="no")


@pytest.mark.parametrize("value", ["1G", b"1", True, [1], 1j])
def test_a_memory_limit_is_a_number_of_bytes(path, value):
    for restore in ways_to_restore(path, memory_limit_bytes=value):
        with pytest.raises(TypeError, match=r"memory_limit_bytes is a number of bytes, such as 1 << 30, not"):
            restore()
    for restore in ways_to_restore(path, memory_limit_bytes=float("nan")):
        with pytest.raises(ValueError, match="memory_limit_bytes must be at least 1, not nan"):
            restore()


@pytest.mark.parametrize("value", [{}, {"rank": 3}, 5, ot.Limits])
def test_limits_are_limits(path, value):
    for restore in ways_to_restore(path, limits=value):
        with pytest.raises(TypeError, match=r"limits= is an orbax_t5x\.Limits\(name=bound, …\) or None, not"):
            restore()
    with pytest.raises(TypeError, match=r"Limits\(rank='3'\): a limit is a number"):
        ot.Limits(rank="3")


def test_arguments_in_the_wrong_order_are_named(path):
    target = {"a": jax.ShapeDtypeStruct((8,), np.float32)}
    order = "the checkpoint is the first argument, and the target the second"
    model = flax.linen.Dense(3)  # its `path` is a property that raises
    for source in (target, target["a"], model, {"source": target}):
        with pytest.raises(TypeError, match=f"not (ShapeDtypeStruct|Dense|dict); {order}"):
            ot.restore(source, None)
    for call in (ot.restore, ot.plan_restore):
        with pytest.raises(TypeError, match=f"not the path '.*'; {order}"):
            call(path, path)
    with pytest.raises(TypeError, match=f"not Dense; {order}"):
        ot.open_checkpoint(model)


def test_a_class_is_no_target(path):
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.plan_restore(path, flax.nnx.Linear, "auto")
    (problem,) = caught.value.problems
    assert problem.message == "Linear is a class, and a target has the shapes of what an object of it holds"
    assert "nnx.eval_shape(lambda: Linear(…))" in str(problem.fix)


def test_a_model_is_no_target(path):
    for function in (flax.linen.Dense(3), flax.linen.Dense(3).init):
        with pytest.raises(ot.RestorePlanError) as caught:
            ot.plan_restore(path, {"a": function})
        assert "jax.eval_shape(model.init, …)" in str(caught.value.problems[0].fix)
    for transforms in ((), "auto"):  # nothing else is said of the target, such as that there is none
        with pytest.raises(ot.RestorePlanError) as caught:
            ot.plan_restore(path, flax.linen.Dense(3), transforms)
        (problem,) = caught.value.problems
        assert problem.message == "Dense is a model, and a target has the shapes of what it holds"
        assert str(problem.fix) == "pass jax.eval_shape(model.init, …), with what model.init takes"


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


@pytest.mark.parametrize(
    "value", [[np.ones(1), np.ones(2)], [[1], [1, 2]], object()], ids=["arrays", "lists", "object"]
)
def test_what_is_no_array_in_the_state_dict_is_a_problem(path, value):
    def put(state, target):
        return {"a": state["a"], "w": value}

    for restore in (
        lambda: ot.restore(path, None, put),
        lambda: ot.restore(path, {**TARGET, "w": np.zeros(2)}, put),
        lambda: ot.convert(path, path.parent / "converted", put),
        lambda: ot.diff(path, path, put),
    ):
        with pytest.raises(ot.RestorePlanError, match=r"no array|not an array") as caught:
            restore()
        assert [(problem.kind, problem.leaf) for problem in caught.value.problems] == [("transform", "w")]
        assert caught.value.path == str(path)


def test_text_in_the_state_dict_comes_back_as_numpy(path):
    got = ot.restore(path, None, lambda state, target: {"w": "x", "v": np.array(["y", "zz"])})
    assert got["w"].item() == "x"
    assert got["v"].tolist() == ["y", "zz"]


def test_text_and_numbers_are_told_apart_without_proposing_a_cast(tmp_path):
    tree = {"number": np.int64(3), "text": "three"}
    ocp.PyTreeCheckpointer().save(tmp_path / "saved", tree)
    swapped = {"number": "x", "text": np.int64(0)}
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.restore(tmp_path / "saved", swapped)
    found = {problem.leaf: problem for problem in caught.value.problems}
    assert {leaf: problem.kind for leaf, problem in found.items()} == {"number": "dtype", "text": "dtype"}
    assert found["number"].message == "the checkpoint has dtype int64, the target text"
    assert str(found["number"].fix) == "give the target dtype int64 there"
    assert found["text"].message == "the checkpoint has text, the target dtype int64"
    assert str(found["text"].fix) == "give the target text there, such as an empty str"
    # Both fixes together are the tree that was saved.
    assert ot.restore(tmp_path / "saved", {"number": np.int64(0), "text": ""}) == tree
    with pytest.raises(ot.RestorePlanError) as caught:
        ot.restore(tmp_path / "saved", {**tree, "new": "x"}, fallback={"new": np.int64(3)})
    assert [str(problem.fix) for problem in caught.value.problems] == ["give the fallback text there"]


@pytest.mark.slow
def test_auto_that_finds_nothing_names_the_checkpoint(goldens, path):
    bundle = goldens / "tf_bundle" / "t5_1_1_f32"
    for target in ({"q": jax.ShapeDtypeStruct((3,), np.float32)}, None):
        for source in (bundle, {"one": ot.Source(bundle, "auto"), "two": path}):
            with pytest.raises(ot.RestorePlanError, match="transforms='auto'") as caught:
                ot.plan_restore(source, target, "auto" if source is bundle else ())
            assert str(bundle) in str(caught.value.path)


def test_a_read_records_the_metrics_of_orbax(tmp_path):
    """Names and amounts are stock Orbax's for the same item."""
    found = []
    jax.monitoring.register_event_listener(lambda name, **_: found.append((name, None)))
    jax.monitoring.register_scalar_listener(lambda name, value, **_: found.append((name, value)))
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: found.append((name, None)))
    names = ("/jax/orbax/read/start", "/jax/orbax/read/success", "/jax/orbax/read/total_duration_secs")
    size, speed = "/jax/checkpoint/read/gbytes", "/jax/checkpoint/read/gbytes_per_sec"
    tree = {"a": np.ones((64, 4), np.float32), "b": np.zeros(3, np.float32)}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "item", tree)
        recorded = []
        for read in (lambda: checkpointer.restore(tmp_path / "item"), lambda: ot.restore(tmp_path / "item", tree)):
            found.clear()
            read()
            recorded.append({name: value for name, value in found if name in (*names, size, speed)})
    stock, ours = recorded
    assert ours.keys() == stock.keys() == {*names, size, speed}
    assert ours[size] == stock[size] > 0 and ours[speed] > 0
