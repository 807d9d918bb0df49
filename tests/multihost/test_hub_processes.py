"""Files of the hub in a job of two real processes, counted by the servers: no byte is sent twice."""

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

from tests.support.hub_server import RedirectingHub, Storage
from tests.support.jax_job import run_script

pytestmark = pytest.mark.slow

W = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)
# Two caches as on two hosts, where files are read by range, then one for both, where they are downloaded.
RESTORE = """
    import orbax_t5x as ot
    from huggingface_hub import constants
    constants.HF_HUB_DISABLE_XET = True
    mesh = jax.make_mesh((jax.device_count(),), ("all",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for path, cache in (("hf://google/tiny", f"{sys.argv[1]}_{process}"), ("hf://google/tiny/item", sys.argv[1])):
        constants.HF_HUB_CACHE = cache
        target = {"w": jax.ShapeDtypeStruct((512, 512), np.float32, sharding=sharding)}
        restored = ot.restore(path, target, broadcast=True)
        whole = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)
        tell(all(np.array_equal(shard.data, whole) for shard in restored["w"].addressable_shards))
"""


@pytest.fixture
def storage(tmp_path, monkeypatch):
    """The server to which the hub sends for its files."""
    storage = Storage()
    hub = RedirectingHub(storage)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "item", {"w": W})
    files = {f"item/{path.relative_to(tmp_path / 'item')}": path for path in (tmp_path / "item").rglob("*")}
    hub.files = {name: path.read_bytes() for name, path in files.items() if path.is_file()}
    hub.files["model.safetensors"] = safetensors.numpy.save({"w": W})
    storage.files = hub.files
    yield storage
    hub.close()
    storage.close()


def test_a_job_gets_each_byte_once(storage, tmp_path):
    assert run_script(RESTORE, 2, tmp_path / "cache", devices=1) == [[True, True]] * 2
    sent = [request for request in storage.log if request.method == "GET"]
    ranges = [request.range for request in sent if request.name == "model.safetensors"]
    spans = [
        range(int(first), int(last) + 1) for first, last in (one.removeprefix("bytes=").split("-") for one in ranges)
    ]
    assert W.nbytes <= sum(map(len, spans)) < 1.2 * W.nbytes, "headers are read by both"
    downloaded = [request.name for request in sent if request.name.startswith("item/")]
    assert sorted(downloaded) == sorted(name for name in storage.files if name.startswith("item/"))
