"""Transforms while saving: what is left out, renamed, cast, stacked and cut, as stock Orbax reads it afterwards."""

from __future__ import annotations

import dataclasses
import json
import re
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_t5x as ot
from orbax_t5x.provenance import records as provenance
from orbax_t5x.trees.flat import unflatten
from tests.support import t5_model

SAVE = ot.args.TrainStateSave
STACK = ot.transforms.StackLayers(r"(.*)layers_(?P<i>\d+)/(.*)", r"\1layers/\3", 1)
CUT = ot.transforms.UnstackLayers(r"(.*)layers/(.*)", r"\1layers_{i}/\2", 1)
MIB = 1 << 20


def rows(*axes):
    return NamedSharding(Mesh(np.asarray(jax.devices()).reshape(2, 4), ("x", "y")), PartitionSpec(*axes))


def stock(path):
    """What Orbax alone restores, by name."""
    with ocp.StandardCheckpointer() as checkpointer:
        return ot.state_utils.flatten_state_dict(checkpointer.restore(path))


def save(path, item, kind=ocp.AsyncCheckpointer, **keywords):
    with kind(ot.TrainStateHandler()) as checkpointer:
        checkpointer.save(path, args=SAVE(item, **keywords))
    return stock(path)


def layers(shape=(16, 24), count=3):
    """Layers on devices, split by rows, by columns, and not at all."""
    specs = ("x", "y"), (None, ("x", "y")), ()
    values = {f"layers_{i}": np.random.default_rng(i).normal(size=shape).astype(np.float32) for i in range(count)}
    placed = {name: {"w": jax.device_put(values[name], rows(*specs[i % 3]))} for i, name in enumerate(values)}
    return values, placed


def state():
    numbers = np.random.default_rng(0)
    params = {"encoder": {"w": numbers.normal(size=(8, 4)).astype(np.float32), "ids": np.arange(3)}}
    slots = jax.tree.map(np.zeros_like, params)
    item = {"target": params, "state": {"param_states": slots, "step": np.int32(7)}}
    return jax.device_put(item, rows())


@pytest.mark.slow
@pytest.mark.parametrize(
    "transforms", [(ot.transforms.Keep(("target/.*",)),), (ot.transforms.Drop(("state/.*",)),)], ids=["keep", "drop"]
)
def test_parameters_alone_in_another_dtype(tmp_path, transforms):
    item = state()
    found = save(tmp_path / "export", item, dtype=jnp.bfloat16, transforms=transforms)
    assert sorted(found) == ["target/encoder/ids", "target/encoder/w"]
    expected = np.asarray(item["target"]["encoder"]["w"]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(found["target/encoder/w"], expected)
    assert found["target/encoder/w"].sharding == rows() and found["target/encoder/ids"].dtype == np.int32


@pytest.mark.slow
def test_export_names(tmp_path):
    item = state()
    renamed = ot.transforms.Rename(((r"target/(.*)", r"model/\1"), (r"state/(.*)", r"optimizer/\1")))
    found = save(tmp_path / "export", item, transforms=[renamed])
    assert {re.sub("^model", "target", re.sub("^optimizer", "state", name)) for name in found} == set(
        ot.state_utils.flatten_state_dict(item)
    )
    np.testing.assert_array_equal(found["model/encoder/w"], item["target"]["encoder"]["w"])


@pytest.mark.parametrize("kind", [ocp.Checkpointer, ocp.AsyncCheckpointer])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_live_arrays_are_stacked_and_cut_again(tmp_path, kind, dtype):
    values, placed = layers()
    expected = np.stack(list(values.values()), 1).astype(dtype or np.float32)
    found = save(tmp_path / "stacked", {"params": placed}, kind, transforms=[STACK], dtype=dtype)
    assert list(found) == ["params/layers/w"]
    np.testing.assert_array_equal(found["params/layers/w"], expected)
    assert ot.verify(tmp_path / "stacked").status == "ok"
    whole = {"layers": {"w": jax.device_put(np.stack(list(values.values()), 1), rows("x", None, "y"))}}
    cut = save(tmp_path / "cut", whole, kind, transforms=[CUT])
    for name, value in values.items():
        np.testing.assert_array_equal(cut[f"{name}/w"], value)


def test_arrays_may_be_given_away_once_an_asynchronous_save_has_returned(tmp_path):
    values, placed = layers()
    with ocp.AsyncCheckpointer(ot.TrainStateHandler()) as checkpointer:
        checkpointer.save(tmp_path / "stacked", args=SAVE(placed, transforms=[STACK]))
        for leaf in jax.tree.leaves(placed):
            leaf.delete()
    np.testing.assert_array_equal(stock(tmp_path / "stacked")["layers/w"], np.stack(list(values.values()), 1))


@pytest.mark.slow
def test_a_pack_and_its_inverse_are_applied_while_saving(tmp_path):
    config = t5_model.T5Config(encoder_layers=2, decoder_layers=2)
    params = {"target": jax.device_put(t5_model.init(config)[1]["params"], rows())}
    pack = ot.rules.t5_minimal_to_scanned(config.heads, config.head_dim)
    scanned = save(tmp_path / "scanned", params, transforms=pack)
    expected = t5_model.init(dataclasses.replace(config, scan_layers=True))[1]["params"]
    assert {name: leaf.shape for name, leaf in scanned.items()} == {
        name: leaf.shape for name, leaf in ot.state_utils.flatten_state_dict({"target": expected}).items()
    }
    back = save(tmp_path / "back", unflatten(scanned), transforms=pack.inverse())
    for name, leaf in ot.state_utils.flatten_state_dict(params).items():
        np.testing.assert_array_equal(back[name], leaf)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ocp.Checkpointer, ocp.AsyncCheckpointer])
