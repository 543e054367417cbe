"""Pallas decode kernels for TPU and GPU; importable without vhajax. None has landed yet."""
