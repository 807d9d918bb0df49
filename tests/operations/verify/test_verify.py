"""`ot.verify` and the command `verify`: what is damaged, what is right, and what nobody can say."""

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import orbax_t5x as ot
from orbax_t5x.cli.main import main
from orbax_t5x.errors import CheckpointNotFoundError
from orbax_t5x.readers.orbax.metadata import CHECKSUMS_FILE
from tests.support.saving import save

GOLDENS = Path(__file__).parents[2] / "goldens"


def statuses(report):
    return {leaf.name: leaf.status for leaf in report.leaves}


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def bundle(tmp_path):
    for file in (GOLDENS / "tf_bundle" / "t5_1_1_f32").glob("model.ckpt*"):
        shutil.copy(file, tmp_path)
    return next(tmp_path.glob("*.data-00000-*"))


def run(capsys, *arguments):
    code = main(["verify", *map(str, arguments)])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("use_zarr3", [False, True])
@pytest.mark.parametrize("use_ocdbt", [False, True])
def test_saves_of_this_package_verify(tmp_path, capsys, use_ocdbt, use_zarr3):
    arrays = {"a": np.arange(1000.0).reshape(50, 20), "text": "words", "step": 3}
    path = save(tmp_path / "item", arrays, {"use_ocdbt": use_ocdbt, "use_zarr3": use_zarr3})
    report = ot.verify(path)
    assert statuses(report) == {"a": "ok", "step": "ok", "text": "ok"} and report.status == "ok"
    assert report.bytes_read == 8008
    assert run(capsys, path)[0] == 0


def test_a_damaged_leaf_is_named_and_the_others_are_right(tmp_path, capsys):
    path = save(tmp_path / "item", {"a": np.ones(9), "b": np.ones(9)}, {"use_ocdbt": False, "use_compression": False})
    flip(path / "a" / "0")
    report = ot.verify(path)
    assert statuses(report) == {"a": "damaged", "b": "ok"} and report.status == "damaged"
    assert "crc32c" in report.leaves[0].reason
    code, out = run(capsys, path)
    assert code == 1 and "damaged:\na" in out and "1 leaf damaged, 1 leaf ok" in out
    code, out = run(capsys, path, "--json")
    told = json.loads(out)
    assert code == 1 and told["status"] == "damaged"
    assert [leaf["status"] for leaf in told["leaves"]] == ["damaged", "ok"]


def test_a_missing_chunk_is_damage_without_checksums_too(tmp_path):
    path = save(tmp_path / "item", {"a": np.ones(9), "b": np.ones(9)}, {"use_ocdbt": False, "checksums": False})
    (path / "a" / "0").unlink()
    assert statuses(ot.verify(path)) == {"a": "damaged", "b": "no checksum"}


def test_an_unusable_file_of_checksums_is_damage_of_all(tmp_path):
    path = save(tmp_path / "item", {"a": np.ones(9), "b": np.ones(9)})
    flip(path / CHECKSUMS_FILE, 40)
    assert set(statuses(ot.verify(path)).values()) == {"damaged"}


def test_bundles_have_a_checksum_of_each_tensor(tmp_path, capsys):
    data = bundle(tmp_path)
    assert run(capsys, tmp_path)[0] == 0
    flip(data, 100)
    report = ot.verify(tmp_path)
    assert list(statuses(report).values()).count("damaged") == 1
    assert run(capsys, tmp_path)[0] == 1


def test_a_format_without_checksums_is_reported(capsys):
    code, out = run(capsys, GOLDENS / "safetensors" / "t5_1_1")
    assert code == 3 and "no checksum:" in out and "65 leaves without checksum" in out


@pytest.mark.slow
def test_checksums_of_chunks_count_and_are_named(tmp_path):
    """T5X's own array of gzip chunks, the rest of its checkpoint without."""
    with tarfile.open(GOLDENS / "t5x_native" / "d8_bf16.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    path = next(tmp_path.rglob("checkpoint_3"))
    with ot.open_checkpoint(path) as checkpoint:
        name = next(name for name, view in checkpoint.leaves.items() if view.leaf.chunks)
        value = np.asarray(checkpoint.leaves[name])
    directory = next(entry for entry in path.iterdir() if entry.name == name.replace("/", "."))
    shutil.rmtree(directory)
    metadata = {"compressor": {"id": "gzip", "level": 1}, "chunks": [8], "shape": list(value.shape), "dtype": "<f4"}
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(directory)}, "metadata": metadata}
    ts.open(spec, create=True).result().write(value).result()
    (leaf,) = [leaf for leaf in ot.verify(path).leaves if leaf.name == name]
    assert (leaf.status, leaf.reason) == ("ok", "the checksums of its gzip chunks hold")
    flip(directory / "0", -6)
    (leaf,) = [leaf for leaf in ot.verify(path).leaves if leaf.name == name]
    assert leaf.status == "damaged"


def test_steps_and_items_are_chosen_as_when_opening(tmp_path):
    with ocp.CheckpointManager(tmp_path / "run", item_handlers={"state": ot.TrainStateHandler()}) as manager:
        manager.save(1, args=ocp.args.Composite(state=ot.args.TrainStateSave({"a": np.ones(3)})))
    assert statuses(ot.verify(tmp_path / "run")) == statuses(ot.verify(tmp_path / "run", item="state")) == {"a": "ok"}
    with pytest.raises(CheckpointNotFoundError):
        ot.verify(tmp_path / "run", item="other")


def test_progress_counts_the_bytes_of_all_leaves(tmp_path):
    path = save(tmp_path / "item", {"a": np.ones(9), "b": np.ones(5, np.int8)})
    calls = []
    ot.verify(path, progress=lambda *call: calls.append(call))
    assert calls == [(72, 77, "a"), (77, 77, "b")]
