"""A job starts from its own newest good step, else from a checkpoint, else from scratch; what was applied is kept."""

import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_t5x as ot
from orbax_t5x.provenance import runs

T = ot.transforms
SWAP = T.Rename([("x", "y"), ("y", "x")])
OTHER = T.Rename([("y", "z"), ("z", "y")])
SOURCE = {name: np.full(8, value, np.float32) for name, value in (("x", 1), ("y", 2), ("z", 3))}
SWAPPED = {"x": 2.0, "y": 1.0, "z": 3.0}
STATE = {name: np.full(8, value, np.float32) for name, value in SWAPPED.items()}


@pytest.fixture(autouse=True)
def new_process():
    runs.forget_all()


@pytest.fixture
def target():
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    return {name: jax.ShapeDtypeStruct((8,), np.float32, sharding=rows) for name in SOURCE}


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, SOURCE)
    return path


def initial():
    return {name: jax.random.normal(jax.random.key(seed), (8,)) for seed, name in enumerate(SOURCE)}


def values(state):
    return {name: float(array[0]) for name, array in state.items()}


def ours(root, **options):
    return ocp.CheckpointManager(
        root, options=ocp.CheckpointManagerOptions(**options), item_handlers=ot.TrainStateHandler()
    )


def our_args(state):
    return ot.args.TrainStateSave(state)


def recorded(step_item):
    metadata = json.loads((step_item / "_METADATA").read_text())
    return metadata["custom_metadata"]["orbax_t5x"]["provenance"]


def cut(file):
    """Half of a file, as a full disk leaves it."""
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def largest(item):
    """The largest data file of an item."""
    return max((file for file in item.rglob("d/*")), key=lambda file: file.stat().st_size)


def cut_data(item):
    cut(largest(item))


def flip_a_bit(item):
    data = bytearray(largest(item).read_bytes())
    data[len(data) // 2] ^= 1
    largest(item).write_bytes(data)


# -- the three ways


def test_scratch_is_the_function_under_jit_in_the_targets_shardings(tmp_path, target):
    with ours(tmp_path / "root") as manager:
        start = ot.restore_or_initialize(manager, target, init_fn=initial)
    assert start[1:] == (0, "scratch")
    expected = jax.jit(initial)()
    for name, array in start.state.items():
        np.testing.assert_array_equal(array, expected[name])
        assert array.sharding == target[name].sharding


def test_a_new_run_begins_with_the_mapped_source(tmp_path, target, source):
    with ours(tmp_path / "root") as manager:
        state, step, how = ot.restore_or_initialize(manager, target, init_from=source, transforms=SWAP)
        assert (values(state), step, how) == (SWAPPED, 0, "initialized")
        assert state["x"].sharding == target["x"].sharding


def test_only_what_the_source_lacks_is_initialised(tmp_path, target, source):
    wanted = {**target, "new": target["x"]}
    asked = []

    def init():
        return {**initial(), "new": jnp.full(8, 5.0)}

    def traced():
        asked.append("traced")
        return init()

    with ours(tmp_path / "root") as manager:
        state, _, how = ot.restore_or_initialize(manager, wanted, init_from=source, init_fn=traced, transforms=[SWAP])
    assert how == "initialized" and values(state) == {**SWAPPED, "new": 5.0}
    assert asked and isinstance(state["new"], jax.Array) and state["new"].sharding == target["x"].sharding


def test_a_run_goes_on_from_its_newest_step(tmp_path, target, source):
    root = tmp_path / "root"
    for expected in ("initialized", "resumed", "resumed"):
        runs.forget_all()  # as a new process
        with ours(root) as manager:
            state, step, how = ot.restore_or_initialize(manager, target, init_from=source, transforms=SWAP)
            assert how == expected and values(state) == SWAPPED
            manager.save(step + 1, args=our_args(state))
    with ours(root) as manager:
        assert manager.all_steps() == [1, 2, 3]
    shutil.rmtree(source)  # nobody needs it any more
    with ours(root) as manager:
        assert ot.restore_or_initialize(manager, target, init_from=source, transforms=SWAP)[1:] == (3, "resumed")


def test_step_0_is_a_step(tmp_path, target):
    with ours(tmp_path / "root") as manager:
        manager.save(0, args=our_args(STATE))
        assert ot.restore_or_initialize(manager, target, init_fn=initial)[1:] == (0, "resumed")


def test_nothing_to_begin_with_is_an_error(tmp_path, target):
    with ours(tmp_path / "root") as manager:
        with pytest.raises(ot.errors.CheckpointNotFoundError, match="init_from= nor init_fn="):
            ot.restore_or_initialize(manager, target)
        with pytest.raises(ot.errors.CheckpointNotFoundError):
            ot.restore_or_initialize(manager, target, init_from=tmp_path / "nowhere", init_fn=initial)


def test_scratch_that_does_not_fit_the_target_is_a_plan_error(tmp_path, target):
    with ours(tmp_path / "root") as manager:
        with pytest.raises(ot.RestorePlanError) as raised:
            ot.restore_or_initialize(manager, {**target, "more": target["x"]}, init_fn=initial)
        assert [problem.leaf for problem in raised.value.problems] == ["more"]
        with pytest.raises(ot.RestorePlanError) as raised:
            ot.restore_or_initialize(manager, {"x": np.zeros(3, np.float32)}, init_fn=initial)
        assert {problem.leaf for problem in raised.value.problems} == {"x"}


def test_scratch_without_a_target_is_all_that_the_function_returns(tmp_path):
    with ours(tmp_path / "root") as manager:
        state, _, how = ot.restore_or_initialize(manager, None, init_fn=initial)
        again = ot.restore_or_initialize(manager, None, init_fn=state)
    assert how == again.how == "scratch"
    assert values(again.state) == values(state)
    jax.tree.map(np.testing.assert_array_equal, state, jax.jit(initial)())


# -- managers


def stock(root, **options):
    return ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(**options))


