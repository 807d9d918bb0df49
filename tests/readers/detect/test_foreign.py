"""Formats that are no checkpoints are named, and the way to convert them."""

import gzip
import io
import os
import pickle
import zipfile

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


FOREIGN = {
    "pickle": (pickle.dumps(Hostile()), "a pickle"),
    "old pickle of PyTorch": (pickle.dumps([1], protocol=2), "a pickle"),
    "zip": (zipped(), "zip archive"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF5"),
    "npy": (b"\x93NUMPY\x01\x00", "NumPy array"),
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
    ("name", "said"), [("pytorch_model.bin", "PyTorch"), ("tf_model.h5", "Keras"), ("saved_model.pb", "SavedModel")]
)
def test_other_directories_say_what_they_are(tmp_path, name, said):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UnsupportedCheckpointError, match=said):
        ot.open_checkpoint(tmp_path)
