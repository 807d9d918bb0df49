"""T5X's train states as targets: of bundles, of T5X's Orbax checkpoints, of states that stock Orbax saved whole."""

from __future__ import annotations

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.linen.partitioning import AxisMetadata

import orbax_t5x as ot
from orbax_t5x.adafactor import Adafactor
from orbax_t5x.optimizers import adamw
from orbax_t5x.state_utils import apply_assignment_map
from orbax_t5x.train_state import FlaxOptimTrainState, InferenceState
from orbax_t5x.transforms import Translate
from orbax_t5x.trees.flat import flatten
from tests.support import t5_model
from tests.support.memory_checkpoint import checkpoint
from tests.support.train_states import DEFAULT, factored, inference_state, sharded, training_state

CONFIGS = {
    "t5_1_1_f32": DEFAULT,
    "t5_1_1_bf16_snappy": DEFAULT,
    "t5_1_0_bf16": t5_model.T5Config(gated=False, tied=True),
    "t5_1_1_perlayer_rel": t5_model.T5Config(per_layer_bias=True),
}


def assert_values(state, expected, *, optimizer=True):
    """The state's leaves are those values, whatever their dtypes."""
    flat = flatten(state.state_dict())
    assert flat.keys() == {name for name in expected if optimizer or not name.startswith("state/param_states/")}
    for name, value in flat.items():
        np.testing.assert_array_equal(np.asarray(value, np.float64), expected[name].astype(np.float64), err_msg=name)


def imported(goldens, name):
    """What T5X's importer made of a bundle."""
    meta = json.loads((goldens / "importer" / f"{name}.json").read_text())["leaves"]
    with np.load(goldens / "importer" / f"{name}.npz") as values:
        return {key: values[key].astype(getattr(ml_dtypes, leaf["dtype"], leaf["dtype"])) for key, leaf in meta.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("make", [training_state, inference_state])
def test_bundles(goldens, name, make):
    target = sharded(make(CONFIGS[name]))
    state = ot.restore(goldens / "tf_bundle" / name, target, [Translate()])
    assert jax.tree.structure(state) == jax.tree.structure(target)
    for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(target), strict=True):
        assert leaf.dtype == wanted.dtype
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
    assert_values(state, imported(goldens, name), optimizer=make is training_state)


@pytest.mark.parametrize("name", ["t5_1_1_f32", "t5_1_0_bf16"])
def test_a_bundle_into_a_scanned_model(goldens, name):
    bundle = goldens / "tf_bundle" / name
    unrolled = ot.restore(bundle, inference_state(CONFIGS[name]), [Translate()])
    config = dataclasses.replace(CONFIGS[name], scan_layers=True)
    to_scanned = ot.rules.t5_minimal_to_scanned(config.heads, config.head_dim)
    scanned = ot.restore(bundle, sharded(inference_state(config)), [Translate(), to_scanned])
    jax.tree.map(np.testing.assert_array_equal, scanned.params, t5_model.scanned_from(unrolled.params, config))


@pytest.mark.slow
def test_the_kind_stays(goldens):
    bundle = goldens / "tf_bundle" / "t5_1_1_f32"
    for state in (training_state(), inference_state()):
        for target in (state, jax.eval_shape(lambda state=state: state)):
            restored = ot.restore(bundle, target, [Translate()])
            assert type(restored) is type(state)
            assert jax.tree.structure(restored) == jax.tree.structure(state)
            assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))


def test_an_inference_state_reads_no_byte_of_the_optimizer():
    arrays = {name: np.asarray(leaf) for name, leaf in flatten(training_state().state_dict()).items()}
    source = checkpoint(arrays)
    plan = ot.plan_restore(source, sharded(inference_state()))
    restored = plan.execute()
    read = {name for name, leaf in source.made.items() if leaf.boxes}
    assert read == {name for name in arrays if not name.startswith("state/param_states/")}
    assert sorted(plan.dropped) == sorted(arrays.keys() - read)
    assert plan.bytes_to_read == sum(arrays[name].nbytes for name in read)
    assert_values(restored, arrays, optimizer=False)


def test_dtype_casts_neither_step_nor_slots(goldens):
    # T5X's bfloat16 restore makes 1,097,728 of this step.
    names = {"global_step": np.int64(1_100_001), "shared/embedding": np.float32(np.pi) * np.ones((8, 4), np.float32)}
    slots = {f"shared/embedding_slot_{slot}": np.full(size, np.float32(np.e)) for slot, size in (("vr", 4), ("vc", 8))}
    given = {"params": {"token_embedder": {"embedding": np.zeros((8, 4), np.float32)}}}
    state = FlaxOptimTrainState.create(Adafactor(0.1, min_dim_size_to_factor=2), {**given, **_axes("vocab", "embed")})
    restored = ot.restore(checkpoint({**names, **slots}), state, [Translate()], dtype=jnp.bfloat16)
    assert int(restored.step) == 1_100_001
    embedding = restored.param_states["token_embedder"]["embedding"]
    assert (embedding.v_row.dtype, embedding.v_row[0]) == (jnp.float32, np.float32(np.e))
    parameter = restored.params["token_embedder"]["embedding"]
    assert (parameter.dtype, parameter[0, 0]) == (jnp.bfloat16, jnp.bfloat16(np.pi))


