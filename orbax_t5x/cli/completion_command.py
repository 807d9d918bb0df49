"""Scripts for completion in a shell, by `shtab`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import shtab

from orbax_t5x.cli.main import make_parser
from orbax_t5x.cli.rule_packs import AUTO, pack_names
from orbax_t5x.text.output import print_text

_PATHS = ("PATH", "FILE", "DIR")
# An attribute that shtab reads.
_COMPLETE = "complete"


def run(options: argparse.Namespace) -> int:
    """Prints the script for a shell."""
    parser = make_parser()
    packs = " ".join([AUTO, *pack_names()])
    for action in _arguments(parser):
        if "--rules" in action.option_strings:
            setattr(action, _COMPLETE, shtab.cmd(f"echo {packs}") | {"fish": packs})
        elif action.metavar in _PATHS or not (action.option_strings or action.choices):
            setattr(action, _COMPLETE, shtab.FILE)
    print_text(shtab.complete(parser, options.shell))
    return 0


def _arguments(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _arguments(command)
        else:
            yield action
