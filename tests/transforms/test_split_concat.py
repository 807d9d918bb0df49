"""`Split` and `Concat`: missing inputs."""

from orbax_t5x import transforms as tr
from tests.support.transform_cases import AB, problems


def test_concat_names_the_missing_part():
    found = problems(tr.Concat(["(.)/w", "(.)/b"], r"\1/wb", 0), {"x/w": AB["a"], "x/b": AB["b"], "y/w": AB["c"]})
    assert [(p.kind, p.leaf) for p in found] == [("missing", "y/wb")] and "(.)/b" in found[0].message
