"""Every fix that an error prints, followed blindly, ends right or in another error.

Each mistake is a call that fails. Every way of every problem's fix that is data (transforms or arguments) is applied as
a user would who does not think, and again to the error after it, up to four rounds. A restore at the end has the values
that NumPy says, wherever the checkpoint has them; only leaves that it lacks may come from the fallback.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization

import orbax_t5x as ot
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support.memory_checkpoint import checkpoint
from tests.support.small_models import (
    FILL,
    array,
    below,
    empty,
    fallback_of,
    filled,
    model,
    moved,
    renamed,
    target_state,
    train_state,
)

T = ot.transforms
ROUNDS = 4
MOST_CALLS = 150


@dataclasses.dataclass(frozen=True)
class Call:
    source: Any
    target: Any
    transforms: Any = ()
    keywords: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self):
        return repr(self.transforms), repr([(name, name == "fallback" or value) for name, value in self.keywords])

    def plan(self):
        return ot.plan_restore(self.source, self.target, self.transforms, **dict(self.keywords))

    def after(self, way):
        """The call with a way of a fix, or None for advice in words."""
        transforms, keywords = self.transforms, dict(self.keywords)
        if not way.transforms and not way.arguments and way.removed is None:
            return None
        chain = () if isinstance(transforms, str) else tuple(transforms)
        if way.removed is not None:
            transforms = tuple(one for one in chain if one != way.removed)
        if way.transforms:
            assert not isinstance(transforms, str), f"{way} beside {transforms!r}"
            transforms = (*transforms, *way.transforms)
        for name, value in way.arguments.items():
            if name == "fallback":
                keywords[name] = lambda: jax.tree.map(filled, self.target, is_leaf=lambda leaf: leaf is None)
            elif value is ...:
                return None
            elif name == "transforms":
                transforms = pasted(value, self)
            else:
                keywords[name] = value
        return dataclasses.replace(self, transforms=transforms, keywords=tuple(keywords.items()))


def pasted(value, call):
    """What the code of `transforms=` makes."""
    if isinstance(value, (str, tuple)):
        return value
    leaves = call.source.leaves if isinstance(call.source, ot.Checkpoint) else ot.open_checkpoint(call.source).leaves
    return eval(value.as_code(), {"ot": ot, "source": leaves, "target": call.target})


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A call that fails, and the values of the target that the checkpoint has, or their first rows.

    `is_cured`: whether a way leads to a restore.
    """

    call: Call
    truth: Mapping[str, np.ndarray]
    is_cured: bool | None = True


def values_of(state):
    state = nnx.to_pure_dict(state) if isinstance(state, nnx.State) else state
    return flatten(serialization.to_state_dict(state))


def assert_right(call, plan, truth):
    values = values_of(plan.execute(verify="off"))
    for name, wanted in truth.items():
        value = np.asarray(values[name])
        rows = value[tuple(slice(size) for size in wanted.shape)]
        assert np.array_equal(rows, wanted[tuple(slice(size) for size in value.shape)].astype(value.dtype)), (
            f"{name} is not the checkpoint's with transforms={call.transforms!r}, {dict(call.keywords)}"
        )
        if rows.shape != value.shape:
            rest = value.copy()
            rest[tuple(slice(size) for size in wanted.shape)] = 0
            assert set(np.unique(rest)) <= {0.0, FILL}
    lacked = {name for name in plan.filled if name not in truth}
    assert not plan.filled or lacked == set(plan.filled), plan.filled


def follow_blindly(mistake):
    """Returns the number of calls that restored; each is right."""
    pending, seen, restored = [mistake.call], {mistake.call.key}, 0
    for round_ in range(ROUNDS + 1):
        following = []
        for call in pending:
            try:
                plan = call.plan()
            except ot.RestorePlanError as error:
                assert len(str(error).splitlines()) < 60
                ways = [way for problem in error.problems if problem.fix for way in problem.fix.ways]
                for after in filter(None, map(call.after, ways)):
                    if after.key not in seen and len(seen) < MOST_CALLS:
                        seen.add(after.key)
                        following.append(after)
            else:
                assert round_, "the mistake is none"
                assert_right(call, plan, mistake.truth)
                restored += 1
        pending = following
    return restored


