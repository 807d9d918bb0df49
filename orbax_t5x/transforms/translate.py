"""Translation of a bundle's names to the target's.

Names are translated and views passed on; nothing is read. Names that no rule knows are one problem that lists them,
since a bundle from another model has them by the hundred.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from orbax_t5x.errors import Fix
from orbax_t5x.mesh_tf.blocks import one_layer_blocks
from orbax_t5x.mesh_tf.rules import adafactor_placeholders, place_relative_bias, t5_importer
from orbax_t5x.mesh_tf.translator import CheckpointTranslator, Translation
from orbax_t5x.text.wording import listed
from orbax_t5x.transforms.base import FollowingOnRequest
from orbax_t5x.transforms.diagnostics import Diagnostics
from orbax_t5x.transforms.prefix import PrefixChange, model_prefix, rename_leaves
from orbax_t5x.trees.flat import FlatState

# Unmatched names shown in the one problem that counts them.
_SHOWN_NAMES = 20
# What the rules put before the names of parameters.
_PARAMETERS = "target/"


@dataclasses.dataclass(frozen=True)
class Translate(FollowingOnRequest):
    """Translation of a Mesh TensorFlow T5 bundle's names to T5X's.

    Parameters get the prefix of the target's parameters, without a target `target/`. A relative bias becomes the
    tower's or a layer's as the target names it, and the (1,) zeros of T5X's Adafactor appear where the target has them;
    without a target, a bias that only block 0 has is the tower's. Every parameter with slots gets all four of them
    without a target, and where the target has Adafactor's slots and not this parameter: a later transform gives it the
    target's name.

    Attributes:
      translator: a `CheckpointTranslator` (or anything with its `apply`); None for T5's own rules. With one of the
        caller's and no target, the result is what its rules say and nothing more.

    Example:
      >>> ot.transforms.Translate()({"shared/embedding": 1, "encoder/final_layer_norm/scale": 2}, {})
      {'target': {'token_embedder': {'embedding': 1}, 'encoder': {'encoder_norm': {'scale': 2}}}}
    """

    translator: Any = None

    def apply(self, state: FlatState, target: FlatState, diagnostics: Diagnostics) -> dict[str, Any]:
        if self.translator is None:
            state = rename_leaves(state, one_layer_blocks(state), "a block for each layer", diagnostics)
        translation = _translate(t5_importer if self.translator is None else self.translator, state, diagnostics)
        _note_failures(translation, len(state), diagnostics)
        values = translation.values
        if self.translator is not None and not target:
            diagnostics.record_origins(_new_origins(translation, {}))
            return values
        prefix = model_prefix(target)
        change = None if prefix in (None, _PARAMETERS) else PrefixChange(_PARAMETERS, prefix)
        # The rules know T5X's own names.
        own_target = target if change is None else change.reversed().applied(target)
        bias_renames = place_relative_bias(values, own_target)
        values = {bias_renames.get(name, name): value for name, value in values.items()}
        added = adafactor_placeholders(values, own_target or None)
        diagnostics.record_origins(_new_origins(translation, bias_renames))
        diagnostics.rule_for.update(dict.fromkeys(added, "Adafactor placeholder"))
        values.update(added)
        if change is not None:
            values = rename_leaves(values, change.renames(values), f"below {change.new!r}", diagnostics)
        return values

    def describe(self) -> str:
        """Returns a line for people."""
        return "Translate()" if self.translator is None else f"Translate({self.translator!r})"

    def digest(self) -> str | None:
        """Returns the digest of the translator's patterns and functions."""
        if not isinstance(self.translator, CheckpointTranslator):
            return super().digest()
        if self.translator.digest() is None:
            return None
        return hashlib.sha256(f"Translate: {self.translator.describe()}".encode()).hexdigest()[:32]


def _new_origins(translation: Translation, renames: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Returns new name -> (the bundle's name, the rule), for `Diagnostics.record_origins`."""
    return {renames.get(name, name): (old, translation.rule_for[name]) for name, old in translation.sources.items()}


def _translate(translator: Any, state: FlatState, diagnostics: Diagnostics) -> Translation:
    """Runs a translator, and collects all its failures."""
    if isinstance(translator, CheckpointTranslator) and type(translator).apply is CheckpointTranslator.apply:
        return translator.translate(state, {})
    try:
        values = dict(translator.apply(state))
    except ValueError as error:
        diagnostics.problem("translate", None, str(error))
        return Translation({}, {}, {}, [], [], [])
    names = {id(value): name for name, value in state.items()}
    sources = {new: names.get(id(value), new) for new, value in values.items()}
    return Translation(values, sources, dict.fromkeys(values, type(translator).__name__), [], [], [])


def _note_failures(translation: Translation, count: int, diagnostics: Diagnostics) -> None:
    for name, message in translation.failed:
        diagnostics.problem("translate", name, message, Fix("leave it out before Translate with Drop, or add a rule"))
    unmatched = translation.unmatched
    if not unmatched:
        return
    names = listed(map(repr, unmatched), _SHOWN_NAMES)
    message = f"no translation rule matches {len(unmatched)} of {count} names: {names}"
    fix = Fix.any_of(
        Fix.removing(Translate(), "where the checkpoint has the target's names already"),
        Fix.in_program("take the names out before it with ot.transforms.Drop"),
        Fix.in_program("pass a CheckpointTranslator that knows them"),
    )
    diagnostics.problem("translate", unmatched[0] if len(unmatched) == 1 else None, message, fix)
