"""A linen model's parameters, mutable collections and logical axes.

A collection `x_axes` (of `flax.linen.partitioning.AxisMetadata`, as `param_with_axes` and `variable_with_axes` leave
it) belongs to the collection `x`. Where it exists it names the axes of every variable there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flax.core import FrozenDict, freeze
from flax.linen import partitioning

from orbax_t5x.trees.flat import flatten

_AXES = "_axes"


class ModelVariables(NamedTuple):
    """Variables of `module.init`, with the axis metadata of each collection."""

    params: Any
    params_axes: Any
    mutables: FrozenDict[str, Any]
    mutables_axes: FrozenDict[str, Any] | None


def split_variables(model_variables: Mapping[str, Any]) -> ModelVariables:
    """Separates collections of variables.

    Raises:
      ValueError: there are no parameters, or axes and variables do not fit.
    """
    if "params" not in model_variables:
        raise ValueError(f"The model variables have no collection 'params', only {sorted(model_variables)}.")
    mutables, axes = split_collections(model_variables)
    params, params_axes = mutables.pop("params"), axes.pop("params", None)
    return ModelVariables(params, params_axes, freeze(mutables), freeze(axes) if axes else None)


def split_collections(variables_and_axes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separates the collections from their axes.

    Axes are under the names of their collections.
    """
    variables: dict[str, Any] = {}
    axes: dict[str, Any] = {}
    for name, collection in variables_and_axes.items():
        if not name.endswith(_AXES):
            variables[name] = collection
            continue
        named = name.removesuffix(_AXES)
        if named not in variables_and_axes:
            raise ValueError(f"The model variables have a collection {name!r}, but no {named!r} to which it belongs.")
        check_axes(collection, variables_and_axes[named])
        axes[named] = collection
    return variables, axes


def check_axes(axes: Any, variables: Any) -> None:
    """Raises a ValueError that lists the variables without axis names."""
    missing = sorted(flatten(variables).keys() - flatten(partitioning.get_axis_names(axes)).keys())
    if missing:
        raise ValueError(f"Missing axis names for parameters: {{{', '.join(map(repr, missing))}}}")


def params_axis_names(params_axes: Any) -> FrozenDict[str, Any]:
    """Returns a tree like the parameters of `PartitionSpec`s of logical axis names."""
    if params_axes is None:
        raise ValueError(
            "The train state has no params_axes. Declare parameters with flax.linen.partitioning.param_with_axes, and "
            "create the state from what module.init returns, the collection 'params_axes' included."
        )
    return partitioning.get_axis_names(params_axes)


def mutables_axis_names(axes: Any) -> FrozenDict[str, Any]:
    """Returns axis names by collection of mutable variables.

    A collection that names no axes is absent.
    """
    return freeze({name: partitioning.get_axis_names(collection) for name, collection in (axes or {}).items()})
