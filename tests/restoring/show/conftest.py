"""A plan with every kind of row."""

import pytest

from tests.support.shown_plans import plan_with_every_row


@pytest.fixture
def t5_plan():
    return plan_with_every_row()
