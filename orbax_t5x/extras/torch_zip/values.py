"""Values in a PyTorch file's pickle, and its stack: data only.

Operations are bounded by the bytes of the pickle, objects by `Limits.entries`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeAlias

import ml_dtypes
import numpy as np

from orbax_t5x.errors import CorruptCheckpointError, Fix, UnsafeCheckpointError
from orbax_t5x.files.interface import StoredFile

STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        **{"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64"},
        **{"Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"},
        **{"ComplexFloat": "complex64", "ComplexDouble": "complex128"},
    }.items()
} | {"torch.storage.UntypedStorage": None, "torch.storage._UntypedStorage": None}
# Of quantized tensors: what an element takes.
_QUANTIZED = {"qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1}
WITHOUT_NUMPY = ("complex32", "float4_e2m1fn_x2", *_QUANTIZED)
"""Of which NumPy has no type."""
STORAGES |= {
    f"torch.{name}Storage": dtype
    for name, dtype in zip(("QInt8", "QUInt8", "QInt32", "QUInt4x2", "QUInt2x4"), _QUANTIZED, strict=True)
}
_SIGNED = ("int8", "int16", "int32", "int64", "float16", "float32", "float64", "bfloat16", "complex64", "complex128")
_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
DTYPES = {
    f"torch.{name}"
    for name in ("bool", "uint8", "uint16", "uint32", "uint64", *_SIGNED, *_FLOAT8, "complex32", "float4_e2m1fn_x2")
}


def itemsize_of(dtype: str | None) -> int:
    """Returns the bytes of a storage's element."""
    return 1 if dtype is None else _QUANTIZED.get(dtype) or np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize


class Tuple(list[Any]):
    """A tuple of the pickle, as a list."""

    __slots__ = ()


class OrderedNode(dict[str, Any]):
    """An OrderedDict of the pickle."""

    __slots__ = ()


class Name(NamedTuple):
    """A name on the list, such as "torch.FloatStorage"; nothing was imported."""

    text: str


class Opaque(NamedTuple):
    """Unread object."""

    what: str
    advice: str = ""


class StorageNode(NamedTuple):
    """Storage; without a dtype it counts bytes."""

    dtype: str | None
    key: str
    elements: int


class TensorNode(NamedTuple):
    """Tensor as its pickle describes it, not checked yet."""

    storage: StorageNode
    offset: Any
    shape: Any
    strides: Any
    dtype: str | None
    metadata: Any


Scalar: TypeAlias = str | bytes | bool | int | float | complex | None
Node: TypeAlias = "dict[str, Node] | list[Node] | TensorNode | StorageNode | Name | Opaque | Scalar"


def describe_value(value: Any) -> str:
    """Describes a value of the pickle for an error."""
    if isinstance(value, Name):
        return repr(value.text)
    if isinstance(value, Opaque):
        return value.what
    names = {Tuple: "a tuple", OrderedNode: "an OrderedDict", TensorNode: "a tensor", StorageNode: "a storage"}
    return names.get(type(value), f"a {type(value).__name__}")


# -- what names on the list describe: functions of data, that raise TypeError or ValueError


def _ordered_dict(items: Any = ()) -> OrderedNode:
    """Makes an OrderedDict; Python 2 wrote its items as arguments."""
    for item in items:
        if type(item) not in (list, Tuple) or len(item) != 2 or type(item[0]) not in (str, int):
            raise TypeError
    made = OrderedNode((str(key), value) for key, value in items)
    if len(made) != len(items):
        raise ValueError
    return made


def _tensor_v2(storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, metadata: Any = None) -> Any:
    if not isinstance(storage, StorageNode) or storage.dtype is None:
        raise TypeError
    return TensorNode(storage, offset, shape, strides, storage.dtype, metadata)


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> Any:
    if not isinstance(storage, StorageNode) or not isinstance(dtype, Name) or dtype.text not in DTYPES:
        raise TypeError
    return TensorNode(storage, offset, shape, strides, dtype.text.removeprefix("torch."), metadata)


def _parameter(tensor: Any, grad: Any, hooks: Any) -> Any:
    if not isinstance(tensor, TensorNode):
        raise TypeError
    return tensor


def _torch_size(sizes: Any) -> Any:
    if type(sizes) is not Tuple:
        raise TypeError
    return sizes


def _device(kind: Any, index: Any = None) -> str:
    if not isinstance(kind, str) or type(index) not in (int, type(None)):
        raise TypeError
    return kind if index is None else f"{kind}:{index}"


def _from_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    if type(arguments) is not Tuple:
        raise TypeError
    if isinstance(function, Opaque):
        return function
    if not isinstance(function, Name) or function.text not in CALLS or not isinstance(kind, Opaque):
        raise TypeError
    # The numbers of a class of its own may mean anything; the attributes of a tensor (Megatron's) change none.
    if kind not in _PLAIN_TENSORS:
        return Opaque(f"a tensor of another class, {kind.what}", "tensor.as_subclass(torch.Tensor)")
    return CALLS[function.text](*arguments)


def _encoded(text: Any, encoding: Any) -> Any:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise TypeError
    return text.encode(encoding)


def _bytes(value: Any = b"", encoding: Any = None) -> Any:
    if not isinstance(value, bytes):
        return _encoded(value, encoding)
    return value


