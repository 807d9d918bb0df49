"""The key-value store of `jax.distributed`, in memory."""


class KeyValues:
    """Texts and bytes by key; what is absent is not waited for."""

    def __init__(self):
        self.held = {}
        self.on_delete = lambda key: None

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.held
        self.held[key] = value

    key_value_set_bytes = key_value_set

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.held.items() if key.startswith(folder)]

    def key_value_increment(self, key, by):
        self.held[key] = str(int(self.held.get(key, "0")) + by)
        return int(self.held[key])

    def key_value_delete(self, key):
        self.held = {one: value for one, value in self.held.items() if one != key and not one.startswith(f"{key}/")}
        self.on_delete(key)

    def blocking_key_value_get_bytes(self, key, milliseconds):
        if key not in self.held:
            raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
        return self.held[key]
