"""A program compiled for devices that are not here: its memory, its traffic, what compilers say."""

import contextlib
import dataclasses
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels import UnsupportedError
from vhajax import hlo, sharding
from vhajax.errors import UserError

LARGE = 2**24  # bytes of an array that should not lie on every device
INVOLUNTARY = "Involuntary full rematerialization"
PARTS = ("forward and backward", "optimizer")


@dataclass(frozen=True)
class Memory:
    """Bytes a device.

    inputs: rows of a batch, or tokens and cache of a decode step; and the padding of all arguments.
    activations: kept between forward and backward pass. temporaries: everything else that lives
    inside a step, gradients included. results: what is not written over an argument.
    program: the code.
    """

    parameters: int
    optimizer: int
    inputs: int
    activations: int
    temporaries: int
    results: int
    program: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in a step. part: of PARTS. sent: bytes a device."""

    part: str
    kind: str
    count: int
    sent: float


def compile_for(topology: str, lowered: Any, told: list[str]) -> tuple[Any, float]:
    start = time.perf_counter()
    try:
        with hushed() as heard:
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(
            f"The step does not fit the memory of {topology} ({brief(error)}); take more "
            "devices, raise train.grad_accum, or set train.remat to full."
        ) from error
    except UnsupportedError as error:
        raise UserError(str(error)) from error
    told += [" ".join(line.split()) for line in heard if INVOLUNTARY in line]
    return compiled, time.perf_counter() - start


def memory_of(compiled: Any, parameters: Any, optimizer: Any, kept: int) -> Memory:
    found = compiled.memory_analysis()
    weights, moments = _tree_bytes(parameters), _tree_bytes(optimizer)
    activations = min(kept, found.temp_size_in_bytes)
    return Memory(
        parameters=weights,
        optimizer=moments,
        inputs=found.argument_size_in_bytes - weights - moments,
        activations=activations,
        temporaries=found.temp_size_in_bytes - activations,
        results=found.output_size_in_bytes - found.alias_size_in_bytes,
        program=found.generated_code_size_in_bytes,
    )


def traffic_of(text: str) -> tuple[Traffic, ...]:
    """The optimizer's is what carries its scope, which the global norm of clipping does too."""
    totals: dict[tuple[str, str], list[float]] = {}
    for one in hlo.collectives(text):
        part = PARTS["optimizer" in one.name.split("/")]
        entry = totals.setdefault((part, one.kind), [0, 0.0])
        entry[0] += one.times
        entry[1] += one.total
    order = sorted(totals, key=lambda key: (PARTS.index(key[0]), hlo.KINDS.index(key[1])))
    return tuple(Traffic(*key, int(totals[key][0]), totals[key][1]) for key in order)


def replicated(trees: dict[str, Any], devices: int) -> list[str]:
    """Sentences about large arrays of which every device holds all."""
    told = []
    for kind, tree in trees.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            size = shard_bytes(x)
            if devices > 1 and size >= LARGE and x.sharding.is_fully_replicated:
                name = jax.tree_util.keystr(path)
                told.append(f"{kind} {name} of {size:,} bytes lies whole on every device")
    return told


def _tree_bytes(tree: Any) -> int:
    return sum(map(shard_bytes, jax.tree.leaves(tree)))


def shard_bytes(x: Any) -> int:
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


@contextlib.contextmanager
def told_by() -> Iterator[list[str]]:
    """Python's warnings of the block as sentences, each once."""
    told: list[str] = []
    sharding._warn_replicated.cache_clear()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield told
    told += [str(one.message) for one in heard]


@contextlib.contextmanager
def hushed() -> Iterator[list[str]]:
    """What the compilers, which are C++, write to stderr, as lines once the block has ended."""
    lines: list[str] = []
    sys.stderr.flush()
    with tempfile.TemporaryFile(mode="w+", errors="replace") as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            lines += file.read().splitlines()


def brief(error: Exception) -> str:
    """The first lines of a compiler's error, without its full stop."""
    return " ".join(str(error).split())[:300].rstrip(". ")
