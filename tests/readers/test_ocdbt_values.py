"""Values of OCDBT databases over HTTP are those that TensorStore reads; hostile trees are typed errors."""

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointError, CheckpointNotFoundError, LimitExceededError, UnsafeCheckpointError
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.places import files_at, opening
from orbax_t5x.readers.ocdbt_values import OcdbtValues
from tests.support.http_store import serving


def opened(store):
    return OcdbtValues(files_at(store.url), "")


def values_of(store, limits=None):
    with opening(limits):
        return opened(store)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A tree of three levels: small nodes, values inside them and beside them."""
    directory = tmp_path_factory.mktemp("tree")
    config = {"max_decoded_node_bytes": 1000, "max_inline_value_bytes": 40}
    spec = {"driver": "ocdbt", "base": f"file://{directory}/", "config": config}
    database = ts.KvStore.open(spec).result()
    known = {f"layers/{number % 7}/c/{number}": bytes([number % 251]) * (number % 90) for number in range(700)}
    with ts.Transaction() as transaction:
        for key, value in known.items():
            database.with_transaction(transaction)[key] = value
    return directory, known


@pytest.mark.slow
def test_every_value_is_found(tree):
    directory, known = tree
    with serving(directory) as store:
        values = values_of(store)
        assert values._height >= 2
        for key, value in known.items():
            assert values.read_whole(key, limit=90) == value
        files = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
        assert set(values.data_files()) <= files
        for key in ("", "a", "layers/3/c", "layers/3/c/10x", "layers/9", "z"):
            with pytest.raises(CheckpointNotFoundError):
                values.read_whole(key, limit=90)


def test_what_a_value_may_have_is_bounded(tree):
    directory, known = tree
    key, value = next((key, value) for key, value in known.items() if len(value) > 50)
    with serving(directory) as store:
        values = values_of(store)
        store.forget()
        with pytest.raises(LimitExceededError, match=f"more than Limits.index_bytes = {len(value) - 1}"):
            values.read_whole(key, limit=len(value) - 1, leaf="x")
        # A manifest may be larger than the root node: TensorStore writes one version of the tree into it, or several.
        limits = Limits(index_bytes=(directory / "manifest.ocdbt").stat().st_size)
        with pytest.raises(LimitExceededError, match=r"Limits.index_bytes"):
            values_of(store, limits).data_files()


def test_a_database_without_values_is_read(tmp_path):
    ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/"}).result().write("a", b"b").result()
    ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/"}).result().write("a", None).result()
    with serving(tmp_path) as store:
        with pytest.raises(CheckpointNotFoundError):
            values_of(store).read_whole("a", limit=9)


def test_nodes_lead_to_no_other_files(tree):
    """Names of data files are a file's word: they stay below the database."""
    directory, _ = tree
    with serving(directory) as store:
        values = values_of(store)
        for base, problem in (("..%2Fother/", "leads upwards"), ("d/./", "shortest form"), ("%2Fother/", "absolute")):
            with pytest.raises(UnsafeCheckpointError, match=problem):
                values._location(f"btreenode:{base}:secret:0:10")
        assert not [request for request in store.log if "secret" in request.name]


@pytest.mark.slow
def test_a_checkpoint_whose_tree_is_damaged(tmp_path):
    """Every byte of the root node matters, and each is noticed."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "item", {"w": np.arange(6.0)})
    node = next(path for path in (tmp_path / "item" / "d").iterdir())
    good = node.read_bytes()
    with serving(tmp_path) as store:
        for at in range(0, len(good), 7):
            store.files[f"item/d/{node.name}"] = good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :]
            with pytest.raises(CheckpointError):
                ot.open_checkpoint(f"{store.url}/item")
