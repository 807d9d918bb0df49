"""A plan as data: complete, with nothing folded."""

import json


def test_json_says_everything(t5_plan):
    said = json.loads(json.dumps(t5_plan.to_json()))
    entries = {entry["name"]: entry for entry in said["entries"]}
    assert set(entries) == {entry.name for entry in t5_plan.entries}
    assert entries["layers/layers_3/query"] | {"rule": ""} == {
        "name": "layers/layers_3/query",
        "action": "read",
        "fidelity": "",
        "sources": ["encoder/block_003/q"],
        "how": "",
        "rule": "",
        "shape": [8, 16],
        "dtype": "float32",
        "kind": "jax",
        "sharding": {
            "type": "NamedSharding",
            "devices": 8,
            "memory_kind": entries["layers/layers_3/query"]["sharding"]["memory_kind"],
            "spec": [None, "model"],
            "mesh": {"data": 2, "model": 4},
        },
        "bytes": 512,
        "why": None,
    }
    assert entries["kept"]["dtype"] is None and entries["kept"]["action"] == "keep"
    assert said["unused"] == ["left/over"] and said["dropped"] == ["gone"]
    assert said["sources"] == {"": {"path": "/memory", "format": "orbax", "step": None}}
