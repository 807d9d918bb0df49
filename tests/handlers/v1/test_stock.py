"""What is saved through Orbax v1 here is anyone's: read by stock Orbax in processes where this package is missing."""

import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as v0
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_t5x as ot

# Finding the package fails, as it does where it was never installed.
WITHOUT_US = """
    import sys
    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "orbax_t5x":
                raise ModuleNotFoundError(name)
    sys.meta_path.insert(0, Missing())
    try:
        import orbax_t5x
    except ModuleNotFoundError:
        pass
    else:
        raise AssertionError("the package is there")
    import json, warnings
    import jax, numpy as np
    import orbax.checkpoint as v0
    import orbax.checkpoint.experimental.v1 as v1
    root = sys.argv[1]
    def told(tree):
        leaves, structure = jax.tree.flatten(tree)
        sums = [[str(leaf.dtype), np.asarray(leaf).astype(float).tolist()] if hasattr(leaf, "dtype") else leaf
                for leaf in leaves]
        return [str(structure), sums, [type(leaf).__name__ for leaf in leaves]]
"""
READ = (
    WITHOUT_US
    + """
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    abstract = {
        "w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=rows),
        "n": {"host": np.zeros(3, np.int64), "step": 0},
        "listed": [jax.ShapeDtypeStruct((8,), jax.numpy.bfloat16, sharding=rows)],
    }
    told_by = {
        "v1 load": told(v1.load(root + "/0")),
        "v1 load, abstract": told(v1.load(root + "/0", abstract)),
        "v1 checkpointables": told(v1.load_checkpointables(root + "/0")["state"]),
        "v1 another name": told(v1.load(root + "/other", checkpointable_name="model")),
        "v1 another name, abstract": told(v1.load_checkpointables(root + "/other", {"model": abstract})["model"]),
    }
    for name, path in (("v0 handler", "/version_0/0"), ("v0 handler, commit file", "/commit_file/0")):
        told_by[name + ": v1 load"] = told(v1.load(root + path))
        told_by[name + ": v1 load, abstract"] = told(v1.load(root + path, abstract))
        told_by[name + ": v1 checkpointables"] = told(v1.load_checkpointables(root + path)["state"])
        with v1.training.Checkpointer(root + path[:-2]) as checkpointer:
            told_by[name + ": v1 Checkpointer"] = told(checkpointer.load(0))
    shapes = jax.tree.map(lambda leaf: getattr(leaf, "shape", None), v1.metadata(root + "/0").metadata)
    with v1.training.Checkpointer(root) as checkpointer:
        told_by["v1 Checkpointer"] = told(checkpointer.load(1))
        told_by["v1 Checkpointer, abstract"] = told(checkpointer.load(1, abstract))
    with v0.StandardCheckpointer() as checkpointer:
        told_by["v0 StandardCheckpointer"] = told(checkpointer.restore(root + "/0/state"))
        told_by["v0 StandardCheckpointer, abstract"] = told(checkpointer.restore(root + "/0/state", abstract))
    with v0.PyTreeCheckpointer() as checkpointer:
        told_by["v0 PyTreeCheckpointer"] = told(checkpointer.restore(root + "/0/state"))
    for step in range(2):
        with v0.CheckpointManager(root, item_names=("state",)) as manager:
            args = v0.args.Composite(state=v0.args.StandardRestore())
            told_by[f"v0 manager {step}"] = told(manager.restore(step, args=args)["state"])
            args = v0.args.Composite(state=v0.args.StandardRestore(abstract))
            told_by[f"v0 manager {step}, abstract"] = told(manager.restore(step, args=args)["state"])
        with v0.CheckpointManager(root, item_names=("state",)) as manager:
            args = v0.args.Composite(state=v0.args.PyTreeRestore(abstract))
            told_by[f"v0 manager {step}, PyTreeRestore"] = told(manager.restore(step, args=args)["state"])
    assert "orbax_t5x" not in sys.modules
    print(json.dumps([told_by, shapes["w"]]))
"""
)
WRITE = (
    WITHOUT_US
    + """
    tree = {"w": jax.numpy.arange(64, dtype=np.float32).reshape(8, 8), "n": {"host": np.arange(3), "step": 3}}
    v1.save(root + "/0", tree)
    with v1.training.Checkpointer(root) as checkpointer:
        checkpointer.save(1, tree)
    with v0.CheckpointManager(root, item_names=("state",)) as manager:
        manager.save(2, args=v0.args.Composite(state=v0.args.StandardSave(tree)))
    with v0.CheckpointManager(root, item_names=("state",)) as manager:
        manager.save(3, args=v0.args.Composite(state=v0.args.PyTreeSave(tree)))
    with v0.StandardCheckpointer() as checkpointer:
        checkpointer.save(root + "/alone", tree)
"""
)


def run(script, root):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), str(root)],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("checksums", [True, False], ids=["checksums", "no checksums"])
def test_stock_orbax_reads_what_is_saved_here(tmp_path, checksums):
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    w = np.arange(64, dtype=np.float32).reshape(8, 8)
    tree = {
        "w": jax.device_put(w, rows),
        "n": {"host": np.arange(3), "step": 3},
        "listed": [jax.device_put(jnp.arange(8, dtype=jnp.bfloat16), rows)],
    }
    with ot.v1.context(checksums=checksums):
        ocp.save(tmp_path / "0", tree)
        ocp.save_checkpointables(tmp_path / "other", {"model": tree})
        with ocp.training.Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.save(1, tree, force=True)
    commit_file = v0.options.AtomicityOptions(mode=v0.options.AtomicityMode.COMMIT_FILE)
    for name, options in (("version_0", {}), ("commit_file", {"atomicity_options": commit_file})):
        handlers = {"state": ot.TrainStateHandler(checksums=checksums)}
        made = v0.CheckpointManagerOptions(**options)
        with v0.CheckpointManager(tmp_path / name, item_handlers=handlers, options=made) as manager:
            manager.save(0, args=v0.args.Composite(state=ot.args.TrainStateSave(tree)))
    assert len(list(tmp_path.rglob("_CHECKSUMS.json"))) == (5 if checksums else 0)
    told_by, shape = json.loads(run(READ, tmp_path).splitlines()[-1])
    assert shape == [8, 8]
    structure = str(jax.tree.structure(tree))
    values = [["bfloat16", list(range(8))], ["int64", [0, 1, 2]], 3, ["float32", w.tolist()]]
    kinds = ["ArrayImpl", "ndarray", "int", "ArrayImpl"]
    assert len(told_by) == 24
    for told in told_by.values():
        assert told == [structure, values, kinds]


def test_what_stock_orbax_saved_loads_here(tmp_path):
    run(WRITE, tmp_path)
    target = {"renamed": jnp.zeros((8, 8)), "n": {"host": np.zeros(3, np.int64), "step": 0}}
    abstract = ot.v1.AbstractTrainState(target, [ot.transforms.Rename([("w", "renamed")])])
    with ot.v1.context():
        loaded = [ocp.load(tmp_path / str(step), abstract) for step in range(4)]
        with ocp.training.Checkpointer(tmp_path) as checkpointer:
            loaded += [checkpointer.load(step, abstract) for step in range(4)]
        # An item that lies in no step: Orbax calls this layout flat.
        loaded.append(ocp.load(tmp_path / "alone", abstract))
        loaded.append(ocp.load(tmp_path / "alone", abstract, checkpointable_name=None))
    for state in loaded:
        np.testing.assert_array_equal(state["renamed"], np.arange(64).reshape(8, 8))
        np.testing.assert_array_equal(state["n"]["host"], np.arange(3))
        assert state["n"]["step"] == 3
