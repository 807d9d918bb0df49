"""Suites for the authors of readers and transforms.

They need pytest, and the package never imports them.
"""

import pytest

# Their assertions show values, as those of test files do.
for _name in ("array_leaf", "leaf_reads", "leaf_suite", "reader_suite", "transform_suite"):
    pytest.register_assert_rewrite(f"{__name__}.{_name}")
