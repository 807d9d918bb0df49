"""T5X's optimizers under T5X's names and layouts.

They are any Optax optimizer, and several over parts of the parameters.

`adam(learning_rate=1e-3).create(params)` is a pytree to train, shard, save and restore. Optax optimizers have their own
learning rates and schedules: a `learning_rate` given to `apply_gradient` (T5X's trainer gives one to every optimizer)
is ignored. State dicts hold no empty entries; a restore puts them in again.

Example:
  >>> optimizer = ot.optimizers.adam(learning_rate=1e-3).create({"w": jnp.ones(3)})
  >>> optimizer = optimizer.apply_gradient({"w": jnp.ones(3)})
  >>> sorted(optimizer.state_dict()["state"]["param_states"]["0"])
  ['count', 'mu', 'nu']
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import flax.struct
import optax
import optax.contrib

from orbax_t5x.optim.base import Optimizer, OptimizerDef, OptimizerState, first_step
from orbax_t5x.optim.multi import MultiOptimizer
from orbax_t5x.optim.optax_axes import AxesRule, align_axes, apply_axes_rules, state_axes
from orbax_t5x.optim.optax_state import to_state_dict

__all__ = [
    "MultiOptimizer",
    "OptaxStatePartitionRules",
    "OptaxWrapper",
    "Optimizer",
    "OptimizerDef",
    "OptimizerDefType",
    "OptimizerState",
    "OptimizerStateType",
    "OptimizerType",
    "adabelief",
    "adagrad",
    "adam",
    "adamw",
    "chain",
    "dpsgd",
    "fromage",
    "lamb",
    "lars",
    "lion",
    "noisy_sgd",
    "radam",
    "rmsprop",
    "sgd",
    "wrap_optax_optimizer",
    "yogi",
]

OptimizerType = Optimizer
OptimizerStateType = OptimizerState | Mapping[str, Any]
OptimizerDefType = OptimizerDef
OptaxFactory = Callable[..., "OptaxWrapper"]
"""Makes an optimizer definition from the arguments of an Optax optimizer."""


@flax.struct.dataclass
class _OptaxWrapperHyperParams:
    """Hyper-parameters that a step of an Optax optimizer may get.

    The learning rate is ignored, because Optax has its own schedules; `extra_args` are keywords for the update of
    optimizers that take some, such as `value`.
    """

    learning_rate: Any = None
    extra_args: Any = flax.struct.field(default_factory=dict)


class OptaxStatePartitionRules:
    """Logical axes of Optax states, from the parameters'.

    Axes are found for any Optax state. `OptaxStatePartitionRules._RULES[SparseState] = rule` gives those of a state of
    one's own: the axes of a `SparseState` are those that `rule(state, params_axes)` returns.
    """

    _RULES: ClassVar[dict[type, AxesRule]] = {}

    @classmethod
    def _is_optax_state(cls, x: Any) -> bool:
        """Tests if a value is a named tuple of a class `…State`."""
        return isinstance(x, tuple) and hasattr(x, "_fields") and type(x).__name__.endswith("State")

    @classmethod
    def derive_params_axes(cls, optax_params: Any, params_axes: Any) -> Any:
        """Returns the axes of a tree like the parameters.

        Masked subtrees stay `MaskedNode`s.
        """
        return state_axes(optax_params, params_axes)

    @classmethod
    def derive_optax_logical_axes(cls, optax_state: Any, params_axes: Any, params: Any = None) -> Any:
        """Returns the state with partition specs for leaves.

        A leaf without logical axes has None.

        Args:
          optax_state: the state of any Optax optimizer; leaves may be abstract.
          params_axes: a tree like the parameters whose leaves are `PartitionSpec`s.
          params: the parameters. Their shapes are needed for the moments of factored optimizers, which get None without
          them.
        """
        return apply_axes_rules(cls._RULES, optax_state, params_axes, state_axes(optax_state, params_axes, params))


class OptaxWrapper(OptimizerDef):
    """Any Optax gradient transformation as a T5X optimizer definition.

    Two wrappers of the same transformation are equal, so that a state made anew does not compile a step again.
    """

    keeps_param_tree = False

    def __init__(self, optax_optimizer: optax.GradientTransformation):
        super().__init__(hyper_params=_OptaxWrapperHyperParams())
        self.optax_optimizer = optax_optimizer
        self._update = optax.with_extra_args_support(optax_optimizer).update

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OptaxWrapper) or type(self) is not type(other):
            return False
        return self.optax_optimizer == other.optax_optimizer

    def __hash__(self) -> int:
        try:
            return hash((type(self), self.optax_optimizer))
        except TypeError:
            return hash(type(self))

    def init_state(self, params: Any) -> OptimizerState:
        """Makes a new state with Optax's as its `param_states`."""
        return OptimizerState(step=first_step(), param_states=self.optax_optimizer.init(params))

    def update_hyper_params(self, **hyper_param_overrides: Any) -> Any:
        """Returns the hyper-parameters of a step.

        `learning_rate` has no effect; keyword arguments are for the transformation's own update.
        """
        hyper_params = hyper_param_overrides.pop("hyper_params", None) or self.hyper_params
        learning_rate = hyper_param_overrides.pop("learning_rate", hyper_params.learning_rate)
        extra_args = {**hyper_params.extra_args, **hyper_param_overrides}
        return hyper_params.replace(learning_rate=learning_rate, extra_args=extra_args)

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any
    ) -> tuple[Any, OptimizerState]:
        """Applies gradients once; see the base class."""
        extra_args = {} if hyper_params is None else hyper_params.extra_args
        updates, param_states = self._update(grads, state.param_states, params, **extra_args)
        return optax.apply_updates(params, updates), OptimizerState(step=state.step + 1, param_states=param_states)

    def state_dict(self, target: Any, state: OptimizerState) -> dict[str, Any]:
        """As in the base class, but `state` holds no empty dicts."""
        return {"target": to_state_dict(target), "state": to_state_dict(state, keep_empty=False)}

    def derive_logical_axes(self, optimizer: Optimizer, param_logical_axes: Any) -> Optimizer:
        states = optimizer.state.param_states
        axes = state_axes(states, param_logical_axes, optimizer.target, self.optax_optimizer)
        param_states = apply_axes_rules(OptaxStatePartitionRules._RULES, states, param_logical_axes, axes)
        target = align_axes(optimizer.target, param_logical_axes)
        return optimizer.replace(state=OptimizerState(step=None, param_states=param_states), target=target)


