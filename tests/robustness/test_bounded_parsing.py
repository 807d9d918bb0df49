"""Small files that would cost much: what is parsed is bounded in memory, and in steps.

Memory is what `tracemalloc` sees; steps are counted. No test takes the time.
"""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import CorruptCheckpointError, LimitExceededError, RestorePlanError
from orbax_t5x.files.strict_json import parsed_bytes
from orbax_t5x.readers.tf_bundle import leaves as bundle_leaves
from orbax_t5x.readers.tf_bundle.proto import Extent
from orbax_t5x.readers.tiling import check_tiling
from tests.support.bundle_writer import bundle_of, entry
from tests.support.hostile_files import repeated
from tests.support.traced_memory import peak_of

_MIB = 1 << 20
GOOD = np.arange(6, dtype=np.float32)


def safetensors_file(path: Path, header: bytes) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + GOOD.tobytes())
    return path


@pytest.mark.slow
def test_a_header_of_empty_objects_and_a_large_configuration(tmp_path):
    good = b'{"a":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}'
    hostile = b',"__metadata__":{"b":' + repeated(b"{}", 12 * _MIB) + b"}}"
    with pytest.raises(LimitExceededError, match="bytes of JSON"):
        ot.open_checkpoint(safetensors_file(tmp_path / "model.safetensors", good + hostile))
    path = safetensors_file(tmp_path / "model.safetensors", good + b"}")
    (tmp_path / "config.json").write_bytes(b" " * (16 * _MIB) + b"{}")
    with ot.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.metadata["config"] is None and "Limits.json_bytes" in checkpoint.metadata["config_error"]
        assert np.array_equal(checkpoint.leaves["a"].get(), GOOD)
    assert path.exists()


def test_no_header_of_small_tensors_is_refused_for_its_memory():
    """Short names and small shapes, of which the most fit into a header, stay below the bound."""
    entries = {f"{i:07d}": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, i + 10**8]} for i in range(1000)}
    data = json.dumps(entries, separators=(",", ":")).encode()
    assert parsed_bytes(data) < 12 * len(data)


@pytest.mark.parametrize("dtype", ["U8", "unknown"])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_many_tensors_take_ten_times_their_header(tmp_path, dtype, is_sorted):
    """Sound and unreadable ones alike, in whatever order their keys are."""
    entry = {"dtype": dtype, "shape": [0]}
    entries = {f"{number:07d}": {**entry, "data_offsets": [0, 0]} for number in range(4_000)}
    entries["zz"] = {"dtype": "F32", "shape": [6], "data_offsets": [0, GOOD.nbytes]}
    header = json.dumps(entries, separators=(",", ":"), sort_keys=is_sorted).encode()
    path = safetensors_file(tmp_path / "model.safetensors", header)

    def opened() -> None:
        with ot.open_checkpoint(path) as checkpoint:
            assert len(checkpoint.leaves) == len(entries)

    opened()
    assert peak_of(opened) < 10 * len(header)


def test_strings_over_a_hole_are_counted_before_they_are_read(tmp_path):
    count = 200_000_000
    bundle = bundle_of({"good": GOOD})
    bundle.entries[b"bad"] = entry(7, (count,), offset=GOOD.nbytes, size=count + 4)
    prefix = bundle.write(tmp_path)
    os.truncate(f"{prefix}.data-00000-of-00001", GOOD.nbytes + count + 4)

    def read():
        with ot.open_checkpoint(prefix) as checkpoint:
            for get in (checkpoint.leaves["bad"].get, checkpoint.leaves["bad"][:1].get):
                with pytest.raises(LimitExceededError, match=r"strings, more than Limits\.entries") as caught:
                    get()
                assert caught.value.leaf == "bad"
            assert np.array_equal(checkpoint.leaves["good"].get(), GOOD)

    assert peak_of(read) < 16 * _MIB


