"""`compare-logits`: runs two checkpoints on the same tokens.

Exit code 0 where the logits are equal within the tolerances, 1 where they are not, or a checkpoint is no T5.
"""

from __future__ import annotations

import argparse
import contextlib

from orbax_t5x.extras.demo.compare_logits import compare_logits
from orbax_t5x.readers import open_checkpoint
from orbax_t5x.text.output import print_report

_EQUAL, _DIFFERENT = 0, 1


def run(options: argparse.Namespace) -> int:
    """Prints how far the logits differ."""
    item_b = options.item if options.item_b is None else options.item_b
    with contextlib.ExitStack() as stack:
        a = stack.enter_context(open_checkpoint(options.a, item=options.item))
        b = stack.enter_context(open_checkpoint(options.b, item=item_b))
        report = compare_logits(
            a,
            b,
            sequences=options.sequences,
            length=options.length,
            seed=options.seed,
            atol=options.atol,
            rtol=options.rtol,
        )
    print_report(report, json=options.json)
    return _EQUAL if report.is_close else _DIFFERENT