# -- models and states

MODEL = model()
STATE = train_state(MODEL)
NEW_HEAD = model(head=7)
BODY = {name: value for name, value in MODEL.items() if not name.startswith("head/")}


def simple(source, target, truth, transforms=(), *, is_cured=True, **keywords):
    source = checkpoint(source) if isinstance(source, dict) else source
    target = (
        empty(target)
        if isinstance(target, dict) and all(isinstance(one, np.ndarray) for one in target.values())
        else target
    )
    return Mistake(Call(source, target, transforms, tuple(keywords.items())), truth, is_cured)


MISTAKES = {}


def mistake(make):
    MISTAKES[make.__name__] = make
    return make


# -- names


@mistake
def prefix_in_the_checkpoint():
    return simple(below("params/", MODEL), MODEL, MODEL)


@mistake
def prefix_in_the_target():
    return simple(MODEL, below("params/", MODEL), below("params/", MODEL))


@mistake
def other_prefix():
    return simple(below("target/", MODEL), below("params/", MODEL), below("params/", MODEL))


@mistake
def prefix_of_a_single_leaf():
    return simple({"w": array("w", 3)}, below("model/", {"w": array("w", 3)}), below("model/", {"w": array("w", 3)}))


@mistake
def abbreviated_part():
    new = renamed(MODEL, attention="attn")
    return simple(MODEL, new, new)


@mistake
def misspelt_leaves():
    new = {name.replace("embedding", "embeding").replace("final", "finall"): value for name, value in MODEL.items()}
    return simple(MODEL, new, new)


@mistake
def unknown_word():
    new = renamed(MODEL, mlp="ffn")
    return simple(MODEL, new, new, is_cured=False)


@mistake
def two_unknown_words_of_one_shape():
    """Which norm is which only the order of letters would say."""
    new = renamed(MODEL, norm_a="first", norm_b="second")
    return simple(MODEL, new, new, is_cured=False)


@mistake
def two_unknown_words_with_auto():
    new = renamed(MODEL, norm_a="first", norm_b="second")
    return simple(MODEL, new, new, "auto", is_cured=False)


@mistake
def other_last_word_with_auto():
    """Modules keep their paths, so that the norms are told apart."""
    old, new = renamed(MODEL, scale="gamma"), renamed(MODEL, attention="attn")
    return simple({**old, "more": array("more", 2)}, new, new, "auto")


@mistake
def unknown_words_and_a_fallback():
    new = renamed(MODEL, mlp="ffn")
    return simple(MODEL, new, new, is_cured=False, fallback=fallback_of(empty(new)))


@mistake
def unknown_words_and_a_fallback_that_is_not_strict():
    new = {**renamed(MODEL, mlp="ffn"), "extra": array("extra", 3)}
    truth = {name: value for name, value in new.items() if name != "extra"}
    return simple(MODEL, new, truth, is_cured=False, fallback=fallback_of(empty(new)), fallback_for=["extra"])


@mistake
def grown_table_under_another_name():
    new = {**{name: value for name, value in MODEL.items() if "embed" not in name}, "tok/table": array("t", 15, 4)}
    truth = {**MODEL, "tok/table": MODEL["embed/embedding"]}
    del truth["embed/embedding"]
    return simple(MODEL, new, truth, is_cured=False)


@mistake
def rename_with_a_typo():
    new = renamed(MODEL, mlp="ffn")
    return simple(MODEL, new, new, [T.Rename([("(.*)/mpl/(.*)", r"\1/ffn/\2")])], is_cured=False)


@mistake
def assignment_map_in_the_wrong_direction():
    new = renamed(MODEL, mlp="ffn")
    return simple(MODEL, new, new, [T.AssignmentMap([("(.*)/mlp/(.*)", r"\1/ffn/\2")])], is_cured=False)


@mistake
def rules_that_are_not_needed():
    return simple(
        below("params/", MODEL), below("params/", MODEL), below("params/", MODEL), [T.Rename([("params/(.*)", r"\1")])]
    )


