"""Every signature that T5X's five modules have is here: names, order and defaults of arguments, and underscored names.

The table says what T5X has. Here arguments may follow T5X's where they have a default, and what T5X demands
may have a default.
"""

from __future__ import annotations

import enum
import importlib
import inspect
from collections.abc import Mapping
from concurrent.futures import Executor

import jax.numpy as jnp
import pytest

from orbax_t5x.train_state import EMPTY_DICT

_STEP = "self, hyper_params, params, state, grads"
_BLOCK = "opts, key, val, encdec, blocknum"

CALLABLES = {
    "state_utils": {
        "tensorstore_leaf": "_, value",
        "flatten_state_dict": "state_dict, keep_empty_nodes=False",
        "get_name_tree": "state_dict, keep_empty_nodes=False",
        "intersect_state": "state_dict, intersect_state_dict",
        "merge_state": "state_dict, from_scratch_state, overwrite=False",
        "apply_assignment_map": (
            "ckpt_optimizer_state, optimizer_state, assignment_map, require_all_rules_match=True, *, is_resuming=False"
        ),
    },
    "checkpoint_importer": {
        "LazyArray": "shape, dtype, get_fn",
        "LazyArray.astype": "self, dtype",
        "LazyArray.get": "self",
        "LazyArray.get_async": "self",
        "LazyThreadPoolArray": "shape, dtype, get_fn",
        "LazyThreadPoolArray.get": "self",
        "LazyThreadPoolArray.get_async": "self",
        "LazyAwaitableArray": "shape, dtype, get_fn",
        "LazyAwaitableArray.get": "self",
        "LazyAwaitableArray.get_async": "self",
        "LazyAwaitableArray.from_array": "array, get_fn, dtype=None",
        "LazyAwaitableArray.from_tensor_store_spec": "ts_spec, get_fn, dtype=None",
        "LazyAwaitableArray.from_tensor_store_spec_or_array": "maybe_ts_spec, get_fn, dtype=None",
        "CheckpointTranslator": "",
        "CheckpointTranslator.add": "self, pattern",
        "CheckpointTranslator.apply": "self, flatdict, **opts",
        "global_step": "opts, key, val",
        "shared_embeddings": "opts, key, val, slot",
        "separate_embeddings": "opts, key, val, encdec, slot",
        "rel_embeddings": f"{_BLOCK}, slot",
        "attention_layers": f"{_BLOCK}, attntype, qkvo, slot",
        "mlpblock": f"{_BLOCK}, io_name, io_num, slot",
        "layernorms": f"{_BLOCK}, lyrnum, slot",
        "final_layernorms": "opts, key, val, encdec, slot",
        "final_logits": "opts, key, val, slot",
        "load_tf_ckpt": "path",
        "restore_from_t5_checkpoint": "state_dict, path, lazy_parameters=False, strict=True, translator=None",
        "_add_missing_param_states": "t5_data",
        "_maybe_correct_relpos_bias": "t5_data",
        "_update_state_dict": "state_dict, t5_data, strict=True",
    },
    "optimizers": {
        "OptimizerState": "step, param_states",
        "OptimizerDef": "hyper_params",
        "OptimizerDef.init_state": "self, params",
        "OptimizerDef.apply_gradient": _STEP,
        "OptimizerDef.update_hyper_params": "self, **hyper_param_overrides",
        "OptimizerDef.create": "self, target",
        "OptimizerDef.state_dict": "self, target, state",
        "OptimizerDef.restore_state": "self, opt_target, opt_state, state_dict",
        "Optimizer": "optimizer_def, state, target",
        "Optimizer.apply_gradient": "self, grads, **hyper_param_overrides",
        "Optimizer.state_dict": "self",
        "Optimizer.restore_state": "self, state",
        "OptaxStatePartitionRules._is_optax_state": "x",
        "OptaxStatePartitionRules.derive_params_axes": "optax_params, params_axes",
        "OptaxStatePartitionRules.derive_optax_logical_axes": "optax_state, params_axes",
        "_OptaxWrapperHyperParams": "learning_rate=None",
        "OptaxWrapper": "optax_optimizer",
        "OptaxWrapper.init_state": "self, params",
        "OptaxWrapper.apply_gradient": _STEP,
        "OptaxWrapper.update_hyper_params": "self, **hyper_param_overrides",
        "OptaxWrapper.state_dict": "self, target, state",
        "OptaxWrapper.restore_state": "self, opt_target, opt_state, state_dict",
        "OptaxWrapper.derive_logical_axes": "self, optimizer, param_logical_axes",
        "wrap_optax_optimizer": "optax_optimizer",
        "chain": "transformations",
        "MultiOptimizer": "traversals_and_optimizers",
        "MultiOptimizer.init_state": "self, params",
        "MultiOptimizer.apply_gradient": _STEP,
        "MultiOptimizer.update_hyper_params": "self, **hyper_param_overrides",
        "MultiOptimizer.set_param_axes": "self, param_logical_axes",
        "MultiOptimizer.state_dict": "self, target, state",
        "MultiOptimizer.restore_state": "self, opt_target, opt_state, state_dict",
        "MultiOptimizer.derive_logical_axes": "self, optimizer, param_logical_axes",
    },
    "adafactor": {
        "Adafactor": (
            "learning_rate=None, factored=True, multiply_by_parameter_scale=True, beta1=None, decay_rate=0.8, "
            "step_offset=0, clipping_threshold=1.0, weight_decay_rate=None, min_dim_size_to_factor=128, "
            "epsilon1=1e-30, epsilon2=1e-3, dtype_momentum=jnp.float32, factor_map=None, logical_factor_rules=None, "
            "weight_decay_rate_lr_exponent=None, global_norm_clip_threshold=None, max_parameter_scale=None, "
            "skip_nan_updates=False"
        ),
        "Adafactor.init_state": "self, params",
        "Adafactor.init_param_state": "self, param, path",
        "Adafactor.apply_gradient": _STEP,
        "Adafactor.apply_param_gradient": "self, step, hyper_params, param, state, grad, path",
        "Adafactor.update_hyper_params": "self, **hyper_param_overrides",
        "Adafactor.create": "self, target",
        "Adafactor.state_dict": "self, target, state",
        "Adafactor.restore_state": "self, opt_target, opt_state, state_dict",
        "Adafactor.set_param_axes": "self, param_logical_axes",
        "Adafactor.derive_logical_axes": "self, optimizer_state, param_logical_axes",
        "Adafactor._decay_rate_pow": "i, exponent=0.8",
        "Adafactor._factored_dims": "self, shape",
        "Adafactor._parse_rule": "rule, shape, path, fallback_to_heuristics=True",
        "HParamMap": "rules",
        "HParamMap.__getitem__": "self, key",
        "HParamMap.__call__": "self, params",
        "factor_name_to_factordim": "name",
        "standard_logical_factor_rules": "",
        "_AdafactorHyperParams": (
            "learning_rate, factored, multiply_by_parameter_scale, beta1, decay_rate, step_offset, clipping_threshold, "
            "weight_decay_rate, min_dim_size_to_factor, epsilon1, epsilon2, factor_map=None, "
            "logical_factor_rules=None, weight_decay_rate_lr_exponent=None, global_norm_clip_threshold=None, "
            "max_parameter_scale=None, skip_nan_updates=False"
        ),
        "_AdafactorParamState": "v_row, v_col, v, m",
    },
    "train_state": {
        **{
            f"{kind}.{method}": arguments
            for kind in ("TrainState", "FlaxOptimTrainState", "InferenceState")
            for method, arguments in {
                "state_dict": "self",
                "restore_state": "self, state_dict",
                "replace_params": "self, params",
                "replace_flax_mutables": "self, flax_mutables",
                "replace_step": "self, step",
                "as_logical_axes": "self",
            }.items()
        },
        "TrainState.apply_gradient": "self, grads, learning_rate, flax_mutables=EMPTY_DICT",
        "FlaxOptimTrainState": "_optimizer, params_axes=None, flax_mutables=EMPTY_DICT, flax_mutables_axes=None",
        "FlaxOptimTrainState.create": "optimizer_def, model_variables",
        "FlaxOptimTrainState.apply_gradient": "self, grads, learning_rate, flax_mutables=EMPTY_DICT",
        "InferenceState": "step, params, params_axes=None, flax_mutables=EMPTY_DICT, flax_mutables_axes=None",
        "InferenceState.create": "model_variables",
        "InferenceState.apply_gradient": "self, *args, **kwargs",
        "_split_variables_and_axes": "variables_and_axes",
        "_validate_params_axes": "params_axes, params",
    },
}
# What is no function: the name, and what it is.
VALUES = {
    "checkpoint_importer": {"SLOT_MAP": Mapping, "TOWER_MAP": Mapping, "LazyThreadPoolArray.executor": Executor},
    "optimizers": {"OptaxStatePartitionRules._RULES": dict, "OptimizerType": type, "OptimizerDefType": type},
    "adafactor": {"HEURISTIC_RULE": enum.Enum, "FactorDim.NONE": enum.Enum, "HeuristicRule.token": enum.Enum},
    "train_state": {"EMPTY_DICT": Mapping},
}
# What these modules have beyond T5X's.
OURS = {
    "CheckpointTranslator.describe",
    "CheckpointTranslator.digest",
    "CheckpointTranslator.translate",
    "OptimizerDef.derive_logical_axes",
}


