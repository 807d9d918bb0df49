"""A bundle of 45 GB of holes: opening and listing costs little memory, and one layer of it reads.

In a process of its own: memory is the growth of its peak over what it had after the imports.
"""

import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.bundle_writer import np_dtype
from tests.support.sparse_checkpoints import t5_xxl, write_bundle

pytestmark = pytest.mark.slow

MIB = 1 << 20


CHILD = """
    import asyncio, json, sys

    import numpy as np

    from orbax_t5x.lazy.leaf import ReadStats, Request
    from orbax_t5x.readers.tf_bundle.open import open_tf_bundle

    def memory(field):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before = memory("VmRSS")
    checkpoint = open_tf_bundle(sys.argv[1])
    total = sum(view.nbytes for view in checkpoint.leaves.values())
    figures = {"leaves": len(checkpoint.leaves), "bytes": total}
    figures["open_growth"] = memory("VmHWM") - before

    stats = ReadStats("touched")
    verified = []
    wanted = 0
    out = np.ones((10240, 4096), np.float32)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = memory("VmRSS")
    for name, view in checkpoint.leaves.items():
        if name.startswith("encoder/block_007/") and view.nbytes < out.nbytes:
            (leaf,) = view.leaves()
            part = out.reshape(-1)[: view.size].reshape(view.shape)
            part.fill(1)
            asyncio.run(leaf.read_into([Request(tuple((0, n) for n in view.shape), part)], stats))
            verified.append(asyncio.run(leaf.verify_checksum(stats, stats.ranges(leaf))))
            assert not part.any()
            wanted += view.nbytes
    figures |= {"layer": verified, "wanted": wanted, "read": stats.bytes_read}
    figures["layer_growth"] = memory("VmHWM") - before
    print(json.dumps(figures))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_bundle_of_45_gb_opens_lists_and_reads_in_little_memory(tmp_path: Path, record_property) -> None:
    shapes = t5_xxl()
    prefix = write_bundle(tmp_path, shapes, 8)
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(prefix)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    for name, value in figures.items():
        record_property(name, value)
    print(figures)
    assert figures["leaves"] == len(shapes)
    expected = sum(math.prod(shape) * np_dtype(dtype).itemsize for dtype, shape in shapes.values())
    assert figures["bytes"] == expected > 44e9
    assert figures["open_growth"] < 64 * MIB
    assert figures["layer"] and set(figures["layer"]) == {True}
    assert figures["read"] == figures["wanted"] > 200 * MIB
    assert figures["layer_growth"] < 64 * MIB
