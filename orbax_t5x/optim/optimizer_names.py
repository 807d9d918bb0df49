"""Words in the names of optimizers' states."""

from __future__ import annotations

import functools
import re

SLOT_MAP: dict[str, str] = {"_slot_vc": "v_col", "_slot_vr": "v_row", "_slot_v": "v"}
"""Kinds of Adafactor's slots by the ends of their names in Mesh TensorFlow."""

KINDS = frozenset({"mu", "nu", "v_row", "v_col", "trace", "momentum", "ema", "exp_avg", "exp_avg_sq"})
"""Names that tell moments where no word of an optimizer is above them; those of Optax, T5X and PyTorch."""

_COPIES = frozenset({"ema", "average", "averaged", "avg", "target", "slow", "shadow", "polyak", "swa"})
_STATE = re.compile(r"(?:.*_)?opt_states?|param_states|(?:.*_)?(?:optimizer|optim)_states?")
_CONTAINER = re.compile(rf"{_STATE.pattern}|(?:.*_)?(?:optimizer|optim|opt)")
_IN_STATE = re.compile(rf"(?:.*/)?(?:{_STATE.pattern})/.*")
# Letters of which every word of an optimizer or of a copy has some; most names have none.
_HINT = re.compile("|".join(("opt", "param_states", "_slot_", *KINDS, *_COPIES)))
_GLUED_NAME = re.compile(rf"(.+)({'|'.join(SLOT_MAP)})")


def may_tell_optimizer(name: str) -> bool:
    """Returns False if a name has no word of an optimizer's state, or of a copy of parameters, in it."""
    return _HINT.search(name.lower()) is not None


def is_container(part: str) -> bool:
    """Returns True if a part of a name is called as an optimizer's state is."""
    return ("opt" in part or part == "param_states") and _CONTAINER.fullmatch(part) is not None


def is_state(part: str) -> bool:
    """Returns True if a part of a name can only be that of an optimizer's state."""
    return "_state" in part and _STATE.fullmatch(part) is not None


def is_in_optimizer(name: str) -> bool:
    """Returns True if a leaf's name alone shows that it belongs to an optimizer's state."""
    # Most names have neither word, which costs less to see than a regular expression.
    return ("_state" in name and _IN_STATE.fullmatch(name) is not None) or (
        "_slot_" in name and _GLUED_NAME.fullmatch(name) is not None
    )


def may_be_moment(name: str) -> bool:
    """Returns True if a name has a moment's word in it."""
    return is_in_optimizer(name) or not KINDS.isdisjoint(name.split("/"))


def is_step(name: str) -> bool:
    """Returns True if a leaf's name is that of the step."""
    return name.removesuffix("/value").rpartition("/")[2] == "step"


@functools.lru_cache(4096)
def has_copy_word(path: str) -> bool:
    """Returns True if a path says that its parameters are an average or another copy."""
    return not _COPIES.isdisjoint(re.split("[^A-Za-z0-9]+", path.lower()))


def glued_parameter(name: str) -> str:
    """Returns the parameter of a slot of a Mesh TensorFlow bundle, or an empty text."""
    match = _GLUED_NAME.fullmatch(name)
    return "" if match is None else match[1]


def may_be_optimizer(name: str) -> bool:
    """Returns True if a part of a name is a word of optimizers' states."""
    return any(part in KINDS or is_container(part) for part in name.split("/"))


def optimizer_path(name: str) -> str:
    """Returns the directory in a name that is called as an optimizer's state is, or an empty text."""
    parts = name.split("/")
    end = next((at for at, part in enumerate(parts[:-1]) if is_container(part)), -1)
    return "/".join(parts[: end + 1])
