"""Orbax v1's free functions inside `ot.v1.context()`: what they save and load, and what they refuse."""

import asyncio
import json

import flax.linen as nn
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError, RestorePlanError
from orbax_t5x.restoring.plan import RestorePlan
from tests.support.orbax_v1 import RULES, abstract_of, assert_same, flip_a_byte
from tests.support.train_states import inference_state, sharded, training_state

# Stock Orbax, where it loads without a target.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning")


def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


def placed(value, *spec):
    return jax.device_put(value, NamedSharding(mesh(), P(*spec)))


def plain_tree():
    return {
        "w": placed(jnp.arange(64, dtype=jnp.float32).reshape(8, 8), "x", "y"),
        "replicated": placed(jnp.arange(6, dtype=jnp.bfloat16)),
        "nested": [{"host": np.arange(3)}, None, (2.5, True), {}],
        "key": jax.random.key(7),
        "raw": jax.random.PRNGKey(3),
        "step": 3,
        "text": "t5",
    }


def flax_state():
    model = nn.Dense(4)
    params = model.init(jax.random.key(0), jnp.ones((2, 8)))["params"]
    tx = optax.chain(optax.clip(1.0), optax.masked(optax.adam(1e-3), {"kernel": True, "bias": False}))
    return flax.training.train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)


class TwoLayers(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, inputs):
        return self.norm(self.first(inputs), use_running_average=True)


def nnx_state():
    return nnx.state(TwoLayers(nnx.Rngs(0)))


TREES = {"plain": plain_tree, "flax": flax_state, "nnx": nnx_state, "optax": lambda: flax_state().opt_state}


@pytest.mark.parametrize("make", TREES.values(), ids=TREES.keys())
def test_trees_come_back_as_stock_orbax_loads_them(tmp_path, make):
    tree = make()
    with ot.v1.context():
        ocp.save(tmp_path / "1", tree)
        ours = ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(abstract_of(tree)))
        beside = ocp.load(tmp_path / "1", abstract_of(tree))
    assert_same(ours, tree)
    assert_same(beside, tree)
    assert_same(ocp.load(tmp_path / "1", abstract_of(tree)), tree)
    assert ot.verify(tmp_path / "1").status == "ok"


@pytest.mark.parametrize("make", [training_state, inference_state])
def test_t5x_states_are_written_by_their_state_dict(tmp_path, make):
    state = make()
    with ot.v1.context():
        ocp.save(tmp_path / "1", state)
        target = sharded(state)
        # A T5X state is a target by itself: its names are no pytree's.
        for abstract in (ot.v1.AbstractTrainState(target), target):
            loaded = ocp.load(tmp_path / "1", abstract)
            assert_same(loaded, state)
            assert [leaf.sharding for leaf in jax.tree.leaves(loaded)] == [
                leaf.sharding for leaf in jax.tree.leaves(target)
            ]
    stock = ocp.load(tmp_path / "1")
    assert stock.keys() == state.state_dict().keys()
    jax.tree.map(np.testing.assert_array_equal, stock["target"], state.state_dict()["target"])


def test_what_stock_orbax_saved_is_renamed_and_resharded(tmp_path):
    tree = {"old": placed(jnp.arange(64.0).reshape(8, 8), "x"), "step": 3}
    ocp.save(tmp_path / "1", tree)
    rows = NamedSharding(mesh(), P(None, "y"))
    target = {"params": {"new": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=rows)}, "step": 0}
    rules = [ot.transforms.Rename([("old", "params/new")])]
    with ot.v1.context():
        loaded = ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(target, rules))
    assert loaded["step"] == 3 and loaded["params"]["new"].sharding == rows
    np.testing.assert_array_equal(loaded["params"]["new"], tree["old"])


def test_an_abstract_module_is_a_target(tmp_path):
    module = TwoLayers(nnx.Rngs(0))
    with ot.v1.context():
        ocp.save(tmp_path / "1", nnx.state(module))
        abstract = nnx.eval_shape(lambda: TwoLayers(nnx.Rngs(1)))
        loaded = ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(abstract))
    assert type(loaded) is TwoLayers
    np.testing.assert_array_equal(loaded(jnp.ones((1, 8))), module(jnp.ones((1, 8))))