def _complex(real: Any, imaginary: Any) -> complex:
    return complex(float(real), float(imaginary))


def _counter(counts: Any = None) -> Any:
    if counts is not None and not isinstance(counts, dict):
        raise TypeError
    return OrderedNode() if counts is None else counts


def _layout(name: Any) -> Any:
    if not isinstance(name, str):
        raise TypeError
    return name


_TENSORS = {
    "torch._utils._rebuild_sparse_tensor": ("a sparse tensor", "tensor.to_dense()"),
    "torch._utils._rebuild_sparse_csr_tensor": ("a sparse tensor", "tensor.to_dense()"),
    "torch._utils._rebuild_qtensor": ("a quantized tensor", "tensor.dequantize()"),
    "torch._utils._rebuild_nested_tensor": ("a nested tensor", "tensor.unbind()"),
    "torch.nested._internal.nested_tensor._rebuild_njt": ("a nested tensor", "tensor.unbind()"),
    "torch._utils._rebuild_meta_tensor_no_storage": ("a tensor without values, of the meta device", ""),
}


def named_object(text: str) -> Opaque:
    """Returns the placeholder of a name that is not on the list."""
    what, advice = _TENSORS.get(text, (f"an object of {text!r}", ""))
    return Opaque(what, advice)


_PLAIN_TENSORS = [named_object(f"torch.{name}") for name in ("Tensor", "nn.parameter.Parameter", "nn.parameter.Buffer")]
CALLS: dict[str, Callable[..., Any]] = {
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch._utils._rebuild_parameter_with_state": lambda tensor, grad, hooks, state: _parameter(tensor, grad, hooks),
    "torch.serialization._get_layout": _layout,
    "collections.Counter": _counter,
    "collections.defaultdict": lambda factory=None, items=None: _counter(items),
    "_codecs.encode": _encoded,
    **{
        f"{module}.{kind.__name__}": made
        for module in ("builtins", "__builtin__")
        for kind, made in ((bytes, _bytes), (bytearray, _bytes), (complex, _complex))
    },
    "collections.OrderedDict": _ordered_dict,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.Size": _torch_size,
    "torch.device": _device,
}


_FIX = Fix("in PyTorch, save only tensors: torch.save(model.state_dict(), path), or write safetensors")


class PickleStack:
    """Stack and memo of a pickle, which gives bytes in order."""

    def __init__(self, data: bytes, file: StoredFile):
        self._data = data
        self._path = file.path
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._limits = file.limits
        self._objects = 0

    # -- errors

    def _corrupt(self, message: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(message, path=self._path)

    def _unsafe(self, what: str) -> UnsafeCheckpointError:
        return UnsafeCheckpointError(f"its pickle {what}; nothing was imported or called", path=self._path, fix=_FIX)

    def refuse(self, name: str) -> NoReturn:
        """Refuses an opcode that makes objects."""
        raise self._unsafe(f"has the opcode {name}")

    # -- the stack

    def take(self, size: int) -> bytes:
        """Takes the next bytes."""
        end = self._at + size
        if size < 0 or end > len(self._data):
            raise self._corrupt(f"its pickle claims {size} bytes at {self._at}, and has {len(self._data)} in all")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def byte(self) -> int:
        """Takes the next byte."""
        if self._at >= len(self._data):
            raise self._corrupt("its pickle ends within an opcode")
        self._at += 1
        return self._data[self._at - 1]

    def number(self, code: str) -> int:
        """Takes the next number, in the format of `struct`."""
        (value,) = struct.unpack(code, self.take(struct.calcsize(code)))
        return value

    def push(self, value: Any) -> None:
        """Pushes a value that takes no memory of its own."""
        self._stack.append(value)

    def make(self, value: Any, size: int = 1) -> None:
        """Pushes a new object with its cost."""
        self._objects += size
        if self._objects > self._limits.entries:
            self._limits.require_entries(self._objects, self._path)
        self._stack.append(value)

    def pop(self) -> Any:
        """Pops a value above the last mark."""
        self.top()
        return self._stack.pop()

    def top(self) -> Any:
        """Returns the value on top, above the last mark."""
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise self._corrupt(f"its pickle takes a value at byte {self._at - 1} where there is none")
        return self._stack[-1]

    def mark(self) -> None:
        """Marks the stack."""
        self._marks.append(len(self._stack))

    def pop_mark(self) -> list[Any]:
        """Pops all above the last mark, and the mark."""
        if not self._marks:
            raise self._corrupt(f"its pickle takes a mark at byte {self._at - 1} where there is none")
        first = self._marks.pop()
        values = self._stack[first:]
        del self._stack[first:]
        return values

    # -- the memo

    def put(self, index: int) -> None:
        """Remembers the value on top; Python's picklers number them in order."""
        value = self.top()
        if index == len(self._memo):
            self._memo.append(value)
        elif index < len(self._memo):
            self._memo[index] = value
        else:
            raise self._corrupt(f"its pickle remembers a value as {index} after {len(self._memo)} others")

    def put_next(self) -> None:
        """Remembers the value on top under the next number."""
        self.put(len(self._memo))

    def get(self, index: int) -> None:
        """Pushes a value that was remembered."""
        if index >= len(self._memo):
            raise self._corrupt(f"its pickle takes the value {index}, and remembered {len(self._memo)}")
        self._stack.append(self._memo[index])
