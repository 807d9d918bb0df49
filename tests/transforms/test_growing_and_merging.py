"""Vocabularies that grow, parts that are taken and adapters that are merged, through `ot.restore`."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from orbax_t5x import transforms as tr
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.trees.flat import flatten, unflatten
from tests.conftest import GOLDENS

BUNDLE = GOLDENS / "tf_bundle" / "t5_1_1_f32"
EMBEDDING = "target/token_embedder/embedding"
OLD, NEW, WIDTH = 100, 112, 24
RNG = np.random.default_rng(0)
WEIGHTS = {"emb": RNG.normal(size=(OLD, WIDTH)).astype("float32"), "bias": RNG.normal(size=6).astype("float32")}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("grow") / "old"
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, {"params": WEIGHTS})
    return path


ROWS = P("x")


def place(shape, dtype="float32", spec=ROWS):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def init():
    keys = jax.random.split(jax.random.key(1))
    return {"params": {"emb": jax.random.normal(keys[0], (NEW, WIDTH)), "bias": jax.random.normal(keys[1], (6,))}}


FALLBACKS = {
    "function": lambda: init,
    "arrays": init,
    "numpy": lambda: jax.tree.map(np.asarray, init()),
    "state dict": lambda: {"params": {"emb": np.asarray(init()["params"]["emb"])}},
}
GROW = tr.Pad(".*/emb", (NEW, None), tr.FALLBACK)


@pytest.mark.slow
@pytest.mark.parametrize("name", FALLBACKS)
@pytest.mark.parametrize("spec", [P("x"), P(None, "y"), P("x", "y"), P()], ids=str)
def test_new_rows_come_from_the_fallback(checkpoint, name, spec):
    """Against rows put together by NumPy; of the checkpoint only the old rows are read, each once."""
    target = {"params": {"emb": place((NEW, WIDTH), spec=spec), "bias": place((6,), spec=P())}}
    plan = ot.plan_restore(checkpoint, target, [GROW], fallback=FALLBACKS[name]())
    entry = next(entry for entry in plan.entries if entry.name == "params/emb")
    assert (entry.action, entry.sources, entry.how) == (
        "read",
        ("params/emb",),
        f"pad to ({NEW}, {WIDTH}) with the fallback",
    )
    assert plan.bytes_to_read == 4 * (OLD * WIDTH + 6)
    for _ in range(2):
        state = plan.execute()
        expected = np.concatenate([WEIGHTS["emb"], np.asarray(init()["params"]["emb"])[OLD:]])
        np.testing.assert_array_equal(state["params"]["emb"], expected)
        np.testing.assert_array_equal(state["params"]["bias"], WEIGHTS["bias"])
        assert state["params"]["emb"].sharding == target["params"]["emb"].sharding
        assert plan.report.bytes_read == plan.bytes_to_read


@pytest.mark.slow
def test_a_vocabulary_of_a_bundle_grows_with_its_optimizer():
    """The embedding's rows from a traced function, its Adafactor slots with zeros, all else as it is without."""
    translated = flatten(ot.restore(BUNDLE, None, [tr.Translate()]))
    rows, width = translated[EMBEDDING].shape
    vocabulary = tr.FollowOptimizer(tr.Pad(EMBEDDING, (rows + 28, None), tr.FALLBACK))
    slots = [name for name in translated if name.startswith("state/param_states/token_embedder/")]
    target = {
        name: jax.ShapeDtypeStruct(
            tuple(rows + 28 if size == rows and name in (*slots, EMBEDDING) else size for size in leaf.shape),
            np.int32 if leaf.dtype == np.int64 else leaf.dtype,
        )
        for name, leaf in translated.items()
    }
    target[EMBEDDING] = place((rows + 28, width))

    def fresh():
        return unflatten({EMBEDDING: jnp.full((rows + 28, width), 7.0)})

    grown = flatten(ot.restore(BUNDLE, unflatten(target), [tr.Translate(), vocabulary], fallback=fresh))
    for name, leaf in grown.items():
        old = translated[name]
        filled = np.full(leaf.shape, 7 if name == EMBEDDING else 0, old.dtype)
        filled[tuple(map(slice, old.shape))] = old
        np.testing.assert_array_equal(leaf, filled, err_msg=name)
    assert any(grown[name].shape != translated[name].shape for name in slots)


