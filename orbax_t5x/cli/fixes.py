"""Transforms that an error proposes, as Python text, in the words of the command line."""

from __future__ import annotations

import ast
import json

_RULES = "ot.rules."


def options_for(transforms: str) -> str | None:
    """What a list of transforms is as options, such as `pass --rules hf_t5_to_t5x`.

    Args:
      transforms: a Python list of calls; `*transforms` in it stands for what was given already.

    Returns:
      None where one of them has no option.
    """
    try:
        parsed = ast.parse(transforms, mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(parsed, ast.List):
        return None
    calls = [item for item in parsed.elts if not isinstance(item, ast.Starred)]
    options = [_option(call) for call in calls]
    return " and ".join(option for option in options if option) if calls and None not in options else None


def _option(call: ast.expr) -> str | None:
    if not isinstance(call, ast.Call):
        return None
    function = ast.unparse(call.func)
    if function == "ot.transforms.Translate" and not call.args and not call.keywords:
        return "pass --translate"
    if function == "ot.transforms.AssignmentMap" and len(call.args) == 1 and not call.keywords:
        rules = [json.dumps(rule, ensure_ascii=False) for rule in ast.literal_eval(call.args[0])]
        return f"give the {'rule' if len(rules) == 1 else 'rules'} {', '.join(rules)} by --map"
    pack = _pack(call)
    return None if pack is None else f"pass --rules {pack}"


def _pack(call: ast.Call) -> str | None:
    """A rule pack as `--rules` takes it: its name, its arguments and the direction."""
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr == "inverse" and isinstance(function.value, ast.Call):
        forwards = _pack(function.value)
        return None if forwards is None else f"{forwards}:inverse"
    name = ast.unparse(function)
    if not name.startswith(_RULES):
        return None
    given = [_text(argument) for argument in call.args]
    given += [f"{keyword.arg}={_text(keyword.value)}" for keyword in call.keywords]
    return name.removeprefix(_RULES) + (f":{','.join(given)}" if given else "")


def _text(argument: ast.expr) -> str:
    value = ast.literal_eval(argument)
    return str(value).lower() if isinstance(value, bool) else str(value)