def test_the_keywords_of_restore(tmp_path):
    tree = {"params": {"w": jnp.arange(8, dtype=jnp.float32)}, "left": np.ones(2)}
    ocp.save(tmp_path / "1", tree)
    told = []
    target = {"params": {"w": jnp.zeros(8), "new": jax.ShapeDtypeStruct((2,), jnp.float32)}, "step": ...}
    abstract = ot.v1.AbstractTrainState(
        target,
        strict=False,
        dtype=jnp.bfloat16,
        allow_lossy_cast=True,
        fallback={"params": {"new": jnp.full(2, 7.0)}},
        verify="full",
        progress=lambda *progress: told.append(progress),
        memory_limit_bytes=1 << 20,
    )
    with ot.v1.context():
        loaded = ocp.load(tmp_path / "1", abstract)
    assert {name: leaf.dtype for name, leaf in loaded["params"].items()} == dict.fromkeys(("w", "new"), jnp.bfloat16)
    np.testing.assert_array_equal(loaded["params"]["new"], np.full(2, 7, jnp.bfloat16))
    assert loaded["step"] is ... and told


def test_everything_as_numpy_and_what_metadata_tells_as_a_target(tmp_path):
    tree = {"a": placed(jnp.arange(8), "x"), "b": {"c": np.ones((2, 3)), "d": 3}}
    with ot.v1.context():
        ocp.save(tmp_path / "1", tree)
        assert_same(ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(None)), jax.tree.map(np.asarray, tree))
        told = ocp.metadata(tmp_path / "1")
        assert told.metadata["a"].shape == (8,)
        loaded = ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(told))
    assert_same(loaded, tree)
    assert loaded["a"].sharding == tree["a"].sharding


@pytest.mark.parametrize("saves", ["save", "save_checkpointables", "save_async", "save_checkpointables_async"])
def test_each_way_to_save(tmp_path, saves):
    tree = plain_tree()
    what = {"state": tree} if "checkpointables" in saves else tree
    with ot.v1.context():
        response = getattr(ocp, saves)(tmp_path / "1", what)
        if response is not None:
            response.result()
        loaded = ocp.load_checkpointables(tmp_path / "1", {"state": ot.v1.AbstractTrainState(abstract_of(tree))})
    assert_same(loaded["state"], tree)
    assert (tmp_path / "1" / "state" / "_CHECKSUMS.json").exists()


def test_the_caller_may_write_over_its_arrays_and_give_them_away(tmp_path):
    host, device = np.arange(1 << 16), jnp.arange(1 << 16)
    expected = host.copy()
    with ot.v1.context():
        response = ocp.save_async(tmp_path / "1", {"host": host, "device": device})
        host[:] = 0
        device = jax.jit(lambda array: array * 0, donate_argnums=0)(device)
        response.result()
        loaded = ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(None))
    for array in loaded.values():
        np.testing.assert_array_equal(array, expected)


def test_several_checkpointables_beside_others(tmp_path):
    model, optimizer = {"w": jnp.arange(8.0)}, {"mu": np.zeros(3)}
    with ot.v1.context(provenance=()):
        ocp.save_checkpointables(tmp_path / "1", {"model": model, "optimizer": optimizer, "notes": {"epoch": 3}})
        target = {"renamed": jnp.zeros(8)}
        wanted = {
            "model": ot.v1.AbstractTrainState(target, [ot.transforms.Rename([("w", "renamed")])]),
            "optimizer": optimizer,
        }
        loaded = ocp.load_checkpointables(tmp_path / "1", wanted)
        by_name = ocp.load(tmp_path / "1", wanted["model"], checkpointable_name="model")
        assert ocp.load_checkpointables(tmp_path / "1").keys() == {"model", "optimizer", "notes"}
    assert_same(loaded, {"model": {"renamed": model["w"]}, "optimizer": optimizer})
    assert_same(by_name, {"renamed": model["w"]})
    assert {path.parent.name for path in (tmp_path / "1").rglob("_CHECKSUMS.json")} >= {"model", "optimizer"}


class Iterator:
    """A checkpointable that saves and loads itself."""

    position = 5

    async def save(self, directory):
        async def write():
            path = await directory.await_creation()
            (path / "position.txt").write_text(str(self.position))

        return write()

    async def load(self, directory):
        async def read():
            self.position = int((directory / "position.txt").read_text())

        return read()


def test_a_checkpointable_that_saves_itself_is_left_to_do_so(tmp_path):
    iterator = Iterator()
    with ot.v1.context():
        ocp.save_checkpointables(tmp_path / "1", {"state": {"a": np.ones(2)}, "data": iterator})
        iterator.position = 0
        ocp.load_checkpointables(tmp_path / "1", {"data": iterator})
    assert iterator.position == 5


class Words(list):
    """What a handler of a user's saves."""