@mistake
def translate_of_a_flax_model():
    return simple(below("params/", MODEL), below("params/", MODEL), below("params/", MODEL), [T.Translate()])


# -- leaves that are missing or left over


@mistake
def new_leaf():
    return simple(MODEL, {**MODEL, "adapter/kernel": array("adapter", 4, 2)}, MODEL)


@mistake
def new_leaves_of_every_layer():
    new = {f"layers_{i}/adapter/{one}": array("x", 4, 2) for i in range(2) for one in ("down", "up")}
    return simple(MODEL, {**MODEL, **new}, MODEL)


@mistake
def new_leaf_beside_fallback_for():
    new = {"adapter/kernel": array("a", 4, 2), "extra": array("e", 3)}
    target = {**MODEL, **new}
    return simple(MODEL, target, MODEL, fallback=fallback_of(empty(target)), fallback_for=["extra"])


@mistake
def left_over():
    return simple({**MODEL, "old/kernel": array("old", 4, 2)}, MODEL, MODEL)


@mistake
def new_and_left_over_of_one_shape():
    """May be one array under two names."""
    source, target = {**MODEL, "zeta": array("zeta", 5, 3)}, {**MODEL, "omega": array("omega", 5, 3)}
    return simple(source, target, {**MODEL, "omega": source["zeta"]}, is_cured=False)


@mistake
def new_and_left_over_with_a_fallback():
    source, target = {**MODEL, "zeta": array("zeta", 5, 3)}, {**MODEL, "omega": array("omega", 5, 3)}
    return simple(
        source, target, {**MODEL, "omega": source["zeta"]}, is_cured=False, fallback=fallback_of(empty(target))
    )


@mistake
def parameters_only_into_a_train_state():
    return simple(below("params/", MODEL), target_state(MODEL), below("params/", MODEL))


@mistake
def train_state_into_parameters():
    return simple(STATE, below("params/", MODEL), below("params/", MODEL))


@mistake
def nothing_in_common():
    source = {"a": array("a", 2), "b": array("b", 3)}
    return simple(source, MODEL, MODEL, is_cured=False, fallback=fallback_of(empty(MODEL)))


# -- shapes


@mistake
def new_head():
    return simple(MODEL, NEW_HEAD, BODY)


@mistake
def new_head_in_a_train_state():
    truth = {name: value for name, value in STATE.items() if "head/" not in name}
    return simple(STATE, target_state(NEW_HEAD), truth)


@mistake
def new_head_with_a_fallback():
    return simple(MODEL, NEW_HEAD, BODY, fallback=fallback_of(empty(NEW_HEAD)))


@mistake
def new_head_in_other_names():
    return simple(below("params/", MODEL), NEW_HEAD, BODY)


@mistake
def larger_vocabulary():
    new = model(vocab=15)
    return simple(MODEL, new, MODEL)


@mistake
def smaller_vocabulary():
    new = model(vocab=10)
    return simple(MODEL, new, MODEL)


@mistake
def larger_vocabulary_in_a_train_state():
    return simple(STATE, target_state(model(vocab=15)), STATE)


@mistake
def larger_vocabulary_in_other_names():
    return simple(below("params/", MODEL), model(vocab=15), MODEL)


@mistake
def two_tables_of_a_smaller_vocabulary():
    source = {**MODEL, "lm_head/kernel": array("lm", 4, 12)}
    target = {**model(vocab=10), "lm_head/kernel": array("lm", 4, 10)}
    return simple(source, target, source)


@mistake
def vocabulary_and_head():
    new = model(vocab=15, head=7)
    return simple(MODEL, new, BODY)


@mistake
def other_width():
    return simple(model(width=6), MODEL, {name: array("none", 1) * 0 - 1 for name in MODEL}, is_cured=False)


@mistake
def turned_matrix():
    source = {**MODEL, "head/kernel": MODEL["head/kernel"].T}
    return simple(source, MODEL, MODEL, is_cured=False)


