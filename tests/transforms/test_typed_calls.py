# pyright: reportUnnecessaryTypeIgnoreComment=true
"""Transforms as users write them: `make lint` checks the types of this file, and the test what is held."""

import dataclasses
import re
from typing import Any, assert_type

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.transforms.patterns.table import Pattern, Rule

T = ot.transforms


def test_constructors_take_what_users_write_and_hold_what_they_say():
    rename, drop = T.Rename([("a", "b")]), T.Drop(["a", re.compile("b")])
    assert assert_type(rename.rules, tuple[Rule, ...]) == (("a", "b"),)
    assert assert_type(drop.patterns, tuple[Pattern, ...]) == ("a", re.compile("b"))
    assert T.Keep("a").patterns == ("a",) and T.Concat(["a", "b"], "c", 0).patterns == ("a", "b")
    assert T.AssignmentMap([("a", "b"), ("c", None)]).rules == (("a", "b"), ("c", None))
    assert assert_type(T.Overlay(["x"]).sources, tuple[str, ...]) == ("x",)
    assert assert_type(T.Split("a", ["b", "c"], 0, sizes=[1, 2]).into, tuple[str, ...]) == ("b", "c")
    assert T.Average({"a": 1, "b": 3}).weights == (("a", 1.0), ("b", 3.0)) and T.Average([1, 3]).weights == (1.0, 3.0)
    assert T.Slice("a", np.s_[:3]).index == ((None, 3, None),) and T.Slice("a", np.s_[..., 0]).index == (..., 0)
    assert assert_type(T.Reshape("a", [1, 2]).shape, tuple[int, ...]) == (1, 2) and T.Pad("a", (8, None)).shape[0] == 8
    assert T.Chain([rename, drop]).steps == (rename, drop) and T.Transpose("a", [1, 0]).axes == (1, 0)
    assert T.RepeatLayers(r"a_(\d+)", 3, how=range(3)).how == (0, 1, 2)
    assert T.Cast(".*", "bfloat16").dtype.name == "bfloat16" and T.Cast(".*", np.float32).dtype == np.float32
    assert T.Affine("a", offset=1).offset == 1.0 and len(T.inverse([rename])) == 1
    follow = T.FollowOptimizer(rename, factors=[("a", ["ROW", "COLUMN"])], roots=[("model", "optimizer")])
    assert follow.roots == (("model", "optimizer"),)
    assert assert_type(ot.rules.hf_t5_to_t5x().inverse(), ot.rules.RulePack).has_inverse


def test_other_arguments_are_errors_of_types():
    """A comment that pyright no longer needs is an error of its own."""
    with pytest.raises(TypeError):
        T.Rename(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        T.Drop(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        T.Overlay(3)  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass
class State:
    params: dict[str, np.ndarray]


def test_restores_return_the_type_of_their_target(tmp_path):
    """A dict comes back with other leaves than abstract ones, so its type is open."""
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"params/w": np.ones(2, np.float32)}, path)
    state = jax.tree_util.register_dataclass(State, ["params"], [])({"w": np.zeros(2, np.float32)})
    assert assert_type(ot.restore(path, state), State).params["w"].sum() == 2
    plan = assert_type(ot.plan_restore(path, state), "ot.RestorePlan[State]")
    assert assert_type(plan.execute(), State).params["w"].sum() == 2 and plan.report.bytes_read == 8
    assert assert_type(ot.restore(path, None), dict[str, Any])["params"]["w"].sum() == 2
    assert assert_type(ot.restore(path, {"params": {"w": np.zeros(2, np.float32)}}), Any)["params"]["w"].sum() == 2
    assert assert_type(ot.v1.load_and_transform(path, state), State).params["w"].sum() == 2
    with ocp.CheckpointManager(tmp_path / "run", item_handlers=ot.TrainStateHandler()) as manager:
        assert assert_type(ot.restore_or_initialize(manager, state, init_from=path).state, State).params["w"].sum() == 2
    with pytest.raises(TypeError):
        ot.restore(path, state, stirct=False)  # pyright: ignore[reportCallIssue]
