"""Published figures of accelerators, one JAX device each; no JAX here.

Peaks are dense bfloat16 (no sparsity). Sources: Google Cloud's pages of TPU v4, v5e, v5p, v6e and
TPU7x (docs.cloud.google.com/tpu/docs); NVIDIA's data sheets of A100, H100 and H200 (SXM) and of HGX
B200. A page's GB are taken as 10⁹ bytes, its GiB as 2³⁰.
"""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Accelerator:
    """One JAX device: a GPU, a TPU chip, or one of the two cores of a tpu7x chip.

    name: as in a topology. kinds: JAX's `device_kind`s.
    peak: dense bfloat16 FLOP/s. memory: bytes of HBM. bandwidth: bytes/s of HBM.
    interconnect: bytes/s that it sends over all its ICI or NVLink links together (half of what is
      published as bidirectional), with a torus or switch that gives every link a neighbour.
    """

    name: str
    kinds: tuple[str, ...]
    peak: float
    memory: int
    bandwidth: float
    interconnect: float


ACCELERATORS = {
    device.name: device
    for device in (
        Accelerator("v4", ("TPU v4",), 275e12, 32 * GIB, 1200e9, 300e9),
        Accelerator("v5e", ("TPU v5 lite", "TPU v5e"), 197e12, 16 * 10**9, 819e9, 200e9),
        Accelerator("v5p", ("TPU v5", "TPU v5p"), 459e12, 95 * 10**9, 2765e9, 600e9),
        Accelerator("v6e", ("TPU v6 lite", "TPU v6e"), 918e12, 32 * 10**9, 1640e9, 400e9),
        Accelerator("tpu7x", ("TPU7x", "TPU 7x"), 1153.5e12, 96 * GIB, 3690e9, 300e9),
        Accelerator("a100", ("NVIDIA A100-SXM4-80GB",), 312e12, 80 * 10**9, 2039e9, 300e9),
        Accelerator("h100", ("NVIDIA H100 80GB HBM3",), 989e12, 80 * 10**9, 3.35e12, 450e9),
        Accelerator("h200", ("NVIDIA H200",), 989e12, 141 * 10**9, 4.8e12, 450e9),
        Accelerator("b200", ("NVIDIA B200",), 2250e12, 180 * 10**9, 8e12, 900e9),
    )
}


def find(device_kind: str) -> Accelerator | None:
    """The device of JAX's `device_kind`; None where no figures of it are held."""
    return next((d for d in ACCELERATORS.values() if device_kind in d.kinds), None)
