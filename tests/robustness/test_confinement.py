"""Checkpoints that reach out, read by a process that the kernel watches, and by one that it confines.

The watched process opens no file outside and connects to nobody, whatever library would; the confined one, which could
not, gives the same errors, so none of them is what was met outside.
"""

import gzip
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import flax.serialization
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

from tests.robustness.confined_process import landlock_version
from tests.support import t5x_steps as t5x
from tests.support.bundle_writer import bundle_of
from tests.support.orbax_metadata import entry, with_tree

pytestmark = pytest.mark.slow

VALUE = np.arange(6, dtype=np.float32).reshape(2, 3)


def bundle(directory: Path, outside: Path, port: int) -> Path:
    bundle_of({"bad": VALUE, "good": VALUE}).write(directory)
    return next(directory.glob("*.data-*"))


def linked_shard(directory: Path, outside: Path, port: int) -> None:
    shard = bundle(directory, outside, port)
    shard.unlink()
    shard.symlink_to(outside / "secret")


def linked_index(directory: Path, outside: Path, port: int) -> None:
    (directory / "m.index").symlink_to(outside / "m.index")


def bundle_state(directory: Path, outside: Path, port: int) -> None:
    (directory / "checkpoint").write_text(f'model_checkpoint_path: "../../{outside.name}/m"\n')


def t5x_spec(**changes) -> Callable[[Path, Path, int], None]:
    def write(directory: Path, outside: Path, port: int) -> None:
        for name in ("bad", "good"):
            t5x.array(directory / name)
        text = json.dumps(t5x.spec(**changes)).replace("OUTSIDE", str(outside)).replace("PORT", str(port))
        t5x.save(directory, json.loads(text))

    return write


def t5x_link(place: str, target: str) -> Callable[[Path, Path, int], None]:
    def write(directory: Path, outside: Path, port: int) -> None:
        t5x_spec()(directory, outside, port)
        if place == "bad/0/0":
            t5x.array(directory / "deep", dimension_separator="/")
            for file in (directory / "bad").iterdir():
                file.unlink()
            (directory / "bad").rmdir()
            (directory / "deep").rename(directory / "bad")
        t5x.link(directory / place, outside / target)

    return write


def beside_msgpack(directory: Path, outside: Path, port: int) -> None:
    tree = {"bad": f"//GDAPlaceholder:{outside}/secret", "good": VALUE}
    (directory / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))


def safetensors_index(file: str) -> Callable[[Path, Path, int], None]:
    def write(directory: Path, outside: Path, port: int) -> None:
        name = file.replace("OUTSIDE", str(outside)).replace("PORT", str(port))
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"bad": name}}))

    return write


def safetensors_link(directory: Path, outside: Path, port: int) -> None:
    (directory / "model.safetensors").symlink_to(outside / "x.safetensors")


def item(directory: Path, *, ocdbt: bool = False) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)) as checkpointer:
        checkpointer.save(directory, args=ocp.args.PyTreeSave({"bad": VALUE, "good": VALUE}), force=True)


def orbax_key(directory: Path, outside: Path, port: int) -> None:
    item(directory)
    with_tree(directory, entry("good"), entry("bad", f"../../{outside.name}/array"))


def orbax_link(place: str, target: str, *, ocdbt: bool = False) -> Callable[[Path, Path, int], None]:
    def write(directory: Path, outside: Path, port: int) -> None:
        item(directory, ocdbt=ocdbt)
        t5x.link(directory / place, outside / target)

    return write


def as_item_link(directory: Path, outside: Path, port: int) -> None:
    (directory / "state").symlink_to(outside / "item")