def standard(root, **options):
    options = ocp.CheckpointManagerOptions(**options)
    return ocp.CheckpointManager(root, options=options, item_handlers=ocp.StandardCheckpointHandler())


MANAGERS = {
    "ours": (ours, our_args),
    "without handlers": (stock, ocp.args.StandardSave),
    "without handlers, our arguments": (stock, our_args),
    "Orbax's handler": (standard, ocp.args.StandardSave),
    "without handlers, PyTree": (stock, ocp.args.PyTreeSave),
}
FORMATS = {
    "numbers": {},
    "prefix": {"step_prefix": "run"},
    "padded": {"step_prefix": "run", "step_format_fixed_length": 8},
    "marked": {"atomicity_options": ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)},
    "format": {"step_name_format": ocp.path.step.standard_name_format(step_prefix="at", step_format_fixed_length=4)},
}


@pytest.mark.parametrize("kind", MANAGERS)
def test_a_step_of_any_writer_is_resumed(tmp_path, target, source, kind):
    make, args = MANAGERS[kind]
    with make(tmp_path / "root") as manager:
        manager.save(4, args=args(STATE))
        manager.wait_until_finished()
    for _ in range(2):  # new managers know nothing of what others saved
        with make(tmp_path / "root") as manager:
            start = ot.restore_or_initialize(manager, target, init_from=source, transforms=SWAP)
            assert (values(start.state), start.step, start.how) == (SWAPPED, 4, "resumed")
            manager.save(start.step + 1, args=args(start.state))  # and the manager is as good as before
            manager.wait_until_finished()
            manager.delete(5)


@pytest.mark.parametrize("names", FORMATS)
def test_steps_have_the_names_that_the_manager_gives_them(tmp_path, target, names):
    with ours(tmp_path / "root", **FORMATS[names]) as manager:
        manager.save(3, args=our_args(SOURCE))
        manager.save(20, args=our_args(STATE))
        manager.wait_until_finished()
        start = ot.restore_or_initialize(manager, target)
    assert (values(start.state), start.step) == (SWAPPED, 20)


def test_steps_with_other_names_are_another_runs(tmp_path, target):
    with ours(tmp_path / "root", step_prefix="other") as other:
        other.save(5, args=our_args(SOURCE))
    with ours(tmp_path / "root", step_prefix="run") as manager:
        assert ot.restore_or_initialize(manager, target, init_fn=initial).how == "scratch"


