"""`convert`: a checkpoint as a plain Orbax checkpoint or as safetensors files."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
from collections.abc import Iterator, Mapping

import numpy as np

from orbax_t5x.cli.arguments import read_json_object
from orbax_t5x.cli.mapping import MappingOptions, answers_as_options, plan_options
from orbax_t5x.errors import CheckpointNotFoundError
from orbax_t5x.files.places import files_at, opening, resolved_path
from orbax_t5x.operations.convert.convert import ConvertReport, convert_for
from orbax_t5x.operations.convert.output_format import WriteOptions
from orbax_t5x.operations.convert.safetensors_output import CONFIG_NAME
from orbax_t5x.readers import open_checkpoint
from orbax_t5x.rules.layouts import find_layout
from orbax_t5x.text.output import UsageError, print_json, print_text
from orbax_t5x.text.wording import plain
from orbax_t5x.transforms.dtype_names import as_dtype

# The files beside the weights of a model that are copied with it.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
)
_MOST_BYTES = 64 << 20


def run(options: argparse.Namespace) -> int:
    """Converts, and prints a report."""
    mapping = MappingOptions(options)
    writing = WriteOptions(
        options.format,
        _parse_dtype(options.dtype),
        options.overwrite,
        options.memory_limit,
        "bar",
        options.on_unsupported,
        _read_companions(options),
    )
    with answers_as_options(), open_checkpoint(options.source, item=options.item) as source, _quiet():
        target = mapping.target()
        chain = mapping.transforms(source)
        report = convert_for(target, source, options.destination, chain, plan_options(options), writing)
    if options.json:
        print_json({"source": source.path, **report.to_json()})
    else:
        print_text(str(report))
        for line in _about_names(report, writing):
            print_text(plain(line))
    return 0


def _about_names(report: ConvertReport, writing: WriteOptions) -> list[str]:
    """Describes the result's names."""
    lines = [f"mapped by {', '.join(report.rules)}" if report.rules else "names, shapes and dtypes are the source's"]
    with open_checkpoint(report.destination, format=writing.format) as written:
        layout = find_layout(written.leaves).kind
    if layout == "minimal" and writing.format == "safetensors":
        lines.append("the names are T5X's: --rules t5x_to_hf_t5 makes them those that from_pretrained reads")
    if layout != "hugging face":
        return lines
    if writing.format == "orbax":
        lines.append("the names are Hugging Face's: --rules hf_t5_to_t5x makes them T5X's")
    elif CONFIG_NAME not in (writing.beside or ()):
        lines.append("from_pretrained also needs a config.json: --from or --config puts one beside the files")
    return lines


def _read_companions(options: argparse.Namespace) -> Mapping[str, bytes]:
    """Reads the files to put beside the weights."""
    given = {"--config": options.config, "--from": options.companions}
    for option, value in given.items():
        if value is not None and options.format != "safetensors":
            raise UsageError(f"{option} is for --format safetensors")
    beside = {} if options.companions is None else dict(read_companions(os.path.expanduser(options.companions)))
    if options.config is not None:
        beside[CONFIG_NAME] = read_json_object(options.config, "--config")
    return beside


def read_companions(path: str) -> Mapping[str, bytes]:
    """Reads the files of `COMPANIONS` in a directory."""
    with opening():
        store = files_at(resolved_path(path))
        names = [name for name, is_there in zip(COMPANIONS, store.has_files(COMPANIONS), strict=True) if is_there]
        if not names:
            raise CheckpointNotFoundError(f"there is none of {', '.join(COMPANIONS)}", path=path)
        return {name: store.read_whole(name, limit=_MOST_BYTES) for name in names}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences Orbax's log of errors that reach the caller anyway.

    Orbax logs the tracebacks of errors that it raises, and of threads after an interrupt removed their directory.
    """

    def has_no_traceback(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    logger = logging.getLogger("absl")
    logger.addFilter(has_no_traceback)
    try:
        yield
    finally:
        logger.removeFilter(has_no_traceback)


def _parse_dtype(name: str | None) -> np.dtype | None:
    try:
        return None if name is None else as_dtype(name)
    except TypeError as error:
        raise UsageError(f"--dtype {error}") from error
