"""Layouts of training states: real trees of Flax, Optax, NNX and T5X, and where in them parameters and optimizers are.

A layout makes an abstract tree; the names of its leaves tell what they are (a prefix per tower of parameters, per
optimizer and per copy).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

from orbax_t5x.adafactor import Adafactor
from orbax_t5x.optimizers import OptaxWrapper
from tests.transforms.follow.resume_truth import key_text, nested

Shapes = Mapping[str, tuple[int, ...]]
Towers = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy of a tower's parameters; it follows if its root says that it is one."""

    prefix: str
    tower: int
    follows: bool


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where things are in a training state.

    Attributes:
      name: Name of the layout.
      make: Function of the towers' parameters, their optimizers and the copies to an abstract tree.
      towers: Prefix of the parameters and of the optimizer's state, per tower.
      copies: Copies of parameters beside them.
      suffix: What Orbax writes after the names of leaves that the package names without it.
      inner: Beginning of all parameters' names in their tree.
      root: Key of the parameters if a rule may give them another one.
    """

    name: str
    make: Callable[[Towers, list[Any], Towers], Any]
    towers: tuple[tuple[str, str], ...] = (("params/", "opt_state/"),)
    copies: tuple[Copy, ...] = ()
    suffix: str = ""
    inner: str = ""
    root: str | None = None
    is_nnx: bool = False
    is_t5x: bool = False


def abstract(shapes: Shapes) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}


def _step() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), np.int32)


def _state(optimizer: Any, parameters: Mapping[str, Any]) -> Any:
    return jax.eval_shape(optimizer.init, nested(parameters))


def _train_state(towers: Towers, optimizers: list[Any], copies: Towers) -> Any:
    return TrainState(
        step=_step(),  # type: ignore[arg-type]  # an array, as a train state has after a step
        apply_fn=None,  # type: ignore[arg-type]  # nothing is applied here
        params=nested(towers[0]),
        tx=optimizers[0],
        opt_state=_state(optimizers[0], towers[0]),
    )


def _dictionary(
    names: tuple[str, ...], root: str, towers: Towers, optimizers: list[Any], copies: Towers
) -> dict[str, Any]:
    tree = {root: nested(towers[0]), "opt_state": _state(optimizers[0], towers[0]), "step": _step()}
    for name, copy in zip(names, copies, strict=True):
        tree[name] = nested(copy)
    return tree


def _lookahead(towers: Towers, optimizers: list[Any], copies: Towers) -> Any:
    optimizer = optax.lookahead(optimizers[0], sync_period=5, slow_step_size=0.5)
    parameters = optax.LookaheadParams(nested(towers[0]), nested(copies[0]))
    return {"params": parameters, "opt_state": jax.eval_shape(optimizer.init, parameters), "step": _step()}


def _at_the_root(towers: Towers, optimizers: list[Any], copies: Towers) -> Any:
    return {**nested(towers[0]), "opt_state": _state(optimizers[0], towers[0]), "global_step": _step()}


def _by_tower(towers: Towers, optimizers: list[Any], copies: Towers) -> Any:
    return {
        name: {"params": nested(tower), "opt_state": _state(optimizer, tower)}
        for name, tower, optimizer in zip(("gen", "dis"), towers, optimizers, strict=True)
    }


def _by_state(towers: Towers, optimizers: list[Any], copies: Towers) -> Any:
    names = ("gen", "dis")
    return {
        "params": {name: nested(tower) for name, tower in zip(names, towers, strict=True)},
        "opt_state": {
            name: _state(optimizer, tower) for name, tower, optimizer in zip(names, towers, optimizers, strict=True)
        },
        "step": _step(),
    }


def _by_name(towers: Towers, optimizers: list[Any], copies: Towers) -> Any:
    tree: dict[str, Any] = {"step": _step()}
    for name, tower, optimizer in zip(("gen", "dis"), towers, optimizers, strict=True):
        tree[f"{name}_params"] = nested(tower)
        tree[f"{name}_opt"] = _state(optimizer, tower)
    return tree


class _Module(nnx.Module):
    """A module with the given parameters; it has a Dropout where one of its names says so."""

    def __init__(self, tree: Mapping[str, Any], has_dropout: bool, rngs: nnx.Rngs) -> None:
        for name, value in tree.items():
            if name.startswith("batch_norm"):
                setattr(self, name, nnx.BatchNorm(value["scale"].shape[0], rngs=rngs))
            elif isinstance(value, dict):
                setattr(self, name, _Module(value, has_dropout and name.startswith(("attn", "mlp")), rngs))
            else:
                setattr(self, name, nnx.Param(np.zeros(value.shape, value.dtype)))
        if has_dropout:
            self.drop = nnx.Dropout(0.1, rngs=rngs)


class _MaxTextState(nnx.Module):
    def __init__(self, model: nnx.Module, optimizer: nnx.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer


def _nnx(has_dropout: bool, is_maxtext: bool, towers: Towers, optimizers: list[Any], copies: Towers) -> Any:
    def create() -> Any:
        model = _Module(nested(towers[0]), has_dropout, nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optimizers[0], wrt=nnx.Param)
        if is_maxtext:
            return nnx.state(_MaxTextState(model, optimizer))
        return {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}

    return nnx.eval_shape(create)


def _t5x(towers: Towers, optimizers: list[Any], copies: Towers) -> Any:
    (definition,) = (
        optimizer if isinstance(optimizer, Adafactor) else OptaxWrapper(optimizer) for optimizer in optimizers
    )
    return jax.eval_shape(lambda tower: definition.create(tower).state_dict(), nested(towers[0]))


_NNX = dict(towers=(("model/", "optimizer/opt_state/"),), suffix="/value", is_nnx=True)
_T5X_TOWERS = (("target/", "state/param_states/"),)


def _copied(name: str, *copies: tuple[str, bool], root: str = "params") -> Layout:
    make = functools.partial(_dictionary, tuple(copy for copy, _ in copies), root)
    places = tuple(Copy(f"{copy}/", 0, follows) for copy, follows in copies)
    return Layout(name, make, ((f"{root}/", "opt_state/"),), places, root=root)


def _towers(*pairs: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return pairs


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("linen", _train_state),
        Layout("maxtext_linen", _train_state, inner="params/"),
        _copied("dict"),
        _copied("dict_model", root="model"),
        _copied("ema", ("ema_params", True)),
        _copied("teacher", ("teacher_params", False)),
        _copied("ema_teacher", ("ema", True), ("teacher", False)),
        _copied("target_network", ("target_params", True)),
        _copied("slow", ("slow", True), ("average", True)),
        Layout("lookahead", _lookahead, (("params/fast/", "opt_state/fast_state/"),), (Copy("params/slow/", 0, True),)),
        Layout("root", _at_the_root, (("", "opt_state/"),)),
        Layout(
            "gan_by_tower", _by_tower, _towers(("gen/params/", "gen/opt_state/"), ("dis/params/", "dis/opt_state/"))
        ),
        Layout(
            "gan_by_state", _by_state, _towers(("params/gen/", "opt_state/gen/"), ("params/dis/", "opt_state/dis/"))
        ),
        Layout("gan_by_name", _by_name, _towers(("gen_params/", "gen_opt/"), ("dis_params/", "dis_opt/"))),
        Layout("nnx", functools.partial(_nnx, False, False), **_NNX),
        Layout("nnx_dropout", functools.partial(_nnx, True, False), **_NNX),
        Layout("maxtext_nnx", functools.partial(_nnx, True, True), **_NNX),
        Layout("t5x", _t5x, _T5X_TOWERS, is_t5x=True),
    )
}


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """Returns a tree's leaves by the names that the package gives them: NNX's `value` is no part."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        keys = [key_text(key) for key in path]
        # A field of Optax may have this name, too, but is in a tuple or another named tuple.
        if keys[-1] == "value" and hasattr(path[-1], "name") and all(hasattr(key, "key") for key in path[:-1]):
            keys.pop()
        named["/".join(keys)] = leaf
    return named


def with_leaves(tree: Any, values: Mapping[str, Any]) -> Any:
    """Returns the tree with other leaves."""
    leaves, structure = jax.tree.flatten(tree)
    names = list(leaves_by_name(tree))
    assert len(names) == len(leaves)
    return jax.tree.unflatten(structure, [values[name] for name in names])
