"""`python -m benchmarks.scale [--plots DIR]`: what a restore of T5-XXL and of a 540B tree takes on 8, 64 and 512 hosts.

A model (`scale_model.py`), not a measurement. Its costs were measured on one machine (`scale_measured.json`, made by
`python -m benchmarks.scale_measure`); stores and hosts are assumptions, printed with the tables. The last table
compares the model with the restores that were measured there, by 1, 2 and 4 processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.data import layer_shapes
from benchmarks.scale_measure import MEASURED
from benchmarks.scale_model import Case, Costs, Format, Host, Layout, Leaf, Prediction, Store, Tree, predict
from tests.support.sparse_checkpoints import t5_xxl

_HOSTS = (8, 64, 512)
_GIB = 1 << 30
# A host of a TPU v4 pod: 4 chips of 32 GiB. Its processors decode; its network is that of the data centre.
_HOST = Host(devices=4, device_bytes=32 * _GIB, cores=64, network=6e9, transfer=20e9)
_STORES = (
    Store("local disk", 2e9, math.inf, 1e-4, 64, math.inf, 16 << 20),
    Store("NFS", 1e9, 2.5e9, 1e-3, 16, 2e5, 1 << 20),
    Store("bucket", 3e9, 2e11, 30e-3, 512, 2e4, 2 << 20),
)
_FORMATS = (
    Format("bundle", None, 2, 0),
    # T5X wrote a chunk for each partition of its model-parallel training, and reads its metadata array by array.
    Format("t5x", 16, 3, 2),
    # Written by 64 hosts that held rows; a node of its database has the metadata of some arrays.
    Format("orbax", 64, 4, 0.2),
)
_LAYOUTS = (
    Layout("rows over all", None),
    Layout("model 16, replicated", 16, columns=True),
)


def _adafactor(shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    slots = []
    for shape in shapes:
        slots += [shape[:1], shape[1:]] if len(shape) == 2 else [shape]
    return shapes + slots


def _tree(name: str, shapes: list[tuple[int, ...]]) -> Tree:
    return Tree(name, tuple(Leaf(shape, count) for shape, count in Counter(shapes).items()))


def t5_xxl_tree() -> Tree:
    """T5.1.1-XXL: 11 billion parameters."""
    return _tree("T5-XXL", [shape for _, shape in t5_xxl().values()])


def palm_tree() -> Tree:
    """540 billion parameters: 118 layers of width 18,432, gated feed-forward of 73,728, one head of keys."""
    width, hidden, heads, head, layers, vocabulary = 18432, 73728, 48, 256, 118, 256000
    layer: list[tuple[int, ...]] = [(width, hidden)] * 2 + [(hidden, width)]
    layer += [(width, heads * head), (width, head), (width, head), (heads * head, width), (width,)]
    return _tree("540B", _adafactor([(vocabulary, width), (width,), *layer * layers]))


def cases() -> Iterator[Case]:
    """All of them."""
    for tree in (t5_xxl_tree(), palm_tree()):
        for layout in _LAYOUTS:
            for format_ in _FORMATS:
                for store in _STORES:
                    for hosts in _HOSTS:
                        yield Case(tree, format_, layout, store, _HOST, hosts)
                        if layout.ways is not None:
                            yield Case(tree, format_, layout, store, _HOST, hosts, broadcast=True)


def size(count: float) -> str:
    """A number of bytes or requests for people."""
    for unit, divisor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= divisor:
            return f"{count / divisor:.3g} {unit}"
    return f"{count:.0f} "


def row(case: Case, found: Prediction) -> str:
    """One line of a table."""
    cells = [
        case.store.name,
        f"{case.hosts}",
        "yes" if case.broadcast else "",
        "" if found.fits else "shards do not fit",
        f"{size(found.host_bytes)}B",
        f"{size(found.all_bytes)}B",
        size(found.host_requests).strip(),
        f"{found.first:.2g} s",
        f"{found.last:.3g} s",
        f"{found.host_memory / (1 << 20):.0f} MiB",
        found.bottleneck,
    ]
    return "| " + " | ".join(cells) + " |"


_HEADINGS = (
    *("store", "hosts", "broadcast", "", "read by a host", "by all", "requests of a host"),
    *("first shard", "last shard", "host memory", "what takes longest"),
)


def print_tables(costs: Costs) -> None:
    """The predictions, one table for each tree, layout and format."""
    title = None
    for case in cases():
        now = f"{case.tree.name}, {case.tree.nbytes / 1e9:,.0f} GB in {case.tree.count:,} leaves: "
        now += f"{case.format.name}, {case.layout.name}"
        if now != title:
            title = now
            print(f"\n## {title}\n\n| {' | '.join(_HEADINGS)} |\n{'|---' * len(_HEADINGS)}|")
        print(row(case, predict(case, costs)))


def print_assumptions(costs: Costs, measured: dict[str, Any]) -> None:
    """What the tables rest on."""
    print("# A model of restores on many hosts\n\nAssumed:\n")
    print(
        f"- a host: {_HOST.devices} devices of {_HOST.device_bytes / _GIB:.0f} GiB, {_HOST.cores} cores, "
        f"{_HOST.network / 1e9:.0f} GB/s to other hosts, {_HOST.transfer / 1e9:.0f} GB/s to its devices, "
        f"memory_limit_bytes {_HOST.memory_limit >> 20} MiB"
    )
    for store in _STORES:
        print(
            f"- {store.name}: {store.host_rate / 1e9:g} GB/s for a host, {store.rate / 1e9:g} GB/s in all, "
            f"{store.latency * 1e3:g} ms, {store.in_flight} requests of a host at once, "
            f"{store.request_rate:g} requests a second in all, at most {store.piece >> 20} MiB each"
        )
    for layout in _FORMATS:
        stored = "byte ranges" if layout.chunk_ways is None else f"{layout.chunk_ways} chunks of rows for each array"
        print(f"- {layout.name}: {stored}")
    print(f"\nMeasured, {measured['cores']} cores, load {measured['load']:.1f}:\n")
    for key, value in dataclasses.asdict(costs).items():
        print(f"- {key}: {json.dumps(value)}")


def print_check(costs: Costs, measured: dict[str, Any]) -> None:
    """The model beside what was measured."""
    tree = _tree("24 layers", list(layer_shapes(24).values()))
    cores = measured["cores"]
    rate = measured["floor_bytes_per_second"]
    print(
        "\n## The model beside measured restores: 24 layers, 1 GB, 8 devices of the CPU\n\n"
        "| format | layout | processes | bytes of all: model / measured | seconds: model | measured | ratio |\n"
        "|---|---|---|---|---|---|---|"
    )
    formats = {"bundle": _FORMATS[0], "orbax": Format("orbax", 1, 4, 0), "t5x": Format("t5x", 1, 3, 0)}
    for name, figures in measured["cases"].items():
        format_, layout, count = name.split()
        processes = int(count)
        host = Host(8 // processes, 1 << 40, max(1, cores // processes), math.inf, math.inf)
        store = Store("page cache", rate * cores, rate * cores, 0.0, 64, math.inf, 16 << 20)
        case = Case(tree, formats[format_], Layout(layout, None, layout == "columns"), store, host, processes)
        warm = dataclasses.replace(costs, start=0.0)
        found = predict(case, warm)
        # The processes share the cores of one machine.
        seconds = found.last
        wanted = tree.nbytes if format_ != "bundle" else found.all_bytes  # of chunks the elements are counted
        print(
            f"| {format_} | {layout} | {processes} | {wanted / figures['bytes']:.2f} | {seconds:.2f} "
            f"| {figures['seconds']:.2f} | {seconds / figures['seconds']:.2f} |"
        )


def plot(costs: Costs, folder: Path) -> None:
    """Seconds to the last shard over hosts, one picture for each tree, as SVG."""
    import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]  # (only plots need it)

    folder.mkdir(parents=True, exist_ok=True)
    plt.rcParams["svg.hashsalt"] = "scale"  # the same file for the same figures
    for tree in (t5_xxl_tree(), palm_tree()):
        figure, axes = plt.subplots(1, len(_LAYOUTS) + 1, figsize=(13, 4), sharey=True)
        panels = [(layout, False) for layout in _LAYOUTS] + [(_LAYOUTS[-1], True)]
        for axis, (layout, broadcast) in zip(axes, panels, strict=True):
            for colour, store in zip(("tab:blue", "tab:orange", "tab:green"), _STORES, strict=True):
                for style, format_ in zip(("-", ":", "--"), _FORMATS, strict=True):
                    found = [
                        predict(Case(tree, format_, layout, store, _HOST, hosts, broadcast), costs) for hosts in _HOSTS
                    ]
                    label = f"{store.name}, {format_.name}"
                    axis.plot(_HOSTS, [one.last for one in found], style, color=colour, marker="o", label=label)
            axis.set(xscale="log", yscale="log", xlabel="hosts", xticks=_HOSTS, xticklabels=_HOSTS)
            axis.set_title(layout.name + (", broadcast=True" if broadcast else ""), fontsize=10)
            axis.grid(visible=True, which="major", alpha=0.3)
        axes[0].set_ylabel("seconds to the last shard (model)")
        axes[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1))
        figure.suptitle(f"{tree.name}, {tree.nbytes / 1e9:,.0f} GB")
        figure.tight_layout()
        figure.savefig(folder / f"scale-{tree.name.lower()}.svg", metadata={"Date": None})


def main() -> None:
    """Parses the command line and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plots", type=Path, help="where to write pictures; needs matplotlib")
    options = parser.parse_args()
    measured = json.loads(MEASURED.read_text())
    costs = Costs(**measured["costs"])
    print_assumptions(costs, measured)
    print_tables(costs)
    print_check(costs, measured)
    if options.plots is not None:
        plot(costs, options.plots)


if __name__ == "__main__":
    main()
