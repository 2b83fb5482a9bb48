"""hr_crc32c of headrace.h: published values, and continuing over pieces."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_published_values(lib, data, expected):
    """RFC 3720, appendix B.4, and the usual check value."""
    _, C = lib
    assert C.hr_crc32c(0, data, len(data)) == expected


def test_pieces_continue(lib):
    _, C = lib
    data = np.random.default_rng(2).integers(0, 256, 5000, np.uint8).tobytes()
    whole = C.hr_crc32c(0, data, len(data))
    for cut in (0, 1, 7, 4096, 5000):
        first = C.hr_crc32c(0, data[:cut], cut)
        assert C.hr_crc32c(first, data[cut:], len(data) - cut) == whole
