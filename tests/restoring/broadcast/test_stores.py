"""Stores are told apart by the variable, by URLs, and by the types of mounts; what is unknown counts as local."""

import pytest

from orbax_t5x.errors import RestorePlanError
from orbax_t5x.restoring.broadcast import needs
from orbax_t5x.restoring.broadcast.needs import StoreKind, Stores, store_of

MOUNTS = """\
22 1 0:20 / / rw shared:1 - ext4 /dev/sda1 rw
30 22 0:30 / /home rw - nfs4 host:/home rw
31 30 0:31 / /home/local rw - xfs /dev/sdb rw
32 22 0:32 / /mnt/my\\040bucket rw - fuse.gcsfuse bucket rw
33 22 0:33 / /twice rw - xfs /dev/sdc rw
34 22 0:34 / /twice rw - lustre host rw
35 22 0:35 / /odd rw - unknownfs x rw
a line of something else
"""


@pytest.fixture(autouse=True)
def mounts(tmp_path, monkeypatch):
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTS)
    monkeypatch.setattr(needs, "_MOUNTS", path)
    monkeypatch.delenv("ORBAX_T5X_STORE", raising=False)
    return path


@pytest.mark.parametrize(
    ("path", "store"),
    [
        ("/data/model", StoreKind.LOCAL),
        ("/home/me/model", StoreKind.SHARED),
        ("/homes/model", StoreKind.LOCAL),
        ("/home/local/model", StoreKind.LOCAL),
        ("/mnt/my bucket/model", StoreKind.BUCKET),
        ("/twice/model", StoreKind.SHARED),
        ("/odd/model", StoreKind.LOCAL),
        ("gs://bucket/model", StoreKind.BUCKET),
        ("https://host/model", StoreKind.BUCKET),
        ("hf://org/name", StoreKind.BUCKET),
    ],
)
def test_stores_of_paths_and_urls(path, store):
    assert store_of(path) is store


def test_the_variable_comes_first(monkeypatch):
    for store in StoreKind:
        monkeypatch.setenv("ORBAX_T5X_STORE", store.label)
        assert store_of("gs://bucket/model") is store_of("/data") is store
    monkeypatch.setenv("ORBAX_T5X_STORE", "near")
    with pytest.raises(RestorePlanError, match="ORBAX_T5X_STORE is 'near', and can be 'local', 'shared' or 'bucket'"):
        store_of("/data")


def test_without_a_table_of_mounts_all_is_local(mounts):
    mounts.unlink()
    assert store_of("/home/me") is StoreKind.LOCAL


def test_sources_of_two_kinds_have_a_store_each():
    found = Stores(StoreKind.BUCKET, StoreKind.LOCAL)
    assert found.of([]) is StoreKind.LOCAL
    assert Stores(*max(found, Stores(StoreKind.BUCKET, StoreKind.SHARED))) == (StoreKind.BUCKET, StoreKind.SHARED)