@mistake
def fewer_layers():
    truth = model(depth=2)
    return simple(model(depth=4), model(depth=2), {name: truth[name] for name in BODY if "layers_1" not in name})


@mistake
def more_layers():
    """RepeatLayers copies; the first layer is the first."""
    truth = {name: value for name, value in MODEL.items() if "layers_1" not in name}
    return simple(MODEL, model(depth=4), truth)


@mistake
def stacked_layers_with_auto():
    stacked = {name: value for name, value in MODEL.items() if "layers_" not in name}
    for name in MODEL:
        if name.startswith("layers_0/"):
            rest = name.removeprefix("layers_0/")
            stacked[f"layers/{rest}"] = np.stack([MODEL[f"layers_{i}/{rest}"] for i in range(2)])
    return simple(MODEL, stacked, stacked, is_cured=False)


# -- dtypes


@mistake
def lossy_dtype():
    target = {name: value.astype(np.float16) for name, value in below("params/", MODEL).items()}
    return simple(below("params/", MODEL), target, below("params/", MODEL))


@mistake
def lossy_dtype_of_other_leaves():
    target = {name: value.astype(np.float16) for name, value in MODEL.items()}
    return simple(MODEL, target, MODEL)


@mistake
def floats_into_integers():
    target = {
        **MODEL,
        "head/bias": MODEL["head/bias"].astype(np.int32),
        "final/scale": MODEL["final/scale"].astype(np.int32),
    }
    return simple(MODEL, target, MODEL)


# -- optimizers


@mistake
def assignment_map_without_the_optimizer():
    new = renamed(MODEL, mlp="ffn")
    rules = [T.AssignmentMap([("params/(.*)/ffn/(.*)", r"params/\1/mlp/\2")])]
    return simple(STATE, target_state(new), moved(STATE, "/mlp/", "/ffn/"), rules)


@mistake
def function_without_the_optimizer():
    new = renamed(MODEL, mlp="ffn")
    return simple(STATE, target_state(new), moved(STATE, "/mlp/", "/ffn/"), [rename_mlp])


def rename_mlp(state, target, *, is_resuming=False):
    flat = flatten(state)
    return unflatten(
        {name.replace("/mlp/", "/ffn/") if name.startswith("params/") else name: flat[name] for name in flat}
    )


@mistake
def function_without_the_optimizer_and_with_a_fallback():
    target = target_state(renamed(MODEL, mlp="ffn"))
    return simple(STATE, target, moved(STATE, "/mlp/", "/ffn/"), [rename_mlp], fallback=fallback_of(target))


@mistake
def rename_of_the_parameters():
    """Followed by itself, or asked about."""
    new = {**renamed(MODEL, mlp="ffn"), "adapter": array("adapter", 3)}
    rules = [T.Rename([("params/(.*)/mlp/(.*)", r"params/\1/ffn/\2")])]
    return simple(STATE, target_state(new), moved(STATE, "/mlp/", "/ffn/"), rules, is_cured=None)


@mistake
def optimizer_in_a_wrapper():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3), optax.ema(0.9))
    return simple(STATE, target_state(MODEL, tx), below("params/", MODEL), is_cured=None)


@mistake
def optimizer_in_a_wrapper_with_auto():
    tx = optax.apply_if_finite(optax.adam(1e-3), 5)
    moments = {name.replace("opt_state/", "opt_state/inner_state/"): value for name, value in STATE.items()}
    return simple(STATE, target_state(MODEL, tx), moments, "auto", is_cured=None)


@mistake
def another_optimizer():
    return simple(STATE, target_state(MODEL, optax.sgd(0.1, momentum=0.9)), below("params/", MODEL), is_cured=None)


@mistake
def another_optimizer_with_a_fallback():
    target = target_state(MODEL, optax.sgd(0.1, momentum=0.9))
    return simple(
        STATE, target, below("params/", MODEL), is_cured=None, fallback=fallback_of(target), fallback_for=["x"]
    )


@mistake
def rules_of_a_source_without_the_optimizer():
    """What replaces a source's rules would be applied beside them."""
    source = ot.Source(checkpoint(STATE), [rename_mlp])
    target = target_state(renamed(MODEL, mlp="ffn"))
    return Mistake(Call(source, target), moved(STATE, "/mlp/", "/ffn/"), is_cured=False)


