"""Reasons why a tree of a known layout is no one model that a pack can translate, as problems."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.rules.leaf_table import LeafTable
from orbax_t5x.text.wording import counted, listed
from orbax_t5x.transforms.base import Transform
from orbax_t5x.transforms.names import Keep

_ADAPTER = re.compile(r".*[./]lora_(?:embedding_)?[AB](?:\..*)?")
_SHOWN = 4


def refusal_of_tree(
    leaves: LeafTable, state: Mapping[str, Any], chain: Sequence[Transform], *, allows_adapters: bool
) -> Problem | None:
    """Returns why a tree is refused as a whole: it has several models, or adapters; None where it is one model.

    `chain` are the transforms that would translate one model, for the fix.
    """
    prefixes = leaves.prefixes(state) if leaves.has_dots else []
    if len(prefixes) < 2:
        return None if allows_adapters else _adapters(state)
    found = f"{len(prefixes)} models, below {listed(map(repr, prefixes), _SHOWN)}"
    ways = [
        Fix.setting(f"keep {prefix!r}: pass {{}}", transforms=(Keep((f"{re.escape(prefix)}.*",)), *chain))
        for prefix in prefixes[:_SHOWN]
    ]
    message = f"the checkpoint has {found}, and each would get the same names"
    return Problem("rule", None, message, Fix.any_of(*ways))


def _adapters(state: Mapping[str, Any]) -> Problem | None:
    adapters = [name for name in state if _ADAPTER.fullmatch(name)]
    if not adapters:
        return None
    message = (
        f"{counted(len(adapters), 'leaf is', 'leaves are')} of LoRA adapters ({listed(adapters, 1)}), which change the "
        "weights of a base model"
    )
    fix = (
        "restore both, with the adapters' pack first: ot.restore({'base': …, 'adapter': …}, target, "
        "[ot.rules.peft_lora('adapter_config.json'), …])"
    )
    return Problem("rule", None, message, Fix.in_program(fix))
