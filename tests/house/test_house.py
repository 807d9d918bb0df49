"""The house itself: every module has a room, rooms import only from floors below, nothing runs in a circle."""

import ast
import collections
import dataclasses
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import orbax_t5x as ot

PACKAGE = Path(ot.__file__).parent

# A room imports from the floors above it in this list alone (docs/project/architecture.md has the picture). A module
# that stands by itself in the package's root is a room, too.
FLOORS = (
    ("on_demand", "registry", "text", "trees"),
    ("errors",),
    ("concurrency",),
    ("files", "optim", "provenance"),
    ("lazy", "mesh_tf", "adafactor", "optimizers", "partitioning"),
    ("readers", "transforms", "train_state"),
    ("rules", "state_utils"),
    ("restoring",),
    ("handlers", "checkpoint_importer", "nnx", "models"),
    ("operations", "testing"),
    ("cli", "extras", "integrations"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# What else may be imported where it is used, with the reason; all other imports stand at the top of their module.
IMPORTS_IN_FUNCTIONS: dict[tuple[str, str], str] = {
    ("orbax_t5x.on_demand", "load"): "public names load on first use: importing the package costs nothing",
    ("orbax_t5x.cli.main", "_fix_text"): "only a fix needs the transforms, which load JAX",
    ("orbax_t5x.optimizers", "__getattr__"): "jestimator is an optional package",
    ("orbax_t5x.integrations.t5x", "register"): "T5X is an optional package",
    ("orbax_t5x.integrations.t5x_dataset", "_tracked"): "TensorFlow is an optional package",
    ("orbax_t5x.integrations.t5x_retention", "_tensorboard"): "tensorboard is an optional package",
    ("orbax_t5x.registry", "_loaded"): "entries of a table load on first use",
}


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module of this package, or another package's name."""

    module: str
    function: str | None
    line: int


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def room_of(module: str) -> str:
    room = module.split(".")[1]
    return "cli" if room == "__main__" else room


def resolve(name: str) -> str:
    """The module of the package that a dotted name stands for or lies in; other packages' names stay."""
    while name.startswith("orbax_t5x.") and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def called(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


@functools.cache
def imports_of(module: str) -> tuple[Import, ...]:
    """Everything that a module imports: in functions, under TYPE_CHECKING and by `importlib` with a literal, too."""

    def visit(node: ast.AST, function: str | None) -> Iterator[Import]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Import):
            yield from (Import(resolve(alias.name), function, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}:{node.lineno}: a relative import"
            yield from (Import(resolve(f"{node.module}.{alias.name}"), function, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and called(node.func) in ("importlib.import_module", "__import__"):
            literal = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            yield Import(resolve(str(literal)), function, node.lineno)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    return tuple(visit(tree_of(module), None))


@functools.cache
def edges() -> dict[str, set[str]]:
    """What each module imports of the package. Its own `__init__` names every room, for users, and is left out."""
    return {
        module: {found.module for found in imports_of(module) if found.module in MODULES} - {module}
        for module in MODULES
        if module != "orbax_t5x"
    }


def imports() -> list[tuple[str, str]]:
    return [(module, other) for module, others in edges().items() for other in sorted(others)]


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def connect(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                connect(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in index:
            connect(node)
    return found


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_every_module_has_a_room():
    assert {room_of(module) for module in edges()} == set(FLOOR_OF)
    assert len(FLOOR_OF) <= 30 and len(FLOORS) <= 11


def test_the_page_on_the_architecture_draws_the_same_floors():
    page = (PACKAGE.parent / "docs" / "project" / "architecture.md").read_text()
    floors: list[set[str]] = []
    for number, rooms in re.findall(r"^\| (\d*) ?\| (`[a-z_` ]+) \|", page, re.MULTILINE):
        if number:
            assert int(number) == len(floors)
            floors.append(set())
        floors[-1] |= set(re.findall(r"`(\w+)`", rooms))
    assert floors == [set(rooms) for rooms in FLOORS]


def may_import(module: str, other: str) -> bool:
    if other == "orbax_t5x":
        # The commands use the package as its users do; below, that would be a circle.
        return room_of(module) == "cli" or extra_of(module) == "demo"
    return room_of(module) == room_of(other) or FLOOR_OF[room_of(other)] < FLOOR_OF[room_of(module)]


def test_imports_run_down():
    assert [edge for edge in imports() if not may_import(*edge)] == []


def extra_of(module: str) -> str | None:
    """The extra that a module belongs to: a folder of `extras`."""
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["extras"] and len(parts) > 2 else None


def test_the_core_imports_no_extra():
    assert [edge for edge in imports() if extra_of(edge[1]) not in (None, extra_of(edge[0]))] == []


def test_a_restore_reaches_packs_and_diagnosis_on_demand_alone():
    """Rules are an extra to the planner, and diagnosis is for plans that fail: `on_demand` and tables load both."""
    floors = [edge for edge in imports() if FLOOR_OF[room_of(edge[0])] <= FLOOR_OF["restoring"]]
    for outer in ("orbax_t5x.rules", "orbax_t5x.restoring.diagnose"):
        found = [module for module, other in floors if other.startswith(outer)]
        assert found and [module for module in found if not module.startswith(outer)] == []


def test_diff_and_verify_need_no_handler():
    subrooms = "orbax_t5x.operations.diff", "orbax_t5x.operations.verify"
    found = [edge for edge in imports() if edge[0].startswith(subrooms)]
    assert found and not [edge for edge in found if room_of(edge[1]) == "handlers"]


def test_no_modules_import_one_another_in_a_circle():
    assert circles(edges()) == []


def test_no_subrooms_import_one_another_in_a_circle():
    """A package inside a room is one node here; a module that lies in the room itself is one, too."""

    def subroom(module: str) -> str:
        parent = module.rpartition(".")[0]
        return parent if parent.count(".") >= 2 else module

    between: dict[str, set[str]] = collections.defaultdict(set)
    for module, others in edges().items():
        between[subroom(module)] |= {subroom(other) for other in others} - {subroom(module)}
    assert circles(between) == []


def test_private_modules_are_imported_in_their_own_room_alone():
    def private(module: str) -> bool:
        return any(part.startswith("_") and not part.startswith("__") for part in module.split("."))

    assert [edge for edge in imports() if private(edge[1]) and room_of(edge[0]) != room_of(edge[1])] == []


def test_imports_stand_at_the_top():
    found = {
        (module, imported.function): imported
        for module in MODULES
        for imported in imports_of(module)
        if imported.function is not None
    }
    assert found.keys() == IMPORTS_IN_FUNCTIONS.keys()


_TEXT_TESTS = frozenset(("search", "match", "fullmatch", "findall", "startswith", "endswith", "find", "index", "count"))


def decisions_by_message(tree: ast.AST) -> list[int]:
    """Lines on which the text of a caught error is compared or searched.

    Native errors have no kind but their text: `files/native_errors.py` parses it, for all.
    """

    def is_text(node: ast.AST, caught: set[str]) -> bool:
        match node:
            case ast.Call(func=ast.Name(id="str" | "repr"), args=[ast.Name(id=name)]):
                return name in caught
            case ast.Attribute(value=ast.Name(id=name), attr="message" | "args" | "strerror"):
                return name in caught
        return False

    lines: list[int] = []
    for handler in (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name):
        caught = {str(handler.name)}
        for node in ast.walk(handler):
            is_test = isinstance(node, ast.Compare) or (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TEXT_TESTS
            )
            if is_test and any(is_text(part, caught) for part in ast.walk(node)):
                lines.append(node.lineno)
    return lines


def test_no_code_decides_by_the_text_of_an_error():
    seeded = "try:\n  f()\nexcept OSError as e:\n  a = 'x' in str(e) or e.args[0] == 1 or re.search('x', e.message)\n"
    assert decisions_by_message(ast.parse(seeded)) == [4, 4, 4]
    found = {module_name(path): decisions_by_message(ast.parse(path.read_text())) for path in PACKAGE.rglob("*.py")}
    assert {module for module, lines in found.items() if lines} == set()


# From Python 3.12 on each thread that asks at once computes such a property: its values are equal, or one thread asks.
CACHED_WHERE_THREADS_READ = {
    "files.crc": {"_tables", "_table_lists"},
    "files.remote": {"_kind"},
    "readers.array_kind": {"checking_codec"},
    "readers.box_sums": {"bases", "_corners"},
    "readers.detect": {"subdirectories"},
    "readers.ocdbt_values": {"in_tree"},
    "readers.orbax.arrays": {"database_kvstore", "absent_is_fill"},
}


def test_what_threads_share_is_no_cached_property():
    found: dict[str, set[str]] = collections.defaultdict(set)
    for module in MODULES:
        room = module.removeprefix(f"{PACKAGE.name}.")
        if room.partition(".")[0] in ("concurrency", "extras", "files", "lazy", "readers"):
            for node in ast.walk(tree_of(module)):
                if isinstance(node, ast.FunctionDef) and "cached_property" in ast.dump(ast.List(node.decorator_list)):
                    found[room].add(node.name)
    assert found == CACHED_WHERE_THREADS_READ


def test_every_module_says_what_it_is():
    assert [module for module in MODULES if not ast.get_docstring(tree_of(module))] == []


def test_names_say_something():
    nothing = {"util", "utils", "common", "helper", "helpers", "type", "types", "misc"}
    assert [module for module in MODULES if module.rpartition(".")[2].strip("_") in nothing] == []


@pytest.mark.slow
def test_names_of_classes_are_unique():
    """A leading underscore makes no difference: a name read without its module means one class."""
    modules: dict[str, list[str]] = collections.defaultdict(list)
    for module in MODULES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ClassDef):
                modules[node.name.lstrip("_")].append(module)
    assert {name: found for name, found in modules.items() if len(found) > 1} == {}


def test_strictly_checked_paths_exist():
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["pyright"]
    strict = settings["strict"]
    assert [path for path in strict if not (PACKAGE.parent / path).exists()] == []
    inside = [path for path in strict for other in strict if path.startswith(f"{other}/")]
    assert inside == [], "named by its directory, too"
