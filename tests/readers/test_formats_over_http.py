"""Every format over HTTP: the suites of the readers, opened by URL; and the goldens of all writers."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import orbax_t5x as ot
from orbax_t5x.errors import CheckpointNotFoundError, UnsupportedCheckpointError
from tests.support import format_suites as suites
from tests.support.http_store import serving

pytestmark = pytest.mark.slow

GOLDENS = Path(__file__).parents[1] / "goldens"


class OverHttp:
    """A suite whose checkpoints are opened by URL; they are served from memory."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def served(cls):
        with serving() as store:
            cls.store = store
            yield

    def open(self, path):
        root = path if path.is_dir() else path.parent
        prefix = root.parent
        for file in root.rglob("*"):
            name = str(file.relative_to(prefix))
            if file.is_file() and name not in self.store.files:
                self.store.files[name] = file.read_bytes()
        return ot.open_checkpoint(f"{self.store.url}/{path.relative_to(prefix)}")


class TestBundle(OverHttp, suites.BundleSuite):
    shards = 3
    dtypes = (np.dtype(np.float32), np.dtype(jnp.bfloat16), np.dtype(np.bool_))


class TestSafetensors(OverHttp, suites.SafetensorsSuite):
    pass


class TestSafetensorsWithIndex(OverHttp, suites.SafetensorsIndexSuite):
    dtypes = (np.dtype(np.float32), np.dtype(np.int8))


class TestTorch(OverHttp, suites.TorchSuite):
    pass


class TestTorchWithIndex(OverHttp, suites.TorchIndexSuite):
    dtypes = (np.dtype(np.float32), np.dtype(np.uint16))


class TestNpz(OverHttp, suites.NpzSuite):
    pass


class TestCompressedNpz(OverHttp, suites.NpzSuite):
    save = staticmethod(np.savez_compressed)
    dtypes = (np.dtype(np.float32), np.dtype(jnp.bfloat16))


class TestFlaxMsgpack(OverHttp, suites.FlaxMsgpackSuite):
    dtypes = (np.dtype(np.float32), np.dtype(jnp.bfloat16))


class TestFlaxIndex(OverHttp, suites.FlaxIndexSuite):
    dtypes = (np.dtype(np.float32), np.dtype(np.int8))


class TestGguf(OverHttp, suites.GgufSuite):
    dtypes = (np.dtype(np.float32), np.dtype(jnp.bfloat16))


class TestT5xGzip(OverHttp, suites.T5xGzipSuite):
    pass


class TestT5xSingleFile(OverHttp, suites.T5xSingleFileSuite):
    dtypes = (np.dtype(np.float32), np.dtype(np.int64))


class TestOrbaxOcdbt(OverHttp, suites.OrbaxSuite):
    pass


class TestOrbaxDirectories(OverHttp, suites.OrbaxSuite):
    ocdbt = False
    dtypes = (np.dtype(np.float32), np.dtype(jnp.int4))


class TestOrbaxZarr3(OverHttp, suites.OrbaxSuite):
    ocdbt = False
    zarr3 = True
    dtypes = (np.dtype(np.float32), np.dtype(jnp.bfloat16))


def golden_checkpoints():
    for directory, _, names in sorted(os.walk(GOLDENS)):
        single = [
            name
            for name in names
            if name.endswith((".index", ".safetensors", "flax_model.msgpack", "pytorch_model.bin"))
        ]
        if single or "_METADATA" in names or "checkpoint" in names:
            yield str(Path(directory).relative_to(GOLDENS))


@pytest.mark.parametrize("name", list(golden_checkpoints()))
def test_goldens_are_the_same_over_http(name):
    """What the local reader gives is compared with its oracles elsewhere."""
    with serving(GOLDENS) as store, ot.open_checkpoint(GOLDENS / name) as expected:
        with ot.open_checkpoint(f"{store.url}/{name}") as checkpoint:
            assert (checkpoint.format, checkpoint.step) == (expected.format, expected.step)
            assert checkpoint.empties == expected.empties
            assert list(checkpoint.leaves) == list(expected.leaves)
            for leaf, view in expected.leaves.items():
                found = checkpoint.leaves[leaf]
                assert (found.shape, found.dtype) == (view.shape, view.dtype)
                if any(part.error is not None for part in view.leaves()):
                    with pytest.raises(ot.errors.CheckpointError):
                        found.get()
                elif view.dtype == object:
                    assert found.get().tolist() == view.get().tolist()
                else:
                    assert found.get().tobytes() == view.get().tobytes(), leaf


