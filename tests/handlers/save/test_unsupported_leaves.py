"""Leaves that Orbax cannot store: what the error says of each kind, and that all of them can be left out."""

import datetime
import re

import jax
import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError, UnsupportedCheckpointError
from orbax_t5x.provenance import records as provenance
from tests.support.saving import custom_metadata, files, save, stock

STRUCTURED = np.dtype([("x", "<i4"), ("y", "<f8")])
# A leaf, what the error says of it, and the shape and dtype that are recorded.
UNSTORED = {
    "bytes": (b"xx", "holds bytes (bytes16)", (), "|S2"),
    "large": (2**70, "is an integer that does not fit into 64 bits", (), "object"),
    "small": (-(2**63) - 1, "is an integer that does not fit into 64 bits", (), "object"),
    "complex": (
        1j,
        "is of type complex, which Orbax does not store: make it an array with np.asarray",
        (),
        "complex128",
    ),
    "object": (object(), "is of type object, which Orbax does not store", (), "object"),
    "function": (len, "is of type builtin_function_or_method, which Orbax does not store", (), "object"),
    "date": (datetime.date(2020, 1, 1), "is of type date, which Orbax does not store", (), "object"),
    "text": (np.array(["a"]), "holds text (str32)", (1,), "<U1"),
    "objects": (np.array([None]), "holds Python objects (object)", (1,), "object"),
    "dates": (
        np.array(["2020-01-01"], "M8[D]"),
        "has a dtype that Orbax does not store (datetime64[D])",
        (1,),
        "datetime64[D]",
    ),
    "fields": (np.zeros(2, STRUCTURED), f"has a dtype that Orbax does not store ({STRUCTURED})", (2,), str(STRUCTURED)),
}


@pytest.mark.parametrize("kind", UNSTORED)
def test_leaves_of_each_kind_are_told_apart_and_can_be_left_out(tmp_path, kind):
    leaf, reason, shape, dtype = UNSTORED[kind]
    state = {"x": {"y": leaf}, "w": np.ones(2)}
    with pytest.raises(UnsupportedCheckpointError, match=re.escape(f"'x/y' {reason}; nothing was written.")) as raised:
        save(tmp_path / "c", state)
    assert raised.value.leaf == "x/y" and files(tmp_path) == []
    save(tmp_path / "c", state, on_unsupported="skip")
    assert provenance.skipped_from_metadata(custom_metadata(tmp_path / "c")) == {"x/y": (shape, dtype)}
    assert stock(tmp_path / "c").keys() == {"x", "w"} and stock(tmp_path / "c")["x"] == {}
    assert ot.restore(tmp_path / "c", None).keys() == {"x", "w"}


@pytest.mark.parametrize(
    "empty",
    [np.zeros(0, "U3"), np.zeros(0, "S3"), np.zeros(0, object), np.zeros(0, "M8[D]"), np.zeros(0, STRUCTURED)],
    ids=lambda array: array.dtype.kind,
)
def test_a_checkpoint_opens_whose_record_has_empty_arrays_of_no_numbers(tmp_path, empty):
    save(
        tmp_path / "c",
        {"x": empty, "key": jax.random.split(jax.random.key(0))[:0], "w": np.ones(2)},
        on_unsupported="skip",
    )
    assert ot.restore(tmp_path / "c", None).keys() == {"w"}
    assert ot.verify(tmp_path / "c").status == "ok"
    with pytest.raises(RestorePlanError, match="x"):
        ot.restore(tmp_path / "c", {"x": np.zeros(0), "w": np.ones(2)})
