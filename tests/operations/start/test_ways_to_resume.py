"""Ways to go on with a run that began with `"auto"` after its model changed, on the old run and in a fresh root.

Each way restores what NumPy says, also at the start after it, or its error names the rules to pass in its first line.
"""

import importlib.resources
import re
from typing import NamedTuple

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.serialization import to_state_dict

import orbax_t5x as ot
from orbax_t5x.trees.flat import flatten, unflatten

BUNDLE = importlib.resources.files("orbax_t5x") / "cli/demo_data/model.ckpt-1000000"
T = ot.transforms
# A module has a new name, and a second application of the swap would be seen in the values. The optimizer follows.
RENAMED = [
    T.Rename([("params/(.*)/mlp/(.*)", r"params/\1/ffn/\2")]),
    T.Rename([("params/(.*)/self_attention/query/(.*)", r"params/\1/self_attention/key/\2"),
              ("params/(.*)/self_attention/key/(.*)", r"params/\1/self_attention/query/\2")]),
]  # fmt: skip
MIGRATIONS = ot.Migrations([("names", RENAMED)])
OPTIMIZER = optax.adam(1e-3)
STEP = 1_000_000
RIGHT = "right"


def new_name(name):
    """Returns a leaf's name in the changed model."""
    swapped = {"query": "key", "key": "query"}
    name = name.replace("/mlp/", "/ffn/")
    return re.sub("(?<=/self_attention/)(query|key)(?=/)", lambda match: swapped[match[0]], name)


def state_of(params):
    return {"params": params, "opt_state": OPTIMIZER.init(params), "step": 0}


def values_of(state):
    return {name: np.asarray(leaf) for name, leaf in flatten(to_state_dict(state)).items() if leaf is not None}


def assert_same(values, expected):
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(values[name], value, err_msg=name)


class Job:
    """A run in a root; each call stands for a process of its own."""

    def __init__(self, root, params):
        self.root = root
        self.params = jax.tree.map(np.zeros_like, params)

    def manager(self):
        return ocp.CheckpointManager(self.root, item_handlers=ot.TrainStateHandler())

    def start(self, init_from, transforms, *, train=lambda state: state, **options):
        target = jax.eval_shape(lambda: state_of(self.params))
        with self.manager() as manager:
            state, step, _ = ot.restore_or_initialize(
                manager, target, init_from=init_from, transforms=transforms,
                init_fn=lambda: state_of(self.params), fallback_for=["opt_state/.*", "step"], **options,
            )  # fmt: skip
            manager.save(step + 1, args=ot.args.TrainStateSave(train(state)))
        return values_of(state)

    def restore(self, transforms, **options):
        target = jax.eval_shape(lambda: state_of(self.params))
        with self.manager() as manager:
            step = manager.latest_step()
            state = manager.restore(step, args=ot.args.TrainStateRestore(target, transforms, **options))
            manager.save(step + 1, args=ot.args.TrainStateSave(state))
        return values_of(state)


def trained(state):
    """Returns the state as after training: no two leaves have like values."""
    numbers = np.random.default_rng(0)
    moved = jax.tree.map(lambda leaf: numbers.normal(size=leaf.shape).astype(leaf.dtype), state)
    first, *others = moved["opt_state"]
    return {**moved, "opt_state": (first._replace(count=np.int32(1)), *others), "step": 1}


class Models(NamedTuple):
    """Parameters of the model of the first day and of the changed one, with the values of the bundle."""

    first: dict
    changed: dict
    found_rules: list


@pytest.fixture(scope="module")
def models():
    with ot.open_checkpoint(BUNDLE) as bundle:
        translated = flatten(T.Translate()(bundle.tree(), {}))
        start = "target/"
        first = {name[len(start) :]: leaf.get() for name, leaf in translated.items() if name.startswith(start)}
    changed = {new_name(name): leaf for name, leaf in first.items()}
    state = state_of(unflatten(first))
    plan = ot.plan_restore(BUNDLE, state, "auto", fallback=state, fallback_for=["opt_state/.*", "step"])
    return Models(unflatten(first), unflatten(changed), list(plan.found_rules))


WAYS = {
    "the same call": lambda job, found: job.start(BUNDLE, "auto"),
    '["auto", R]': lambda job, found: job.start(BUNDLE, ["auto", *RENAMED]),
    '["auto", Migrations]': lambda job, found: job.start(BUNDLE, ["auto", MIGRATIONS]),
    'Source(bundle, "auto"), [R]': lambda job, found: job.start(ot.Source(BUNDLE, "auto"), RENAMED),
    'Source(bundle, "auto"), Migrations': lambda job, found: job.start(ot.Source(BUNDLE, "auto"), MIGRATIONS),
    "Migrations": lambda job, found: job.start(BUNDLE, MIGRATIONS),
    "[R]": lambda job, found: job.start(BUNDLE, RENAMED),
    "[R], is_resuming=False": lambda job, found: job.start(BUNDLE, RENAMED, is_resuming=False),
    "[*found_rules, R]": lambda job, found: job.start(BUNDLE, [*found, *RENAMED]),
    "[*found_rules, Migrations]": lambda job, found: job.start(BUNDLE, [*found, MIGRATIONS]),
    "Source(bundle, found_rules), Migrations": lambda job, found: job.start(ot.Source(BUNDLE, found), MIGRATIONS),
    'Migrations of "start" and "names"': lambda job, found: job.start(
        BUNDLE, ot.Migrations([("start", found), ("names", RENAMED)])
    ),
    "manager.restore, Migrations": lambda job, found: job.restore(MIGRATIONS),
    'manager.restore, ["auto", R]': lambda job, found: job.restore(["auto", *RENAMED]),
}


