"""What a plan is asked for: a topology that nobody here owns, and a mesh over it."""

import dataclasses
import math
import re
from dataclasses import dataclass

import jax

from pallas_kernels import ahead
from vhajax import config, hardware, sharding
from vhajax.errors import UserError
from vhajax.mechanisms import require
from vhajax.program import brief, hushed

CHIPS = (*ahead.TOPOLOGIES, "v4", *ahead.GPUS)
CORES = {"tpu7x": 2}  # JAX devices of a chip


@dataclass(frozen=True)
class Target:
    """topology: as libtpu names it, or `h100:8`. mesh: over all of its devices."""

    topology: str
    accelerator: hardware.Accelerator
    mesh: config.Mesh

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.shape)


def target(topology: str, mesh: str | None) -> Target:
    """`v5e:16x16` or `h100:8`, and `data=64,model=4` (default: data over all devices).

    Raises:
      UserError: a name or a size that there is not, or a mesh of another number of devices.
    """
    found = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", topology)
    require(
        found is not None and found[1] in CHIPS,
        f"--topology is {topology!r}; write a chip ({', '.join(CHIPS)}) and its size, as in "
        "v5e:4x4, v5p:2x2x1 or h100:8.",
    )
    assert found
    count = math.prod(map(int, found[2].split("x"))) * CORES.get(found[1], 1)
    require(count > 0, f"--topology is {topology!r}, which has no devices; make it larger.")
    require(
        found[1] not in ahead.GPUS or "x" not in found[2],
        f"--topology is {topology!r}; of GPUs write how many, as in {found[1]}:8.",
    )
    made = _mesh(mesh, count)
    require(
        math.prod(made.shape) == count,
        f"--mesh is {mesh} of {math.prod(made.shape)} devices, but {topology} has {count}; "
        "make them equal.",
    )
    return Target(topology, hardware.ACCELERATORS[found[1]], made)


def _mesh(text: str | None, count: int) -> config.Mesh:
    if text is None:
        return config.Mesh(data=count)
    parts = [part.partition("=") for part in text.split(",")]
    sizes = {name: int(size) for name, _, size in parts if size.isdecimal()}
    require(
        len(sizes) == len(parts) and sizes.keys() <= set(sharding.AXES),
        f"--mesh is {text!r}; write sizes by axis, as in data=64,model=4.",
    )
    return config.Mesh(**sizes)


def elsewhere(experiment: config.Experiment) -> config.Experiment:
    """The experiment without its mesh, which is about other devices than the target's."""
    return dataclasses.replace(experiment, mesh=config.Mesh())


def placed(experiment: config.Experiment, where: Target) -> config.Experiment:
    """The experiment on the target's mesh.

    Raises:
      UserError: its batch or its sizes do not divide over that mesh, or it has one of its own.
    """
    require(
        experiment.mesh == config.Mesh(),
        f"mesh is {experiment.mesh.shape}; of a plan it is given as --mesh data=D,model=M.",
    )
    return dataclasses.replace(experiment, mesh=where.mesh)


def device_mesh(where: Target) -> jax.sharding.Mesh:
    """
    Raises:
      UserError: the compiler is not installed, or it knows no such topology.
    """
    try:
        with hushed():
            devices = ahead.topology(where.topology)
            return sharding.make_mesh(where.mesh, devices)
    except ahead.NoCompilerError as error:
        raise UserError(str(error)) from error
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"--topology is {where.topology!r}, which the compiler refuses ({brief(error)}); "
            "choose one that is built."
        ) from error
