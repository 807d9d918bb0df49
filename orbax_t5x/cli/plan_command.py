"""`plan`: what a restore would do, printed or as JSON; its problems are exit code 1. Only indices are read."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from typing import Any

import numpy as np

from orbax_t5x.cli.arguments import UsageError, read_rules, resuming_argument
from orbax_t5x.cli.error_text import problem_with_options
from orbax_t5x.cli.output import emit, emit_json
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.readers import Checkpoint, open_checkpoint
from orbax_t5x.restoring.api import open_plan
from orbax_t5x.restoring.lineage import Asking
from orbax_t5x.restoring.options import PlanOptions
from orbax_t5x.transforms import AssignmentMap, Transform, Translate


def run(options: argparse.Namespace) -> int:
    """Prints the plan; 1 when it has problems."""
    if options.map is not None and options.target is None:
        raise UsageError("--map needs --target: its patterns match the target's names")
    rules = None if options.map is None else read_rules(options.map)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(open_checkpoint(options.source, item=options.item))
        target = None if options.target is None else _target(options.target, options.target_item)
        chain = translation(source, options.translate)
        if rules is not None:
            chain.append(AssignmentMap(tuple(rules)))
        keywords = PlanOptions(
            is_resuming=resuming_argument(options.resuming),
            strict=options.strict,
            allow_lossy_cast=options.allow_lossy_cast,
        )
        try:
            plan = stack.enter_context(open_plan(source, target, chain, keywords, Asking("convert")))
        except RestorePlanError as error:
            if not options.json:
                raise
            problems = [dataclasses.asdict(problem_with_options(problem)) for problem in error.problems]
            emit_json({"problems": problems})
            return 1
        _show(plan, options)
    return 0


def translation(source: Checkpoint, wanted: bool | None) -> list[Transform]:
    """What `--translate` means: None translates bundles, whose names are Mesh TensorFlow's."""
    return [Translate()] if (source.format == "tf_bundle" if wanted is None else wanted) else []


def _show(plan: Any, options: argparse.Namespace) -> None:
    if options.explain is not None:
        try:
            emit(plan.explain(options.explain))
        except KeyError as error:
            raise UsageError(f"--explain: {error.args[0]}") from error
    elif options.json:
        emit_json(plan.to_json())
    else:
        emit(str(plan))


def _target(path: str, item: str | None) -> dict[str, Any]:
    """Names, shapes and dtypes of another checkpoint as NumPy arrays that take no memory."""
    with open_checkpoint(path, item=item) as checkpoint:
        leaves = {name: _stand_in(view) for name, view in checkpoint.leaves.items()}
    return leaves


def _stand_in(view: Any) -> np.ndarray:
    dtype = np.dtype(view.dtype)
    return np.broadcast_to(np.empty((), dtype), view.shape)