MOVES = {
    "renamed": ([tr.Rename([("params/emb", "params/table")])], "params/table", lambda a: a),
    "transposed": ([tr.Transpose("params/emb"), tr.Rename([("params/emb", "lm/head")])], "lm/head", np.transpose),
    "heads": ([tr.Reshape("params/emb", (NEW, 4, 6))], "params/emb", lambda a: a.reshape(NEW, 4, 6)),
    "cast": ([tr.Cast("params/emb", "bfloat16")], "params/emb", lambda a: a),
    "part": ([tr.Slice("params/emb", np.s_[90:, :3])], "params/emb", lambda a: a[90:, :3]),
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", MOVES)
def test_the_place_is_that_in_the_leaf_of_the_target(checkpoint, name, traced):
    more, leaf, move = MOVES[name]
    dtype = ml_dtypes.bfloat16 if name == "cast" else np.float32
    unknown = move(np.pad(WEIGHTS["emb"], [(0, NEW - OLD), (0, 0)], constant_values=np.nan)).astype(dtype)
    fresh = (np.arange(unknown.size).reshape(unknown.shape) + 0.5).astype(dtype)
    target = unflatten({leaf: jax.ShapeDtypeStruct(unknown.shape, dtype), "params/bias": ...})
    values = unflatten({leaf: fresh})
    fallback = (lambda: jax.tree.map(jnp.asarray, values)) if traced else values
    state = flatten(ot.restore(checkpoint, target, [GROW, *more], fallback=fallback))
    found = np.asarray(state[leaf])
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.where(np.isnan(unknown), fresh, unknown))


@pytest.mark.slow
def test_hosts_and_other_dtypes(checkpoint):
    """A traced fallback has 32 bits; what stays on the host is converted there. Old rows are cast, new ones are not."""
    target = {"params": {"emb": np.zeros((NEW, WIDTH)), "bias": ...}}
    state = ot.restore(checkpoint, target, [GROW], fallback=init)
    fresh = np.asarray(init()["params"]["emb"])
    np.testing.assert_array_equal(state["params"]["emb"][:OLD], WEIGHTS["emb"].astype(np.float64))
    np.testing.assert_array_equal(state["params"]["emb"][OLD:], fresh[OLD:].astype(np.float64))
    target = {"params": {"emb": place((NEW, WIDTH), "bfloat16"), "bias": ...}}
    narrow = {"params": {"emb": fresh.astype("bfloat16")}}
    state = ot.restore(checkpoint, target, [GROW], fallback=narrow, allow_lossy_cast=True)
    np.testing.assert_array_equal(np.asarray(state["params"]["emb"])[OLD:], narrow["params"]["emb"][OLD:])


@pytest.mark.slow
def test_new_rows_of_another_checkpoint_are_read_alone(checkpoint, tmp_path):
    fresh = np.asarray(init()["params"]["emb"])
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "new", {"params": {"emb": fresh}})
    target = {"params": {"emb": jax.ShapeDtypeStruct((NEW, WIDTH), "float32"), "bias": ...}}
    with ot.open_checkpoint(tmp_path / "new") as other:
        plan = ot.plan_restore(checkpoint, target, [GROW], fallback=other.tree())
        state = plan.execute()
    np.testing.assert_array_equal(state["params"]["emb"], np.concatenate([WEIGHTS["emb"], fresh[OLD:]]))
    assert plan.report.bytes_read == plan.bytes_to_read == 4 * NEW * WIDTH


def problems_of(*args, **keywords):
    with pytest.raises(RestorePlanError) as caught:
        ot.plan_restore(*args, **keywords)
    return caught.value.problems