def wrap_optax_optimizer(optax_optimizer: Callable[..., optax.GradientTransformation]) -> OptaxFactory:
    """Makes optimizer definitions from a factory of gradient transformations.

    The result takes the same arguments.
    """

    @functools.wraps(optax_optimizer)
    def wrapped_optimizer(*args: Any, **kwargs: Any) -> OptaxWrapper:
        return OptaxWrapper(optax_optimizer(*args, **kwargs))

    return wrapped_optimizer


def _chain(transformations: Sequence[optax.GradientTransformation]) -> optax.GradientTransformation:
    return optax.chain(*transformations)


chain: OptaxFactory = wrap_optax_optimizer(_chain)
adabelief: OptaxFactory = wrap_optax_optimizer(optax.adabelief)
adagrad: OptaxFactory = wrap_optax_optimizer(optax.adagrad)
adam: OptaxFactory = wrap_optax_optimizer(optax.adam)
adamw: OptaxFactory = wrap_optax_optimizer(optax.adamw)
dpsgd: OptaxFactory = wrap_optax_optimizer(optax.contrib.dpsgd)
fromage: OptaxFactory = wrap_optax_optimizer(optax.fromage)
lamb: OptaxFactory = wrap_optax_optimizer(optax.lamb)
lars: OptaxFactory = wrap_optax_optimizer(optax.lars)
lion: OptaxFactory = wrap_optax_optimizer(optax.lion)
noisy_sgd: OptaxFactory = wrap_optax_optimizer(optax.noisy_sgd)
radam: OptaxFactory = wrap_optax_optimizer(optax.radam)
rmsprop: OptaxFactory = wrap_optax_optimizer(optax.rmsprop)
sgd: OptaxFactory = wrap_optax_optimizer(optax.sgd)
yogi: OptaxFactory = wrap_optax_optimizer(optax.yogi)


def __getattr__(name: str) -> Any:
    # Amos is no part of Optax; T5X takes it from this package.
    if name == "amos":
        try:
            module = importlib.import_module("jestimator.amos")
        except ImportError:
            raise AttributeError("orbax_t5x.optimizers.amos needs the package `jestimator`") from None
        return wrap_optax_optimizer(module.amos)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
