"""A list of migrations: its names, its answer for checkpoints without a record, its place in a chain."""

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.restoring.chains import chain_of

T = ot.transforms
HISTORY = ot.Migrations([("rename", [T.Rename([("a", "b")])]), ("turn", T.Transpose("b"))])


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ([("a", []), ("a", [])], ValueError),
        ([("", [])], ValueError),
        (["a"], TypeError),
        ([("a", ["auto"])], TypeError),
        ([("a", "auto")], TypeError),
        ([("a", [T.Rename])], TypeError),
    ],
)
def test_what_is_no_list_of_migrations(wrong, error):
    with pytest.raises(error):
        ot.Migrations(wrong)


def test_names_digests_and_since():
    assert HISTORY.names == ("rename", "turn")
    again = ot.Migrations([("rename", [T.Rename([("a", "b")])]), ("turn", [T.Transpose("b")])]).since("rename")
    assert again == HISTORY and [step.digest() for step in again.steps] == [step.digest() for step in HISTORY.steps]
    assert [step.is_assumed for step in again.steps] == [True, False]
    assert len({step.digest() for step in ot.Migrations([("a", []), ("b", [])]).steps}) == 2
    with pytest.raises(ValueError, match="the names are rename, turn"):
        HISTORY.since("nothing")


def test_its_place_in_a_chain(tmp_path):
    assert len(chain_of([T.Drop("z"), HISTORY])) == 3
    with pytest.raises(TypeError, match="other transforms follow"):
        chain_of([HISTORY, T.Drop("z")])
    source = ot.Source(tmp_path, HISTORY)
    np.savez(tmp_path / "x.npz", a=np.zeros(2))
    with pytest.raises(TypeError, match="Migrations are for restores"):
        ot.TrainStateHandler().save(tmp_path / "step", ot.args.TrainStateSave({"a": np.zeros(2)}, transforms=HISTORY))
    with pytest.raises((TypeError, ot.errors.CheckpointError)):
        ot.restore({"one": source}, None)
