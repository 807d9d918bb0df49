"""Work follows what is there, not what a header claims: each integer of small files is set to its limits.

What is read must be right, by the oracles of the fuzz targets, or refused by a typed error, within two seconds of
processor time and 64 MiB each.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.claimed_integers import CLAIMS_IN

pytestmark = pytest.mark.slow

_MOST_SECONDS = 2
_MOST_BYTES = 64 << 20

CHILD = """
import json, pathlib, sys, time
import orbax_t5x as ot
from tests.fuzz import targets
from tests.support.claimed_integers import CLAIMS_IN

targets._LIMITS = ot.Limits()  # those of users; for fuzzing they are smaller

def memory(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

said = {}
for name, claims in CLAIMS_IN.items():
    target = targets.TARGETS[name]
    directory = pathlib.Path(sys.argv[1]) / name
    directory.mkdir()
    check = target.make(directory)
    seed = next(iter(target.seeds()))
    assert check(seed) is None  # what is made once is there
    count = refused = 0
    slowest = largest = (0, "")
    for data in claims(seed):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak is what there is now
        before, begun = memory("VmRSS"), time.process_time()
        refused += check(data) is not None
        count += 1
        slowest = max(slowest, (time.process_time() - begun, data.hex()[:2000]))
        largest = max(largest, (memory("VmHWM") - before, data.hex()[:2000]))
    said[name] = count, refused, slowest, largest
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    arguments = [sys.executable, "-c", CHILD, str(tmp_path_factory.mktemp("claims"))]
    root = Path(__file__).parents[2]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=800, cwd=root)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CLAIMS_IN)
def test_a_claim_alone_costs_nothing(name, said):
    count, refused, (seconds, slowest), (grown, largest) = said[name]
    assert count >= 20 and refused, "the edits do not reach the parser"
    assert seconds < _MOST_SECONDS, slowest
    assert grown < _MOST_BYTES, largest
