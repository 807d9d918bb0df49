"""Slots of new parameters get the target's names, or stay in their container."""

import numpy as np

from orbax_t5x import transforms as tr
from orbax_t5x.testing.transform_suite import run

STATE = {"params/w": (2, 3), "opt_state/0/mu/w": (2, 3), "opt_state/0/nu/w": (2, 3), "opt_state/0/count": ()}
MOVE = tr.FollowOptimizer(tr.Rename([("params/(.*)", r"model/\1")]))


def arrays(names):
    return {name: np.full(shape, at) for at, (name, shape) in enumerate(names.items())}


def test_without_a_target_slots_stay_in_their_container():
    result, diagnostics = run(MOVE, arrays(STATE))
    assert diagnostics.problems == []
    assert result.keys() == {name.replace("params/", "model/") for name in STATE}


def test_a_targets_container_gives_the_names():
    source = arrays(STATE)
    for container in ("opt/opt_state/", "trainer/optimizer/state/"):
        names = {name: name.replace("params/", "model/").replace("opt_state/", container) for name in STATE}
        target = {names[name]: np.zeros(shape) for name, shape in STATE.items()}
        result, diagnostics = run(MOVE, source, target)
        assert diagnostics.problems == [] and result.keys() == target.keys()
        for name, value in source.items():
            np.testing.assert_array_equal(result[names[name]], value, err_msg=name)


def test_a_wrapper_takes_each_of_equal_states_to_its_place():
    states = {f"opt_state/{label}/mu/{name}": (2,) for label, name in (("a", "v"), ("b", "w"))}
    source = arrays({"params/v": (2,), "params/w": (2,), **states})
    target = {name.replace("opt_state/", "opt_state/1/"): value for name, value in source.items()}
    result, _ = run(tr.FollowOptimizer(tr.Rename([("params/absent", "params/x")], require_match=False)), source, target)
    assert result.keys() == target.keys()
    assert all(np.array_equal(result[name.replace("opt_state/", "opt_state/1/")], source[name]) for name in states)
