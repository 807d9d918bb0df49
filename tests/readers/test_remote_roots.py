"""Roots with something else beside their steps: the same step is chosen on a disk and in buckets."""

import hypothesis
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import strategies as st

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError
from tests.support.amazon_store import amazon_store
from tests.support.google_store import GoogleStore
from tests.support.http_store import HttpStore

pytestmark = pytest.mark.slow

IN_PLACE = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)


NEWEST = {"latest": 12, "validated": 12, "opened": ("orbax", 12), "restored": {"w": [12] * 3}}


def files_of(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The files of a root with the steps 3 and 12, as Orbax writes it in a bucket."""
    directory = tmp_path_factory.mktemp("root")
    options = ocp.CheckpointManagerOptions(atomicity_options=IN_PLACE, enable_async_checkpointing=False)
    with ocp.CheckpointManager(directory, options=options) as manager:
        for step in (3, 12):
            manager.save(step, args=ocp.args.StandardSave({"w": np.full(3, step)}))
    return files_of(directory)


def strays(root):
    """What may lie in a root, by name: files that are added."""
    step = {name.removeprefix("12/"): data for name, data in root.items() if name.startswith("12/")}
    item = {name.removeprefix("default/"): data for name, data in step.items() if name.startswith("default/")}
    last = {name: data for name, data in step.items() if not name.startswith("default/")}

    def below(prefix, files):
        return {f"{prefix}/{name}": data for name, data in files.items()}

    uncommitted = {name: data for name, data in step.items() if not name.endswith("commit_success.txt")}
    state = b'model_checkpoint_path: "model.ckpt-99"\n'
    return {
        "notes": {"README.md": b"x", ".DS_Store": b"\0", "config.json": b"{}"},
        "logs": {"train/events.out.tfevents.1": b"x", "events.out.tfevents.1": b"x"},
        "a step's name as a file": {"99": b"x"},
        "a step's name with a prefix as a file": {"checkpoint_99": b"x"},
        "an older step's name as a file": {"2": b"x"},
        "a directory without items": {"99/notes.txt": b"x"},
        "a directory of files of another kind": {"99/metrics/metrics": b"{}"},
        "a temporary directory": below("99.orbax-checkpoint-tmp-1234", step),
        "a temporary directory of an older Orbax": below("99.orbax-checkpoint-tmp", uncommitted),
        "a temporary item": below("99/default.orbax-checkpoint-tmp-1234", item),
        "a half-written step": below("99", uncommitted),
        "a step of which only the metadata are there": {"99/_CHECKPOINT_METADATA": step["_CHECKPOINT_METADATA"]},
        "an item whose step was not finished": {
            **below("99/default", item),
            "99/_CHECKPOINT_METADATA": step["_CHECKPOINT_METADATA"],
        },
        "a mark alone": {"99/commit_success.txt": b"x"},
        "half-deleted": {**last_of(last), "99/default/d/abc": b"x"},
        "a deeper root": below("copies/99", step),
        "names that are no numbers": {**below("best", step), **below("99a", step), **below("-99", step)},
        "TensorFlow's state": {"checkpoint": state},
        "a model": {"model.safetensors": b"x"},
        "a padded name": {"0099/notes.txt": b"x"},
        "the descriptor of a run": {"descriptor/descriptor.pbtxt": b"x"},
        "a conversion's mark": {".99.orbax-t5x-convert": b'{"owner": "x"}'},
    }


def last_of(files):
    return {f"99/{name}": data for name, data in files.items() if name != "_CHECKPOINT_METADATA"}


def chosen(path):
    """What a caller gets from a root: steps, and what is restored; an error by its class."""

    def attempt(call):
        try:
            return call()
        except CheckpointError as error:
            return type(error).__name__

    def opened():
        with ot.open_checkpoint(path) as checkpoint:
            return checkpoint.format, checkpoint.step

    return {
        "latest": attempt(lambda: ot.latest_step(path)),
        "validated": attempt(lambda: ot.latest_step(path, validated=True)),
        "opened": attempt(opened),
        "restored": attempt(lambda: {name: array.tolist() for name, array in ot.restore(path, None).items()}),
    }


def clashes(path, files):
    """On a disk a name is a file or a directory."""
    return any(one.startswith(f"{path}/") or path.startswith(f"{one}/") for one in files)


class Roots:
    """The same roots on a disk, in a bucket and on a web server."""

    def __init__(self, root, directory, google):
        self.root, self.strays = root, strays(root)
        self._directory, self._google = directory, google
        self._count = 0

    def compare(self, names):
        """Compares a root with these strays on a disk and in a bucket of Google's; returns it, and what is chosen."""
        self._count += 1
        files = dict(self.root)
        for name in names:
            files |= {path: data for path, data in self.strays[name].items() if not clashes(path, files)}
        place = self._directory / f"{self._count}"
        for path, data in files.items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_bytes(data)
        self._google.files = {f"runs/{self._count}/{path}": data for path, data in files.items()}
        local = chosen(place)
        assert chosen(f"gs://bucket/runs/{self._count}") == local, names
        return files, local


@pytest.fixture
def roots(root, tmp_path, monkeypatch):
    google = GoogleStore()
    for name, value in google.environment.items():
        monkeypatch.setenv(name, value)
    yield Roots(root, tmp_path, google)
    google.close()


def test_the_files_of_a_root_go_before_its_steps(roots):
    """Of a bucket, files that make a checkpoint are looked for first; a state that names no bundle is none."""
    assert roots.compare(["TensorFlow's state"])[1] == NEWEST
    broken = "CorruptCheckpointError"  # the model that was found is one byte
    assert roots.compare(["a model"])[1] == NEWEST | {"opened": broken, "restored": broken}


def test_a_root_of_a_web_server_is_refused_and_its_steps_are_opened(roots):
    """It lists nothing, whatever lies in the root."""
    server = HttpStore()
    try:
        for name in ("notes", "TensorFlow's state", "a model", "a step's name as a file"):
            strays_there = roots.strays[name]
            server.files = {f"run/{path}": data for path, data in {**roots.root, **strays_there}.items()}
            found = chosen(f"{server.url}/run")
            assert all(value is None or isinstance(value, str) for value in found.values()), (found, [*strays_there])
        assert chosen(f"{server.url}/run/12")["restored"] == NEWEST["restored"]
    finally:
        server.close()


@hypothesis.settings(
    max_examples=max(2, hypothesis.settings.default.max_examples // 10),
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(data=st.data())
def test_any_strays_together(roots, data):
    names = data.draw(st.lists(st.sampled_from(sorted(roots.strays)), unique=True, min_size=1))
    roots.compare(names)  # some of them together are a finished step


def test_s3(roots, monkeypatch):
    files, local = roots.compare(["notes", "a half-written step", "a step's name with a prefix as a file"])
    with amazon_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        for path, data in files.items():
            store.write(f"run/{path}", data)
        assert local == NEWEST
        assert ot.latest_step("s3://bucket/run") == 12
        np.testing.assert_array_equal(ot.restore("s3://bucket/run", None)["w"], [12] * 3)
