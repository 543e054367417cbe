"""Decode attention kernels over a cache of rows; nothing of vhajax is imported. See README.md."""

from pallas_kernels.core import BACKENDS, Attended, Backend
from pallas_kernels.decode import gqa_decode, lrkv_decode, merge

__all__ = ["BACKENDS", "Attended", "Backend", "gqa_decode", "lrkv_decode", "merge"]