class WordsHandler(ocp.CheckpointableHandler):
    async def save(self, directory, checkpointable):
        async def write():
            (await directory.await_creation() / "words.txt").write_text(" ".join(checkpointable))

        return write()

    async def load(self, directory, abstract_checkpointable=None):
        async def read():
            return Words((directory / "words.txt").read_text().split())

        return read()

    async def metadata(self, directory):
        return None

    def is_handleable(self, checkpointable):
        return isinstance(checkpointable, Words)

    def is_abstract_handleable(self, abstract_checkpointable):
        return abstract_checkpointable is None or isinstance(abstract_checkpointable, Words)


@pytest.mark.parametrize("name", [None, "words", "state"])
def test_handlers_of_a_base_context_keep_what_is_theirs(tmp_path, name):
    registry = ocp.handlers.local_registry(include_global_registry=name != "state")
    if name == "state":  # theirs alone
        registry.add(ocp.handlers.PyTreeHandler)
    registry.add(WordsHandler, checkpointable_name=name)
    base = ocp.Context()
    base.checkpointables.registry = registry
    base.array.saving.use_zarr3 = False
    theirs, ours = ("state", "model") if name == "state" else ("words", "state")
    with ot.v1.context(ot.v1.context(base), provenance=()):
        ocp.save_checkpointables(tmp_path / "1", {theirs: Words(["a", "b"]), ours: {"w": np.ones(2)}})
        assert ocp.load_checkpointables(tmp_path / "1", {theirs: None})[theirs] == ["a", "b"]
        loaded = ocp.load_checkpointables(tmp_path / "1", {ours: ot.v1.AbstractTrainState({"v": np.zeros(2)}, RULES)})
    np.testing.assert_array_equal(loaded[ours]["v"], np.ones(2))
    assert json.loads((tmp_path / "1" / ours / "_METADATA").read_text())["use_zarr3"] is False
    assert (tmp_path / "1" / ours / "_CHECKSUMS.json").exists()
    assert not (tmp_path / "1" / theirs / "_CHECKSUMS.json").exists()


def test_the_handler_in_a_registry_of_ones_own(tmp_path):
    registry = ocp.handlers.local_registry(include_global_registry=False)
    registry.add(ocp.handlers.PyTreeHandler).add(ot.v1.TrainStateHandler, checkpointable_name="state")
    made = ocp.Context()
    made.checkpointables.registry = registry
    state = training_state()
    with made:
        ocp.save(tmp_path / "1", state)
        loaded = ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(sharded(state)))
    assert_same(loaded, state)
    assert ot.verify(tmp_path / "1").status == "ok"


def test_other_functions_of_orbax_work_on_checkpoints(tmp_path):
    with ot.v1.context():
        ocp.partial.save(tmp_path / "1", {"a": np.ones(2)})
        ocp.partial.save(tmp_path / "1", {"b": np.zeros(3)})
        ocp.partial.finalize(tmp_path / "1")
        loaded = ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(None))
        assert_same(loaded, {"a": np.ones(2), "b": np.zeros(3)})
        ocp.save(tmp_path / "2", {"a": np.ones(2)})
        ocp.save(tmp_path / "2", {"a": np.zeros(2)}, overwrite=True)
        assert_same(ocp.load(tmp_path / "2", ot.v1.AbstractTrainState(None)), {"a": np.zeros(2)})
        assert ot.verify(tmp_path / "2").status == "ok"


def test_nothing_global_changes(tmp_path):
    before = list(ocp.handlers.global_registry().get_all_entries())
    with ot.v1.context():
        ocp.save(tmp_path / "1", {"w": np.ones(2)})
    assert ocp.handlers.global_registry().get_all_entries() == before
    assert ocp.Context().checkpointables.registry.get_all_entries() == before
    ocp.save(tmp_path / "2", {"w": np.ones(2)})
    assert not (tmp_path / "2" / "state" / "_CHECKSUMS.json").exists()


# -- options of the context


def options_of(context, name):
    saving = context.array.saving
    if name == "no ocdbt":
        saving.use_ocdbt = False
    elif name == "zarr2":
        saving.use_zarr3 = False
    elif name == "no compression":
        saving.use_compression = False
    elif name == "dtype":
        saving.storage_options.dtype = jnp.bfloat16
    elif name == "scoped dtype":
        storage = type(saving.storage_options)
        saving.storage_options.dtype = jnp.float16
        saving.scoped_storage_options_creator = lambda path, value: (
            storage(dtype=jnp.bfloat16) if "a" in jax.tree_util.keystr(path) else None
        )
    elif name == "chunks":
        saving.storage_options.chunk_byte_size = 64
    elif name == "transfers":
        context.memory.transfer_concurrent_bytes = 1 << 10
    return context


