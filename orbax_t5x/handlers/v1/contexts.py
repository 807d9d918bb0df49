"""Orbax contexts for train states, and the registration.

The registration is for tools that make their own contexts.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal

import orbax.checkpoint.experimental.v1 as v1

from orbax_t5x.handlers.run_lineage import RestoredHistory
from orbax_t5x.handlers.v1.handler import AnyTreeHandler, V1TrainStateHandler
from orbax_t5x.handlers.v1.orbax_v1_names import global_entries, recorded_type
from orbax_t5x.provenance.records import given_lineage


def context(
    base: v1.Context | None = None,
    *,
    checksums: bool | None = None,
    provenance: Sequence[Mapping[str, Any]] | None = None,
    on_unsupported: Literal["error", "skip"] | None = None,
) -> v1.Context:
    """Makes a context for Orbax v1 with our handler.

    Its registry is its own. In it `ocp.save` and all other functions of Orbax save trees with our handler, under
    whatever name, and load what is wrapped in an `AbstractTrainState`. Handlers of your own keep what they can handle.
    Set further options on what is returned, before you enter it: `made = ot.v1.context(); made.array.saving.use_zarr3 =
    False`.

    Args:
      base: whose options the new context has; None for Orbax's defaults, as in `ocp.Context`.
      checksums: whether saves write checksums beside the arrays, for later loads and `orbax_t5x.verify`. None: as in
        `base`, and True if that sets none.
      provenance: transforms behind the states that are saved: `plan.provenance`, or `()` for none. None: as in `base`,
        and if that sets none, as in `orbax_t5x.args.TrainStateSave`, by the loads and saves of this context.
      on_unsupported: "error": a leaf that Orbax cannot store fails the save before anything is written, by name.
        "skip": it is left out, and its name, shape and dtype are recorded. None: as in `base`, and
        "error" if that sets none.

    Returns:
      A context that is not entered yet, for one `with` or many, in any number of threads and asyncio tasks.

    Raises:
      TypeError: `base` is no context, or `checksums` is neither True nor False.
      ValueError: `provenance` is no lineage, or `on_unsupported` is something else.
    """
    if base is not None and not isinstance(base, v1.Context):
        raise TypeError(f"base must be an ocp.Context of Orbax v1, not a {type(base).__name__}")
    given: dict[str, Any] = {}
    if checksums is not None:
        if not isinstance(checksums, bool):
            raise TypeError(f"checksums must be True or False, not {checksums!r}")
        given["checksums"] = checksums
    if provenance is not None:
        given["provenance"] = given_lineage(provenance)
    if on_unsupported is not None:
        if on_unsupported not in ("error", "skip"):
            raise ValueError(f"on_unsupported must be 'error' or 'skip', not {on_unsupported!r}")
        given["on_unsupported"] = on_unsupported
    made = _ReenteredContext(base)
    registry = made.checkpointables.registry
    handler = _handler_with(given, handler_of(registry))
    made.checkpointables.registry = _with_handler(registry, handler)
    return made


def register() -> Callable[[], None]:
    """Registers our handler with Orbax for the whole process.

    For tools that make their own `ocp.Context`.

    Contexts and `training.Checkpointer`s made after it save trees with our handler, and load what is wrapped in an
    `AbstractTrainState`, as inside `orbax_t5x.v1.context`; those made before stay as they are. Handlers of others
    keep what they handle.

    Returns:
      A function of no arguments that undoes it. Several registrations are one, which ends with the last of them.

    Example:
      >>> undo = ot.v1.register()
      >>> with ocp_v1.training.Checkpointer(directory / "run") as checkpointer:
      ...     _ = checkpointer.save(0, {"w": jnp.ones(3)})
      ...     checkpointer.load(0, ot.v1.AbstractTrainState({"w": np.zeros(3, np.float32)}))
      {'w': array([1., 1., 1.], dtype=float32)}
      >>> undo()
    """
    token = object()
    _REGISTRATION.add(token)
    return lambda: _REGISTRATION.remove(token)


class _Registration:
    """Our handler in Orbax's global registry, counted by users."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted_by: set[object] = set()
        self._before: list[Any] = []
        self._after: list[Any] = []

    def add(self, token: object) -> None:
        with self._lock:
            if not self._wanted_by:
                self._register()
            self._wanted_by.add(token)

    def remove(self, token: object) -> None:
        with self._lock:
            is_last = self._wanted_by == {token}
            self._wanted_by.discard(token)
            if is_last:
                entries = global_entries()
                entries[:] = [*self._before, *(entry for entry in entries if entry not in self._after)]

    def _register(self) -> None:
        entries = global_entries()
        registry = _with_handler(v1.handlers.global_registry(), _handler_with({}, V1TrainStateHandler))
        self._before, self._after = list(entries), list(registry.get_all_entries())
        for cls in {cls for cls, _ in self._after if _is_our_handler(cls)}:
            # Orbax's way to add a handler also keeps its recorded types. Then the order is made that of a context.
            v1.handlers.register_handler(cls, secondary_typestrs=list(registry.get_secondary_typestrs(cls)) or None)
        entries[:] = self._after