def module(name):
    return importlib.import_module(f"orbax_t5x.{name}")


def find(where, name):
    value = module(where)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def parameters(callable_):
    return list(inspect.signature(callable_).parameters.values())


@pytest.mark.parametrize(("where", "name"), [(where, name) for where, table in CALLABLES.items() for name in table])
def test_signature(where, name):
    wanted = parameters(eval(f"lambda {CALLABLES[where][name]}: None", {"jnp": jnp, "EMPTY_DICT": EMPTY_DICT}))
    ours = parameters(find(where, name))
    for index, parameter in enumerate(wanted):
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            found = ours[index]
            # In its place, and by its name.
            assert (found.name, found.kind) == (parameter.name, parameter.kind)
        else:
            found = next(found for found in ours if found.kind is parameter.kind)
            assert found.name == parameter.name
        if parameter.default is not parameter.empty:
            assert found.default is parameter.default or found.default == parameter.default
    for found in ours:
        beyond = found.name not in {parameter.name for parameter in wanted}
        assert not beyond or found.default is not found.empty


@pytest.mark.parametrize(("where", "name"), [(where, name) for where, table in VALUES.items() for name in table])
def test_value(where, name):
    assert isinstance(find(where, name), VALUES[where][name])


def public(where):
    """The functions and the methods of classes that a module gives, by name; wrapped Optax optimizers are Optax's."""
    for name in module(where).__all__:
        value = getattr(module(where), name)
        if inspect.isfunction(value) and not hasattr(value, "__wrapped__"):
            yield name
        elif inspect.isclass(value) and value.__module__.startswith("orbax_t5x"):
            own = {key for key in vars(value) if not key.startswith("_") and callable(getattr(value, key))}
            yield from (f"{value.__name__}.{key}" for key in own - {"replace"})


@pytest.mark.parametrize("where", CALLABLES)
def test_the_table_is_whole(where):
    """A public function or method that is added stands in the table, or among what is ours."""
    assert set(public(where)) - set(CALLABLES[where]) - OURS == set()