@pytest.mark.parametrize(
    "name", ["no ocdbt", "zarr2", "no compression", "dtype", "scoped dtype", "chunks", "transfers"]
)
def test_options_of_the_context_hold_and_what_is_stored_has_its_checksums(tmp_path, name):
    rng = np.random.default_rng(0)
    tree = {
        "a": placed(rng.normal(size=(8, 16)).astype(np.float32), "x"),
        "b": rng.normal(size=(4, 4)).astype(np.float32),
        "c": 2.7,
    }
    with options_of(ot.v1.context(), name):
        ocp.save(tmp_path / "ours", tree)
    with options_of(ocp.Context(), name):
        ocp.save(tmp_path / "stock", tree)
    report = ot.verify(tmp_path / "ours")
    assert {leaf.name: leaf.status for leaf in report.leaves} == dict.fromkeys("abc", "ok")
    with ot.open_checkpoint(tmp_path / "ours") as ours, ot.open_checkpoint(tmp_path / "stock") as stock:
        assert {n: (leaf.shape, leaf.dtype) for n, leaf in ours.leaves.items()} == {
            n: (leaf.shape, leaf.dtype) for n, leaf in stock.leaves.items()
        }
        for leaf in "abc":
            np.testing.assert_array_equal(ours.leaves[leaf].get(), stock.leaves[leaf].get())


def test_checksums_are_checked_and_can_be_left_out(tmp_path):
    tree = {"w": np.random.default_rng(0).integers(0, 255, (256, 1024), np.uint8)}
    for name, checksums in (("with", True), ("without", False)):
        with ot.v1.context(checksums=checksums):
            ocp.save(tmp_path / name, tree)
        flip_a_byte(tmp_path / name / "state")
    assert not (tmp_path / "without" / "state" / "_CHECKSUMS.json").exists()
    with ot.v1.context():
        # What a plan raises comes through both functions as it is.
        with pytest.raises(CorruptCheckpointError):
            ocp.load(tmp_path / "with", ot.v1.AbstractTrainState(tree))
        with pytest.raises(CorruptCheckpointError):
            ocp.load_checkpointables(tmp_path / "with", {"state": ot.v1.AbstractTrainState(tree)})


def test_the_contexts_limit_on_reads_bounds_the_plans(tmp_path, monkeypatch):
    ocp.save(tmp_path / "1", {"w": np.ones(2)})
    limits = []
    run = RestorePlan.run
    monkeypatch.setattr(RestorePlan, "run", lambda plan, reading: limits.append(reading.limit) or run(plan, reading))
    made = ot.v1.context()
    made.memory.read_concurrent_bytes = 1 << 20
    with made:
        ocp.load(tmp_path / "1", ot.v1.AbstractTrainState({"w": np.zeros(2)}))
        ocp.load(tmp_path / "1", ot.v1.AbstractTrainState({"w": np.zeros(2)}, memory_limit_bytes=1 << 10))
        ot.v1.load_and_transform(tmp_path / "1", {"w": np.zeros(2)})
    assert limits == [1 << 20, 1 << 10, 1 << 20]


# -- other formats


def test_load_and_transform_takes_any_path(tmp_path, goldens):
    bundle = goldens / "tf_bundle" / "t5_1_1_f32"
    target = sharded(training_state())
    rules = [ot.transforms.Translate()]
    expected = ot.restore(bundle, target, rules)
    assert_same(ot.v1.load_and_transform(bundle, target, rules), expected)
    with ocp.Context():
        assert_same(ot.v1.load_and_transform(str(bundle), target, rules), expected)
    with ot.v1.context():
        ocp.save(tmp_path / "1", {"a": np.ones(2)})
        assert_same(ot.v1.load_and_transform(tmp_path / "1", {"a": np.zeros(2)}), {"a": np.ones(2)})
        # Orbax looks at its own path first; what is loaded is the source.
        abstract = ot.v1.AbstractTrainState(target, rules, source=bundle)
        assert_same(ocp.load(tmp_path / "1", abstract), expected)


def test_several_sources(tmp_path):
    for name, value in (("x", 1.0), ("y", 3.0)):
        ocp.save(tmp_path / name, {"w": np.full(4, value, np.float32)})
    sources = {"x": tmp_path / "x", "y": tmp_path / "y"}
    rules = [ot.transforms.Average({"x": 0.5, "y": 0.5})]
    loaded = ot.v1.load_and_transform(sources, {"w": jnp.zeros(4)}, rules)
    np.testing.assert_array_equal(loaded["w"], np.full(4, 2.0, np.float32))


