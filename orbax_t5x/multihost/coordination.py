"""Access to the coordination service of `jax.distributed`: its key-value store, and the number of this process in it.

The only module that uses names that JAX keeps private. No public function returns the number of a process before JAX's
backend exists, tests whether it exists, or returns the key-value store.
"""

from __future__ import annotations

from typing import Any

from jax._src import distributed, xla_bridge

# How JAX reports that a time limit has passed.
TIMED_OUT = "DEADLINE_EXCEEDED"


def key_value_store() -> Any:
    """Returns the client of the key-value store.

    Raises:
      RuntimeError: `jax.distributed` is not initialized, or was shut down.
    """
    client: Any = distributed.global_state.client
    if client is None:
        raise RuntimeError("jax.distributed is not initialized")
    return client


def service_process_id() -> int:
    """Returns the number that this process gave to `jax.distributed.initialize`; on TPU JAX's own index may differ."""
    return distributed.global_state.process_id


def service_process_count() -> int:
    """Returns the number of processes that take part in the coordination service."""
    return distributed.global_state.num_processes


def has_backend() -> bool:
    """Tests whether JAX has made its backend, for which it has waited for all processes."""
    return xla_bridge.backends_are_initialized()