LEAF, WHOLE = "bad: UnsafeCheckpointError", "UnsafeCheckpointError"
# Name -> what writes it, and what reading it gives.
CASES: dict[str, tuple[Callable[[Path, Path, int], object], str]] = {
    "a sound bundle": (bundle, "read"),
    "a bundle's shard": (linked_shard, f"{LEAF}, good: UnsafeCheckpointError"),
    "a bundle's index": (linked_index, WHOLE),
    "a bundle's state": (bundle_state, WHOLE),
    "a sound T5X step": (t5x_spec(), "read"),
    "an absolute path": (t5x_spec(place="OUTSIDE/array"), LEAF),
    "a path upwards": (t5x_spec(place="../../outside/array"), LEAF),
    "a kvstore over http": (
        t5x_spec(kvstore={"driver": "http", "base_url": "http://127.0.0.1:PORT/", "path": "bad/"}),
        LEAF,
    ),
    "a kvstore on S3": (
        t5x_spec(kvstore={"driver": "s3", "bucket": "b", "endpoint": "http://127.0.0.1:PORT", "path": "bad/"}),
        LEAF,
    ),
    "a kvstore as URL": (t5x_spec(kvstore="http://127.0.0.1:PORT/bad/"), LEAF),
    "a kvstore as URL of a file": (t5x_spec(kvstore="file://OUTSIDE/array/"), LEAF),
    "a linked array": (t5x_link("bad", "array"), LEAF),
    "a linked .zarray": (t5x_link("bad/.zarray", "array/.zarray"), LEAF),
    "a linked chunk": (t5x_link("bad/0.0", "secret"), LEAF),
    "a linked chunk in a directory": (t5x_link("bad/0/0", "secret"), LEAF),
    "an array beside msgpack": (beside_msgpack, LEAF),
    "an index of safetensors, absolute": (safetensors_index("OUTSIDE/x.safetensors"), WHOLE),
    "an index of safetensors, upwards": (safetensors_index("../../outside/x.safetensors"), WHOLE),
    "an index of safetensors, a URL": (safetensors_index("http://127.0.0.1:PORT/x.safetensors"), WHOLE),
    "linked safetensors": (safetensors_link, WHOLE),
    "a key of Orbax": (orbax_key, WHOLE),
    "a linked array of Orbax": (orbax_link("bad", "array"), LEAF),
    "a linked chunk of Orbax": (orbax_link("bad/0.0", "secret"), LEAF),
    "a linked database": (orbax_link("d", "item/d", ocdbt=True), WHOLE),
    "a linked manifest": (orbax_link("manifest.ocdbt", "item/manifest.ocdbt", ocdbt=True), WHOLE),
    "linked names of leaves": (orbax_link("_METADATA", "item/_METADATA", ocdbt=True), WHOLE),
    "a linked item": (as_item_link, WHOLE),
}


@pytest.fixture(scope="module")
def outside(tmp_path_factory) -> Path:
    """Everything that one would like to reach, sound."""
    directory = tmp_path_factory.mktemp("reached") / "outside"
    directory.mkdir()
    (directory / "secret").write_bytes(gzip.compress(VALUE.tobytes()))
    t5x.array(directory / "array")
    safetensors.numpy.save_file({"bad": VALUE}, directory / "x.safetensors")
    bundle_of({"bad": VALUE}).write(directory, "m")
    item(directory / "item", ocdbt=True)
    return directory


@pytest.mark.parametrize("confined", [False, True])
def test_nothing_outside_is_opened_and_nobody_is_called(confined, outside, tmp_path):
    root = outside.parent / f"root-{confined}"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        paths = {}
        for number, (name, (write, _)) in enumerate(CASES.items()):
            directory = root / str(number)
            directory.mkdir(parents=True)
            write(directory, outside, port)
            paths[name] = str(directory)
        landlock = landlock_version() > 0
        job = {
            "root": str(root),
            "outside": str(outside),
            "port": port,
            "paths": paths,
            "confined": confined and landlock,
        }
        job["watched"] = not job["confined"]
        (tmp_path / "job.json").write_text(json.dumps(job))
        arguments = [sys.executable, "-m", "tests.robustness.confined_process", str(tmp_path / "job.json")]
        place = Path(__file__).parents[2]
        run = subprocess.run(arguments, capture_output=True, text=True, timeout=800, cwd=place)
        assert run.returncode == 0, run.stderr[-2000:]
        said = json.loads(run.stdout)
        listener.setblocking(False)
        calls = 0
        try:
            while True:
                listener.accept()[0].close()
                calls += 1
        except BlockingIOError:
            pass
    assert said["outcomes"] == {name: outcome for name, (_, outcome) in CASES.items()}
    assert said["opened"] == []
    # What these oracles are worth. Without Landlock both processes are watched.
    assert said["control"] == ("refused" if confined and landlock else "opened")
    assert ("secret" in said["seen"]) == job["watched"]
    assert said["connected"] == (not said["left_network"]) and calls == said["connected"]
