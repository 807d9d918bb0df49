"""Operations of two processes ask a web server and a bucket for metadata as often as those of one process do."""

import collections
import json
import urllib.parse
from contextlib import contextmanager

import flax.serialization
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from hypothesis import settings

from tests.support.amazon_store import amazon_store
from tests.support.checkpoint_writers import orbax_writer, write_bundle
from tests.support.format_suites import write_t5x
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
    folder, marks, chosen, *sources = sys.argv[1:]
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
        "convert": lambda source: process or ot.convert(source, f"{folder}/converted", overwrite=True),
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
        for source in sources if name in json.loads(chosen) or not json.loads(chosen) else []:
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


def counted(tmp_path, web, sources, count, operations=(), bucket=None):
    """Counts the requests of each operation, of all by default, made by some processes of one job."""
    web.log = Counts()
    if bucket is not None:
        bucket.log = web.log
    run_script(SCRIPT, count, tmp_path, f"{web.url}/mark/", json.dumps(operations), *sources, devices=1)
    return web.log.found


@contextmanager
def marked(directory):
    """A web server of a directory that answers marks, too."""
    with serving(directory) as web:
        answer_to = web.answer_to
        web.answer_to = lambda name, query: b"" if name.startswith("mark/") else answer_to(name, query)
        yield web


def test_two_processes_ask_for_metadata_as_often_as_one(tmp_path):
    (tmp_path / "stored").mkdir()
    safetensors.numpy.save_file(ARRAYS, tmp_path / "stored" / "large.safetensors")
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "own", ARRAYS)
    with pytest.MonkeyPatch.context() as patched, marked(tmp_path / "stored") as web, amazon_store() as bucket:
        for name, value in bucket.environment.items():
            patched.setenv(name, value)
        bucket.write("large.safetensors", safetensors.numpy.save(ARRAYS))
        sources = [f"{web.url}/large.safetensors", "s3://bucket/large.safetensors"]
        one, two = (counted(tmp_path, web, sources, count, bucket=bucket) for count in (1, 2))
    assert len(one) == 20 and one.keys() == two.keys()
    for name, requests in one.items():
        assert two[name] == requests, name


def write_msgpack(directory, arrays):
    path = directory / "model.msgpack"
    path.write_bytes(flax.serialization.msgpack_serialize(dict(arrays)))
    return path


def write_merged(directory, arrays):
    """Saves by two processes, each of which writes half of the large array into a database of its own."""
    script = """
        import orbax.checkpoint as ocp
        mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        whole = {"x": np.arange(1 << 19, dtype=np.float32), "y": np.arange(1 << 9, dtype=np.float32)}
        tree = {name: jax.make_array_from_callback(one.shape, split, lambda at: one[at]) for name, one in whole.items()}
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(sys.argv[1], args=ocp.args.PyTreeSave(tree))
    """
    run_script(script, 2, directory / "item", devices=1)
    return directory / "item"


FORMATS = {
    "bundle": write_bundle,
    "msgpack": write_msgpack,
    "ocdbt": orbax_writer(ocdbt=True, zarr3=False),
    "ocdbt of two processes": write_merged,
    "zarr": orbax_writer(ocdbt=False, zarr3=False),
    "zarr3": orbax_writer(ocdbt=True, zarr3=True),
    "t5x": lambda directory, arrays: write_t5x(directory / "t5x", arrays),
}


def test_each_format_is_opened_once_and_read_once(tmp_path):
    """With more examples by `make fuzz` all formats and operations; else two that differ most."""
    everything = settings.default.max_examples > 100
    operations = (
        ("plan", "restore", "handler", "restore_or_initialize", "verify", "diff")
        if everything
        else ("restore", "verify")
    )
    formats = FORMATS if everything else {name: FORMATS[name] for name in ("ocdbt", "t5x")}
    names = []
    for name, write in formats.items():
        (tmp_path / "stored" / name).mkdir(parents=True)
        names.append(write(tmp_path / "stored" / name, ARRAYS).relative_to(tmp_path / "stored"))
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "own", ARRAYS)
    with marked(tmp_path / "stored") as web:
        sources = [f"{web.url}/{urllib.parse.quote(str(name))}" for name in names]
        one, two = (counted(tmp_path, web, sources, count, operations) for count in (1, 2))
    assert len(one) == len(formats) * len(operations) and one.keys() == two.keys()
    for name, requests in one.items():
        assert two[name] - requests == {}, name
        # What the opening has read of a small array needs one proof where nothing else is read by that process.
        missing = requests - two[name]
        is_small = ".msgpack" in name or name.endswith("verify")
        assert missing == {} or (is_small and [key[0] for key in missing.elements()] == ["HEAD"]), name
