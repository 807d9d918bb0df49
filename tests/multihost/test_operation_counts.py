"""Operations of two processes ask a web server and a bucket for metadata as often as those of one process do."""

import collections

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

from tests.support.amazon_store import amazon_store
from tests.support.http_store import Request, serving
from tests.support.jax_job import run_script

pytestmark = pytest.mark.slow

# Larger than what is read whole at once.
ARRAYS = {"x": np.arange(1 << 19, dtype=np.float32), "y": np.arange(1 << 9, dtype=np.float32)}
SCRIPT = """
    import urllib.request
    import orbax.checkpoint as ocp
    import orbax.checkpoint.experimental.v1 as v1
    import orbax_t5x as ot
    from jax.experimental import multihost_utils
    folder, marks, *sources = sys.argv[1:]
    arrays = {"x": np.zeros(1 << 19, np.float32), "y": np.zeros(1 << 9, np.float32)}

    def with_handler(source):
        with ocp.Checkpointer(ot.TrainStateHandler()) as checkpointer:
            return checkpointer.restore(f"{folder}/own", ot.args.TrainStateRestore(arrays, source=source))

    def with_v1(source):
        with ot.v1.context():
            return v1.load(f"{folder}/own", ot.v1.AbstractTrainState(arrays, source=source))

    def started(source):
        with ocp.CheckpointManager(f"{folder}/run of {count}", item_handlers=ot.TrainStateHandler()) as manager:
            return ot.restore_or_initialize(manager, arrays, init_from=source).state

    operations = {
        # First, because loads of v1 wait until all processes have counted as many operations.
        "convert": lambda source: ot.convert(source, f"{folder}/converted", overwrite=True),
        "plan": lambda source: ot.plan_restore(source, arrays),
        "restore": lambda source: ot.restore(source, arrays),
        "load_and_transform": lambda source: ot.v1.load_and_transform(source, arrays),
        "handler": with_handler,
        "handler of v1": with_v1,
        "restore_or_initialize": started,
        "verify": ot.verify,
        "diff of names": lambda source: ot.diff(source, source, values=False),
        "diff": lambda source: ot.diff(source, source),
    }
    for name, operation in operations.items():
        for source in sources:
            multihost_utils.sync_global_devices("begin")
            if process == 0:
                urllib.request.urlopen(marks + urllib.request.quote(f"{source}: {name}", safe="")).read()
            multihost_utils.sync_global_devices("begun")
            operation(source)
    multihost_utils.sync_global_devices("end")
"""


class Counts:
    """Log of several stores: how often each request came in each operation, by the mark before it."""

    def __init__(self):
        self.found = {}
        self._current = collections.Counter()

    def append(self, one):
        if isinstance(one, Request) and one.name.startswith("mark/"):
            self._current = self.found.setdefault(one.name.removeprefix("mark/"), collections.Counter())
        else:
            self._current[one[:4] if isinstance(one, tuple) else (one.method, one.name, one.range)] += 1


def counted(tmp_path, web, bucket, count):
    """Counts the requests of each operation, made by some processes of one job."""
    web.log = bucket.log = Counts()
    sources = [f"{web.url}/large.safetensors", "s3://bucket/large.safetensors"]
    run_script(SCRIPT, count, tmp_path, f"{web.url}/mark/", *sources, devices=1)
    return web.log.found


def test_two_processes_ask_for_metadata_as_often_as_one(tmp_path):
    (tmp_path / "stored").mkdir()
    safetensors.numpy.save_file(ARRAYS, tmp_path / "stored" / "large.safetensors")
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "own", ARRAYS)
    with pytest.MonkeyPatch.context() as patched, serving(tmp_path / "stored") as web, amazon_store() as bucket:
        for name, value in bucket.environment.items():
            patched.setenv(name, value)
        bucket.write("large.safetensors", safetensors.numpy.save(ARRAYS))
        answer_to = web.answer_to
        web.answer_to = lambda name, query: b"" if name.startswith("mark/") else answer_to(name, query)
        one, two = (counted(tmp_path, web, bucket, count) for count in (1, 2))
    assert len(one) == 20 and one.keys() == two.keys()
    for name, requests in one.items():
        store, _, operation = name.rpartition(": ")
        # Calls that only one process may make: each reads the arrays for itself.
        reads_arrays = operation in ("verify", "diff")
        metadata = set(one[f"{store}: plan"])
        expected = {key: times if key in metadata or not reads_arrays else 2 * times for key, times in requests.items()}
        assert two[name] == expected, name