ITEMS = {
    "handlers": {"item_handlers": {"state": ot.TrainStateHandler(), "data": ocp.JsonCheckpointHandler()}},
    "names": {"item_names": ("state", "data")},
    "nothing": {},
}


@pytest.mark.parametrize("items", ITEMS)
@pytest.mark.parametrize("item", ["state", None])
def test_one_of_several_items_is_the_state(tmp_path, target, source, items, item):
    root = tmp_path / "root"

    def start():
        runs.forget_all()
        with ocp.CheckpointManager(root, **ITEMS[items]) as manager:
            state, step, how = ot.restore_or_initialize(manager, target, init_from=source, transforms=SWAP, item=item)
            args = {"state": our_args(state), "data": ocp.args.JsonSave({"at": step})}
            manager.save(step + 1, args=ocp.args.Composite(**args))
        return values(state), step, how

    assert start() == (SWAPPED, 0, "initialized")
    assert start() == (SWAPPED, 1, "resumed")
    assert len(recorded(root / "1" / "state")) == 1
    assert recorded(root / "1" / "state")[0]["digest"] is not None
    assert recorded(root / "2" / "state") == recorded(root / "1" / "state")


def test_an_item_that_no_step_has_is_an_error(tmp_path, target):
    with ours(tmp_path / "root") as manager:
        manager.save(1, args=our_args(STATE))
        manager.wait_until_finished()
        with pytest.raises(ot.errors.CheckpointNotFoundError, match="'stat'"):
            ot.restore_or_initialize(manager, target, item="stat", init_fn=initial)


def test_several_items_keep_their_own_lineages(tmp_path, target, source):
    root = tmp_path / "root"
    handlers = {name: ot.TrainStateHandler() for name in ("model", "ema")}
    with ocp.CheckpointManager(root, item_handlers=handlers) as manager:
        state = ot.restore_or_initialize(manager, target, init_from=source, transforms=SWAP, item="model").state
        items = {"model": our_args(state), "ema": ot.args.TrainStateSave(STATE, provenance=())}
        manager.save(1, args=ocp.args.Composite(**items))
    runs.forget_all()
    both = {"model": target, "ema": target}
    with ocp.CheckpointManager(root, item_handlers=handlers) as manager:
        start = ot.restore_or_initialize(manager, both)
        assert start.how == "resumed" and [values(one) for one in start.state.values()] == [SWAPPED, SWAPPED]
        items = {name: our_args(one) for name, one in start.state.items()}
        manager.save(2, args=ocp.args.Composite(**items))
    for item in handlers:
        assert recorded(root / "2" / item) == recorded(root / "1" / item)


# -- damage


def remove_metadata(item):
    (item / "_METADATA").unlink()


def empty(item):
    shutil.rmtree(item.parent)
    item.parent.mkdir()


DAMAGE = {
    "data": cut_data,
    "a bit of the data": flip_a_bit,
    "manifest": lambda item: cut(item / "manifest.ocdbt"),
    "metadata": lambda item: cut(item / "_METADATA"),
    "no metadata": remove_metadata,
    "no manifest": lambda item: (item / "manifest.ocdbt").unlink(),
    "no data": lambda item: [shutil.rmtree(directory) for directory in item.rglob("d") if directory.is_dir()],
    "no files": lambda item: [file.unlink() for file in item.iterdir() if file.is_file()],
    "an empty item": lambda item: (shutil.rmtree(item), item.mkdir()),
    "an empty step": empty,
}


@pytest.fixture
def three_steps(tmp_path):
    root = tmp_path / "root"
    rng = np.random.default_rng(0)
    with ours(root) as manager:
        for step in (1, 2, 3):
            state = {
                name: np.r_[np.float32(10 * step + place), rng.random(7, np.float32)]
                for place, name in enumerate("xyz")
            }
            manager.save(step, args=our_args(state))
    return root


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_step_is_passed_over_with_a_warning(three_steps, target, damage):
    DAMAGE[damage](three_steps / "3" / "default")
    with ours(three_steps) as manager:
        with pytest.warns(UserWarning, match=r"step 3 is skipped: .*manager\.delete\(3\)") as warned:
            state, step, how = ot.restore_or_initialize(manager, target, init_fn=initial)
        assert (values(state), step, how) == ({"x": 20.0, "y": 21.0, "z": 22.0}, 2, "resumed")
        assert [one.filename for one in warned] == [__file__]
        # What the warning says.
        assert not manager.save(3, args=our_args(state))
        manager.delete(3)
        assert manager.save(3, args=our_args(state))