def outcome(way, job, expected, found):
    """Returns "right" if two starts give the values, else the first line of the error."""
    try:
        values = way(job, found)
    except (ot.RestorePlanError, TypeError) as error:
        return str(error).splitlines()[0]
    assert_same(values, expected)
    assert_same(way(job, found), expected)
    return RIGHT


def on_old_run(way, models, root):
    params, _, found = models
    first = Job(root, params)
    first.start(BUNDLE, "auto", train=trained)
    with ocp.CheckpointManager(root) as manager:
        saved = values_of(manager.restore(1, args=ocp.args.StandardRestore()))
    expected = {new_name(name): value for name, value in saved.items()}
    return outcome(way, Job(root, models.changed), expected, found)


def in_fresh_root(way, models, root):
    expected = {**values_of(state_of(models.changed)), "step": 0}
    return outcome(way, Job(root, models.changed), expected, models.found_rules)


def names_the_rules(*words):
    """Returns a pattern of a first line that says what was applied, and of the code to pass."""
    return ".*".join(map(re.escape, words))


NOT_FOUND = names_the_rules("[rule] the rules given lead to the target after those that 'auto' finds")
# The swap cannot be seen in names and shapes, so that a model with it is not told from one without it.
RENAMING_ONLY = names_the_rules("[rule] step 1 of the run does not fit the target: applied before: 'auto'",
                                "rules.mesh_tf_to_t5x()", "these rules lead from it to the target")  # fmt: skip
OUTCOMES = {
    "the same call": (RENAMING_ONLY, None),
    "Migrations": (RIGHT, NOT_FOUND),
    "[R]": (RIGHT, NOT_FOUND),
    "[R], is_resuming=False": (RIGHT, NOT_FOUND),
    "manager.restore, Migrations": (RIGHT, None),
    'manager.restore, ["auto", R]': (RIGHT, None),
}


@pytest.mark.parametrize("kind", [on_old_run, in_fresh_root])
@pytest.mark.parametrize("name", WAYS)
def test_each_way_is_right_or_names_the_rules(models, tmp_path, name, kind):
    expected = OUTCOMES.get(name, (RIGHT, RIGHT))[kind is in_fresh_root]
    if expected is None:  # there is no step to restore, or nothing that tells of the swap
        assert name in OUTCOMES
        return
    assert re.match(expected, kind(WAYS[name], models, tmp_path / "run"))


def test_rules_stay_when_the_list_gets_shorter_or_longer(models, tmp_path):
    """What "auto" found is behind the state, whatever is given beside it."""
    Job(tmp_path, models.first).start(BUNDLE, "auto", train=trained)
    changed = Job(tmp_path, models.changed)
    values = changed.start(BUNDLE, ["auto", *RENAMED])
    assert_same(changed.start(BUNDLE, "auto"), values)
    assert_same(changed.start(ot.Source(BUNDLE, "auto"), RENAMED), values)
    back = T.Rename([("params/(.*)/ffn/(.*)", r"params/\1/mlp/\2")])
    again = {re.sub("/ffn/", "/mlp/", name): value for name, value in values.items()}
    params = {re.sub("/ffn/", "/mlp/", name): leaf for name, leaf in flatten(models.changed).items()}
    third = Job(tmp_path, unflatten(params))
    for _ in range(2):
        assert_same(third.start(BUNDLE, ["auto", *RENAMED, back]), again)


def test_named_sources_go_on_each_with_its_list(models, tmp_path):
    """One of two towers is renamed: "auto" stands for what it found in its own source."""

    def start(root, params, sources):
        with ocp.CheckpointManager(root, item_handlers=ot.TrainStateHandler()) as manager:
            target = jax.tree.map(np.zeros_like, params)
            state, step, _ = ot.restore_or_initialize(manager, target, init_from=sources)
            manager.save(step + 1, args=ot.args.TrainStateSave(state))
        return values_of(state)

    first = {name: {"params": models.first} for name in ("a", "b")}
    second = {**first, "a": {"params": models.changed}}
    auto = ot.Source(BUNDLE, "auto")
    for _ in range(2):
        assert_same(start(tmp_path / "run", first, {"a": auto, "b": auto}), values_of(first))
    for root in ("run", "fresh"):
        for _ in range(3):
            sources = {"a": ot.Source(BUNDLE, ["auto", *RENAMED]), "b": auto}
            assert_same(start(tmp_path / root, second, sources), values_of(second))


@pytest.mark.parametrize("given", ["auto", ()])
def test_a_handlers_error_names_the_rules_in_place_of_auto(models, tmp_path, given):
    """There "auto" stands for what began the run: to pass it would change nothing."""
    first = Job(tmp_path, models.first)
    saved = first.start(BUNDLE, "auto")
    ffn = {name.replace("/mlp/", "/ffn/"): leaf for name, leaf in flatten(models.first).items()}
    job = Job(tmp_path, unflatten(ffn))
    with pytest.raises(ot.RestorePlanError) as caught:
        job.restore(given)
    problem = caught.value.problems[0]
    assert problem.message.startswith("the run's step does not fit the target: ")
    rules = problem.fix.transforms or problem.fix.arguments["transforms"]
    assert_same(job.restore(rules), {name.replace("/mlp/", "/ffn/"): value for name, value in saved.items()})
