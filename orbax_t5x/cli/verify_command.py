"""`verify`: all leaves compared with their checksums.

Exit code 0 where what can be compared is right, 1 where a leaf is damaged or cannot be read, 3 where there is nothing
to compare with.
"""

from __future__ import annotations

import argparse

from orbax_t5x.operations.verify.verify import verify
from orbax_t5x.text.output import print_report

_EXIT_CODES = {"ok": 0, "damaged": 1, "no checksum": 3}


def run(options: argparse.Namespace) -> int:
    """Prints the findings."""
    report = verify(options.path, item=options.item, progress=None if options.json else "bar")
    print_report(report, json=options.json)
    return _EXIT_CODES[report.status]
