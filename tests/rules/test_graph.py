"""The graph of layouts: one shortest path between any two, along which packs compose."""

import itertools

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.rules import graph
from orbax_t5x.rules.layouts import NAMES
from orbax_t5x.testing.transform_suite import assert_same, run
from tests.support import t5_layouts as t5
from tests.support.memory_checkpoint import checkpoint

KINDS = sorted({end for edge in graph.EDGES for end in (edge.source, edge.target)})


def test_one_shortest_path_leads_between_any_two_layouts():
    """`shortest_path` raises where there are two."""
    for source, target in itertools.product(KINDS, KINDS):
        path = graph.shortest_path(source, target)
        if path is None:
            assert target == "mesh tf" != source
            continue
        ends = [source, *(step.end for step in path)]
        assert ends[-1] == target and len(set(ends)) == len(ends)


def test_two_paths_of_one_length_are_an_error(monkeypatch):
    twin = graph.EDGES[0]._replace(function=rules.hf_t5_to_t5x)
    monkeypatch.setattr(graph, "EDGES", (*graph.EDGES, twin))
    with pytest.raises(ValueError, match="several paths lead from gguf to minimal"):
        graph.shortest_path.__wrapped__("gguf", "minimal")


def test_names_of_other_programs_lead_to_t5x_without_dimensions():
    assert {kind for kind in KINDS if graph.pack_to_minimal(kind) is not None} == set(NAMES)
    pack = graph.pack_to_minimal("gguf")
    assert pack is not None and pack.parts == (rules.gguf_t5_to_hf_t5(), rules.hf_t5_to_t5x())
    assert graph.pack_to_minimal("minimal") is None


def test_packs_compose_over_several_layouts():
    """From Flaxformer's joined heads, stacked on one axis, to T5X's split ones on another, and to MaxText's."""
    plain = t5.minimal(bias="layer")
    source, target = t5.scanned(plain, split=False, axis=0), t5.below("target/", t5.scanned(plain))
    pack = rules.infer(source, target)
    stacked, split = rules.t5_unscanned_to_scanned(scan_axis=0), rules.t5_minimal_to_scanned(t5.H, t5.D)
    assert pack.parts == (stacked.inverse(), split)
    result, diagnostics = run(pack, source, target)
    assert diagnostics.problems == []
    assert_same(result, target)
    decoder = t5.models()["decoder without bias"]
    maxtext = t5.below("params/params/", t5.maxtext(decoder))
    result, diagnostics = run(rules.infer(t5.scanned(decoder), maxtext), t5.scanned(decoder), maxtext)
    assert diagnostics.problems == []
    assert_same(result, maxtext)


def test_names_of_two_layouts_are_ambiguous():
    plain = t5.minimal()
    source = {**t5.below("target/", plain), **t5.hugging_face(plain)}
    with pytest.raises(RestorePlanError, match=r"names of several layouts \(hugging face and minimal\)"):
        rules.infer(source, t5.scanned(plain))
    target = {name: np.zeros_like(value) for name, value in t5.below("target/", t5.scanned(plain)).items()}
    kept = [ot.transforms.Keep((r"target/.*",)), rules.t5_minimal_to_scanned(t5.H, t5.D)]
    ot.plan_restore(checkpoint(source), target, kept)
