"""Errors about a checkpoint that does not fit, with fixes in this call's keywords."""

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot
from tests.support.damaged_steps import TARGET, save_items, save_single, start, state


def test_fixes_are_what_this_call_takes(tmp_path):
    save_items(tmp_path)
    with pytest.raises(
        ot.errors.RestorePlanError, match="name the item that is the state: item= one of 'ema', 'state'"
    ):
        start(tmp_path)
    with pytest.raises(ot.errors.RestorePlanError) as caught:
        start(tmp_path, {**TARGET, "more": TARGET["w"]}, item="state")
    fix = caught.value.problems[0].fix
    assert dict(fix.arguments) == {"fallback_for": ("more",)} and "fallback=" not in str(caught.value)
    with ocp.CheckpointManager(tmp_path / "new") as manager:
        with pytest.raises(ot.errors.RestorePlanError, match="give init_fn= values") as caught:
            ot.restore_or_initialize(
                manager, {**TARGET, "more": TARGET["w"]}, init_from=tmp_path / "2" / "state", init_fn=state
            )
        assert "fallback=" not in str(caught.value)
        with pytest.raises(ot.errors.RestorePlanError) as caught:
            ot.restore_or_initialize(manager, TARGET, init_fn=lambda: {"w": float(jnp.sum(jnp.ones(3))), "step": 0})
        assert "init_fn=" in str(caught.value) and "fallback=" not in str(caught.value)
    with pytest.raises(TypeError, match=r"manager is '.*'; pass an ocp.CheckpointManager"):
        ot.restore_or_initialize(str(tmp_path), TARGET)


def test_what_a_transform_raised_is_the_cause(tmp_path):
    """As in a restore: the error with other fixes stands in place of the one of the plan."""

    def wrong(state, target):
        raise KeyError("kernel")

    save_single(tmp_path / "source")
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(ot.errors.RestorePlanError, match="wrong raised KeyError") as caught:
            source = tmp_path / "source"
            ot.restore_or_initialize(manager, TARGET, init_from=source, transforms=[wrong], is_resuming=False)
    assert isinstance(caught.value.__cause__, KeyError)