# -- what is refused


def test_outside_the_context_orbaxs_error_names_it(tmp_path):
    ocp.save(tmp_path / "1", {"w": np.ones(2)})
    abstract = ot.v1.AbstractTrainState({"w": np.zeros(2)})
    with pytest.raises(ValueError, match=r"AbstractTrainState is loaded inside `with ot.v1.context\(\):`"):
        ocp.load(tmp_path / "1", abstract)
    with pytest.raises(KeyError, match=r"loaded inside `with ot.v1.context\(\):`"):
        ocp.load_checkpointables(tmp_path / "1", {"state": abstract})


def test_paths_that_are_not_orbaxs_are_refused_by_orbax(tmp_path, goldens):
    with ot.v1.context(), pytest.raises(ocp.errors.InvalidLayoutError):
        ocp.load(goldens / "tf_bundle" / "t5_1_1_f32", ot.v1.AbstractTrainState(None))


def test_orbax_reads_safetensors_without_a_handler(goldens):
    """Whatever it is given to load into: there is no place for ours, and its error is its own."""
    source = goldens / "safetensors" / "t5_1_1"
    made = ot.v1.context()
    made.checkpoint_layout = "safetensors"
    with made:
        with pytest.raises(ValueError, match="flat dictionary"):
            ocp.load(source, ot.v1.AbstractTrainState(None))
        assert_same(ot.v1.load_and_transform(source, None), ot.restore(source, None))


def test_a_plans_problems_come_through_both_functions(tmp_path):
    ocp.save(tmp_path / "1", {"w": np.ones(2)})
    abstract = ot.v1.AbstractTrainState({"v": np.zeros(2)})
    with ot.v1.context():
        for load in (
            lambda: ocp.load(tmp_path / "1", abstract),
            lambda: ocp.load_checkpointables(tmp_path / "1", {"state": abstract}),
        ):
            with pytest.raises(RestorePlanError) as raised:
                load()
            assert "missing" in {problem.kind for problem in raised.value.problems}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ot.v1.AbstractTrainState(ot.v1.AbstractTrainState(None)), TypeError, "pass its own target"),
        (lambda: ot.v1.load_and_transform("x", ot.v1.AbstractTrainState(None)), TypeError, "pass its own target"),
        (lambda: ot.v1.AbstractTrainState({}, [3]), TypeError, "transform"),
        (lambda: ot.v1.AbstractTrainState({}, item=3), TypeError, "item"),
        (lambda: ot.v1.AbstractTrainState({}, verify="yes"), ValueError, "'touched', 'full' or 'off'"),
        (lambda: ot.v1.AbstractTrainState({}, memory_limit_bytes=0), ValueError, "at least 1"),
        (lambda: ot.v1.context({}), TypeError, "ocp.Context"),
        (lambda: ot.v1.context(checksums="no"), TypeError, "checksums must be True or False, not 'no'"),
        (lambda: ot.v1.context(on_unsupported="ignore"), ValueError, "'error' or 'skip'"),
        (lambda: ot.v1.context(provenance=[{"a": 1}]), ValueError, "provenance"),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_an_abstract_state_is_a_pytree_with_its_target_as_the_child():
    target = {"a": jax.ShapeDtypeStruct((2,), jnp.float32), "b": [...]}
    abstract = ot.v1.AbstractTrainState(target, RULES, strict=False, source="elsewhere")
    assert jax.tree.leaves(abstract) == jax.tree.leaves(target)
    again = jax.tree.map(lambda leaf: leaf, abstract)
    assert again.target == target
    assert (again.transforms, again.strict, again.source) == (RULES, False, "elsewhere")


def test_loads_work_inside_a_running_event_loop(tmp_path):
    pytest.importorskip("uvloop")
    tree = {"w": placed(jnp.arange(16.0).reshape(8, 2), "x")}

    async def notebook():
        with ot.v1.context():
            ocp.save(tmp_path / "1", tree)
            return ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(abstract_of(tree)))

    assert_same(asyncio.run(notebook()), tree)


def test_only_parameters_are_loaded_from_a_training_state(tmp_path):
    state = training_state()
    with ot.v1.context():
        ocp.save(tmp_path / "1", state)
        inference = ocp.load(tmp_path / "1", ot.v1.AbstractTrainState(sharded(inference_state())))
    assert_same(inference.params, state.params)
