"""Trees of models under other names, of which it is known which leaf is which.

A case is made of a model, random changes of its names, and the arrays under the new ones. A change is *unique* where
the new names leave one reading, by what this module finds out on its own: a word is replaced by one without meaning
only where nothing beside it has equal shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import re

import numpy as np

from tests.support import t5_layouts

WORDS = [first + last for first in "bdfgjlnprstvz" for last in ("ax", "el", "ix", "on", "ul", "ap", "em", "iro", "usk")]
USUAL = {
    "decoder": ["dec", "Decoder"],
    "encoder": ["enc", "Encoder"],
    "query": ["q", "q_proj", "query_proj"],
    "key": ["k", "k_proj", "key_proj"],
    "value": ["v", "v_proj", "value_proj"],
    "attention": ["attn", "self_attn", "SelfAttention"],
    "self_attention": ["attn", "self_attn", "SelfAttention"],
    "encoder_decoder_attention": ["cross_attn", "cross_attention", "EncDecAttention"],
    "mlp": ["ffn", "DenseReluDense", "feed_forward"],
    "wi_0": ["gate", "gate_proj"],
    "wi_1": ["up", "up_proj"],
    "wo": ["down", "down_proj"],
    "scale": ["weight", "gamma"],
    "relpos_bias": ["relative_attention_bias"],
    "token_embedder": ["shared", "embed_tokens"],
    "encoder_norm": ["final_norm", "final_layer_norm"],
    "decoder_norm": ["final_norm", "final_layer_norm"],
    "pre_attention_layer_norm": ["attn_norm"],
    "pre_self_attention_layer_norm": ["attn_norm"],
    "pre_cross_attention_layer_norm": ["cross_attn_norm"],
    "pre_mlp_layer_norm": ["ffn_norm", "pre_mlp_norm"],
}
LAYER = re.compile(r"layers_(\d+)")


def llama(layers=3, embed=6, square=True):
    """A decoder as PyTorch's projects call it; `square`: all projections of the attention have one shape."""
    inner = embed if square else 10
    shapes = {"embed_tokens/embedding": (17, embed), "norm/scale": (embed,), "lm_head/kernel": (embed, 17)}
    for i in range(layers):
        for name in ("query", "key", "value"):
            shapes[f"layers_{i}/self_attention/{name}/kernel"] = (embed, inner)
        shapes[f"layers_{i}/self_attention/out/kernel"] = (inner, embed)
        for name in ("gate", "up"):
            shapes[f"layers_{i}/mlp/{name}/kernel"] = (embed, 14)
        shapes[f"layers_{i}/mlp/down/kernel"] = (14, embed)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers_{i}/{name}/scale"] = (embed,)
    return _filled(shapes)


def vision(layers=2, embed=6):
    """A vision transformer with biases and one fused projection."""
    shapes = {"patch/kernel": (4, 4, 3, embed), "patch/bias": (embed,), "cls": (1, 1, embed), "head/kernel": (embed, 9)}
    for i in range(layers):
        block = f"layers_{i}"
        shapes |= {f"{block}/attention/qkv/kernel": (embed, 3 * embed), f"{block}/attention/qkv/bias": (3 * embed,)}
        shapes |= {f"{block}/attention/out/kernel": (embed, embed), f"{block}/attention/out/bias": (embed,)}
        shapes |= {f"{block}/mlp/wi/kernel": (embed, 20), f"{block}/mlp/wi/bias": (20,)}
        shapes |= {f"{block}/mlp/wo/kernel": (20, embed), f"{block}/mlp/wo/bias": (embed,)}
        shapes |= {f"{block}/{norm}/{kind}": (embed,) for norm in ("norm_1", "norm_2") for kind in ("scale", "bias")}
    return _filled(shapes)


def _filled(shapes):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@functools.cache
def models():
    t5 = {name: tree for name, tree in t5_layouts.models().items() if name != "prompts"}
    square = {
        name: np.resize(value, (12, 12)) + np.float32(at) if value.ndim == 2 and "attention/" in name else value
        for at, (name, value) in enumerate(t5["t5 1.1"].items())
    }
    split = t5_layouts.unscanned(t5["t5 1.1"])
    return {
        **t5,
        "square": square,
        "unscanned": split,
        "llama": llama(),
        "llama 2": llama(5, square=False),
        "vision": vision(),
    }


