"""The keywords of a restore have one definition, and what was opened for a restore that fails is closed."""

import dataclasses
import inspect
import pathlib

import numpy as np
import pytest
from safetensors.numpy import save_file

import orbax_t5x as ot
from orbax_t5x.restoring.options import RestoreOptions

DEFAULTS = {field.name: field.default for field in dataclasses.fields(RestoreOptions)}
READING = {"verify", "memory_limit_bytes", "progress", "broadcast"}


def keyword_defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.name in DEFAULTS}


def test_every_signature_has_the_keywords_and_defaults_of_the_options():
    assert keyword_defaults(ot.restore) == DEFAULTS
    assert keyword_defaults(ot.args.TrainStateRestore) == keyword_defaults(ot.v1.AbstractTrainState) == DEFAULTS
    # Contexts and managers have the processes as an option of their own.
    of_contexts = {name: default for name, default in DEFAULTS.items() if name != "multiprocessing_options"}
    assert keyword_defaults(ot.v1.load_and_transform) == of_contexts
    # What a new run lacks comes from `init_fn`.
    without_fallback = {name: default for name, default in of_contexts.items() if name != "fallback"}
    assert keyword_defaults(ot.restore_or_initialize) == without_fallback
    assert keyword_defaults(ot.plan_restore) == {name: DEFAULTS[name] for name in DEFAULTS.keys() - READING}
    assert keyword_defaults(ot.RestorePlan.execute) == {name: DEFAULTS[name] for name in READING}


def test_every_signature_has_the_types_of_the_options():
    types = {field.name: field.type for field in dataclasses.fields(RestoreOptions)}
    for function in (ot.restore, ot.plan_restore, ot.RestorePlan.execute, ot.v1.load_and_transform):
        parameters = inspect.signature(function).parameters
        assert {name: parameters[name].annotation for name in types.keys() & parameters} == {
            name: types[name] for name in types.keys() & parameters
        }


def test_options_are_taken_from_the_arguments_of_a_handler():
    args = ot.args.TrainStateRestore(None, item="state", strict=False, verify="off", memory_limit_bytes=5)
    options = RestoreOptions.among(vars(args))
    assert (options.item, options.strict, options.verify, options.limit) == ("state", False, "off", 5)


def test_a_path_is_no_fallback():
    for path in ("scratch.safetensors", pathlib.Path("scratch")):
        with pytest.raises(TypeError, match="not a path"):
            ot.plan_restore("model.safetensors", None, fallback=path)


@pytest.mark.parametrize("plan_or_restore", [ot.plan_restore, ot.restore])
def test_a_source_that_does_not_open_closes_those_opened_before(tmp_path, monkeypatch, plan_or_restore):
    path = tmp_path / "a.safetensors"
    save_file({"a": np.zeros(2, np.float32)}, path)
    closed = []
    close = ot.Checkpoint.close
    monkeypatch.setattr(ot.Checkpoint, "close", lambda self: (closed.append(self.path), close(self))[1])
    with pytest.raises(ot.errors.CheckpointNotFoundError):
        plan_or_restore({"first": path, "second": tmp_path / "missing"}, None)
    assert closed == [str(path)]


def test_a_plan_with_problems_closes_what_it_opened(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    save_file({"a": np.zeros(2, np.float32)}, path)
    closed = []
    close = ot.Checkpoint.close
    monkeypatch.setattr(ot.Checkpoint, "close", lambda self: (closed.append(self.path), close(self))[1])
    with pytest.raises(ot.RestorePlanError):
        ot.plan_restore(path, {"b": np.zeros(2, np.float32)})
    assert closed == [str(path)]
