"""What processes need of a view, without a plan."""

from orbax_t5x.restoring.broadcast.needs import EntryNeeds
from orbax_t5x.restoring.plan import PlanEntry


def needs_of(name, view, needers):
    entry = PlanEntry(name, (name,), view.shape, view.dtype, None, "read", view=view, leaves=view.leaves())
    return EntryNeeds(entry, tuple(needers), tuple(tuple(sorted(some)) for some in needers.values()))
