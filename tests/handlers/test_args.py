"""The arguments of a save and of a restore."""

import warnings

import numpy as np

import orbax_t5x as ot


def test_args_are_constructed_without_arguments_and_never_show_arrays():
    assert ot.args.TrainStateRestore().given() == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = repr(ot.args.TrainStateSave({"a": np.arange(1000)})) + repr(ot.args.TrainStateRestore({"a": np.ones(9)}))
    assert "array" not in text