@pytest.fixture
def root(tmp_path):
    """A CheckpointManager's root: step 4 with two items and the names of them, made by stock Orbax."""
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(tmp_path / "root", options=options) as manager:
        state = ocp.args.StandardSave({"w": np.arange(6.0).reshape(2, 3), "key": jax.random.key(3)})
        manager.save(4, args=ocp.args.Composite(state=state, extra=ocp.args.StandardSave({"b": np.ones(2)})))
    return tmp_path / "root"


def test_items_that_the_step_names_need_no_list(root):
    with serving(root) as store:
        with ot.open_checkpoint(f"{store.url}/4") as checkpoint:
            assert (checkpoint.step, list(checkpoint.leaves)) == (4, ["extra/b", "state/key", "state/w"])
        for url, item in ((f"{store.url}/4", "state"), (f"{store.url}/4/state", None)):
            with ot.open_checkpoint(url, item=item) as checkpoint:
                assert list(checkpoint.leaves) == ["key", "w"]
                np.testing.assert_array_equal(checkpoint.leaves["w"].get(), np.arange(6.0).reshape(2, 3))
        target = {"key": jax.random.key(0), "w": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
        restored = ot.restore(f"{store.url}/4/", target, item="state", dtype=None, allow_lossy_cast=True)
        assert jax.random.key_data(restored["key"]).tolist() == jax.random.key_data(jax.random.key(3)).tolist()


def test_what_would_need_a_list_says_to_name_it(root):
    with serving(root) as store:
        with pytest.raises(CheckpointNotFoundError, match="open a step by its own URL"):
            ot.open_checkpoint(store.url)
        (root / "4" / "_CHECKPOINT_METADATA").write_text("{}")
        with pytest.raises(UnsupportedCheckpointError, match=r"name one by item="):
            ot.open_checkpoint(f"{store.url}/4")
        with ot.open_checkpoint(f"{store.url}/4", item="extra") as checkpoint:
            np.testing.assert_array_equal(checkpoint.leaves["b"].get(), np.ones(2))


def test_names_that_a_step_claims_lead_nowhere(root):
    """The metadata of a step are a file's word: a name with a way out is no item, and nothing is asked for it."""
    (root / "4" / "_CHECKPOINT_METADATA").write_text(
        '{"item_handlers": {"../../other": "x", "/etc": "x", "extra": "x"}}'
    )
    with serving(root) as store:
        with ot.open_checkpoint(f"{store.url}/4") as checkpoint:
            assert list(checkpoint.leaves) == ["b"]
        assert not [request for request in store.log if "other" in request.name or "etc" in request.name]


def test_a_url_with_spaces_and_percents(tmp_path):
    directory = tmp_path / "a b%41"
    directory.mkdir()
    safetensors.numpy.save_file({"w": np.arange(4.0)}, directory / "model.safetensors")
    with serving(tmp_path) as store:
        for url in ("a%20b%2541", "a%20b%2541/model.safetensors"):
            with ot.open_checkpoint(f"{store.url}/{url}") as checkpoint:
                np.testing.assert_array_equal(checkpoint.leaves["w"].get(), np.arange(4.0))


@pytest.mark.parametrize("redirect", ["301", "302"])
def test_a_directory_that_is_sent_to_its_slash(root, redirect):
    """What a web server does for directories says nothing about the files in them."""
    with serving(root) as store:
        store.fault = lambda request: redirect if request.name in ("", "4", "4/state") else None
        with ot.open_checkpoint(f"{store.url}/4") as checkpoint:
            assert checkpoint.step == 4


def test_a_checkpoint_at_the_root_of_a_server(tmp_path):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "item", {"w": np.arange(4.0)})
    with serving(tmp_path / "item") as store, ot.open_checkpoint(store.url) as checkpoint:
        np.testing.assert_array_equal(checkpoint.leaves["w"].get(), np.arange(4.0))


def test_adapters_in_a_directory(tmp_path):
    safetensors.numpy.save_file({"w": np.arange(3)}, tmp_path / "adapter_model.safetensors")
    with serving(tmp_path) as store:
        with ot.open_checkpoint(store.url) as checkpoint:
            assert (checkpoint.format, [*checkpoint.leaves]) == ("safetensors", ["w"])
        store.files["pytorch_model.bin"] = b""
        with pytest.raises(UnsupportedCheckpointError, match=r"two formats own this path"):
            ot.open_checkpoint(store.url)


def test_a_file_that_is_not_there(tmp_path):
    with serving(tmp_path) as store, pytest.raises(CheckpointNotFoundError, match=r"no such file"):
        ot.open_checkpoint(f"{store.url}/model.safetensors")
