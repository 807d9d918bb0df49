"""Every hostile or damaged input that is known, by number, beside the tests that hold it.

The numbers are those of the list of hostile inputs; the comments of the tests use them, too. What is checked here is
that each number has a test, that the test is there, and that nobody has let it off.
"""

import ast
import functools
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_t5x as ot

TESTS = Path(__file__).parents[1]

# The short names of the modules below.
FILES = {
    "checksums": "handlers/type_handlers/test_checksums.py",
    "flax_msgpack": "readers/flax_msgpack/test_*.py",
    "orbax": "readers/orbax/test_*.py",
    "safetensors": "readers/safetensors/test_*.py",
    "t5x": "readers/t5x/test_*.py",
    "tf_bundle": "readers/tf_bundle/test_*.py",
    "torch_zip": "extras/torch_zip/test_*.py",
    "npz": "extras/npz/test_*.py",
    "gguf": "extras/gguf/test_*.py",
    "zip_members": "readers/test_zip_members.py",
    "tensorstore_leaf": "readers/test_tensorstore_leaf.py",
    "formats": "readers/test_formats.py",
    "detection": "readers/test_[df]*.py",
    "bounded_parsing": "robustness/test_bounded_parsing.py",
    "files_changed_while_open": "robustness/test_files_changed_while_open.py",
    "deep_names": "robustness/test_deep_names.py",
    "hostile_catalogue": "robustness/test_hostile_catalogue.py",
    "memory_claims": "robustness/test_memory_claims.py",
}

