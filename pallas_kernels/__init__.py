"""Decode attention kernels over a cache of rows; nothing of vhajax is imported. See README.md."""

from pallas_kernels.check import UnsupportedError
from pallas_kernels.core import BACKENDS, Attended, Backend, choose, merge
from pallas_kernels.decode import gqa_decode, lrkv_decode

__all__ = [
    "BACKENDS",
    "Attended",
    "Backend",
    "UnsupportedError",
    "choose",
    "gqa_decode",
    "lrkv_decode",
    "merge",
]
