"""A directory of this machine, as TensorStore and readers of arrays find it."""

from orbax_t5x.files.local import LocalFiles


def test_tensorstore_finds_a_directory_by_its_path(tmp_path):
    (tmp_path / "w").mkdir()
    store = LocalFiles(tmp_path)
    assert store.kvstore("", ".zarray", list) == {"driver": "file", "path": store.path}
    assert store.kvstore("w", ".zarray", list) == {"driver": "file", "path": str(tmp_path / "w")}


def test_an_arrays_directory_has_its_metadata_and_identity(tmp_path):
    for name in ("v", "w"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".zarray").write_bytes(name.encode())
    (tmp_path / "link").symlink_to("w")
    store = LocalFiles(tmp_path)
    found = {name: store.array_directory(name, ".zarray", limit=10) for name in ("v", "w", "link")}
    assert [directory.metadata for directory in found.values()] == [b"v", b"w", b"w"]
    assert found["w"][1] == found["link"][1] != found["v"][1]
