"""Words for what was passed in place of transforms."""

from __future__ import annotations

import inspect

from orbax_t5x import on_demand
from orbax_t5x.transforms import MODULE_OF as public_transforms

_pack_names = on_demand.function("orbax_t5x.rules.graph", "pack_names")
_pack_function = on_demand.function("orbax_t5x.rules.graph", "pack_function")


def of_type(something: object) -> str:
    """Returns `a generator`, `an int`."""
    name = type(something).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def instead_of(something: object) -> str:
    """Suggests a replacement for an item in a list of transforms."""
    call = call_of(something) if isinstance(something, str) else None
    return f"pass {call or 'transforms of ot.transforms, or functions'}"


def call_of(name: str) -> str | None:
    """Returns the call of a named transform or rule pack, or None."""
    if name in _pack_names():
        parameters = inspect.signature(_pack_function(name)).parameters.values()
        wanted = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
        return f"ot.rules.{name}({', '.join(f'{parameter}=…' for parameter in wanted)})"
    return f"ot.transforms.{name}(…)" if name in public_transforms else None