def test_where_all_are_damaged_the_run_begins_anew(three_steps, target):
    for step in (1, 2, 3):
        cut_data(three_steps / str(step) / "default")
    with ours(three_steps) as manager:
        with pytest.warns(UserWarning) as warned:
            assert ot.restore_or_initialize(manager, target, init_fn=initial)[1:] == (0, "scratch")
        assert [str(one.message).partition(":")[0] for one in warned] == [f"step {n} is skipped" for n in (3, 2, 1)]
        with (
            pytest.warns(UserWarning, match="is skipped"),
            pytest.raises(ot.errors.CheckpointNotFoundError, match="each of its steps is damaged"),
        ):
            ot.restore_or_initialize(manager, target)


def test_a_store_that_refuses_begins_no_run_anew(three_steps, target, monkeypatch):
    def refuse(*args, **keywords):
        raise ot.errors.CheckpointIOError("the store is down", path=three_steps)

    monkeypatch.setattr("orbax_t5x.restoring.api.open_sources", refuse)
    with (
        ours(three_steps) as manager,
        pytest.warns(UserWarning, match="is skipped"),
        pytest.raises(ot.errors.CheckpointIOError, match=r"not begun anew.*the store is down"),
    ):
        ot.restore_or_initialize(manager, target, init_fn=initial)


def test_a_target_that_does_not_fit_is_no_damage(three_steps, target):
    with ours(three_steps) as manager, pytest.raises(ot.RestorePlanError) as raised:
        ot.restore_or_initialize(manager, {**target, "more": target["x"]}, init_fn=lambda: {**initial(), "more": 0.0})
    # A step of the run is complete, or does not fit: nothing in it is initialised anew.
    assert [problem.leaf for problem in raised.value.problems] == ["more"]


# -- lineage


@pytest.mark.parametrize("how", ["initialized", "scratch"])
def test_the_first_save_records_how_the_run_began(tmp_path, target, source, how):
    root = tmp_path / "root"
    begins = {"init_from": source, "transforms": SWAP} if how == "initialized" else {"init_fn": initial}
    with ours(root) as manager:
        start = ot.restore_or_initialize(manager, target, **begins)
        assert start.how == how
    with ours(root) as manager:  # the lineage is the root's, not the manager's
        manager.save(1, args=our_args(start.state))
    lineage = recorded(root / "1" / "default")
    rules = [entry["transforms"] for entry in lineage]
    assert rules == ([["Rename: ('x', 'y')", "Rename: ('y', 'x')"]] if how == "initialized" else [])
    # A restore by the handler asks nobody.
    runs.forget_all()
    with ours(root) as manager:
        again = manager.restore(1, args=ot.args.TrainStateRestore(target, SWAP if lineage else ()))
    assert values(again) == values(start.state)


def test_a_new_run_in_the_place_of_an_old_one_has_its_own_lineage(tmp_path, target, source):
    root = tmp_path / "root"
    for transforms in (SWAP, OTHER):
        with ours(root) as manager:
            start = ot.restore_or_initialize(manager, target, init_from=source, transforms=transforms)
            manager.save(1, args=our_args(start.state))
        (entry,) = recorded(root / "1" / "default")
        assert entry["transforms"] == [f"Rename: {rule}" for rule in transforms.rules]
        shutil.rmtree(root)


def test_other_rules_than_recorded_are_a_warning_once(tmp_path, target, source, caplog):
    root = tmp_path / "root"

    def start(transforms):
        runs.forget_all()
        caplog.clear()
        with ours(root) as manager, caplog.at_level(logging.WARNING, "orbax_t5x"):
            state, step, _ = ot.restore_or_initialize(manager, target, init_from=source, transforms=transforms)
            manager.save(step + 1, args=our_args(state))
        return values(state), [record.message for record in caplog.records if record.name.startswith("orbax_t5x")]

    assert start(SWAP) == (SWAPPED, [])
    state, (warning,) = start(OTHER)
    assert state == SWAPPED
    assert "other transforms" in warning and "'z'" in warning and "'x'" in warning
    assert [entry.get("is_resuming") for entry in recorded(root / "2" / "default")] == [None, True]
    # Now both are the run's.
    assert start(OTHER) == (SWAPPED, [])
    assert start(SWAP) == (SWAPPED, [])
    assert recorded(root / "4" / "default") == recorded(root / "2" / "default")


