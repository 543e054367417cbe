"""What the kernels must know of a chip: its size, its speed, and how much to copy at once.

Figures are those of one JAX device: a GPU, a TPU chip, or one of the two cores of a tpu7x chip.
"""

import dataclasses
from dataclasses import dataclass

import jax

from pallas_kernels.check import require

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


@dataclass(frozen=True)
class GPU:
    """A Hopper GPU. name: for people. kinds: JAX's `device_kind`s.

    cores: multiprocessors. shared: bytes of shared memory a block may have. hbm: bytes/s, as
      published. clock: cycles/s under load, from published peak FLOPS: an assumption.
    memory, l2: bytes of HBM and of its cache.
    """

    name: str
    kinds: tuple[str, ...]
    cores: int
    shared: int
    hbm: float
    clock: float
    memory: int
    l2: int


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU(
            "h100",
            ("NVIDIA H100 80GB HBM3",),
            132,
            227 * 1024,
            3.35e12,
            1.83e9,
            80 * 10**9,
            50 * MIB,
        ),
        GPU("h200", ("NVIDIA H200",), 132, 227 * 1024, 4.8e12, 1.83e9, 141 * 10**9, 50 * MIB),
    )
}
HOPPER = ("H100", "H200", "H800", "H20")  # in a device kind; GH200 holds H200
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


def is_hopper() -> bool:
    """Whether the program is traced for a GPU with wgmma (compute capability 9.0)."""
    platform, kind = device()
    return platform == "gpu" and any(name in kind for name in HOPPER)


def gpu() -> GPU:
    """The GPU that the program is traced for, with its own number of multiprocessors.

    Raises:
      UnsupportedError: it is no Hopper GPU.
    """
    platform, kind = device()
    require(
        is_hopper(),
        f"backend is 'gpu', but this program is for {kind} ({platform}); the kernel needs a Hopper "
        "GPU (H100, H200, GH200), so use auto, or gpu_interpret to run it in JAX's interpreter.",
    )
    known = next((g for g in GPUS.values() if kind in g.kinds), GPUS["h100"])
    described = jax.sharding.get_abstract_mesh().abstract_device
    cores = jax.devices()[0].core_count if described is None else described.num_cores
    return dataclasses.replace(known, cores=cores or known.cores)
