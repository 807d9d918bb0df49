"""Docstrings begin with what they document: a function's with a verb in the third person, a class's with a noun."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import orbax_t5x as ot

PACKAGE = Path(ot.__file__).parent

# Of any docstring: a clause in place of a verb or a noun.
NEVER_FIRST = frozenset(
    "What Whatever Whether How Where Wherever Why Who Whoever Whose Which When Everything Everybody Nothing Nobody "
    "Somebody That There Those It They".split()
)
# Of a function's: verbs end in "s", but for a reference to another docstring.
OTHER_VERBS = frozenset({"See"})

FirstWord = tuple[str, str]
"""The kind of what is documented ("module", "class", "property" or "function"), and the first word of its docstring."""


def first_words(tree: ast.AST) -> Iterator[tuple[str, FirstWord]]:
    """Yields names and first words of everything that has a docstring, nested functions included."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if not text:
            continue
        word = re.match(r"[\w'`]*", text)
        assert word is not None
        kind, name = "module", ""
        if isinstance(node, ast.ClassDef):
            kind, name = "class", node.name
        elif not isinstance(node, ast.Module):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            is_property = any("property" in decorator for decorator in decorators)
            kind, name = "property" if is_property else "function", node.name
        yield name, (kind, word[0])


def begins_well(first: FirstWord) -> bool:
    kind, word = first
    if kind != "function":
        return word not in NEVER_FIRST
    return word in OTHER_VERBS or (word.endswith("s") and word not in NEVER_FIRST)


@pytest.mark.parametrize(
    ("first", "well"),
    [
        (("function", "Returns"), True),
        (("function", "See"), True),
        (("function", "Whether"), False),
        (("function", "The"), False),
        (("class", "Table"), True),
        (("class", "What"), False),
        (("property", "The"), True),
        (("property", "Where"), False),
        (("module", "How"), False),
    ],
)
def test_clauses_are_found(first, well):
    assert begins_well(first) is well


# Files whose docstrings are still to be rewritten.
TO_DO: frozenset[str] = frozenset(
    """
    cli/error_text.py cli/fixes.py cli/main.py concurrency/carried.py concurrency/loops.py
    concurrency/process_threads.py errors.py handlers/args.py handlers/checkpoint_handler.py
    handlers/failed_saves.py handlers/orbax_names.py handlers/restore/stock.py handlers/save/key_checks.py
    handlers/save/leaf_options.py handlers/save/prepare.py handlers/save/type_table.py
    handlers/type_handlers/checksums.py handlers/type_handlers/lazy_array.py handlers/type_handlers/numpy_or_lazy.py
    handlers/type_handlers/registration.py handlers/type_handlers/stream.py handlers/type_handlers/unsupported.py
    handlers/v1/abstract_state.py handlers/v1/contexts.py handlers/v1/handler.py handlers/v1/orbax_v1_names.py
    handlers/v1/saving.py lazy/leaf.py lazy/reshape.py multihost/agreement.py multihost/collectives.py
    operations/convert/convert.py operations/convert/destination.py operations/convert/fingerprint.py
    operations/convert/job.py operations/convert/journal.py operations/convert/ocdbt_files.py
    operations/convert/orbax_output.py operations/convert/output_format.py operations/convert/partition.py
    operations/convert/pipeline.py operations/convert/replaceable.py operations/convert/report.py
    operations/convert/safetensors_layout.py operations/convert/safetensors_output.py
    operations/convert/sequences.py operations/convert/work_directory.py operations/convert/writing.py
    operations/diff/blocks.py operations/diff/diff.py operations/diff/report.py operations/diff/values.py
    operations/start/advice.py operations/start/restore_or_initialize.py operations/verify/report.py
    operations/verify/verify.py readers/flax_msgpack/headers.py readers/orbax/metadata.py readers/orbax/open.py
    readers/ranges/byte_range.py readers/ranges/leaf.py readers/ranges/sliced_leaf.py readers/safetensors/header.py
    readers/safetensors/open.py readers/tensorstore_leaf.py restoring/broadcast/all_gather.py
    restoring/broadcast/schedule.py restoring/broadcast/send.py restoring/broadcast/wanted.py
    restoring/diagnose/hypothesis.py restoring/diagnose/renamed_part.py restoring/execute/buffers.py
    restoring/execute/groups.py restoring/execute/lowering.py restoring/execute/shared_checksums.py
    restoring/execute/steps.py restoring/executor.py restoring/plan_data.py restoring/run_steps.py storage/paths.py
    storage/remote/connection.py storage/store.py text/html.py text/problem_lines.py text/wording.py
    """.split()
)


def test_docstrings_begin_with_a_verb_or_a_noun():
    found = [
        f"{path.relative_to(PACKAGE)}: {name}: {first[1]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if str(path.relative_to(PACKAGE)) not in TO_DO
        for name, first in first_words(ast.parse(path.read_text()))
        if not begins_well(first)
    ]
    assert not found, f"{len(found)} docstrings begin otherwise (CONTRIBUTING.md):\n" + "\n".join(found)
