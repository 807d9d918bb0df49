"""Settings of PEFT's LoRA adapters, by `adapter_config.json`.

A setting that changes a merge and is not known here is refused by its name, never left out.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from orbax_t5x.errors import CorruptCheckpointError, Fix, UnsupportedCheckpointError
from orbax_t5x.files.limits import Limits
from orbax_t5x.files.places import files_at
from orbax_t5x.files.strict_json import parse_object
from orbax_t5x.trees.narrow import is_list_or_tuple, is_mapping

_FILE = "adapter_config.json"
# Settings of training, of the file itself, and of which modules have adapters, which their names show.
_WITHOUT_EFFECT = frozenset(
    """
    auto_mapping base_model_name_or_path bias corda_config eva_config exclude_modules inference_mode
    layers_pattern layers_to_transform loftq_config lora_dropout megatron_core peft_type peft_version
    qalora_group_size revision runtime_config task_type
    """.split()
)
# Other ways to initialize change the base model's weights, which are in another file.
_INITIALIZED = (True, False, None, "gaussian", "eva", "orthogonal")
_MERGE = Fix.in_program(
    "merge them with PEFT, PeftModel.from_pretrained(model, path).merge_and_unload().save_pretrained(merged), and "
    "restore from that"
)
# Of types that change no weight of the model, so that PEFT cannot merge them either.
_OF_INPUTS = re.compile(r"(?:MULTITASK_)?PROMPT_TUNING|PREFIX_TUNING|P_TUNING|ADAPTION_PROMPT|CPT|CARTRIDGE")
_RUN_WITH_PEFT = Fix.in_program(
    "restore the base model alone, from its own file; these adapters are inputs of its layers and no weights, which "
    "nothing merges: run them with PEFT, or hand their arrays (ot.open_checkpoint(path).leaves) to a model that takes "
    "them"
)

Pairs = tuple[tuple[str, float], ...]


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Settings of LoRA adapters."""

    rank: int
    alpha: float
    is_transposed: bool = False
    by_root: bool = False
    rank_pattern: Pairs = ()
    alpha_pattern: Pairs = ()
    targets: tuple[str, ...] | str | None = None
    saved: tuple[str, ...] = ()

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module's factors."""
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Returns the factor of the product of a module's factors."""
        rank = self.rank_of(module)
        return _by_pattern(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.by_root else rank)

    def is_target(self, module: str) -> bool:
        """Tests if a module has adapters; True if unknown."""
        if self.targets is None or self.targets == "all-linear":
            return True
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, module) is not None
        return _ends_in(module, self.targets)

    def is_saved(self, module: str) -> bool:
        """Reports whether a module is stored whole."""
        return _ends_in(module, self.saved)

    def arguments(self) -> dict[str, Any]:
        """Returns the settings of `adapter_config.json` that are no defaults."""
        given = {
            "r": self.rank,
            "lora_alpha": self.alpha,
            "fan_in_fan_out": self.is_transposed,
            "use_rslora": self.by_root,
            "rank_pattern": {name: int(rank) for name, rank in self.rank_pattern},
            "alpha_pattern": dict(self.alpha_pattern),
            "target_modules": list(self.targets) if isinstance(self.targets, tuple) else self.targets,
            "modules_to_save": list(self.saved),
        }
        return {name: value for name, value in given.items() if value}


def _by_pattern(pairs: Pairs, module: str, default: float) -> float:
    found = (value for pattern, value in pairs if re.match(rf"(.*\.)?({pattern})$", module))
    return next(found, default)


def _ends_in(module: str, ends: Iterable[str]) -> bool:
    return any(module == end or module.endswith(f".{end}") for end in ends)


def lora_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> LoraConfig:
    """Reads the settings of LoRA adapters."""
    if not isinstance(config, str | os.PathLike):
        return _Settings(dict(config), None).lora()
    given = files_at(os.path.expanduser(os.fspath(config)))
    path = files_at(f"{given.path}/{_FILE}").path if given.is_directory() else given.path
    directory, _, name = path.rpartition("/")
    data = files_at(directory or "/").read_whole(name, limit=Limits().json_bytes)
    return _Settings(parse_object(data, path), path).lora()


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Given settings, each checked when it is taken."""

    given: dict[str, Any]
    path: str | None

    def lora(self) -> LoraConfig:
        kind = self.given.get("peft_type", "LORA")
        kind = str(getattr(kind, "value", kind))
        if kind.upper() != "LORA":
            fix = _RUN_WITH_PEFT if _OF_INPUTS.fullmatch(kind.upper()) else _MERGE
            self._refuse(f"the adapters are of PEFT's type {kind!r}, and only LoRA is known", fix)
        init = self.given.pop("init_lora_weights", True)
        if init not in _INITIALIZED:
            self._refuse(
                f"init_lora_weights={init!r} is not known here: such adapters belong to weights that differ from the "
                "base model's file"
            )
        rank, alpha = self._number("r"), self._number("lora_alpha")
        if rank < 1 or rank != int(rank):
            self._wrong("r", rank, "a whole number of at least 1")
        found = LoraConfig(
            int(rank),
            alpha,
            bool(self.given.pop("fan_in_fan_out", False)),
            bool(self.given.pop("use_rslora", False)),
            self._pattern("rank_pattern"),
            self._pattern("alpha_pattern"),
            self._targets(),
            self._names("modules_to_save"),
        )
        left = sorted(name for name, value in self.given.items() if value and name not in _WITHOUT_EFFECT)
        if left:
            named = ", ".join(f"{name}={self.given[name]!r}"[:100] for name in left)
            self._refuse(f"adapters with {named} are not known here")
        return found

    def _number(self, name: str) -> float:
        value = self.given.pop(name, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self._wrong(name, value, "a number")
        return value

    def _pattern(self, name: str) -> Pairs:
        value = self.given.pop(name, None) or {}
        if not is_mapping(value):
            self._wrong(name, value, "an object of patterns and numbers")
        pairs: list[tuple[str, float]] = []
        for pattern, number in value.items():
            is_number = isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
            least = 1 if name == "rank_pattern" else -math.inf
            if not isinstance(pattern, str) or not is_number or number < least:
                self._wrong(name, value, "an object of patterns and numbers")
            self._check_regex(name, pattern)
            pairs.append((pattern, number))
        return tuple(pairs)

    def _targets(self) -> tuple[str, ...] | str | None:
        value = self.given.get("target_modules")
        if isinstance(value, str):
            self._check_regex("target_modules", value)
            return self.given.pop("target_modules")
        return self._names("target_modules") or None

    def _names(self, name: str) -> tuple[str, ...]:
        value = self.given.pop(name, None) or ()
        names = sorted(value) if isinstance(value, set | frozenset) else value
        if not is_list_or_tuple(names) or not all(isinstance(one, str) for one in names):
            self._wrong(name, value, "a list of names")
        return tuple(names)

    def _check_regex(self, name: str, pattern: str) -> None:
        try:
            re.compile(pattern)
        except re.error as error:
            self._wrong(name, pattern, f"a regex ({error})")

    def _wrong(self, name: str, value: Any, wanted: str) -> NoReturn:
        raise CorruptCheckpointError(
            f"{name} of the adapters is {value!r}"[:300] + f", and not {wanted}", path=self.path
        )

    def _refuse(self, message: str, fix: Fix = _MERGE) -> NoReturn:
        raise UnsupportedCheckpointError(message, path=self.path, fix=fix)
