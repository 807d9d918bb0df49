"""`orbax-t5x`: runs a command; errors become a line and an exit code.

Exit codes: 0 ok; 1 a difference, damage or a problem; 2 usage; 3 nothing to verify; 130 interrupted; 141 closed pipe.
An unexpected error is one line and 1, too; with ORBAX_T5X_TRACEBACK set its traceback is printed before. A command's
module is imported when it runs, so that `inspect` need not wait for JAX.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from orbax_t5x import __version__
from orbax_t5x.cli.arguments import count_argument, size_argument, tolerance_argument
from orbax_t5x.errors import CheckpointError, Fix
from orbax_t5x.registry import Registry
from orbax_t5x.text.output import UsageError, plain_lines
from orbax_t5x.text.table import terminal_width
from orbax_t5x.text.wording import did_you_mean, plain

PROGRAM = "orbax-t5x"
_Command = Callable[[argparse.Namespace], int]
COMMANDS = Registry[_Command](
    "command",
    {
        "inspect": "orbax_t5x.cli.inspect_command:run",
        "plan": "orbax_t5x.cli.plan_command:run",
        "convert": "orbax_t5x.cli.convert_command:run",
        "diff": "orbax_t5x.cli.diff_command:run",
        "compare-logits": "orbax_t5x.extras.demo.compare_logits_command:run",
        "verify": "orbax_t5x.cli.verify_command:run",
        "demo": "orbax_t5x.extras.demo.command:run",
    },
)
# Any value but an empty one prints the traceback of an error that is not one of the library's.
_TRACEBACK = "ORBAX_T5X_TRACEBACK"
_OK, _PROBLEM, _USAGE, _INTERRUPTED, _PIPE_CLOSED = 0, 1, 2, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code."""
    try:
        options = make_parser().parse_args(arguments)
    except SystemExit as stop:  # argparse has printed its message
        return int(stop.code or 0)
    try:
        code = COMMANDS.get(options.command)(options)
        sys.stdout.flush()
        return code
    except UsageError as error:
        return _print_error(plain_lines(str(error)), _USAGE)
    except CheckpointError as error:
        return _print_error(
            plain_lines(error.described(_fix_text, width=terminal_width() - len(f"{PROGRAM}: "))), _PROBLEM
        )
    except BrokenPipeError:
        # The interpreter flushes once more at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        return _print_error("interrupted", _INTERRUPTED)
    except Exception as error:
        return _fail_unforeseen(error)


def _fix_text(fix: Fix) -> str:
    """Returns a fix with this program's options."""
    return importlib.import_module("orbax_t5x.cli.fixes").fix_text(fix)


def _fail_unforeseen(error: Exception) -> int:
    """Reports an error that is not the library's."""
    if os.environ.get(_TRACEBACK):
        traceback.print_exception(error)
        hint = ""
    else:
        hint = f" (set {_TRACEBACK}=1 for the traceback)"
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return _print_error(f"unexpected {plain(text)}{hint}", _PROBLEM)


