"""Pairs of models with alike towers, of which one was changed: the truth of an alignment is known."""

import dataclasses
import random
import zlib

import numpy as np

TOWERS = [("actor", "critic"), ("left", "right"), ("student", "teacher"), ("encoder", "decoder"), ("net1", "net2")]
TOWERS += [("tower_0", "tower_1"), ("online", "target_net"), ("a", "b")]
MODULES = [
    "x",
    "q",
    "proj",
    "mix",
    "gate",
    "fog",
    "cup",
    "lin",
    "up",
    "down",
    "ff",
    "attn",
    "w1",
    "w2",
    "Dense_0",
    "fc1",
]
LAYERS = ["layers_{}", "blocks/{}", "h/{}", "block{}"]
# Names of matrices, biases and scales; and whether matrices are [out, in].
ARRAYS = [("kernel", "bias", "scale", False), ("weight", "bias", "weight", True), ("w", "b", "g", False)]
ARRAYS += [("kernel/value", "bias/value", "scale/value", False)]
EDITS = ["none", "move", "add", "drop", "deeper", "shallower", "add tower", "drop tower", "head"]


@dataclasses.dataclass
class Pair:
    """Arrays of two models by name; `new` are the leaves of the target that the source lacks."""

    edit: str
    source: dict
    target: dict
    new: set


def pair(seed):
    """Makes a pair, in which a place is a tower, the number of a layer or None, and a module."""
    rng = random.Random(seed)
    towers, depth = rng.choice(TOWERS), rng.choice([0, 1, 2, 3])
    layers = [*range(depth)] or [None]
    shapes = {
        module: (rng.choice("kbn"), rng.choice([(4, 4), (4, 6), (6, 4), (4, 9)])) for module in rng.sample(MODULES, 3)
    }
    modules = list(shapes)
    source: list[tuple] = [(tower, layer, module) for tower in towers for layer in layers for module in modules]
    origins: dict[tuple, tuple | None] = {place: place for place in source}
    edit = EDITS[seed % len(EDITS)]
    first, second = rng.sample(towers, 2)
    module = rng.choice(modules)
    if edit == "move":
        shapes["moved"] = shapes[module]
        source += (moved := [(first, layer, "moved") for layer in layers])
        origins |= {(second, *place[1:]): place for place in moved}
    elif edit == "add":
        shapes["fresh"] = shapes[module]
        origins |= {(first, layer, "fresh"): None for layer in layers}
    elif edit == "drop":
        origins = {place: old for place, old in origins.items() if place[::2] != (first, module)}
    elif edit == "deeper" and depth:
        origins |= {(first, depth, one): None for one in modules}
    elif edit == "shallower" and depth > 1:
        origins = {place: old for place, old in origins.items() if place[:2] != (first, depth - 1)}
    elif edit == "add tower":
        origins |= {("fresh", *place[1:]): None for place in source if place[0] == first}
    elif edit == "drop tower":
        origins = {place: old for place, old in origins.items() if place[0] != first}
    elif edit == "head":
        shapes["new_head"] = shapes["old_head"] = ("b", (4, 4))
        source.append((None, None, "old_head"))
        origins[None, None, "new_head"] = None
    ours, theirs = _Names(rng), _Names(rng)
    if rng.random() < 0.5:
        old = rng.choice(modules)
        theirs.words[old] = f"r{zlib.crc32(old.encode()):x}".translate(str.maketrans("0123456789", "ghijklmnop"))
    found, wanted, new = {}, {}, set()
    for place in source:
        found.update(ours.leaves(place, place, shapes[place[2]]))
    for place, old in origins.items():
        its = dict(theirs.leaves(place, old or ("new", place), shapes[place[2]]))
        wanted.update(its)
        new.update(its if old is None else ())
    return Pair(edit, _shuffled(rng, found), _shuffled(rng, wanted), new)


class _Names:
    """Words of a project for the places of its leaves."""

    def __init__(self, rng):
        self.layer, self.arrays = rng.choice(LAYERS), rng.choice(ARRAYS)
        self.prefix, self.separator = rng.choice(["", "params", "model"]), rng.choice("//.")
        self.words = {}

    def leaves(self, place, origin, look):
        (kind, shape), (tower, layer, module) = look, place
        layer = None if layer is None else self.layer.format(layer)
        path = "/".join(filter(None, (self.prefix, tower, layer, self.words.get(module, module))))
        matrix, bias, scale, is_turned = self.arrays
        parts = [(scale, shape[:1])] if kind == "n" else [(matrix, shape)]
        parts += [(bias, shape[:1] if kind == "n" else shape[1:])] if kind != "k" else []
        for at, (part, its) in enumerate(parts):
            seed = zlib.crc32(f"{origin} {at}".encode())
            value = np.random.default_rng(seed).normal(size=its).astype(np.float32)
            yield f"{path}/{part}".replace("/", self.separator), value.T if is_turned else value


def _shuffled(rng, leaves):
    items = list(leaves.items())
    rng.shuffle(items)
    return dict(items)
