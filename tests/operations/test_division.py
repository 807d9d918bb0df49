"""Several processes report what one does, and each byte is read by one of them."""

import json

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.operations.division import divided
from orbax_t5x.trees.flat import unflatten
from tests.support.jax_job import run_script
from tests.support.saving import save

_SCRIPT = """
import orbax.checkpoint as ocp
import orbax_t5x as ot

a, b, damaged, large = sys.argv[1:]
split = ot.transforms.Split("z/kernel", ["z/left", "z/right"], 0)

def report(call, *arguments, **options):
    done = []
    found = call(*arguments, **options, progress=lambda *update: done.append(update[:2])).to_json()
    tell([found, done[-1]])

report(ot.verify, damaged)
report(ot.diff, damaged, b)
report(ot.diff, a, ot.Source(b, split), split)
from orbax_t5x.operations.verify import verify as module
module._BLOCK_BYTES = 1 << 16
report(ot.verify, large)

def fails(*update):
    if process == 1:
        raise KeyError("mine")

for call in (
    lambda: ot.verify(a, progress=fails),
    lambda: ot.diff(a, b, progress=fails),
    lambda: ot.verify(a if process else b),
    lambda: ot.diff(a, b if process else damaged),
    lambda: ot.verify(a + "none"),
):
    try:
        call()
    except Exception as error:
        tell([type(error).__name__, str(error)])
if process == 1:
    alone = ocp.options.MultiprocessingOptions(primary_host=1, active_processes={1})
    report(ot.verify, a, multiprocessing_options=alone)
    report(ot.diff, a, a, multiprocessing_options=alone)
"""


def without_time(report):
    return {name: value for name, value in json.loads(json.dumps(report)).items() if name != "seconds"}


@pytest.mark.slow
def test_processes_report_what_one_does(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {f"{name}/kernel": rng.standard_normal((64, 8 + size)) for size, name in enumerate("uvwxyz")}
    arrays["complex"] = np.asarray([1 + 2j, 3], np.complex64)
    other = {**arrays, "v/kernel": arrays["v/kernel"] + 1, "complex": np.asarray([1, np.inf], np.complex64)}
    other["w/kernel"] = arrays["w/kernel"].astype(np.float32)
    trees = {"a": arrays, "b": other, "damaged": arrays}
    a, b, damaged = (
        save(tmp_path / name, unflatten(tree), {"use_ocdbt": False, "use_compression": False})
        for name, tree in trees.items()
    )
    for name in ("u.kernel", "x.kernel"):
        chunk = damaged / name / "0.0"
        data = bytearray(chunk.read_bytes())
        data[-1] ^= 1
        chunk.write_bytes(data)
    split = ot.transforms.Split("z/kernel", ["z/left", "z/right"], 0)
    alone = [ot.verify(damaged), ot.diff(damaged, b), ot.diff(a, ot.Source(b, split), split)]
    assert [leaf.name for leaf in alone[0].leaves if leaf.status == "damaged"] == ["u/kernel", "x/kernel"]
    assert alone[1].leaves[0].absolute.b == complex(np.inf)
    safetensors.numpy.save_file({"one": np.zeros((64, 1 << 12), np.float32)}, tmp_path / "large.safetensors")
    told = run_script(_SCRIPT, 3, a, b, damaged, tmp_path / "large.safetensors", devices=1)
    large = [mine.pop(3) for mine in told]
    assert [found["bytes_read"] for found, _ in large] == [1 << 20] * 3
    assert sorted(done for _, (done, _) in large) == [1 << 18, *[3 << 17] * 2], "rows of one leaf, in blocks"
    reports = [[found for found, _ in mine[:3]] for mine in told]
    assert reports[0] == reports[1] == reports[2]
    assert list(map(without_time, reports[0])) == [without_time(one.to_json()) for one in alone]
    total = sum(array.nbytes for array in arrays.values())
    for mine in told:
        assert mine[0][1][0] == mine[0][1][1] < total / 2
    assert sum(mine[0][1][1] for mine in told) == total
    for mine in told:
        assert mine[3:5] == [["KeyError", "'mine'"]] * 2
        for (kind, text), call in zip(mine[5:7], ("verify", "diff"), strict=True):
            assert kind == "RestorePlanError" and f"call {call} with the same arguments" in text
        assert mine[7][0] == "CheckpointNotFoundError"
    assert [found["bytes_read"] for found, _ in told[1][8:]] == [total, 2 * total]


def test_one_process_does_everything():
    with divided(None, "a", "verify") as division:
        assert division.results([3, 4], ["x", "y"], int, list) == [3, 4]
        assert division.total(5, 0.5) == (5, 0.5)
    with pytest.raises(TypeError, match="MultiprocessingOptions"):
        ot.verify("a", multiprocessing_options=ocp.args)
