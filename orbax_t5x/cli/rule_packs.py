"""`--rules`: a rule pack by its name and dimensions, written as `t5_minimal_to_scanned:12,64`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from orbax_t5x.errors import RestorePlanError
from orbax_t5x.rules.graph import PACKS, pack_function
from orbax_t5x.rules.pack import RulePack
from orbax_t5x.text.output import UsageError
from orbax_t5x.text.wording import did_you_mean

AUTO = "auto"
"""Name for the pack that `orbax_t5x.rules.infer` finds."""

# It takes several sources, and a command has one checkpoint.
_NO_PACKS = frozenset({"peft_lora"})
_INVERSE = "inverse"
_CONSTANTS = {"true": True, "false": False, "none": None}


def pack_names() -> list[str]:
    """Lists the packs that can be given by name."""
    return sorted({*PACKS.names()} - _NO_PACKS)


def pack_argument(text: str) -> RulePack:
    """Makes the pack that an argument of `--rules` names."""
    name, *parts = text.split(":")
    if name not in pack_names():
        packs = [AUTO, *pack_names()]
        raise UsageError(f"--rules {text}: no such pack{did_you_mean(name, packs)}; there are {', '.join(packs)}")
    is_inverse = parts[-1:] == [_INVERSE]
    given = parts[: len(parts) - is_inverse]
    try:
        function = pack_function(name)
    except ImportError as error:
        raise UsageError(f"--rules {text}: the module of the pack cannot be imported: {error}") from error
    if len(given) > 1:
        raise _wrong_call(text, function, "too many colons")
    pack = _called(text, function, given[0].split(",") if given and given[0] else [])
    if not is_inverse:
        return pack
    try:
        return pack.inverse()
    except RestorePlanError as error:
        raise UsageError(f"--rules {text}: {error.problems[0].message}") from error


def _called(text: str, function: Callable[..., RulePack], given: list[str]) -> RulePack:
    signature = inspect.signature(function)
    positional = [part for part in given if "=" not in part]
    named = dict(part.split("=", 1) for part in given if "=" in part)
    try:
        bound = signature.bind(*positional, **named)
        for name, value in bound.arguments.items():
            bound.arguments[name] = _parse_annotated(value, str(signature.parameters[name].annotation))
        return function(*bound.args, **bound.kwargs)
    except (TypeError, ValueError) as error:
        raise _wrong_call(text, function, str(error)) from error


def _parse_annotated(text: str, annotation: str) -> Any:
    """Parses a value of the annotated type."""
    if "str" in annotation:
        return text
    if "bool" in annotation:
        if text.lower() not in _CONSTANTS:
            raise ValueError(f"{text!r} is none of {', '.join(_CONSTANTS)}")
        return _CONSTANTS[text.lower()]
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is no whole number") from None


def _wrong_call(text: str, function: Callable[..., RulePack], reason: str) -> UsageError:
    name = text.split(":")[0]
    taken = inspect.signature(function).parameters
    example = ",".join(f"{parameter}=…" for parameter in taken)
    return UsageError(f"--rules {text}: {reason}; it is written as {name}" + (f":{example}" if example else ""))
