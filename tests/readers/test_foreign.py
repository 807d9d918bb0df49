"""Formats that are no checkpoints are named, and the way to convert them."""

import gzip
import io
import os
import pickle
import zipfile

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x.errors import UnsupportedCheckpointError


def zipped():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("data.pkl", b"")
    return buffer.getvalue()


class Hostile:
    def __reduce__(self):
        return os.system, ("touch executed",)


def several_arrays(before=b""):
    """What `eqx.tree_serialise_leaves` writes: each leaf by `numpy.save`."""
    buffer = io.BytesIO()
    buffer.write(before)
    for array in (np.ones((3, 4), np.float32), np.float32(2), np.zeros(3, bool)):
        np.save(buffer, array)
    return buffer.getvalue()


def one_array():
    buffer = io.BytesIO()
    np.save(buffer, np.ones((3, 4)))
    return buffer.getvalue()


FOREIGN = {
    "Equinox": (several_arrays(), "Equinox"),
    "Equinox with hyperparameters": (several_arrays(b'{"width": 3}\n'), "tree_deserialise_leaves"),
    "one array": (one_array(), "numpy.load"),
    "ONNX": (b"\x08\x08\x12\x07pytorch\x1a\x052.1.0:\x10", "ONNX"),
    "ONNX without a producer": (b"\x08\x07\x3a\x90\x01\x0a", "ONNX"),
    "TensorFlow Lite": (b"\x1c\x00\x00\x00TFL3" + bytes(40), "Lite"),
    "pickle": (pickle.dumps(Hostile()), "a pickle"),
    "old pickle of PyTorch": (pickle.dumps([1], protocol=2), "a pickle"),
    "zip": (zipped(), "zip archive"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF5"),
    "EasyLM": (b"\x92\x97\xa6params\xa1a\xa1b", "EasyLM"),
    "gzip": (gzip.compress(b"x"), "decompress"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    "TensorFlow 1": (bytes(100) + bytes.fromhex("57fb808b247547db"), "V1"),
    "empty": (b"", "0 bytes"),
    "text": (b"hello", "begins with b'hello'"),
    "one byte": (b"\x81", "1 bytes"),
}


@pytest.mark.parametrize(("content", "said"), FOREIGN.values(), ids=FOREIGN.keys())
def test_other_files_say_what_they_are(tmp_path, monkeypatch, content, said):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model"
    path.write_bytes(content)
    with pytest.raises(UnsupportedCheckpointError, match=said) as caught:
        ot.open_checkpoint(path)
    assert caught.value.path == str(path)
    assert os.listdir(tmp_path) == ["model"], "a pickle was executed"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *(("m.keras", "Keras model"), ("m.h5", "HDF5"), ("rust_model.ot", "rust-bert"), ("m.onnx", "ONNX")),
        *(("m.eqx", "Equinox"), ("m.tflite", "Lite")),
    ],
)
def test_an_ending_says_more_than_the_first_bytes(tmp_path, name, said):
    (tmp_path / name).write_bytes(zipped())
    with pytest.raises(UnsupportedCheckpointError, match=said) as caught:
        ot.open_checkpoint(tmp_path / name)
    assert "Fix:" in str(caught.value)


def levanter(step):
    for array in ("model/embeddings/weight", "opt_state/0/mu"):
        (step / array).mkdir(parents=True)
        (step / array / ".zarray").write_text("{}")
    (step / "metadata.json").write_text('{"step": 1000, "timestamp": "2024-01-01T00:00:00", "is_temporary": false}')


def paxml(step):
    for array in ("mdl_vars.params.lm.softmax.w", "opt_states_0.no_prefix.count"):
        (step / "state" / array).mkdir(parents=True)
    (step / "metadata").mkdir()
    (step / "metadata" / "metadata").write_text('{"version": 1.1}')


@pytest.mark.parametrize(
    ("write", "name", "said"),
    [(levanter, "step-1000", "save_hf_checkpoint"), (paxml, "checkpoint_00001000", "paxml's own")],
)
def test_steps_and_roots_of_other_frameworks(tmp_path, write, name, said):
    write(tmp_path / name)
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(UnsupportedCheckpointError, match=said) as caught:
            ot.open_checkpoint(path)
        assert caught.value.path == str(path)
        assert caught.value.fix is not None
    if write is paxml:
        with pytest.raises(UnsupportedCheckpointError, match=said):
            ot.open_checkpoint(tmp_path / name / "state")


def test_directories_of_exports(tmp_path):
    (tmp_path / "onnx").mkdir()
    with pytest.raises(UnsupportedCheckpointError, match="'onnx' is an ONNX model"):
        ot.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tf_model.h5", "Keras"),
        ("a.eqx", "Equinox"),
        ("rust_model.ot", "rust"),
        ("a.keras", "Keras"),
        ("saved_model.pb", "SavedModel"),
    ],
)
def test_other_directories_say_what_they_are(tmp_path, name, said):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UnsupportedCheckpointError, match=said):
        ot.open_checkpoint(tmp_path)
