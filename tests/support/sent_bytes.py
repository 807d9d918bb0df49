"""A socket from which given bytes come, of a server that then closes the connection."""

import io


class SentBytes:
    """The part of a socket that a response is received from; `size` bytes at a time at the most."""

    def __init__(self, data: bytes, size: int = 1 << 20):
        self._received = io.BytesIO(data)
        self._size = size

    def recv(self, size: int) -> bytes:
        return self._received.read(min(size, self._size))

    def recv_into(self, buffer: memoryview, size: int) -> int:
        return self._received.readinto(buffer[: min(size, self._size)])

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0
