"""The table of published figures against what else is known of the same devices."""

import pytest

from pallas_kernels.chips import CHIPS, GPUS
from vhajax.hardware import ACCELERATORS, find


@pytest.mark.parametrize("chip", [*CHIPS.values(), *GPUS.values()], ids=lambda chip: chip.name)
def test_the_kernels_know_the_same_device(chip):
    held = ACCELERATORS[chip.name]
    assert held.bandwidth == chip.hbm
    assert held.kinds == chip.kinds
    if chip.name in GPUS:
        assert held.memory == chip.memory


def test_a_device_is_found_by_its_kind_and_no_other():
    kinds = [kind for device in ACCELERATORS.values() for kind in device.kinds]
    assert len(kinds) == len(set(kinds))
    assert [find(kind) for device in ACCELERATORS.values() for kind in device.kinds] == [
        device for device in ACCELERATORS.values() for _ in device.kinds
    ]
    v5p = find("TPU v5")
    assert v5p is not None
    assert v5p.name == "v5p"
    assert find("TPU v5 lite") is ACCELERATORS["v5e"]
    for other in ("cpu", "NVIDIA H100 PCIe", "TPU v3", ""):
        assert find(other) is None
