"""Two processes save and restore one step together; a missing peer kills a process, so they are real ones."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import jax
import numpy as np
import orbax.checkpoint as ocp

import orbax_t5x as ot

SCRIPT = """
    import json, sys
    import jax, numpy as np
    process, port, root, source = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, process, initialization_timeout=60)
    import orbax.checkpoint as ocp
    import orbax_t5x as ot
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows, columns = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec(None, "x"))
    w = np.arange(64, dtype=np.float32).reshape(8, 8)
    array = jax.make_array_from_callback(w.shape, rows, lambda index: w[index])
    written = []
    with ot.open_checkpoint(source) as opened:
        state = {"params": {"w": array}, "lazy": opened.leaves["a"], "small": opened.leaves["b"]}
        with ocp.CheckpointManager(root, item_handlers=ot.TrainStateHandler()) as manager:
            progress = lambda *told: written.append(told)
            args = ot.args.TrainStateSave(state, memory_limit_bytes=1 << 16, progress=progress)
            manager.save(0, args=args)
            manager.wait_until_finished()
            try:
                manager.save(1, args=ot.args.TrainStateSave({"bad": np.zeros(0), "w": array}))
            except ot.errors.UnsupportedCheckpointError:
                print("refused")
            target = {
                "params": {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=rows)},
                "lazy": jax.ShapeDtypeStruct((512, 16384), np.uint8, sharding=columns),
                "small": np.zeros((3,), np.uint8),
            }
            restored = manager.restore(0, args=ot.args.TrainStateRestore(target))
            for leaf, whole in ((restored["params"]["w"], w), (restored["lazy"], opened.leaves["a"].get())):
                for shard in leaf.addressable_shards:
                    np.testing.assert_array_equal(shard.data, whole[shard.index])
            target["lazy"] = jax.ShapeDtypeStruct((512, 16384), np.uint8, sharding=rows)
            plan = ot.plan_restore(root, target)
            plan.execute()
    print(json.dumps([len(written), manager.all_steps(), plan.report.verified]))
"""


def test_two_processes_save_and_restore_together(tmp_path):
    a = np.random.default_rng(0).integers(0, 255, (512, 16384), np.uint8)  # eight chunks of the least size
    b = np.arange(3, dtype=np.uint8)
    header = (
        b'{"a":{"dtype":"U8","shape":[512,16384],"data_offsets":[0,8388608]},'
        b'"b":{"dtype":"U8","shape":[3],"data_offsets":[8388608,8388611]}}'
    )
    source = tmp_path / "source.safetensors"
    source.write_bytes(len(header).to_bytes(8, "little") + header + a.tobytes() + b.tobytes())
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    arguments = [port, str(tmp_path / "root"), str(source)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SCRIPT), str(process), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for process in range(2)
    ]
    done = []
    try:
        done = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, error) in zip(processes, done, strict=True):
        assert process.returncode == 0, error[-3000:]
    # Both wrote pieces of the large leaf, and neither wrote all of them.
    refused, told = zip(*(output.splitlines()[-2:] for output, _ in done), strict=True)
    assert refused == ("refused", "refused")
    pieces = [json.loads(text)[0] for text in told]
    assert min(pieces) >= 3 and sum(pieces) == 8 + 1
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["0"]
    # One file of checksums holds the boxes of both, and what both read together is compared with it.
    assert [json.loads(text)[2] for text in told] == [["lazy", "params/w", "small"]] * 2
    report = ot.verify(tmp_path / "root")
    assert {leaf.name: leaf.status for leaf in report.leaves} == dict.fromkeys(["lazy", "params/w", "small"], "ok")
    assert not list((tmp_path / "root").rglob("_CHECKSUMS.process_*"))

    item = tmp_path / "root" / "0" / "default"
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(item).item_metadata.tree
        as_numpy = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        stock = checkpointer.restore(item, restore_args=as_numpy)
    for restored in (stock, ot.restore(tmp_path / "root", None)):
        np.testing.assert_array_equal(restored["lazy"], a)
        np.testing.assert_array_equal(restored["small"], b)
        np.testing.assert_array_equal(restored["params"]["w"], np.arange(64).reshape(8, 8))