@mistake
def larger_vocabulary_behind_a_source_with_auto():
    source = ot.Source(checkpoint(below("params/", MODEL)), "auto")
    return Mistake(Call(source, empty(model(vocab=15))), MODEL, is_cured=False)


@mistake
def larger_vocabulary_with_auto_in_a_list():
    new = renamed(model(vocab=15), mlp="ffn")
    rules = ["auto", T.Rename([("(.*)/mlp/(.*)", r"\1/ffn/\2")])]
    return simple(below("params/", MODEL), new, renamed(MODEL, mlp="ffn"), rules, is_cured=None)


@mistake
def average_that_is_new():
    target = {**target_state(MODEL), "ema_params": empty(MODEL)}
    return simple(STATE, target, STATE)


# -- several items and sources


def saved(tmp_path, **items):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(
            1, args=ocp.args.Composite(**{name: ocp.args.PyTreeSave(unflatten(tree)) for name, tree in items.items()})
        )
    return tmp_path


@mistake
def item_in_the_names(tmp_path):
    root = saved(tmp_path, params=below("params/", MODEL), more={"step": np.int32(1)})
    return simple(root, below("params/", MODEL), below("params/", MODEL))


@mistake
def item_in_the_names_of_one_leaf(tmp_path):
    leaves = {"params/w": array("w", 3)}
    return simple(saved(tmp_path, params=leaves, more={"step": np.int32(1)}), leaves, leaves)


@mistake
def item_in_the_names_of_the_target(tmp_path):
    leaves = {"w": array("w", 3)}
    return simple(saved(tmp_path, model_state=leaves), below("model_state/", leaves), below("model_state/", leaves))


@mistake
def one_of_two_items(tmp_path):
    return simple(saved(tmp_path, model=MODEL, other=below("x/", BODY)), MODEL, MODEL)


@mistake
def two_sources_of_a_model():
    sources = {
        "base": checkpoint(BODY),
        "tuned": checkpoint({name: MODEL[name] for name in MODEL.keys() - BODY.keys()}),
    }
    return Mistake(Call(sources, empty(MODEL)), MODEL)


@mistake
def one_source_in_a_mapping():
    sources = {"base": checkpoint(MODEL), "step": checkpoint({"step": np.int32(3)})}
    return Mistake(Call(sources, {**empty(MODEL), "step": 0}), {**MODEL, "step": np.int32(3)}, is_cured=None)


# -- NNX


class Network(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(4, 5, rngs=rngs)


def network_leaves():
    leaves = flatten(nnx.to_pure_dict(nnx.state(Network(nnx.Rngs(0)), nnx.Param)))
    return {name: array(name, *value.shape) for name, value in leaves.items()}


@mistake
def patterns_without_value():
    """The names of a saved NNX state end in `/value`, which patterns have to know."""
    leaves = network_leaves()
    source = {f"{name}/value".replace("first/", "begin/"): value for name, value in leaves.items()}
    target = nnx.state(Network(nnx.Rngs(1)), nnx.Param)
    return Mistake(
        Call(checkpoint(source), target, [T.Rename([("begin/kernel", "first/kernel"), ("begin/bias", "first/bias")])]),
        leaves,
        is_cured=False,
    )


@mistake
def nnx_below_another_prefix():
    leaves = network_leaves()
    target = nnx.state(Network(nnx.Rngs(1)), nnx.Param)
    return Mistake(Call(checkpoint({f"model/{name}/value": value for name, value in leaves.items()}), target), leaves)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_fix_that_is_followed_ends_right_or_asks_again(name, tmp_path):
    make = MISTAKES[name]
    found = make(tmp_path) if make.__code__.co_argcount else make()
    restored = follow_blindly(found)
    assert found.is_cured is None or bool(restored) == found.is_cured


def test_there_are_enough_mistakes():
    assert len(MISTAKES) >= 40
    assert sum(1 for _ in itertools.islice(MISTAKES, 40)) == 40
