"""Errors as data: the same type, text, place and fix come back; others stay on their process."""

import json

from orbax_t5x import errors
from orbax_t5x.files.error_data import error_as_data, error_from_data


def test_errors_come_back_as_they_were():
    fix = errors.Fix.any_of(errors.Fix.setting("pass {}", strict=False), errors.Fix("read the log"))
    for kind in (errors.CorruptCheckpointError, errors.CheckpointGoneError, errors.LimitExceededError):
        error = kind("bad", path="/a", leaf="w", fix=fix)
        again = error_from_data(json.loads(json.dumps(error_as_data(error))))
        assert type(again) is kind and str(again) == str(error) and (again.path, again.leaf) == ("/a", "w")
    refused = error_from_data(error_as_data(errors.CheckpointIOError("refused", errno=5)), " (on process 1)")
    assert refused.errno == 5 and refused.message == "refused (on process 1)"
    assert error_as_data(KeyError("x")) is None and error_as_data(errors.RestorePlanError([])) is None