def test_slices_listed_by_entries_that_have_none_of_their_own_are_not_looked_at(tmp_path, monkeypatch):
    bundle = bundle_of({"good": GOOD})
    rows = [[Extent(row, 1)] for row in range(200)]
    bundle.add_sliced("sliced", np.arange(200, dtype=np.float32), rows)
    own = bundle.entries[b"sliced"]
    for number in range(50):
        bundle.entries[f"zz{number}".encode()] = own
    prefix = bundle.write(tmp_path)
    keys: list[bytes] = []
    real = bundle_leaves.slice_key
    monkeypatch.setattr(bundle_leaves, "slice_key", lambda name, extents: keys.append(name) or real(name, extents))
    with ot.open_checkpoint(prefix) as checkpoint:
        assert keys == [b"sliced"] * 200
        assert checkpoint.leaves["sliced"].get().tolist() == list(range(200))
        with pytest.raises(CorruptCheckpointError, match="it lists 200 slices, and the index has far fewer") as caught:
            checkpoint.leaves["zz7"].get()
    assert caught.value.leaf == "zz7"


def test_irregular_slices_share_one_budget_and_even_ones_need_none(tmp_path, monkeypatch):
    even = tuple(((row, row + 1), (0, 3)) for row in range(50))
    assert check_tiling((50, 3), even, 0).problem is None
    odd = [((0, 2), (0, 1)), ((0, 1), (1, 3)), ((1, 2), (1, 3))]
    assert check_tiling((2, 3), odd, 100).problem is None
    assert "too many to check" in (check_tiling((2, 3), odd, 5).problem or "")
    monkeypatch.setattr(bundle_leaves, "MAX_TILING_STEPS", 30)
    bundle = bundle_of({})
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    slices = [[Extent(low, high - low) for low, high in box] for box in odd]
    for name in ("a", "b", "c"):
        bundle.add_sliced(name, value, slices)
    with ot.open_checkpoint(bundle.write(tmp_path)) as checkpoint:
        assert np.array_equal(checkpoint.leaves["a"].get(), value)
        assert np.array_equal(checkpoint.leaves["b"].get(), value)
        with pytest.raises(CorruptCheckpointError, match="too many to check"):
            checkpoint.leaves["c"].get()


@pytest.mark.parametrize("number", [10**15, 100_000])
def test_layers_of_any_number_cost_nothing(number, tmp_path):
    state = {f"enc/layers_{i}/w": GOOD for i in (0, 1, 3, number)}
    transform = ot.transforms.StackLayers(r"(enc)/layers_(\d+)/(.*)", r"\1/layers/\3", 0)

    def run():
        with pytest.raises(RestorePlanError) as caught:
            ot.plan_restore(bundle_of(state).write(tmp_path), None, [transform])
        kinds = {problem.kind for problem in caught.value.problems}
        assert kinds == {"rule", "missing"}

    assert peak_of(run) < 8 * _MIB


def test_a_tower_with_a_gap_of_many_layers_names_the_first(tmp_path):
    state = {f"enc/layers_{i}/w": GOOD for i in (0, 2, 99_999)}
    transform = ot.transforms.StackLayers(r"(enc)/layers_(\d+)/(.*)", r"\1/layers/\3", 0)
    with pytest.raises(RestorePlanError, match=r"layer 1, 3, 4, 5, 6 and 99,992 more of 100000 is missing"):
        ot.plan_restore(bundle_of(state).write(tmp_path), None, [transform])


def test_an_axis_of_10_to_the_12_without_elements_is_not_unstacked(tmp_path):
    header = json.dumps({"a": {"dtype": "U8", "shape": [10**12, 0], "data_offsets": [0, 0]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    transform = ot.transforms.UnstackLayers(r"a", r"layers_{i}", 0)
    with pytest.raises(RestorePlanError, match="1000000000000 layers, and 100000 are the most"):
        ot.plan_restore(path, None, [transform])
