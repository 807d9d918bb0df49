"""Prefixes of a T5 model's parameters, and changes between them.

T5X keeps parameters below `target/`, Flax below `params/`, a file with only the parameters below nothing. Transforms
between layouts of the model leave the prefix as it is, and put their result below the target's at the end. The
optimizer's leaves and the step are placed in the target's train state after all transforms.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from orbax_t5x.optim.optimizer_names import is_in_optimizer
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.diagnostics import Diagnostics, NewState
from orbax_t5x.transforms.names import Rename
from orbax_t5x.trees.flat import FlatState

# Prefixes of parameters in train states. The first that a tree has is the model's, since others may be copies of it.
_ROOTS = ("target/", "params/params/", "params/")

# A parameter as T5X (minimal, scalable, scanned) and MaxText name it.
_PARAMETER = re.compile(
    r"(?P<prefix>(?:.*?/)??)(?:token_embedder/embedding|(?:encoder|decoder)/"
    r"(?:layers_\d+|layers|encoder|decoder|relpos_bias|side_relpos_bias|encoder_norm|decoder_norm|logits_dense|token_embedder)/.*)"
)
# A model's names without a prefix, in a tree that has others too.
_OF_A_MODEL = re.compile(r"(?:token_embedder|encoder|decoder)/.*")


def is_no_parameter(name: str) -> bool:
    """Reports whether a name is the optimizer's or a mutable's."""
    return is_in_optimizer(name) or ("flax_mutables/" in name and "flax_mutables" in name.split("/"))


def parameter_prefixes(names: Iterable[str]) -> list[str]:
    """Lists the prefixes of models' parameters."""
    return [prefix for prefix in dict.fromkeys(map(_parameter_prefix, names)) if prefix is not None]


# Every pack of a chain asks for the same names again.
@functools.lru_cache(maxsize=1 << 14)
def _parameter_prefix(name: str) -> str | None:
    match = None if is_no_parameter(name) else _PARAMETER.fullmatch(name)
    return None if match is None else match["prefix"]


def model_prefix(names: Iterable[str]) -> str | None:
    """Returns the prefix of a tree's only model, or None."""
    prefixes = parameter_prefixes(names)
    if not prefixes:
        return None
    return next((root for root in _ROOTS if root in prefixes), min(prefixes, key=len))


@dataclasses.dataclass(frozen=True)
class PrefixChange:
    """Change of the prefix of a model's parameters and their optimizer state."""

    old: str
    new: str

    def reversed(self) -> PrefixChange:
        """Returns the change in the other direction."""
        return PrefixChange(self.new, self.old)

    def parameter(self, name: str) -> str | None:
        """Returns a parameter's new name, or None."""
        rest = name.removeprefix(self.old)
        if not name.startswith(self.old) or (not self.old and not _OF_A_MODEL.fullmatch(name)):
            return None
        return self.new + rest

    def renames(self, names: Iterable[str]) -> dict[str, str]:
        """Maps names of parameters to new names."""
        return {name: new for name in names if (new := self.parameter(name)) is not None}

    def applied(self, tree: FlatState) -> dict[str, Any]:
        """Returns a tree under the new names."""
        return {self.parameter(name) or name: value for name, value in tree.items()}

    def transform(self) -> Transform:
        """Returns the equivalent transform."""
        pattern = f"{re.escape(self.old)}(.*)" if self.old else f"({_OF_A_MODEL.pattern})"
        return Rename(((pattern, self.new.replace("\\", r"\\") + r"\1"),))


def change_between(names: Iterable[str], target_names: Iterable[str]) -> PrefixChange | None:
    """Finds the change to the target's prefix, or None."""
    found, wanted = parameter_prefixes(names), parameter_prefixes(target_names)
    new = model_prefix(target_names)
    if len(found) != 1 or new is None or found[0] in wanted:
        return None
    return PrefixChange(found[0], new)


def follow_target(state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
    """Moves the model below the target's prefix."""
    change = change_between(state, target)
    if change is None:
        return dict(state)
    return rename_leaves(state, change.renames(state), f"below {change.new!r}", diagnostics)


def rename_leaves(state: FlatState, renames: Mapping[str, str], rule: str, diagnostics: Diagnostics) -> dict[str, Any]:
    """Renames leaves; equal names are a problem."""
    if not renames:
        return dict(state)
    result = NewState(diagnostics)
    for name, value in state.items():
        new = renames.get(name, name)
        result.put(new, value, name, rule if new != name else None)
    return result.finish()