# Number -> (what it is, the tests). A test is `module:function`: a key of FILES, and a function without its `test_`.
CATALOGUE: dict[str, tuple[str, tuple[str, ...]]] = {
    # TensorFlow bundles
    "1.1.1": ("index empty, short, without magic", ("tf_bundle:what_is_no_table",)),
    "1.1.2": ("index cut", ("tf_bundle:every_cut_is_refused", "tf_bundle:a_middle_that_is_missing")),
    "1.1.3": ("a bit flipped in a block", ("tf_bundle:a_flipped_bit_in_a_block_is_refused",)),
    "1.1.4": (
        "block handles beyond the end, over the footer",
        ("tf_bundle:handles_of_the_footer_that_lead_nowhere", "tf_bundle:a_block_that_overlaps_the_footer"),
    ),
    "1.1.5": ("blocks in circles, twice, out of order", ("tf_bundle:handles_that_overlap_or_lead_nowhere",)),
    "1.1.6": ("varints, key lengths and restarts that lie", ("tf_bundle:blocks_that_lie_about_their_entries",)),
    "1.1.7": ("snappy that lies, bombs", ("tf_bundle:snappy_that_lies", "tf_bundle:a_bomb_stops_at_the_limit")),
    "1.1.8": ("unknown compression of a block", ("tf_bundle:other_compressions_are_named",)),
    "1.1.9": ("header missing, counts and versions", ("tf_bundle:headers",)),
    "1.1.10": ("byte order", ("tf_bundle:headers", "tf_bundle:layout_changes_no_value")),
    "1.1.11": ("entries that are none, deep messages", ("tf_bundle:entries_that_are_no_entries",)),
    "1.1.12": (
        "shapes negative, too large, unknown",
        ("tf_bundle:shapes", "memory_claims:a_broken_leaf_raises_its_error_whatever_shape_it_claims"),
    ),
    "1.1.13": ("sizes and offsets", ("tf_bundle:places",)),
    "1.1.14": (
        "dtypes that are not read",
        ("tf_bundle:dtypes", "memory_claims:a_broken_leaf_raises_its_error_whatever_shape_it_claims"),
    ),
    "1.1.15": ("a dtype of the same width", ("tf_bundle:a_dtype_of_the_same_width_cannot_be_told_apart",)),
    "1.1.16": (
        "strings: counts, lengths, checksums, holes",
        ("tf_bundle:damaged_strings", "bounded_parsing:strings_over_a_hole_are_counted_before_they_are_read"),
    ),
    "1.1.17": ("shards missing, special, linked", ("tf_bundle:shards",)),
    "1.1.18": (
        "shards swapped, of another step, short",
        (
            "tf_bundle:swapped_shards_fail_their_checksums",
            "tf_bundle:a_shard_of_another_step",
            "tf_bundle:a_shorter_shard_is_found_at_opening",
        ),
    ),
    "1.1.19": ("flips and zeroed pages of data", ("tf_bundle:flips_and_zeroed_pages_in_the_data",)),
    "1.1.20": (
        "names twice, unsorted, of bytes, with '..'",
        ("tf_bundle:names", "tf_bundle:names_out_of_order", "tf_bundle:names_are_only_names"),
    ),
    "1.1.21": ("many names of one region", ("tf_bundle:many_names_of_one_region_cost_nothing_to_list",)),
    "1.1.22": (
        "slices missing, overlapping, outside, many",
        (
            "tf_bundle:slices",
            "tf_bundle:very_many_slices_are_checked_quickly_or_refused",
            "bounded_parsing:slices_listed_by_entries_that_have_none_of_their_own_are_not_looked_at",
        ),
    ),
    "1.1.23": (
        "a checkpoint file that leads elsewhere",
        ("tf_bundle:an_absolute_path_is_never_followed", "tf_bundle:a_checkpoint_file_that_leads_upwards_is_unsafe"),
    ),
    "1.1.24": ("files replaced between reads", ("files_changed_while_open:one_file_at_a_time",)),
    # T5X's own
    "1.2.1": ("an absolute path", ("t5x:an_absolute_path",)),
    "1.2.2": ("paths that lead out", ("t5x:paths_that_lead_out",)),
    "1.2.3": (
        "links out, dangling links",
        ("t5x:links_out_of_the_checkpoint", "t5x:dangling_links", "t5x:a_link_below_a_directory_of_chunks"),
    ),
    "1.2.4": (
        "kvstores that reach out",
        ("t5x:kvstores_that_are_not_beside_the_checkpoint", "t5x:buckets_are_no_places"),
    ),
    "1.2.5": ("kvstores as URLs", ("t5x:urls",)),
    "1.2.6": ("endpoints and credentials", ("t5x:fields_that_reach_out",)),
    "1.2.7": ("other drivers", ("t5x:other_drivers",)),
    "1.2.8": ("specs that look like subtrees", ("t5x:damaged_specs",)),
    "1.2.9": ("settings that write", ("t5x:settings_change_nothing",)),
    "1.2.10": ("contexts of many threads", ("t5x:settings_change_nothing",)),
    "1.2.11": ("transforms", ("t5x:transforms",)),
    "1.2.12": ("spec and array disagree", ("t5x:specs_that_disagree_with_the_array",)),
    "1.2.13": (
        "terabytes without chunks",
        (
            "t5x:a_shape_of_terabytes_opens_and_reads_a_box",
            "memory_claims:a_sound_header_over_a_hole_of_a_tebibyte_is_a_limit_and_not_an_allocation",
        ),
    ),
    "1.2.14": ("missing chunks", ("t5x:absent_chunks", "t5x:chunks")),
    "1.2.15": (
        "chunks short, long, bombs, of a size that is claimed",
        (
            "t5x:chunks",
            "memory_claims:a_chunk_beyond_the_limit_is_refused_and_its_leaf_listed",
            "tensorstore_leaf:no_more_chunks_are_decoded_at_once_than_the_limit_holds",
        ),
    ),
    "1.2.16": ("metadata of an array", ("t5x:metadata", "t5x:metadata_that_is_none")),
    "1.2.17": ("FIFOs and directories", ("t5x:pipes", "t5x:a_pipe_or_a_directory_in_place_of_the_array")),
    "1.2.18": ("msgpack heads of 4 G", ("flax_msgpack:headers_that_claim_more_than_there_is",)),
    "1.2.19": (
        "nesting and keys",
        (
            "flax_msgpack:nesting",
            "flax_msgpack:keys",
            "flax_msgpack:keys_twice",
            "flax_msgpack:names_that_are_joined_to_one",
            "deep_names:names_of_more_than_64_levels_are_a_limit_in_every_format",
        ),
    ),
    "1.2.20": ("uint16 that is bfloat16", ("t5x:uint16_is_bfloat16_in_old_versions_alone",)),
    "1.2.21": ("two leaves in one directory", ("t5x:two_leaves_in_one_directory",)),
    "1.2.22": ("a damaged checkpoint file", ("t5x:damaged_checkpoint_files",)),
    # Orbax
    "1.3.1": ("manifest and tree of a database", ("orbax:flips_in_manifest_and_tree", "orbax:files_cut")),
    "1.3.2": (
        "data flipped, with a checksum and without",
        (
            "checksums:no_flipped_bit_gives_another_value",
            "hostile_catalogue:data_without_a_checksum_is_said_to_have_none",
        ),
    ),
    "1.3.3": ("data cut or missing", ("orbax:files_cut", "orbax:files_missing")),
    "1.3.4": (
        "_METADATA missing, broken, hostile keys",
        ("orbax:broken_metadata", "orbax:hostile_keys", "orbax:two_nodes_of_one_name_or_place"),
    ),
    "1.3.5": ("references out of a database", ("orbax:a_reference_out_of_the_directory",)),
    "1.3.6": (
        "what is a finished step",
        (
            "orbax:latest_step_agrees_with_orbax",
            "orbax:validated_skips_what_does_not_open",
            "detection:links_out_of_the_path_are_unsafe_and_not_followed",
        ),
    ),
    "1.3.7": ("shardings of other devices", ("orbax:shardings_are_not_looked_at",)),
    "1.3.8": ("handlers by name", ("orbax:handlers_are_not_imported",)),
    # Flax msgpack
    "1.4.1": ("dtypes that are no numbers", ("flax_msgpack:dtypes_that_are_no_numbers",)),
    "1.4.2": ("shapes", ("flax_msgpack:arrays_that_do_not_hold_together",)),
    "1.4.3": ("chunked arrays", ("flax_msgpack:chunked_arrays", "flax_msgpack:very_many_chunks")),
    "1.4.4": ("extensions", ("flax_msgpack:extensions_that_are_not_flaxs", "flax_msgpack:complex_numbers")),
    "1.4.5": ("cut, trailing bytes", ("flax_msgpack:truncated", "flax_msgpack:empty_and_trailing")),
    "1.4.6": ("arrays beside the file", ("flax_msgpack:arrays_beside_the_file",)),
    "1.4.7": ("keys twice, of other kinds, colliding", ("flax_msgpack:a_million_colliding_keys",)),
    "1.4.8": ("3 GiB, one leaf asked", ("flax_msgpack:a_file_of_3_gib_opens_and_reads_in_little_memory",)),
    "1.4.9": ("a pickle, a zip", ("flax_msgpack:what_is_something_else",)),
    # safetensors
    "1.5.1": ("header lengths", ("safetensors:corrupt_headers",)),
    "1.5.2": ("offsets", ("safetensors:corrupt_headers",)),
    "1.5.3": (
        "sizes that disagree or cannot be counted",
        ("safetensors:corrupt_headers", "memory_claims:shapes_that_cannot_be_counted_are_refused_for_their_leaf"),
    ),
    "1.5.4": (
        "JSON: keys twice, BOM, deep, many small parts",
        (
            "safetensors:corrupt_headers",
            "formats:many_keys_of_which_the_last_stands_twice",
            "bounded_parsing:a_header_of_empty_objects_and_a_large_configuration",
        ),
    ),
    "1.5.5": ("unknown dtypes", ("safetensors:an_unknown_dtype_is_that_leafs_error",)),
    "1.5.6": (
        "indexes",
        (
            "safetensors:an_index_that_names_something_else",
            "safetensors:an_index_that_is_wrong_about_its_tensors",
            "safetensors:a_shard_that_is_no_file",
        ),
    ),
    "1.5.7": ("a file cut while it is open", ("safetensors:a_file_cut_after_it_was_opened",)),
    "1.5.8": ("Git LFS pointers", ("safetensors:a_git_lfs_pointer",)),
    # PyTorch, NumPy's archives, GGUF
    "1.6.1": ("names outside the list", ("torch_zip:hostile_pickles", "torch_zip:the_name_is_said")),
    "1.6.2": ("opcodes that call", ("torch_zip:hostile_pickles", "torch_zip:protocol_0")),
    "1.6.3": ("bombs of the stack and the memo", ("torch_zip:bombs_cost_what_the_file_may", "torch_zip:limits")),
    "1.6.4": ("sizes, strides and offsets", ("torch_zip:descriptions_that_do_not_fit",)),
    "1.6.5": ("archives", ("zip_members:damaged_archives", "zip_members:names_that_lead_out")),
    "1.6.6": ("GGUF files", ("gguf:files_that_are_refused", "gguf:leaves_that_are_refused")),
    "1.6.7": ("arrays of NumPy", ("npz:what_is_no_header", "npz:elements_that_are_no_numbers", "npz:damaged_arrays")),
}
SIZES = {"1.1": 24, "1.2": 22, "1.3": 8, "1.4": 9, "1.5": 8, "1.6": 7}