def test_what_is_wrong_with_a_fallback_is_a_problem(checkpoint):
    target = {"params": {"emb": place((NEW, WIDTH)), "bias": ...}}
    (problem,) = problems_of(checkpoint, target, [GROW])
    assert (problem.kind, problem.leaf) == ("fallback", "params/emb") and "no fallback was given" in problem.message
    (problem,) = problems_of(checkpoint, target, [GROW], fallback={"params": {"bias": np.zeros(6)}})
    assert (problem.kind, problem.leaf) == ("fallback", "params/emb") and "has no such leaf" in problem.message
    for fallback in (lambda: {"params": {"emb": jnp.zeros((3, WIDTH))}}, {"params": {"emb": np.zeros((3, WIDTH))}}):
        (problem,) = problems_of(checkpoint, target, [GROW], fallback=fallback)
        assert (problem.kind, problem.leaf) == ("shape", "params/emb") and "(3, 24)" in problem.message
    two = {"a": checkpoint, "b": checkpoint}
    averaged = [GROW, tr.Average({"a": 1, "b": 1})]
    (problem,) = problems_of(two, target, averaged, fallback=init)
    assert (problem.kind, problem.leaf) == ("transform", "params/emb") and "average of 2" in problem.message
    found = problems_of(checkpoint, None, [GROW])
    assert [(problem.kind, problem.leaf) for problem in found] == [("fallback", "params/emb")]


def test_a_shape_that_differs_names_the_transform_that_mends_it(checkpoint):
    def run(shape):
        (problem,) = problems_of(checkpoint, {"params": {"emb": place(shape), "bias": ...}})
        found = re.search(r"ot\.transforms\.(?:Pad|Slice)\(.*?(?:\]\)|value=0\))", str(problem.fix))
        if found is None:
            return str(problem.fix)
        transform = eval(found[0], {"ot": ot, "np": np})
        state = ot.restore(checkpoint, {"params": {"emb": place(shape), "bias": ...}}, [transform])
        return np.asarray(state["params"]["emb"])

    np.testing.assert_array_equal(run((NEW, WIDTH)), np.pad(WEIGHTS["emb"], [(0, NEW - OLD), (0, 0)]))
    np.testing.assert_array_equal(run((96, WIDTH)), WEIGHTS["emb"][:96])
    assert all("the names do not show it" in run(shape) for shape in [(NEW, WIDTH - 2), (OLD * WIDTH,)])


def test_of_a_part_nothing_else_is_read(checkpoint):
    target = {"params": {"emb": place((48, 8)), "bias": ...}}
    plan = ot.plan_restore(checkpoint, target, [tr.Slice("params/emb", np.s_[40:88, ::3])])
    np.testing.assert_array_equal(plan.execute()["params"]["emb"], WEIGHTS["emb"][40:88, ::3])
    # The columns between are in the gaps that readers read over.
    assert 48 * 8 * 4 <= plan.report.bytes_read == plan.bytes_to_read <= 48 * WIDTH * 4


# -- adapters

