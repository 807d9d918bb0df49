"""`completion`: a script for completion in bash and zsh.

It is made from the program's own parser and printed once, so that a shell need not start Python at each completion.
Where none of the words fits, the shell completes names of files.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from orbax_t5x.cli.main import PROGRAM, make_parser
from orbax_t5x.cli.rule_packs import AUTO, pack_names
from orbax_t5x.text.output import print_text

# zsh runs completions written for bash.
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
_SCRIPT = """\
_orbax_t5x() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
    if [[ $COMP_CWORD == 1 ]]; then
        words="{commands}"
    else
        case ${{COMP_WORDS[1]}} in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _orbax_t5x {program}
"""
_COMMAND = """\
            {name})
                case $before in
{values}
                esac ;;"""


def run(options: argparse.Namespace) -> int:
    """Prints the script for a shell."""
    print_text((_ZSH if options.shell == "zsh" else "") + script())
    return 0


def script() -> str:
    """Returns the script for bash."""
    parser = make_parser()
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    cases = [_command(name, command) for name, command in commands.choices.items()]
    words = [*commands.choices, *_options(parser)]
    return _SCRIPT.format(commands=" ".join(words), cases="\n".join(cases), program=PROGRAM).rstrip()


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    taken: dict[str, list[str]] = {}
    for action in parser._actions:
        if action.option_strings and action.nargs != 0:
            taken.setdefault(" ".join(_values(action)), []).extend(action.option_strings)
    values = [f'                    {"|".join(options)}) words="{words}" ;;' for words, options in taken.items()]
    arguments = [value for action in parser._actions if not action.option_strings for value in _values(action)]
    rest = f'if [[ $word == -* ]]; then words="{" ".join(_options(parser))}"; else words="{" ".join(arguments)}"; fi'
    values.append(f"                    *) {rest} ;;")
    return _COMMAND.format(name=name, values="\n".join(values))


def _options(parser: argparse.ArgumentParser) -> Iterable[str]:
    return [option for action in parser._actions for option in action.option_strings if option.startswith("--")]


def _values(action: argparse.Action) -> list[str]:
    """Lists the words that an argument takes."""
    if "--rules" in action.option_strings:
        return [AUTO, *pack_names()]
    return [str(choice) for choice in action.choices or ()]
