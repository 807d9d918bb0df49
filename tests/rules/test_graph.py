"""The graph of layouts: one shortest path between any two, along which packs compose."""

import itertools
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import orbax_t5x as ot
from orbax_t5x import rules
from orbax_t5x.cli.rule_packs import pack_argument, pack_names
from orbax_t5x.errors import RestorePlanError
from orbax_t5x.rules import graph
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
    twin = graph.EDGES[0]._replace(pack="hf_t5_to_t5x")
    monkeypatch.setattr(graph, "EDGES", (*graph.EDGES, twin))
    with pytest.raises(ValueError, match="several paths lead from gguf to minimal"):
        graph.shortest_path("gguf", "minimal")


def test_names_of_other_programs_lead_to_t5x_without_dimensions():
    marked = {"hugging face", "hugging face flax", "gguf", "wan", "pix2struct", "mesh tf"}
    assert {kind for kind in KINDS if graph.pack_to_t5x(kind) is not None} == marked
    pack = graph.pack_to_t5x("gguf")
    assert pack is not None and pack.parts == (rules.gguf_t5_to_hf_t5(), rules.hf_t5_to_t5x())
    assert graph.pack_to_t5x("minimal") is None


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


TOWERS = (("enc", "encoder"), ("dec", "decoder"))


def toy(name="toy_to_t5x", source="toy", target="minimal", marks=r"^(?:enc|dec)\.\d+/"):
    """Layers are `enc.0`, and all else is `top/…` with dots."""
    there = [(rf"{short}\.(\d+)/(.*)", rf"target/{tower}/layers_\1/\2") for short, tower in TOWERS]
    back = [(rf".*/{tower}/layers_(\d+)/(.*)", rf"{short}.\1/\2") for short, tower in TOWERS]
    for rest in (*(f"{tower}/{tower}_norm/scale" for _, tower in TOWERS), "decoder/logits_dense/kernel"):
        there.append((f"top[.]{rest.replace('/', '[.]')}", f"target/{rest}"))
        back.append((f".*/{rest}", f"top.{rest.replace('/', '.')}"))
    there.append(("words", "target/token_embedder/embedding"))
    back.append((".*/token_embedder/embedding", "words"))
    forwards, backwards = (ot.transforms.Rename(tuple(one), require_match=False) for one in (there, back))
    return rules.RulePack((forwards,), (backwards,), name=name, example="enc.0/x").between(source, target, marks=marks)


def toy_tree(plain):
    return run(toy().inverse(), t5.below("target/", plain), {})[0]


def test_a_registered_pack_leads_everywhere_until_it_is_unregistered():
    plain = t5.minimal()
    source, target = toy_tree(plain), t5.below("target/", t5.scanned(plain))
    name = "toy_to_t5x"
    with rules.register(toy()) as held:
        assert getattr(rules, name)() == toy()
        pack = rules.infer(source, target)
        assert pack.name == f"toy_to_t5x then t5_minimal_to_scanned(num_heads={t5.H}, head_dim={t5.D})"
        assert pack.parts[0].as_code() == "ot.rules.toy_to_t5x()"
        result, diagnostics = run(pack, source, target)
        assert diagnostics.problems == []
        assert_same(result, target)
        back = rules.infer(target, source)
        assert back.parts[-1].as_code() == "ot.rules.toy_to_t5x().inverse()"
        assert_same(run(back, target, source)[0], source)
        assert pack_argument("toy_to_t5x:inverse") == toy().inverse() and "toy_to_t5x" in pack_names()
    held.unregister()
    assert "toy_to_t5x" not in pack_names() and not hasattr(rules, name)
    with pytest.raises(RestorePlanError, match="no rule pack leads"):
        rules.infer(source, target)


def test_errors_propose_a_registered_pack():
    plain = t5.minimal()
    target = {name: np.zeros_like(value) for name, value in t5.below("target/", plain).items()}
    with rules.register(toy()), pytest.raises(RestorePlanError) as caught:
        ot.plan_restore(checkpoint(toy_tree(plain)), target)
    (problem,) = caught.value.problems
    assert "a rule pack leads from toy to minimal" in problem.message
    assert str(problem.fix) == "add transforms=[ot.rules.toy_to_t5x()]"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"name": "hf_t5_to_t5x"}, "a rule pack named 'hf_t5_to_t5x' is registered already"),
        ({"name": "to t5x"}, "a registered pack has a name such as"),
        ({"source": "", "target": ""}, "name its layouts by pack.between"),
        ({"target": "elsewhere"}, "no layout is named 'toy' or 'elsewhere'; there are fused, gguf"),
        ({"marks": ""}, "'toy' is a new layout; give the marks="),
        ({"marks": ".*"}, "the marks '.*' are in 'enc.blk.0.attn_q.weight', too, a name of another layout"),
        ({"marks": "^target/"}, "the marks '^target/' are in 'target/encoder/layers_0/attention/query/kernel', too"),
        ({"marks": r"norm/scale$"}, "the marks 'norm/scale$' are in"),
        ({"marks": r"^shared\."}, "the marks '^shared\\\\.' are in 'shared.weight', too"),
        ({"source": "gguf"}, "'gguf' and 'minimal' are known; only a new layout has marks"),
        ({"source": "gguf", "marks": ""}, "packs lead from 'gguf' to 'minimal' already"),
    ],
)
def test_packs_without_a_place_are_refused(given, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        rules.register(toy(**given))
    for name in graph.NO_PACKS:
        with pytest.raises(ValueError, match=f"the name '{name}' stands for something else"):
            rules.register(toy(name=name))
    assert graph.NO_PACKS == {*rules.__all__, "auto"} - {*graph.PACKS.names()}
    with pytest.raises(TypeError, match="is no rule pack"):
        rules.register(ot.transforms.Rename([("a", "b")]))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="no regular expression"):
        toy(marks="(")


@pytest.mark.slow
def test_entry_points_join_and_those_without_a_place_are_left_out(tmp_path):
    """In a new process, since the table finds installed packages once."""
    info = tmp_path / "toy_layouts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-layouts\nVersion: 1.0\n")
    points = {"toy_to_t5x": "toy", "broken": "nothing_of_this_name", "no_pack": "KINDS"}
    lines = [f"{name} = {__name__}:{value}\n" for name, value in points.items()]
    (info / "entry_points.txt").write_text(f"[orbax_t5x.layouts]\n{''.join(lines)}")
    code = """
        from orbax_t5x import rules
        from tests.rules.test_graph import t5, toy_tree
        plain = t5.minimal()
        print(rules.infer(toy_tree(plain), t5.below("target/", t5.scanned(plain))).name)
    """
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.stdout.startswith("toy_to_t5x then "), done.stderr
    assert set(re.findall("the rule pack '(.*)' of another package is left out", done.stderr)) == {"broken", "no_pack"}
