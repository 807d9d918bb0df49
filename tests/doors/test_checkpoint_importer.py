"""T5X's importer without TensorFlow: what T5X itself made of real bundles (`goldens/importer`) is the judge."""

from __future__ import annotations

import gc
import inspect
import json
import os
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest

from orbax_t5x import checkpoint_importer
from orbax_t5x.adafactor import Adafactor
from orbax_t5x.checkpoint_importer import (
    CheckpointTranslator,
    LazyArray,
    load_tf_ckpt,
    restore_from_t5_checkpoint,
    t5_importer,
)
from orbax_t5x.errors import CheckpointError, CheckpointNotFoundError, LeafMismatchError, RestorePlanError
from orbax_t5x.optimizers import adamw
from orbax_t5x.train_state import FlaxOptimTrainState, InferenceState
from orbax_t5x.trees.flat import flatten, unflatten
from tests.support import t5_model

BUNDLES = ["lm_transformer", "t5_1_0_bf16", "t5_1_1_bf16_snappy", "t5_1_1_f32", "t5_1_1_perlayer_rel"]
PREFIX = "model.ckpt-1000000"


@pytest.fixture(scope="module")
def bundle(goldens):
    return goldens / "tf_bundle" / "t5_1_1_f32"


def imported(goldens, name):
    """What T5X's importer made: metadata, and values by name in their true dtypes."""
    meta = json.loads((goldens / "importer" / f"{name}.json").read_text())
    with np.load(goldens / "importer" / f"{name}.npz") as values:
        arrays = {
            key: values[key].astype(getattr(ml_dtypes, leaf["dtype"], leaf["dtype"]))
            for key, leaf in meta["leaves"].items()
        }
    return meta, arrays


def assert_as_t5x(restored, meta, arrays):
    flat = flatten(restored)
    assert list(flat) == meta["order"]
    for name, leaf in meta["leaves"].items():
        value = flat[name]
        assert type(value).__name__ == leaf["type"]
        assert value.dtype.name == leaf["dtype"]
        assert list(value.shape) == leaf["shape"]
        assert value.tobytes() == arrays[name].tobytes(), name


@pytest.mark.parametrize("name", BUNDLES)
@pytest.mark.parametrize("state", ["none", "empty", "of T5X"])
def test_values_dtypes_and_order_are_t5xs(goldens, name, state):
    meta, arrays = imported(goldens, name)
    state_dict = {"none": None, "empty": {}, "of T5X": unflatten(arrays)}[state]
    assert_as_t5x(restore_from_t5_checkpoint(state_dict, goldens / "tf_bundle" / name / PREFIX), meta, arrays)


@pytest.mark.parametrize("name", BUNDLES)
def test_lazy_parameters(goldens, name):
    meta, arrays = imported(goldens, name)
    restored = flatten(restore_from_t5_checkpoint(None, goldens / "tf_bundle" / name, lazy_parameters=True))
    gc.collect()  # nothing but the lazy arrays keeps the files open
    assert list(restored) == meta["order"]
    step = restored.pop("state/step")
    assert type(step) is np.int32 and step == arrays["state/step"]
    for key, lazy in restored.items():
        assert isinstance(lazy, LazyArray)
        assert (lazy.shape, lazy.dtype) == (arrays[key].shape, arrays[key].dtype)
        assert lazy.get().tobytes() == arrays[key].tobytes()


@pytest.mark.parametrize("where", ["", PREFIX, f"{PREFIX}.index"])
def test_paths(bundle, where):
    path = bundle / where if where else bundle
    assert load_tf_ckpt(str(path)).keys() == load_tf_ckpt(path).keys() == set(expected_names(bundle))


def expected_names(bundle):
    return json.loads((bundle / "expected_meta.json").read_text())["tensors"]