@dataclasses.dataclass
class Case:
    """A pair of trees.

    Attributes:
      kinds: what was done to the names.
      source, target: arrays by name; a leaf of the target has the values that a right restore gives it.
      is_unique: whether there is one reading.
    """

    kinds: tuple[str, ...]
    source: dict
    target: dict
    is_unique: bool = True


class Changes:
    """Random changes of the names of one model; `names` maps the model's own names to those by now."""

    def __init__(self, rng, tree):
        self.rng, self.tree = rng, tree
        self.values = dict(tree)
        self.names = {name: name for name in tree}
        self.unique = True
        self.lost = []

    def each(self, change):
        self.names = {name: change(new) for name, new in self.names.items()}

    def part(self, old, new):
        self.each(lambda name: "/".join(new if part == old else part for part in name.split("/")))

    def parts(self):
        return sorted({part for name in self.names.values() for part in name.split("/")})

    def usual(self):
        """Words for words of one meaning, each with one probability."""
        for old in self.rng.sample(sorted(USUAL), 9):
            new = self.rng.choice(USUAL[old])
            if not any(new.split("/")[0] == part for part in self.parts()):
                self.part(old, new)

    def meaningless(self, count=3):
        """Words without meaning for those that shapes and structure tell."""
        tree = nested({self.names[name]: value.shape for name, value in self.values.items()})
        nodes = [(node, _looks(node)) for node in _nodes(tree)]
        told = [part for part in self.parts() if self.is_told(part, nodes)]
        for old in self.rng.sample(told, min(count, len(told))):
            self.part(old, self.word())

    def is_told(self, part, nodes):
        """Whether nothing that looks alike is beside the part, wherever it is."""
        if any(letter.isdigit() for letter in part):
            return False
        if part == "qkv":  # by heads or in turn: only its name shows the arrangement
            return False
        # A module of few leaves beside the towers may be new where the others kept their names.
        if sum(re.search(rf"(^|/){part}(/|$)", name) is not None for name in self.names.values()) < 4:
            return False
        return all(list(looks.values()).count(looks[part]) == 1 for node, looks in nodes if part in node)

    def word(self):
        parts = " ".join(self.parts())
        return self.rng.choice([word for word in WORDS if word not in parts])

    def prefix(self):
        prefix = self.rng.choice(["params", "params/params", "model", "target", "module/net", self.word()])
        self.each(lambda name: f"{prefix}/{name}")

    def value(self):
        self.each(lambda name: f"{name}/value")

    def layers(self):
        """Layers numbered in another way."""
        word = self.rng.choice(["layers", "block", "h", "layer", self.word()])
        start = self.rng.choice([0, 0, 1])
        form = self.rng.choice(["{w}/{i}", "{w}_{i}", "{w}{i}", "{w}_{i:02d}", "{w}-{i}"])
        self.each(lambda name: LAYER.sub(lambda match: form.format(w=word, i=int(match[1]) + start), name))

    def nest(self):
        """One module more around one of them."""
        part, word = self.rng.choice([part for part in self.parts() if not part[-1].isdigit()]), self.word()
        order = (word, part) if self.rng.random() < 0.5 else (part, word)
        self.part(part, "/".join(order))

    def separator(self):
        new = self.rng.choice([".", ".", "_", "__", ":"])
        self.each(lambda name: name.replace("/", new))

    def letters(self):
        """Layers that letters name."""
        self.each(lambda name: LAYER.sub(lambda match: "layer_" + "qwertzuiop"[int(match[1])], name))
        self.unique = not any(LAYER.search(name) for name in self.tree)

    def ambiguous(self):
        """Words without meaning for projections of one shape."""
        words = [word for word in ("query", "key", "value", "gate", "up") if word in self.parts()]
        if not words:
            return
        for old in words:
            self.part(old, self.word())
        self.unique = False

    def torch(self):
        """Matrices of PyTorch."""
        self.values = {n: v.T if n.endswith("/kernel") and v.ndim == 2 else v for n, v in self.values.items()}
        for old in ("kernel", "scale", "embedding"):
            self.part(old, "weight")

    def stacked(self, axis):
        """Layers on an axis; the names of all are those of the first without its number."""
        towers = {}
        for name in [name for name in self.tree if LAYER.search(name)]:
            towers.setdefault(LAYER.sub("layers", name, count=1), []).append(name)
        if any(axis > self.values[names[0]].ndim for names in towers.values()):
            return False
        result = {n: v for n, v in self.values.items() if not LAYER.search(n)}
        result |= {n: np.stack([self.values[name] for name in names], axis) for n, names in towers.items()}
        self.values, self.names = result, {name: name for name in result}
        return True

    def missing(self):
        """A module of the model that the other side lacks, in all layers, or a single leaf."""
        kinds = sorted({re.sub(r"\d+", "#", name) for name in self.tree})
        gone = self.rng.sample(kinds, self.rng.choice([1, 1, 2]))
        alone = self.rng.random() < 0.3
        self.lost = [name for name in self.tree if re.sub(r"\d+", "#", name) in gone]
        self.lost = self.lost[:1] if alone else self.lost
        self.unique = False

    def result(self):
        leaves = [(self.names[name], value) for name, value in self.values.items()]
        self.rng.shuffle(leaves)
        return dict(leaves)