_REGISTRATION = _Registration()


# What is entered and not left yet, innermost last. Each thread and each asyncio task has a value of its own, and a task
# begins with that of the code that started it: just as with Orbax's own variable of the active context.
_ENTERED: ContextVar[tuple[tuple[v1.Context, Any], ...]] = ContextVar("orbax_t5x_entered_contexts", default=())


# Orbax marks its class final; nothing but a subclass can be entered again.
class _ReenteredContext(v1.Context):  # pyright: ignore[reportGeneralTypeIssues]
    """Context that can be entered again while it is active.

    In the same task or another.

    `training.Checkpointer` enters the active context in each call. Orbax's own forgets then that it was active before,
    and whatever follows in the same `with` has Orbax's defaults.
    """

    def __enter__(self) -> v1.Context:
        entry: Any = self.__contextmanager__()  # Orbax makes a context manager of the generator
        entered = entry.__enter__()
        _ENTERED.set((*_ENTERED.get(), (self, entry)))
        return entered

    def __exit__(self, *raised: Any) -> None:
        entries = _ENTERED.get()
        own = [index for index, (context, _) in enumerate(entries) if context is self]
        if not own:
            raise ValueError("this context was entered in another thread or asyncio task, and must be left there")
        _ENTERED.set((*entries[: own[-1]], *entries[own[-1] + 1 :]))
        entries[own[-1]][1].__exit__(*raised)


def handler_of(registry: v1.handlers.CheckpointableHandlerRegistry) -> type[V1TrainStateHandler]:
    """Returns the last of our handlers in a registry.

    It has the options of the context that made it.
    """
    ours = [cls for cls, _ in registry.get_all_entries() if issubclass(cls, V1TrainStateHandler)]
    return ours[-1] if ours else V1TrainStateHandler


def _handler_with(given: Mapping[str, Any], handler: type[V1TrainStateHandler]) -> type[V1TrainStateHandler]:
    """Makes a handler class like `handler` with the given options."""
    own = {"options": dataclasses.replace(handler.options, **given), "history": RestoredHistory()}
    return type(handler.__name__, (handler,), own)


def _with_handler(
    given: v1.handlers.CheckpointableHandlerRegistry, handler: type[V1TrainStateHandler]
) -> v1.handlers.CheckpointableHandlerRegistry:
    """Copies a registry with our handler for `PyTreeHandler`.

    It comes before users' handlers. Of handlers that can handle something, Orbax takes the last. `PyTreeHandler` stays,
    for trees that are loaded without a plan. What it saved is ours to load, whatever its name: so our handler claims
    its recorded types. Trees that no handler can save are refused by ours: that handler is the first.
    """
    stock = v1.handlers.PyTreeHandler
    entries = given.get_all_entries()
    ours_by_name = [name for cls, name in entries if name and (cls is stock or _is_our_handler(cls))]
    others = [(cls, name) for cls, name in entries if not _is_our_handler(cls) and not (cls is stock and name)]
    made = v1.handlers.local_registry(include_global_registry=False)
    made.add(type(handler.__name__, (AnyTreeHandler, handler), {}))

    def add_ours() -> None:
        made.add(handler, secondary_typestrs=[recorded_type(), *given.get_secondary_typestrs(stock)])
        for name in ours_by_name:
            made.add(handler, checkpointable_name=name)

    if (stock, None) not in others:
        add_ours()
    for cls, name in others:
        made.add(cls, checkpointable_name=name, secondary_typestrs=given.get_secondary_typestrs(cls) or None)
        if cls is stock:
            add_ours()
    return made


def _is_our_handler(cls: type) -> bool:
    return issubclass(cls, V1TrainStateHandler)
