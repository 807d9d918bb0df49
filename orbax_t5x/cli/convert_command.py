"""`convert`: a checkpoint of any format that is read becomes a plain Orbax one. `orbax_t5x.convert` does the work."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
from collections.abc import Iterator

import numpy as np

from orbax_t5x.cli.arguments import UsageError, resuming_argument
from orbax_t5x.cli.output import emit, emit_json
from orbax_t5x.cli.plan_command import translation
from orbax_t5x.operations.convert import convert
from orbax_t5x.readers import open_checkpoint
from orbax_t5x.text.wording import array_text


def run(options: argparse.Namespace) -> int:
    """Converts, and says what was written."""
    dtype = _dtype(options.dtype)
    with open_checkpoint(options.source, item=options.item) as source, _quiet():
        chain = translation(source, options.translate)
        report = convert(
            source,
            options.destination,
            chain,
            dtype=dtype,
            overwrite=options.overwrite,
            memory_limit_bytes=options.memory_limit,
            progress="bar",
            on_unsupported=options.on_unsupported,
            is_resuming=resuming_argument(options.resuming),
        )
    if options.json:
        said = dataclasses.asdict(report)
        said["skipped"] = {name: array_text(dtype, shape) for name, (shape, dtype) in report.skipped.items()}
        emit_json({"source": source.path, "translated": bool(chain), **said})
    else:
        emit(str(report))
    return 0


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax logs the traceback of what it also raises, and of threads whose directory an interrupt took away."""

    def has_no_traceback(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    logger = logging.getLogger("absl")
    logger.addFilter(has_no_traceback)
    try:
        yield
    finally:
        logger.removeFilter(has_no_traceback)


def _dtype(name: str | None) -> np.dtype | None:
    try:
        return None if name is None else np.dtype(name)
    except TypeError as error:
        raise UsageError(f"--dtype {name}: no such dtype; bfloat16, float32 and float16 are usual") from error