def nested(flat):
    tree = {}
    for name, value in flat.items():
        *path, last = re.sub(r"[_]?(\d+)(?=/|$)", r"/#\1", name).replace("//", "/").split("/")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def _nodes(tree):
    if isinstance(tree, dict):
        yield tree
        for child in tree.values():
            yield from _nodes(child)


def _look(tree):
    """A text that is equal for trees of equal shapes, whatever their names and the modules around them."""
    return str(sorted(_shapes(tree), key=str))


def _shapes(tree):
    return [shape for child in tree.values() for shape in _shapes(child)] if isinstance(tree, dict) else [tree]


def _looks(node):
    return {part: _look(child) for part, child in node.items()}


# Changes of one kind, and several at once.
KINDS = {
    "usual words": ["usual"],
    "words without meaning": ["meaningless"],
    "prefix": ["prefix"],
    "value": ["value"],
    "numbering": ["layers"],
    "nesting": ["nest"],
    "separator": ["separator"],
    "usual words, numbering, prefix": ["usual", "layers", "prefix"],
    "words, nesting, value": ["meaningless", "nest", "value"],
    "words, numbering, separator": ["meaningless", "layers", "separator"],
    "everything": ["usual", "meaningless", "layers", "nest", "prefix", "value"],
    "transposed": ["torch"],
    "transposed, numbering, separator": ["torch", "layers", "separator"],
    "stacked": ["stacked"],
    "stacked, words, prefix": ["stacked", "usual", "prefix"],
    "letters for layers": ["letters"],
    "leaves that one side lacks": ["missing", "prefix"],
    "words, leaves that one side lacks": ["missing", "meaningless", "layers"],
    "usual words, leaves that one side lacks": ["missing", "usual", "value"],
    "words for all, leaves that one side lacks": ["missing", "ambiguous", "usual", "meaningless"],
    "stacked, leaves that one side lacks": ["stacked", "missing", "usual"],
    "transposed, leaves that one side lacks": ["torch", "missing", "separator"],
    "projections without meaning": ["ambiguous"],
    "projections without meaning, prefix": ["ambiguous", "prefix", "layers"],
}


def case(seed, kind=None):
    """Makes one case; every other one leads back."""
    rng = random.Random(seed)
    trees = models()
    kind = kind or rng.choice(list(KINDS))
    model = rng.choice(list(trees))
    changes = Changes(rng, trees[model])
    plain = dict(trees[model])
    for step in KINDS[kind]:
        if step == "stacked":
            if not changes.stacked(rng.choice([0, 1])):
                changes.stacked(0)
            continue
        getattr(changes, step)()
    source, target = plain, changes.result()
    # One side lacks leaves: of the other one these are not to be found.
    for name in changes.lost:
        del source[name]
    if rng.random() < 0.5:
        source, target = target, source
    return Case((kind, model), source, target, changes.unique)
