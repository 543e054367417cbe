"""What the kernels must know of a TPU: its size, its speed, and how much it should copy at once.

Figures are those of one JAX device: a chip, or one of the two cores of a tpu7x chip.
"""

from dataclasses import dataclass

import jax

MIB = 2**20


@dataclass(frozen=True)
class Chip:
    """name: as in a topology. kinds: JAX's `device_kind`s.

    cores: TensorCores of one device; the grid's splits are spread over them.
    vmem: bytes of VMEM a core. hbm: bytes/s of a device, as published.
    clock: cycles/s, from published peak FLOPS and the size of the MXUs: an assumption.
    tile_bytes: what one copy should bring (see README: an iteration costs a fixed chain of about
      500 to 800 cycles, so small tiles are bound by it, and large ones only delay the first).
    """

    name: str
    kinds: tuple[str, ...]
    cores: int
    vmem: int
    hbm: float
    clock: float
    tile_bytes: int = 5 * MIB


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", ("TPU v5 lite", "TPU v5e"), 1, 128 * MIB, 819e9, 1.50e9),
        Chip("v5p", ("TPU v5", "TPU v5p"), 2, 64 * MIB, 2765e9, 1.75e9),
        Chip("v6e", ("TPU v6 lite", "TPU v6e"), 1, 128 * MIB, 1640e9, 1.75e9),
        Chip("tpu7x", ("TPU7x", "TPU 7x"), 1, 64 * MIB, 3690e9, 2.20e9),
    )
}
UNKNOWN = "v5e"  # the smallest: what is chosen for it fits the others, but for their VMEM


def device() -> tuple[str, str]:
    """Platform and device kind that the program is traced for: those of the mesh in use, if any."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        return described.platform or jax.default_backend(), described.device_kind
    here = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(here, str):
        return here, here
    return here.platform, here.device_kind


def chip() -> Chip:
    """The chip that the program is traced for; v5e where it is none (an interpreter)."""
    _, kind = device()
    return next((c for c in CHIPS.values() if kind in c.kinds), CHIPS[UNKNOWN])
