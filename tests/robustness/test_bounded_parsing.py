"""Numbers of layers and sizes of axes that names and headers claim cost nothing."""

import json
import struct

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import RestorePlanError
from tests.support.bundle_writer import bundle_of
from tests.support.traced_memory import peak_of

_MIB = 1 << 20
GOOD = np.arange(6, dtype=np.float32)


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
