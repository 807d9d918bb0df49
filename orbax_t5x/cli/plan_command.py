"""`plan`: the plan of a restore, as text or JSON.

Problems are exit code 1. Only indices are read.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from orbax_t5x.cli.fixes import fix_text
from orbax_t5x.cli.mapping import MappingOptions, answers_as_options, plan_options
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.readers import open_checkpoint
from orbax_t5x.restoring.api import open_plan
from orbax_t5x.text.output import UsageError, print_json, print_text


def run(options: argparse.Namespace) -> int:
    """Prints the plan; 1 when it has problems."""
    mapping = MappingOptions(options)
    with answers_as_options(), contextlib.ExitStack() as stack:
        source = stack.enter_context(open_checkpoint(options.source, item=options.item))
        target = mapping.target()
        try:
            chain = mapping.transforms(source)
            plan = open_plan(source, target, chain, plan_options(options), stack)
        except RestorePlanError as error:
            if not options.json:
                raise
            problems = [problem.as_data(fix_text) for problem in error.problems]
            print_json({"problems": problems})
            return 1
        _show(plan, options)
    return 0


def _show(plan: Any, options: argparse.Namespace) -> None:
    if options.explain is not None:
        try:
            print_text(plan.explain(options.explain))
        except KeyError as error:
            raise UsageError(f"--explain: {error.args[0]}") from error
    elif options.json:
        print_json(plan.to_json())
    else:
        print_text(str(plan))
