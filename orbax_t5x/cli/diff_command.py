"""`diff`: the differences of two checkpoints, as a table or JSON.

Exit code 0 where they are equal, 1 where something differs, is damaged or cannot be read.
"""

from __future__ import annotations

import argparse
import contextlib

from orbax_t5x.cli.arguments import resuming_argument
from orbax_t5x.cli.mapping import RuleOptions, answers_as_options
from orbax_t5x.operations.diff.diff import diff
from orbax_t5x.readers import open_checkpoint
from orbax_t5x.text.output import print_report

_EQUAL, _DIFFERENT = 0, 1


def run(options: argparse.Namespace) -> int:
    """Prints the differences."""
    mapping = RuleOptions(options)
    item_b = options.item if options.item_b is None else options.item_b
    with answers_as_options(), contextlib.ExitStack() as stack:
        a = stack.enter_context(open_checkpoint(options.a, item=options.item))
        b = stack.enter_context(open_checkpoint(options.b, item=item_b))
        report = diff(
            a,
            b,
            mapping.transforms(a, is_bundle=b.format == "tf_bundle"),
            values=options.values == "yes",
            atol=options.atol,
            rtol=options.rtol,
            only=options.only or (),
            strict=options.strict,
            memory_limit_bytes=options.memory_limit,
            progress=None if options.json else "bar",
            is_resuming=resuming_argument(options.resuming),
        )
    print_report(report, json=options.json)
    return _EQUAL if report.equal else _DIFFERENT