def _print_error(text: str, code: int) -> int:
    print(f"{PROGRAM}: {text}", file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    """Parser that names the closest word for a misspelt one."""

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            words = list(map(str, action.choices))
            choices = ", ".join(map(repr, words))
            hint = did_you_mean(value, words)
            raise argparse.ArgumentError(action, f"invalid choice: {value!r} (choose from {choices}){hint}")

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  (its overloads)
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Refuses unknown options here, where the command's own options are known."""
        options, rest = super().parse_known_args(args, namespace)
        unknown = next((word for word in rest if word.startswith("--")), None)
        if unknown is not None:
            own = [option for action in self._actions for option in action.option_strings]
            self.error(f"unrecognized arguments: {' '.join(rest)}{did_you_mean(unknown.partition('=')[0], own)}")
        return options, rest


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of all commands without importing them."""
    parser = _Parser(
        prog=PROGRAM,
        description="Checkpoints of the T5 family: look at them, plan a restore, convert, compare and verify them.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (_add_inspect, _add_plan, _add_convert, _add_diff, _add_compare_logits, _add_others):
        add(commands)
    return parser


def _add(
    commands, name: str, summary: str, more: str, *, source: str | None = None, json: str | None = None
) -> argparse.ArgumentParser:
    """Adds a command.

    Args:
      commands: those of the program.
      name: of the command.
      summary: for the list of commands.
      more: further sentences for the command's own help.
      source: name of the argument for a checkpoint; None where there is none.
      json: what `--json` prints; None where there is no such option.
    """
    parser = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}. {more}")
    parser.set_defaults(command=name)
    if source is not None:
        parser.add_argument(
            source,
            help="a TensorFlow bundle (prefix, .index or directory), a T5X or Orbax step or root, an Orbax item, Flax "
            "msgpack, safetensors, a PyTorch file or an .npz file",
        )
        parser.add_argument("--item", help="the item of an Orbax step")
    if json is not None:
        parser.add_argument("--json", action="store_true", help=f"print {json}, for programs")
    return parser


def _add_inspect(commands) -> None:
    parser = _add(
        commands, "inspect", "list the leaves of a checkpoint", "No array is read.", source="path", json="everything"
    )
    parser.add_argument("--all", action="store_true", help="every leaf on a line of its own, repeated layers included")


def _add_rules(parser: argparse.ArgumentParser, source: str) -> None:
    """Adds the options for names of leaves."""
    parser.add_argument(
        "--translate",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Mesh TensorFlow's names become T5X's (default: for bundles)",
    )
    parser.add_argument(
        "--rules",
        action="append",
        metavar="auto|PACK",
        help="what maps one model's names to another's, with its dimensions and perhaps ':inverse', such as "
        "t5_minimal_to_scanned:12,64; auto: the pack that leads to the target; may be given several times",
    )
    parser.add_argument(
        "--given",
        action="append",
        metavar="SOURCE=TARGET",
        help="with --rules auto: a leaf's names on both sides, of one layer for all; may be given several times",
    )
    parser.add_argument(
        "--map",
        metavar="FILE",
        help='a JSON list of [pattern of target names, source or null], or {"migrations": [[name, rules], ...]}',
    )
    parser.add_argument(
        "--resuming",
        choices=("yes", "no"),
        help=f"whether the names were translated and mapped before {source} was written (default: by its record)",
    )


def _add_memory_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory-limit", type=size_argument, metavar="SIZE", help="host buffers in flight, such as 256M"
    )


def _add_mapping(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the use of leaves."""
    parser.add_argument(
        "--target",
        metavar="PATH",
        help="a checkpoint whose names, shapes and dtypes are to be filled (default: everything)",
    )
    parser.add_argument("--target-item", help="the item of the target's Orbax step")
    _add_rules(parser, "the source")
    parser.add_argument("--no-strict", dest="strict", action="store_false", help="ignore leaves that the target lacks")
    parser.add_argument("--allow-lossy-cast", action="store_true", help="permit conversions that may lose values")


def _add_plan(commands) -> None:
    parser = _add(
        commands,
        "plan",
        "show what a restore would read from where, and what is wrong with it",
        "No array is read. Exit code 1 when something is wrong.",
        source="source",
        json="the plan, or its problems",
    )
    _add_mapping(parser)
    parser.add_argument("--explain", metavar="LEAF", help="show all about one leaf of the target or of the source")


def _add_convert(commands) -> None:
    parser = _add(
        commands,
        "convert",
        "write a checkpoint as a plain Orbax one, or as safetensors files",
        "Leaf by leaf, in bounded memory; what cannot be stored is named before anything is written.",
        source="source",
        json="what was done",
    )
    parser.add_argument("destination", help="a directory that does not exist yet, local, in a bucket or on the hub")
    parser.add_argument(
        "--format", choices=("orbax", "safetensors"), default="orbax", help="format to write (default: orbax)"
    )
    parser.add_argument("--config", metavar="FILE", help="the config.json to put beside safetensors files")
    parser.add_argument(
        "--from",
        dest="companions",
        metavar="PATH",
        help="a model whose config.json and tokenizer files are copied beside safetensors files, such as hf://org/name",
    )
    _add_mapping(parser)
    parser.add_argument("--dtype", help="for the floating-point model parameters, such as bfloat16")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there, once the new one is complete")
    parser.add_argument(
        "--on-unsupported",
        choices=("error", "skip"),
        default="error",
        help="what to do with leaves that the format cannot store (default: error)",
    )
    _add_memory_limit(parser)


def _add_diff(commands) -> None:
    parser = _add(
        commands,
        "diff",
        "compare two checkpoints: names, shapes, dtypes and values",
        "Block by block, in bounded memory. Exit code 1 when something differs or is damaged.",
        source="a",
        json="what was found for each leaf",
    )
    _add_other(parser)
    _add_rules(parser, "a")
    parser.add_argument(
        "--values", choices=("yes", "no"), default="yes", help="no: only names, shapes and dtypes (default: yes)"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        help="of leaves with such a whole name; may be given several times",
    )
    parser.add_argument(
        "--no-strict",
        dest="strict",
        action="store_false",
        help="leaves that only one side has are shown, and are no difference",
    )
    _add_tolerances(parser, 0.0, "elements are equal where |a - b| <= atol + rtol * |b|")
    _add_memory_limit(parser)


def _add_other(parser: argparse.ArgumentParser) -> None:
    """Adds the second of two checkpoints."""
    parser.add_argument("b", help="the other one, of any format")
    parser.add_argument("--item-b", help="the item of b's Orbax step (default: that of --item)")


def _add_tolerances(parser: argparse.ArgumentParser, default: float, meaning: str) -> None:
    for name in ("atol", "rtol"):
        parser.add_argument(
            f"--{name}",
            type=tolerance_argument,
            default=default,
            metavar="NUMBER",
            help=f"{meaning} (default: {default:g})",
        )


def _add_compare_logits(commands) -> None:
    parser = _add(
        commands,
        "compare-logits",
        "run two checkpoints of a T5 on the same tokens and compare the logits",
        "Each in any format and layout that is known, whole and in float32. Exit code 1 when the logits differ.",
        source="a",
        json="the largest differences",
    )
    _add_other(parser)
    for name, default, what in (("sequences", 2, "how many sequences"), ("length", 16, "tokens of each sequence")):
        parser.add_argument(
            f"--{name}", type=count_argument, default=default, metavar="N", help=f"{what} (default: {default})"
        )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random tokens (default: 0)")
    _add_tolerances(parser, 1e-4, "logits are equal where |a - b| <= atol + rtol * the largest logit of b")


def _add_others(commands) -> None:
    """Adds the commands that have hardly any options."""
    _add(
        commands,
        "verify",
        "read all of a checkpoint and compare it with its checksums",
        "Exit code 1 when a leaf is damaged or cannot be read, 3 when there is nothing to compare with.",
        source="path",
        json="what was found for each leaf",
    )
    demo = _add(
        commands,
        "demo",
        "do the whole job once, on a small checkpoint that comes along",
        "Restores sharded over eight CPU devices, saves through Orbax, restores again and compares every bit.",
    )
    demo.add_argument("--keep", metavar="DIR", help="keep what is written, in this new directory (default: remove it)")