def _axes(*names):
    return {"params_axes": {"token_embedder": {"embedding_axes": AxisMetadata(names)}}}


SWAP = [
    (r"(target|state/param_states)/(.*)/query/(.*)", r"\1/\2/key/\3"),
    (r"(target|state/param_states)/(.*)/key/(.*)", r"\1/\2/query/\3"),
]


@pytest.mark.slow
@pytest.mark.parametrize("source", ["bundle", "orbax"])
@pytest.mark.parametrize("function", [False, True])
def test_t5xs_functions_transform_every_format(goldens, source, function):
    # T5X refuses transformation functions for TensorFlow checkpoints, and on Orbax ones ignores a swap without a word.
    transform = partial(apply_assignment_map, assignment_map=SWAP) if function else ot.transforms.AssignmentMap(SWAP)
    if source == "bundle":
        expected = imported(goldens, "t5_1_1_f32")
        state = ot.restore(goldens / "tf_bundle" / "t5_1_1_f32", sharded(training_state()), [Translate(), transform])
    else:
        with np.load(goldens / "t5x_orbax" / "d8_adafactor" / "expected.npz") as values:
            expected = dict(values)
        target = FlaxOptimTrainState.create(Adafactor(0.1), t5_model.init()[1])
        state = ot.restore(goldens / "t5x_orbax" / "d8_adafactor", sharded(target), [transform])
    swapped = {
        name: expected[name.replace("/query/", "/?/").replace("/key/", "/query/").replace("/?/", "/key/")]
        for name in expected
    }
    assert_values(state, swapped)


@pytest.mark.parametrize("per_layer", [False, True])
def test_a_one_layer_model_gets_its_bias_where_it_has_it(per_layer):
    config = t5_model.T5Config(encoder_layers=1, decoder_layers=1, per_layer_bias=per_layer)
    state = inference_state(config)
    names = {
        "token_embedder/embedding": "shared/embedding",
        "decoder/logits_dense/kernel": "decoder/logits/kernel",
        **{f"{tower}/{tower}_norm/scale": f"{tower}/final_layer_norm/scale" for tower in ("encoder", "decoder")},
    }
    projections = {"query": "q", "key": "k", "value": "v", "out": "o"}
    sublayers = {
        "attention": "0/SelfAttention",
        "self_attention": "0/SelfAttention",
        "encoder_decoder_attention": "1/EncDecAttention",
    }
    norms = {
        "encoder": {"pre_attention_layer_norm": 0, "pre_mlp_layer_norm": 1},
        "decoder": {"pre_self_attention_layer_norm": 0, "pre_cross_attention_layer_norm": 1, "pre_mlp_layer_norm": 2},
    }
    for name in flatten(state.params):
        tower, *rest = name.split("/")
        block = f"{tower}/block_000/layer_00"
        if "relpos_bias" in name:
            names[name] = f"{block}0/SelfAttention/relative_attention_bias"
        elif rest[0] == "layers_0" and rest[1] in sublayers:
            names[name] = f"{block}{sublayers[rest[1]]}/{projections[rest[2]]}"
        elif rest[0] == "layers_0" and rest[1] == "mlp":
            names[name] = f"{block}{norms[tower]['pre_mlp_layer_norm']}/DenseReluDense/{rest[2]}/kernel"
        elif rest[0] == "layers_0":
            names[name] = f"{block}{norms[tower][rest[1]]}/layer_norm/scale"
    values = {name: np.asarray(leaf) for name, leaf in flatten(state.params).items()}
    assert names.keys() == values.keys()
    source = checkpoint({**{names[name]: values[name] for name in values}, "global_step": np.int64(5)})
    restored = ot.restore(source, jax.eval_shape(lambda: state), [Translate()])
    assert_values(restored, {**{f"target/{name}": value for name, value in values.items()}, "state/step": np.int64(5)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("golden", "make_optimizer"), [("d8_adafactor", lambda: Adafactor(0.1)), ("d1_adamw_oldjax", partial(adamw, 0.1))]
)
def test_t5xs_orbax_checkpoints(goldens, golden, make_optimizer):
    with np.load(goldens / "t5x_orbax" / golden / "expected.npz") as values:
        expected = dict(values)
    root = goldens / "t5x_orbax" / golden
    variables = t5_model.init()[1]
    training = ot.restore(root, sharded(FlaxOptimTrainState.create(make_optimizer(), variables)))
    assert_values(training, expected)
    inference = ot.restore(root, sharded(InferenceState.create(variables)))
    assert_values(inference, expected, optimizer=False)


@pytest.mark.slow
@pytest.mark.parametrize("make_optimizer", [factored, partial(adamw, 0.1)])
def test_states_that_stock_orbax_saved_whole(tmp_path, make_optimizer):
    state = FlaxOptimTrainState.create(make_optimizer(), t5_model.init(t5_model.T5Config(encoder_layers=1))[1])
    with ocp.StandardCheckpointer() as stock:
        stock.save(tmp_path / "state", state)
    restored = ot.restore(tmp_path / "state", sharded(state))
    assert_values(restored, {name: np.asarray(leaf) for name, leaf in flatten(state.state_dict()).items()})
    inference = ot.restore(tmp_path / "state", InferenceState(state.step, state.params))
    jax.tree.map(np.testing.assert_array_equal, inference.params, state.params)