def test_every_number_has_tests():
    expected = {f"{section}.{number}" for section, size in SIZES.items() for number in range(1, size + 1)}
    assert CATALOGUE.keys() == expected
    assert all(tests for _, tests in CATALOGUE.values())


@functools.cache
def functions_of(module: str) -> dict[str, ast.FunctionDef]:
    nodes = (node for path in TESTS.glob(FILES[module]) for node in ast.walk(ast.parse(path.read_text())))
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("number", CATALOGUE)
def test_the_tests_of_a_number_are_there_and_run(number):
    for name in CATALOGUE[number][1]:
        module, function = name.split(":")
        node = functions_of(module)[f"test_{function}"]
        marks = " ".join(map(ast.unparse, node.decorator_list))
        assert "mark.skip(" not in marks and "xfail" not in marks
        assert any(isinstance(part, ast.Assert | ast.With | ast.Call) for part in ast.walk(node))


def test_data_without_a_checksum_is_said_to_have_none(tmp_path):
    """Nothing tells a flipped bit in what stock Orbax wrote; a restore says that it verified nothing."""
    value = np.arange(64, dtype=np.float32)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(tmp_path / "item", args=ocp.args.PyTreeSave({"a": value}))
    plan = ot.plan_restore(tmp_path / "item", None)
    assert np.array_equal(plan.execute()["a"], value)
    report = plan.report
    assert report is not None and report.without_checksum == ("a",) and report.verified == ()
