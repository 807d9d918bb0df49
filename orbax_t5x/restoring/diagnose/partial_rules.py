"""Problem of found rules for only a part of the model."""

from __future__ import annotations

import textwrap

from orbax_t5x.errors import Fix, Problem
from orbax_t5x.restoring.plan import RestorePlan
from orbax_t5x.restoring.show.filled import filled_parameters, parameter_counts, patterns_for_filled
from orbax_t5x.restoring.sources import AUTO
from orbax_t5x.text.code import calls_code
from orbax_t5x.text.wording import counted

_LONGEST_CODE = 600


def partial_rules(plan: RestorePlan) -> list[Problem]:
    """Returns the problem of parameters left to the fallback."""
    names = filled_parameters(plan)
    if not names:
        return []
    total, read, filled = parameter_counts(plan)
    code = textwrap.shorten(calls_code(plan.found_rules), _LONGEST_CODE, placeholder=" …")
    message = (
        f"transforms={AUTO!r}: the rules found cover {read:,} of the model's {counted(total, 'parameter')}, and the "
        f"fallback would fill {filled:,}: {names}. The rules: {code}"
    )
    patterns = patterns_for_filled(plan)
    value = ... if patterns is None else patterns
    return [Problem("rule", None, message, Fix.setting("if these are new, pass {}", fallback_for=value))]