RANK = 3
KERNELS = {"q": (24, 16), "v": (24, 4, 8), "o": (16, 24)}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A base model, and adapters for two of its three kernels in another checkpoint."""
    root = tmp_path_factory.mktemp("adapted")
    base = {f"params/{n}/kernel": RNG.normal(size=shape).astype("bfloat16") for n, shape in KERNELS.items()}
    lora = {}
    for name in ("q", "v"):
        first, *rest = KERNELS[name]
        lora[f"params/{name}/lora_a"] = RNG.normal(size=(first, RANK)).astype("float32")
        lora[f"params/{name}/lora_b"] = RNG.normal(size=(RANK, *rest)).astype("float32")
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(root / "base", unflatten(base))
        checkpointer.save(root / "lora", unflatten(lora))
    return root, base, lora


MERGE = [
    tr.AddLowRank("base/(.*)/kernel", r"lora/\1/lora_a", r"lora/\1/lora_b", 0.5),
    tr.Rename([("base/(.*)", r"\1")]),
]


@pytest.mark.parametrize("spec", [P("x", "y"), P(None, "y"), P()], ids=str)
def test_adapters_of_a_second_source_are_merged(adapted, spec):
    root, base, lora = adapted
    target = unflatten({name: place(value.shape, "bfloat16", spec) for name, value in base.items()})
    plan = ot.plan_restore({"base": root / "base", "lora": root / "lora"}, target, MERGE)
    state = flatten(plan.execute())
    assert plan.report.bytes_read == plan.bytes_to_read == sum(v.nbytes for v in [*base.values(), *lora.values()])
    for name, value in base.items():
        expected = value.astype(np.float64)
        if not name.startswith("params/o/"):
            down, up = (lora[name.replace("kernel", factor)].astype(np.float64) for factor in ("lora_a", "lora_b"))
            expected += 0.5 * np.tensordot(down, up, 1)
        # Half a unit in the last place of bfloat16: rounded once.
        np.testing.assert_allclose(np.asarray(state[name], np.float64), expected, rtol=2**-8 * 1.01, atol=1e-6)
    entry = next(entry for entry in plan.entries if entry.name == "params/v/kernel")
    assert entry.sources == ("base/params/v/kernel", "lora/params/v/lora_a", "lora/params/v/lora_b")
    assert entry.how == "plus 0.5 times a product of rank 3"
    assert np.array_equal(np.asarray(state["params/o/kernel"]), base["params/o/kernel"])


def test_a_shard_needs_its_rows_and_columns_alone(adapted):
    """What one device of eight asks for: an eighth of the kernel, no whole factor."""
    root, base, _ = adapted
    target = unflatten({name: place(value.shape, "bfloat16", P("x", "y")) for name, value in base.items()})
    plan = ot.plan_restore({"base": root / "base", "lora": root / "lora"}, target, MERGE)
    view = next(entry for entry in plan.entries if entry.name == "params/q/kernel").view
    boxes = {leaf.name.rsplit("/", 1)[1]: box for leaf, box in view.requests(((6, 12), (8, 16)))}
    assert boxes == {"kernel": ((6, 12), (8, 16)), "lora_a": ((6, 12), (0, RANK)), "lora_b": ((0, RANK), (8, 16))}


def test_adapters_without_a_kernel_are_left_over(adapted):
    root, base, _ = adapted
    target = unflatten({name: place(value.shape, "bfloat16", P()) for name, value in base.items()})
    only_q = [tr.AddLowRank("base/(.*/q)/kernel", r"lora/\1/lora_a", r"lora/\1/lora_b", 0.5), MERGE[1]]
    (problem,) = problems_of({"base": root / "base", "lora": root / "lora"}, target, only_q)
    assert problem.kind == "leftover" and "lora/params/v/lora_a" in problem.message


def test_a_bundle_and_adapters_are_one_restore(tmp_path):
    """A translated bundle, adapters of every query, and rows for new tokens: strict, each stored byte read once."""
    translated = flatten(ot.restore(BUNDLE, None, [tr.Translate(), tr.Keep("target/.*")]))
    queries = [name.removesuffix("/kernel") for name in translated if re.fullmatch(r"target/.*/query/kernel", name)]
    lora = {}
    for query in queries:
        rows, columns = translated[f"{query}/kernel"].shape
        lora[f"{query}/down"] = RNG.normal(size=(rows, 2)).astype("float32")
        lora[f"{query}/up"] = RNG.normal(size=(2, columns)).astype("float32")
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "lora", unflatten(lora))
    rows, width = translated[EMBEDDING].shape
    shapes = {name: value.shape for name, value in translated.items()} | {EMBEDDING: (rows + 8, width)}
    target = unflatten({name: place(shape, spec=P(*(None, "y")[: len(shape)])) for name, shape in shapes.items()})
    plan = ot.plan_restore(
        {"base": ot.Source(BUNDLE, [tr.Translate(), tr.Keep("target/.*")]), "lora": tmp_path / "lora"},
        target,
        [
            tr.AddLowRank("base/(.*)/kernel", r"lora/\1/down", r"lora/\1/up", 2),
            tr.Overlay(["base"]),
            tr.Pad(EMBEDDING, (rows + 8, None), tr.FALLBACK),
        ],
        fallback={EMBEDDING: np.ones((rows + 8, width), np.float32)},
    )
    state = flatten(plan.execute())
    assert len(queries) > 2 and sorted(state) == sorted(translated)
    for name, value in translated.items():
        expected = value
        if name == EMBEDDING:
            expected = np.pad(value, [(0, 8), (0, 0)], constant_values=1)
        elif name.removesuffix("/kernel") in queries:
            query = name.removesuffix("/kernel")
            expected = value + 2 * lora[f"{query}/down"] @ lora[f"{query}/up"]
        np.testing.assert_allclose(state[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)
    stored = [*translated.values(), *lora.values()]
    assert plan.report.bytes_read == plan.bytes_to_read == sum(value.nbytes for value in stored)
