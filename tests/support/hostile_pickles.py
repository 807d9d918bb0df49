"""Pickles that would call something if they were loaded, made at random: a hostile part at a random place."""

from __future__ import annotations

import random
import struct
from typing import Any, NamedTuple

from tests.support.torch_files import Op, SavedTensor, call, name, opcodes

# What such pickles call: each would leave a file called `executed`, or is a way to something that would.
_GLOBALS = (
    *(("os", "system"), ("posix", "system"), ("nt", "system"), ("subprocess", "Popen"), ("builtins", "eval")),
    *(("builtins", "exec"), ("__builtin__", "eval"), ("builtins", "getattr"), ("builtins", "open"), ("torch", "load")),
    *(("torch", "os.system"), ("torch.storage", "UntypedStorage.from_file"), ("torch._utils", "importlib")),
    *(
        ("collections", "OrderedDict.fromkeys"),
        ("collections", "namedtuple"),
        ("torch.hub", "load"),
        ("importlib", "x"),
    ),
    *(("torch", "FloatStorage\0"), ("torch", "FlоatStorage"), ("ｔorch", "FloatStorage"), ("", "eval"), ("torch", "")),
    *(("_codecs", "encode"), ("copyreg", "_reconstructor"), ("torch.nn.modules.linear", "Linear"), ("numpy", "load")),
    *(("torch._utils", "_rebuild_tensor_v2 "), (" torch", "Size"), ("torch", "Storage"), ("x" * 300, "y")),
    ("torch.jit._pickle", "build_intlist"),
)
_COMMAND = "touch executed"


class HostilePickle(NamedTuple):
    """A pickle, and whether its hostile part calls (UnsafeCheckpointError) or only takes too much (another error)."""

    data: bytes
    calls: bool


def hostile_pickle(seed: int) -> HostilePickle:
    """Makes one; the same for the same seed."""
    generator = random.Random(seed)
    calls = generator.random() < 0.8
    part = _calling(generator) if calls else _bomb(generator)
    data = b"\x80" + bytes([generator.choice((2, 2, 2, 3, 4, 5))]) + opcodes(_hidden(part, generator)) + b"."
    return HostilePickle(data, calls)


def _calling(generator: random.Random) -> Op:
    module, text = generator.choice(_GLOBALS)
    named = name(module, text)
    if generator.random() < 0.3 and "\n" not in module + text:
        named = Op(opcodes(module) + opcodes(text) + b"\x93")
    arguments = generator.choice(((_COMMAND,), (), ("__import__('os').system('touch executed')",), (None, {}, [1])))
    safe = name("torch", "FloatStorage")
    ways = (
        named,
        call(named, *arguments),
        Op(named + opcodes(arguments) + b"\x81"),
        Op(named + opcodes(arguments) + b"}\x92"),
        Op(b"(S'touch executed'\nios\nsystem\n"),
        Op(b"(" + named + opcodes(_COMMAND) + b"o"),
        Op(b"(" + safe + b"o"),
        Op(b"\x82\x01"),
        Op(b"\x83\x01\x00"),
        Op(b"\x84\x01\x00\x00\x00"),
        Op(b"Pos.system\n"),
        Op(opcodes(generator.choice(("os.system", ("module", "os", "0", "cpu", 1), ("storage", 1), 7))) + b"Q"),
        call(safe, 3),
        call(Op(opcodes({})), _COMMAND),
        Op(opcodes({}) + opcodes({"__reduce__": _COMMAND}) + b"b"),
        Op(call(name("torch", "Size"), (1,)) + opcodes({"__setstate__": 1}) + b"b"),
        Op(opcodes(SavedTensor("0", "float32", 1, 0, (1,), (1,))) + opcodes({"data": 1}) + b"b"),
    )
    return generator.choice(ways)


def _bomb(generator: random.Random) -> Op:
    many = generator.choice((1_000, 20_000, 200_000))
    ways = (
        Op(b"(" * many),
        Op(b"N" + b"q\x00" * many + b"N" * many),
        Op(b"N2" * many),
        Op(b"]" * many),
        Op(b"}" * (many // 4) + b"N" * many),
        Op(b")" + b"\x85" * many + b"0"),
        Op(b"\x8b" + struct.pack("<i", generator.choice((2**31 - 1, -1, 2**20)))),
        Op(b"X" + struct.pack("<I", 2**32 - 1)),
        Op(b"\x8d" + struct.pack("<Q", generator.choice((2**63, 2**62, 2**32)))),
        Op(b"\x95" + struct.pack("<Q", 2**40)),
        Op(b"Nr\xff\xff\xff\xff"),
        Op(b"j\xff\xff\xff\xff"),
        Op(b"00000"),
        Op(b"tttt"),
        Op(b"(NNN"),
        Op(b"N" + b"Na" * 3),
        Op(b"]" + b"(NNu"),
        Op(b"\x80\x09"),
        Op(b"h\xff"),
        Op(b"\xff"),
    )
    return generator.choice(ways)


def _hidden(part: Op, generator: random.Random) -> Any:
    """A tree with the part somewhere in it."""
    value: Any = part
    for _ in range(generator.randrange(5)):
        beside = generator.choice((1, None, "text", 2.5, SavedTensor("0", "float32", 6, 0, (2, 3), (3, 1)), {}))
        value = generator.choice(([beside, value], {"a": beside, "b": value}, (value, beside), {"model": value}))
    return value
