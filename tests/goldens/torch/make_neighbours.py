"""Writes `neighbours.pt`: `python make_neighbours.py`, in an environment with torch."""

from __future__ import annotations

import argparse
import collections
import datetime
import pathlib
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn

HERE = Path(__file__).parent
ONES = torch.ones(2)


def neighbours() -> dict[str, object]:
    """What `torch.load(weights_only=True)` takes beside tensors, and what it refuses."""
    parameter, attribute = nn.Parameter(torch.arange(2.0)), torch.arange(3.0)
    parameter.tensor_model_parallel, attribute.note = True, "x"
    return {
        "set": {1, 2},
        "complex": 1 + 2j,
        "bytes": b"x\xff",
        "bytearray": bytearray(b"ab"),
        "counter": collections.Counter("aab"),
        "layout": torch.strided,
        "buffer": nn.Buffer(torch.arange(4.0)),
        "parameter": parameter,
        "attribute": attribute,
        "quantized": torch.quantize_per_tensor(ONES, 0.1, 0, torch.qint8),
        "channels": torch.quantize_per_channel(torch.ones(2, 3), ONES, torch.zeros(2).long(), 0, torch.qint8),
        "sparse": torch.eye(2).to_sparse(),
        "csr": torch.eye(2).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([ONES, torch.ones(3)]),
        "jagged": torch.nested.nested_tensor([ONES, torch.ones(3)], layout=torch.jagged),
        "meta": torch.ones(2, device="meta"),
        "namespace": argparse.Namespace(a=1, b=ONES),
        "numpy scalar": np.float64(1.5),
        "numpy array": np.arange(3),
        "path": pathlib.PurePosixPath("a/b"),
        "date": datetime.datetime(2020, 1, 1),
        "defaultdict": collections.defaultdict(list, {"a": [1]}),
        "range": range(3),
        "keys": {(1, 2): ONES, 0.5: ONES, "named": ONES},
    }


def main() -> None:
    warnings.simplefilter("ignore")
    torch.save({"w": torch.arange(6.0).reshape(2, 3), **neighbours()}, HERE / "neighbours.pt")


if __name__ == "__main__":
    main()
