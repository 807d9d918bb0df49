"""crc32c of buffers, masked as TensorFlow stores it."""

from __future__ import annotations

from orbax_t5x.storage.crc import CRC32C

_MASK_DELTA = 0xA282EAD8
_U32 = 0xFFFFFFFF

extend = CRC32C.extend
move = CRC32C.move
combine = CRC32C.combine
combine_spread = CRC32C.combine_spread


def mask(crc: int) -> int:
    """Masks a checksum as LevelDB and TensorFlow store it: a crc over data that holds crcs would be weak."""
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & _U32


def unmask(masked: int) -> int:
    """Returns the checksum that was stored as `masked`."""
    rotated = (masked - _MASK_DELTA) & _U32
    return ((rotated >> 17) | (rotated << 15)) & _U32
