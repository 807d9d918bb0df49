"""Round trips to a store overlap: of many small arrays all reads are under way together."""

import importlib.metadata
import threading

import flax.serialization
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
import tensorstore as ts

import orbax_t5x as ot
from tests.support.http_store import serving

# TensorStore 0.1.84 has fewer than a dozen requests under way, whatever is set: there only a group of small neighbours
# can be seen to overlap.
_VERSION = tuple(int(part) for part in importlib.metadata.version("tensorstore").split(".")[:3])
COUNT = 48 if _VERSION > (0, 1, 84) else 6
# Arrays farther apart than what is read over between two of them.
VALUES = {f"layer_{number:02}": np.full((40, 50), number, np.float32) for number in range(COUNT)}


def write_safetensors(directory):
    safetensors.numpy.save_file(VALUES, directory / "model.safetensors")


def write_scattered_safetensors(directory):
    """What is not restored lies between the arrays: no two are read by one request, and the file is not small."""
    between = {f"{name}_unwanted": np.tile(value, 4) for name, value in VALUES.items()}
    safetensors.numpy.save_file(VALUES | between, directory / "model.safetensors")


def write_t5x(directory):
    specs = {}
    for name, value in VALUES.items():
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{directory}/{name}/"}}
        spec |= {"metadata": {"shape": value.shape, "dtype": "<f4", "compressor": {"id": "gzip", "level": 1}}}
        ts.open(spec, create=True).result().write(value).result()
        kvstore = {"driver": "file", "path": f"{name}/"}
        specs[name] = {"driver": "zarr", "dtype": "float32", "kvstore": kvstore, "metadata": {}}
    tree = {"version": 3, "optimizer": specs}
    (directory / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))


@pytest.mark.parametrize("write", [write_scattered_safetensors, write_t5x])
def test_reads_of_many_leaves_are_under_way_together(tmp_path, write):
    (tmp_path / "model").mkdir()
    write(tmp_path / "model")
    gate = threading.Barrier(COUNT)

    def wait_for_the_others(request):
        if request.name.endswith(("/0.0", ".safetensors")):
            gate.wait(30)

    with serving(tmp_path) as store:
        with ot.open_checkpoint(f"{store.url}/model") as checkpoint:
            store.fault = wait_for_the_others
            target = {name: np.zeros_like(value) for name, value in VALUES.items()}
            restored = ot.restore(checkpoint, target, strict=False)
    for name, value in VALUES.items():
        np.testing.assert_array_equal(restored[name], value)
    assert not gate.broken


def test_the_metadata_of_an_opening_is_requested_once_and_together(tmp_path):
    for name, write in (("t5x", write_t5x), ("safetensors", write_safetensors)):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    (tmp_path / "safetensors" / "config.json").write_text("{}")
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", VALUES)
    gates = {"HEAD": threading.Barrier(2), "bytes=0-": threading.Barrier(2)}

    def wait_for_the_other(request):
        kind = next((kind for kind in gates if kind in (request.method, (request.range or "")[:8])), None)
        if kind is not None and request.name.endswith(("_METADATA", "_strings.json")):
            gates[kind].wait(30)

    with serving(tmp_path) as store:
        for name in ("t5x", "safetensors", "orbax"):
            store.forget()
            store.fault = wait_for_the_other if name == "orbax" else store.fault
            with ot.open_checkpoint(f"{store.url}/{name}") as checkpoint:
                assert set(checkpoint.leaves) == set(VALUES)
            requested = [one.name for one in store.log if one.name.endswith((".zarray", "config.json"))]
            expected = {"t5x": [f"t5x/{leaf}/.zarray" for leaf in VALUES], "safetensors": ["safetensors/config.json"]}
            assert sorted(requested) == expected.get(name, [])
    assert not any(gate.broken for gate in gates.values())