def test_no_stack_of_live_arrays_is_whole_on_the_host(tmp_path, kind):
    """NumPy tells tracemalloc of its buffers, which are all that is computed here."""
    layer_bytes, count = 8 * MIB, 8
    _, placed = layers((1024, layer_bytes // 4096), count)
    with kind(ot.TrainStateHandler()) as checkpointer:
        tracemalloc.start()
        try:
            checkpointer.save(
                tmp_path / "stacked", args=SAVE(placed, transforms=[STACK], memory_limit_bytes=2 * layer_bytes)
            )
            if kind is ocp.AsyncCheckpointer:
                checkpointer.wait_until_finished()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 3 * layer_bytes < count * layer_bytes


def test_save_time_transforms_leave_the_lineage_as_it_is(tmp_path):
    _, placed = layers()
    with ocp.CheckpointManager(tmp_path, item_handlers=ot.TrainStateHandler()) as manager:
        manager.save(0, args=SAVE(placed, transforms=[STACK], provenance=()))
        manager.save(1, args=SAVE(placed, transforms=[STACK]))
    for step in ("0", "1"):
        metadata = json.loads((tmp_path / step / "default" / "_METADATA").read_text())
        assert provenance.from_metadata(metadata["custom_metadata"]) == ()


@pytest.mark.parametrize(
    ("transforms", "error", "text"),
    [
        ("auto", ot.errors.RestorePlanError, r"a save has no target\.\s+Fix: pass the rules: a pack of ot\.rules"),
        (["auto"], ot.errors.RestorePlanError, "a save has no target"),
        ("foo", TypeError, r"transforms='foo' is text; pass transforms of ot\.transforms"),
        ("hf_t5_to_t5x", TypeError, r"pass ot\.rules\.hf_t5_to_t5x\(\)$"),
        (ot.transforms.Translate, TypeError, r"Translate is a class; pass an instance of it: Translate\("),
        ([ot.transforms.Translate], TypeError, "Translate is a class"),
        ([ot.rules.t5_minimal_to_scanned], TypeError, r"makes: ot\.rules\.t5_minimal_to_scanned\(num_heads="),
        ([5], TypeError, "5 is no transform; pass transforms of"),
        (5, TypeError, "transforms is an int; pass a list of transforms"),
        ((one for one in ()), TypeError, "transforms is a generator"),
    ],
)
@pytest.mark.parametrize("kind", [ocp.Checkpointer, ocp.AsyncCheckpointer])
def test_wrong_transforms_raise_the_errors_of_a_restore(tmp_path, transforms, error, text, kind):
    with pytest.raises(error, match=text):
        save(tmp_path / "step", {"a": np.ones(2)}, kind=kind, transforms=transforms)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "_CHECKPOINT_METADATA"]
