"""Options of single leaves in Orbax's form: a tree of `ocp.SaveArgs` like the tree that is saved."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from orbax_t5x.errors import Problem, RestorePlanError
from orbax_t5x.handlers.type_handlers.unsupported import is_storable
from orbax_t5x.restoring.targets import is_train_state
from orbax_t5x.text.wording import listed
from orbax_t5x.trees.pytree_names import leaf_name

# More names than this in one error hide the first.
_SHOWN_NAMES = 10


def save_options(given: Any, names: Sequence[str], casts: Mapping[str, np.dtype]) -> list[ocp.SaveArgs]:
    """Returns the options of each leaf that is saved; `casts` are for leaves that `given` gives no dtype."""
    by_name = _by_name(given, names)
    # Orbax takes only an `np.dtype`.
    dtypes = {name: np.dtype(option.dtype) for name, option in by_name.items() if option.dtype is not None}
    problems = [
        Problem("dtype", name, f"{dtype.name} is not a dtype that Orbax stores")
        for name, dtype in dtypes.items()
        if not is_storable(dtype)
    ]
    if problems:
        raise RestorePlanError(problems)
    dtypes = {**casts, **dtypes}
    without = functools.cache(lambda dtype: ocp.SaveArgs(dtype=dtype))  # nearly all leaves have the same
    return [
        dataclasses.replace(by_name[name], dtype=dtypes.get(name)) if name in by_name else without(dtypes.get(name))
        for name in names
    ]


def _by_name(given: Any, names: Sequence[str]) -> dict[str, ocp.SaveArgs]:
    tree = given.state_dict() if is_train_state(given) else given
    options = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
    for name, option in options.items():
        if not isinstance(option, ocp.SaveArgs):
            raise ValueError(f"save_args has a {type(option).__name__} at {name!r}; pass ocp.SaveArgs(…) or None there")
    unknown = sorted(options.keys() - set(names))
    if unknown:
        shown = listed([repr(name) for name in unknown], _SHOWN_NAMES)
        raise ValueError(f"save_args has {shown}, and the tree that is saved has no such leaf")
    return options
