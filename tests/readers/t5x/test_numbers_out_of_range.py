"""Numbers of `.zarray` that the dtype or a program cannot hold break their own leaf and no other."""

import json

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError
from tests.support.t5x_steps import GOOD, array, save, spec

HUGE = 10**30
CASES = {
    "a fill value beyond 64 bits": {"fill_value": HUGE, "dtype": "<i4"},
    "a fill value beyond float64": {"fill_value": 10**400},
    "a fill value beyond float32": {"fill_value": 1e300},
    "a level beyond 64 bits": {"compressor": {"id": "gzip", "level": HUGE}},
    "a level of zstd beyond 64 bits": {"compressor": {"id": "zstd", "level": -HUGE}},
    "a level that is true": {"compressor": {"id": "gzip", "level": True}},
    "a size beyond 64 bits": {"shape": [HUGE, 3]},
    "a chunk beyond 64 bits": {"chunks": [2, HUGE]},
    **{
        f"{value} of {dtype}": {"fill_value": value, "dtype": dtype}
        for dtype, values in {
            "<u2": (70000, -1, 1e300, 1.5, True),
            "|u1": (256, -1, 0.5, False),
            "|i1": (128, -129, True),
            "<i4": (1 << 31, 1.5, True),
            "<i8": (1 << 63, 1e19),
            "<u8": (1 << 64, -1),
            "int4": (8, -9, 0.5),
            "|b1": (2, 0.0, -1),
            "<f2": (1e6, True),
            "bfloat16": (1e39, True),
            "float8_e4m3fn": (1e4, False),
        }.items()
        for value in values
    },
}


def _step(directory, metadata, version):
    step = directory / "checkpoint_3"
    step.mkdir()
    array(step / "bad")
    array(step / "good")
    written = json.loads((step / "bad" / ".zarray").read_text())
    (step / "bad" / ".zarray").write_text(json.dumps(written | metadata))
    save(step, spec(metadata={}, dtype=...), version)
    return step


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_one_leaf_is_broken_and_the_others_open(case, version, tmp_path):
    with ot.open_checkpoint(_step(tmp_path, CASES[case], version)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.leaves["good"].get(), GOOD)
        with pytest.raises(CheckpointError, match="leaf 'bad'"):
            checkpoint.leaves["bad"].get()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("<u2", 16256),
        ("<u2", 3.0),
        ("|b1", True),
        ("<i8", -(1 << 63)),
        ("<u8", (1 << 64) - 1),
        ("<f4", HUGE),
        ("int4", 7),
    ],
)
def test_fill_values_at_the_border_are_read(dtype, value, tmp_path):
    step = _step(tmp_path, {"fill_value": value, "dtype": dtype}, 2)
    for file in (step / "bad").iterdir():
        if file.name != ".zarray":
            file.unlink()
    with ot.open_checkpoint(step) as checkpoint:
        leaf = checkpoint.leaves["bad"]
        assert leaf.shape == (2, 3)
        found = leaf.get()
        wanted = np.full((2, 3), value).astype(np.uint16) if dtype == "<u2" else np.full((2, 3), value, found.dtype)
        assert found.tobytes() == wanted.tobytes()