def test_load_tf_ckpt_reads_no_arrays(bundle, tmp_path):
    for name in ("checkpoint", f"{PREFIX}.index", *(f"{PREFIX}.data-0000{i}-of-00002" for i in range(2))):
        (tmp_path / name).write_bytes((bundle / name).read_bytes())
    leaves = load_tf_ckpt(tmp_path)
    shapes = {name: (list(lazy.shape), lazy.dtype.name) for name, lazy in leaves.items()}
    assert shapes == {name: (leaf["shape"], leaf["dtype"]) for name, leaf in expected_names(bundle).items()}
    with np.load(bundle / "expected.npz") as expected:
        np.testing.assert_array_equal(leaves["shared/embedding"].get(), expected["shared/embedding"])
    assert t5_importer.apply(leaves)["target/token_embedder/embedding"] is leaves["shared/embedding"]


def test_errors_of_the_bundle_are_typed(bundle, tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        load_tf_ckpt(tmp_path)
    (tmp_path / f"{PREFIX}.index").write_bytes((bundle / f"{PREFIX}.index").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=PREFIX):
        restore_from_t5_checkpoint(None, tmp_path / PREFIX)


# States.


@pytest.fixture(scope="module")
def variables():
    return t5_model.init()[1]


def factored():
    return Adafactor(0.1, min_dim_size_to_factor=8)


@pytest.mark.parametrize("abstract", [False, True])
def test_into_an_adafactor_state(goldens, bundle, variables, abstract):
    _, arrays = imported(goldens, "t5_1_1_f32")
    state = FlaxOptimTrainState.create(factored(), variables)
    if abstract:
        state = jax.eval_shape(lambda: state)
    restored = state.restore_state(restore_from_t5_checkpoint(state.state_dict(), bundle))
    flat = flatten(restored.state_dict())
    assert flat.keys() == arrays.keys()
    for name, value in flat.items():
        np.testing.assert_array_equal(value, arrays[name], err_msg=name)
    assert restored.step == 1_000_000


def test_into_an_inference_state(goldens, bundle, variables):
    _, arrays = imported(goldens, "t5_1_1_f32")
    state = InferenceState.create(variables)
    for strict in (True, False):
        restored = flatten(restore_from_t5_checkpoint(state.state_dict(), bundle, strict=strict))
        assert restored.keys() == {name for name in arrays if not name.startswith("state/param_states/")}
        np.testing.assert_array_equal(
            restored["target/decoder/logits_dense/kernel"], arrays["target/decoder/logits_dense/kernel"]
        )


def test_states_that_the_file_can_not_fill_name_just_what_is_missing(bundle, variables):
    adam = FlaxOptimTrainState.create(adamw(0.1), variables).state_dict()
    with pytest.raises(RestorePlanError, match="state/param_states/0/count") as caught:
        restore_from_t5_checkpoint(adam, bundle)
    (problem,) = caught.value.problems
    assert problem.kind == "missing"
    assert "105 names" in problem.message  # count, mu and nu: the file's own slots are no complaint
    adam["state"]["param_states"] = {}
    assert restore_from_t5_checkpoint(adam, bundle)["state"] == {"step": 1_000_000}


def test_momentum_is_named_as_missing(bundle, variables):
    state = FlaxOptimTrainState.create(Adafactor(0.1, min_dim_size_to_factor=8, beta1=0.9), variables)
    with pytest.raises(RestorePlanError, match=r"52 names: 'state/param_states/decoder/decoder_norm/scale/m'"):
        restore_from_t5_checkpoint(state.state_dict(), bundle)


def test_none_stays_none(bundle):
    state = {"state": {"step": np.int32(0), "param_states": {"encoder": None}}}
    restored = restore_from_t5_checkpoint(state, bundle, strict=False)
    assert restored == {"state": {"param_states": {"encoder": None}, "step": 1_000_000}}


# Strictness and shapes.


def test_names_that_the_state_lacks(goldens, bundle):
    _, arrays = imported(goldens, "t5_1_1_f32")
    del arrays["target/decoder/logits_dense/kernel"]
    with pytest.raises(RestorePlanError, match=r"(?s)'target/decoder/logits_dense/kernel'.*strict=False"):
        restore_from_t5_checkpoint(unflatten(arrays), bundle)
    assert flatten(restore_from_t5_checkpoint(unflatten(arrays), bundle, strict=False)).keys() == arrays.keys()


@pytest.mark.parametrize("strict", [False, True])
def test_names_that_the_file_lacks(goldens, bundle, strict):
    _, arrays = imported(goldens, "t5_1_1_f32")
    arrays["target/decoder/extra/kernel"] = np.zeros(1)
    with pytest.raises(RestorePlanError, match="target/decoder/extra/kernel"):
        restore_from_t5_checkpoint(unflatten(arrays), bundle, strict=strict)


def test_both_kinds_of_names_in_one_error(goldens, bundle):
    _, arrays = imported(goldens, "t5_1_1_f32")
    arrays["target/decoder/renamed/kernel"] = arrays.pop("target/decoder/logits_dense/kernel")
    with pytest.raises(RestorePlanError) as caught:
        restore_from_t5_checkpoint(unflatten(arrays), bundle)
    assert [problem.kind for problem in caught.value.problems] == ["missing", "leftover"]


def test_shapes_are_checked(goldens, bundle):
    _, arrays = imported(goldens, "t5_1_1_f32")
    arrays["target/token_embedder/embedding"] = np.zeros((64, 16), np.float32)
    arrays["target/decoder/logits_dense/kernel"] = jax.ShapeDtypeStruct((16, 64), np.float32)
    with pytest.raises(LeafMismatchError) as caught:
        restore_from_t5_checkpoint(unflatten(arrays), bundle)
    assert caught.value.leaf == "target/decoder/logits_dense/kernel"
    assert "(128, 16), the state's is (64, 16)" in str(caught.value)
    assert str(bundle) in str(caught.value)


def test_names_and_shapes_that_are_wrong_come_in_one_error(goldens, bundle):
    _, arrays = imported(goldens, "t5_1_1_f32")
    arrays["target/token_embedder/embedding"] = np.zeros((64, 16), np.float32)
    arrays["target/decoder/renamed/kernel"] = arrays.pop("target/decoder/logits_dense/kernel")
    with pytest.raises(RestorePlanError, match=r"\(128, 16\), the state's is \(64, 16\)") as caught:
        restore_from_t5_checkpoint(unflatten(arrays), bundle)
    assert [problem.kind for problem in caught.value.problems] == ["missing", "leftover", "shape"]


# The relative bias.


def test_a_one_layer_model_gets_its_bias_where_the_state_has_it(goldens, bundle):
    # Of a state with just the first layer's bias, T5X would not find the name: it takes one bias for a shared one.
    table = np.zeros((4, 32), np.float32)
    for name in ("target/encoder/relpos_bias/rel_embedding", "target/encoder/layers_0/relpos_bias/rel_embedding"):
        restored = restore_from_t5_checkpoint(unflatten({name: table}), bundle, strict=False)
        with np.load(bundle / "expected.npz") as expected:
            source = expected["encoder/block_000/layer_000/SelfAttention/relative_attention_bias"]
        np.testing.assert_array_equal(flatten(restored)[name], source)


def test_shared_in_the_file_and_per_layer_in_the_state_is_an_error(goldens, bundle):
    _, arrays = imported(goldens, "t5_1_1_perlayer_rel")
    with pytest.raises(RestorePlanError) as caught:
        restore_from_t5_checkpoint(unflatten(arrays), bundle)
    text = str(caught.value)
    assert "layers_0/relpos_bias/rel_embedding" in text
    assert "target/encoder/relpos_bias/rel_embedding" in text


# Rules, interface, imports.


def test_a_translator_of_the_callers(bundle):
    translator = CheckpointTranslator()

    @translator.add(r"shared/embedding")
    def embedding(opts, key, val):
        return "words", val

    @translator.add(r".*")
    def rest(opts, key, val):
        return None, val

    restored = restore_from_t5_checkpoint({"words": np.zeros((128, 16))}, bundle, translator=translator)
    with np.load(bundle / "expected.npz") as expected:
        np.testing.assert_array_equal(restored["words"], expected["shared/embedding"])
    assert list(restored) == ["words"]


def test_a_name_that_no_rule_knows(goldens):
    with pytest.raises(RestorePlanError, match="no translation rule matches"):
        restore_from_t5_checkpoint(None, goldens / "tf_bundle" / "dtype_zoo" / "zoo.ckpt")


def test_t5xs_names_and_signatures():
    names = """
        CheckpointTranslator LazyArray LazyAwaitableArray LazyThreadPoolArray load_tf_ckpt restore_from_t5_checkpoint
        t5_importer global_step shared_embeddings separate_embeddings rel_embeddings attention_layers mlpblock
        layernorms final_layernorms final_logits
    """
    for name in names.split():
        assert callable(getattr(checkpoint_importer, name)) or name == "t5_importer"
    parameters = inspect.signature(restore_from_t5_checkpoint).parameters
    assert list(parameters) == ["state_dict", "path", "lazy_parameters", "strict", "translator"]
    assert [parameter.default for parameter in parameters.values()][2:] == [False, True, None]
    assert list(inspect.signature(CheckpointTranslator.apply).parameters) == ["self", "flatdict", "opts"]
    assert checkpoint_importer.global_step({}, "global_step", np.int64(3)) == ("state/step", 3)
    name, _ = checkpoint_importer.attention_layers({}, "", 0, "encoder", "003", "SelfAttention", "q", None)
    assert name == "target/encoder/layers_3/attention/query/kernel"


@pytest.mark.parametrize("name", BUNDLES)
def test_t5xs_steps_by_hand(goldens, name):
    """Code that calls the importer's parts, by the underscored names that T5X has for them."""
    _, arrays = imported(goldens, name)
    translated = t5_importer.apply(load_tf_ckpt(goldens / "tf_bundle" / name))
    completed = checkpoint_importer._maybe_correct_relpos_bias(
        checkpoint_importer._add_missing_param_states(translated)
    )
    assert completed.keys() == arrays.keys()
    state = unflatten(arrays)
    restored = flatten(checkpoint_importer._update_state_dict(state, completed))
    for key, array in arrays.items():
        value = restored[key]
        assert (value.get() if isinstance(value, LazyArray) else value).tobytes() == array.tobytes(), key
    more = {**completed, "target/more": np.ones(2)}
    with pytest.raises(ValueError, match="'target/more', which the state lacks"):
        checkpoint_importer._update_state_dict(state, more)
    assert flatten(checkpoint_importer._update_state_dict(state, more, strict=False)).keys() == arrays.keys()
    with pytest.raises(ValueError, match="'target/more', which the checkpoint lacks"):
        checkpoint_importer._update_state_dict({**state, "target": {"more": np.ones(2)}}, completed, strict=False)
    norm = {"target": {"decoder": {"decoder_norm": {"scale": np.ones(3)}}}}
    with pytest.raises(LeafMismatchError, match="'target/decoder/decoder_norm/scale': has shape"):
        checkpoint_importer._update_state_dict(norm, completed, strict=False)


def test_momenta_are_added_for_parameters_without_slots_too():
    added = checkpoint_importer._add_missing_param_states({"target/a/b": 1, "target/c": 2, "state/param_states/c/v": 3})
    assert {name: getattr(value, "shape", value) for name, value in added.items()} == {
        "target/a/b": 1,
        "target/c": 2,
        "state/param_states/c/v": 3,
        **{f"state/param_states/{slot}": (1,) for slot in ("a/b/m", "c/m", "c/v_row", "c/v_col")},
    }


def test_maps_of_names():
    assert checkpoint_importer.SLOT_MAP == {"_slot_vc": "v_col", "_slot_vr": "v_row", "_slot_v": "v"}
    assert checkpoint_importer.TOWER_MAP == {"transformer": "decoder"}


def test_no_tensorflow_and_no_flax_is_imported(bundle):
    code = (
        "import sys; from orbax_t5x.checkpoint_importer import restore_from_t5_checkpoint as r\n"
        f"r(None, {str(bundle)!r})\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('tensorflow', 'flax')][:3])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, check=True)
    assert done.stdout.strip() == "[]"