def test_nobody_is_asked(tmp_path, target, source):
    root = tmp_path / "root"
    moved = []

    def opaque(state, target):
        moved.append(True)
        return SWAP(state, target)

    for _ in range(3):
        runs.forget_all()
        with ours(root) as manager:
            state, step, _ = ot.restore_or_initialize(
                manager, target, init_from=source, transforms=[lambda s, t: opaque(s, t)]
            )
            assert values(state) == SWAPPED
            manager.save(step + 1, args=our_args(state))
    assert moved == [True]
    # Nothing records what happened before this save.
    unrecorded = tmp_path / "unrecorded"
    runs.forget_all()
    with ours(unrecorded) as manager:
        manager.save(1, args=our_args(STATE))
    with ours(unrecorded) as manager:
        assert values(ot.restore_or_initialize(manager, target, init_from=source, transforms=SWAP).state) == SWAPPED


SOURCES_WITH_TRANSFORMS = {
    "one": lambda path: (ot.Source(path, SWAP), ()),
    "one, and after it": lambda path: (ot.Source(path, SWAP), [OTHER, OTHER]),
    "several": lambda path: (
        {"a": ot.Source(path, SWAP), "b": path},
        [T.Keep(r"a/.*"), T.Rename([(r"a/(.*)", r"\1")])],
    ),
    "auto": lambda path: (ot.Source(path, SWAP), "auto"),
}


@pytest.mark.parametrize("which", SOURCES_WITH_TRANSFORMS)
def test_transforms_of_sources_are_the_runs_too(tmp_path, target, source, which, caplog):
    init_from, transforms = SOURCES_WITH_TRANSFORMS[which](source)
    for _ in range(2):
        runs.forget_all()
        with ours(tmp_path / "root") as manager, caplog.at_level(logging.WARNING, "orbax_t5x"):
            state, step, _ = ot.restore_or_initialize(manager, target, init_from=init_from, transforms=transforms)
            assert values(state) == SWAPPED
            manager.save(step + 1, args=our_args(state))
    assert not [record for record in caplog.records if record.name.startswith("orbax_t5x")]


def test_a_source_that_was_mapped_before_is_not_mapped_again(tmp_path, target, source, caplog):
    with ours(tmp_path / "first") as manager:
        state = ot.restore_or_initialize(manager, target, init_from=source, transforms=SWAP).state
        manager.save(1, args=our_args(state))
    first = tmp_path / "first"
    with ours(tmp_path / "second") as manager, caplog.at_level(logging.WARNING, "orbax_t5x"):
        again = ot.restore_or_initialize(manager, target, init_from=first, transforms=SWAP)
        assert (values(again.state), again.how) == (SWAPPED, "initialized")
    assert "applied already" in caplog.text
    with ours(tmp_path / "third") as manager:
        turned = ot.restore_or_initialize(manager, target, init_from=first, transforms=SWAP, is_resuming=False)
    assert values(turned.state) == {"x": 1.0, "y": 2.0, "z": 3.0}


def test_keywords_are_those_of_restore(tmp_path, target, source):
    halves = {"params": {"x": jax.ShapeDtypeStruct((8,), np.float32)}}
    seen = []
    with ours(tmp_path / "root") as manager:
        start = ot.restore_or_initialize(
            manager,
            halves,
            init_from=source,
            transforms=T.Rename([("x", "params/x")]),
            strict=False,
            dtype=jnp.bfloat16,
            verify="full",
            memory_limit_bytes=1 << 20,
            progress=lambda *told: seen.append(told),
            limits=ot.Limits(),
        )
    assert start.state["params"]["x"].dtype == jnp.bfloat16 and seen
    with ours(tmp_path / "root") as manager, pytest.raises(TypeError, match="item"):
        ot.restore_or_initialize(manager, target, init_from=source, item=target)
