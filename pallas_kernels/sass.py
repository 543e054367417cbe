"""Reads what ptxas made of a kernel: registers, spills, and the machine code of its main loop.

Mosaic GPU leaves the PTX of every kernel in a folder (`flags`). `ptxas` assembles it again, and its
machine code is read as such: 16 bytes an instruction, the operation in the lowest 12 bits, and the
cycles for which its warp issues nothing else in bits 105 to 108. NVIDIA does not document this; the
code of a HGMMA, of a branch and where a branch leads to were compared with nvdisasm's output.
"""

import importlib.util
import re
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

HGMMA, BRANCH = 0x1F0, 0x147  # the lowest 9 bits of the operation; the others tell operands apart
OPERATION = 0x1FF
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class Resources:
    """registers: of a thread at launch. spilled: bytes stored to local memory. serialized: whether
    ptxas says that it made matrix products wait for each other."""

    registers: int
    spilled: int
    serialized: bool


@dataclass(frozen=True)
class Instruction:
    """operation: its lowest 9 bits. stall: cycles that its warp waits before the next. target: of a
    branch, the number of an instruction, or None."""

    operation: int
    stall: int
    target: int | None


@dataclass(frozen=True)
class Work:
    """Of one warp: instructions, cycles that it cannot issue faster than, and products."""

    instructions: float = 0
    cycles: float = 0
    products: float = 0

    def __add__(self, other: "Work") -> "Work":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Work(*(a + b for a, b in pairs))

    def __mul__(self, times: float) -> "Work":
        return Work(*(times * x for x in vars(self).values()))


def flags(folder: Path) -> dict[str, str]:
    """In which environment Mosaic GPU leaves PTX and the assembler's words in a folder."""
    return {
        "MOSAIC_GPU_DUMP_TO": str(folder),
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
    }


def resources(words: str) -> Resources:
    """From what ptxas -v says."""
    registers, spills = REGISTERS.search(words), SPILLS.search(words)
    if registers is None or spills is None:
        raise ValueError("ptxas said nothing of registers and spills")
    return Resources(int(registers[1]), int(spills[2]), "serialized" in words)


def assemble(ptx: Path) -> list[Instruction]:
    """A kernel's machine code, from its PTX."""
    binary = ptx.with_suffix(".cubin")
    command = [str(assembler()), "-arch=sm_90a", str(ptx), "-o", str(binary)]
    subprocess.run(command, check=True, capture_output=True)
    return disassemble(binary.read_bytes())


def assembler() -> Path:
    """ptxas of the package nvidia-cuda-nvcc."""
    spec = importlib.util.find_spec("nvidia.cu13")
    for folder in spec.submodule_search_locations or () if spec else ():
        if (found := Path(folder) / "bin" / "ptxas").exists():
            return found
    raise FileNotFoundError("ptxas is not here; install the package nvidia-cuda-nvcc.")


def disassemble(binary: bytes) -> list[Instruction]:
    """The one kernel of an ELF file."""
    (text,) = (code for name, code in _sections(binary) if name.startswith(".text."))
    words = [struct.unpack_from("<QQ", text, at) for at in range(0, len(text), 16)]
    return [_instruction(number, *pair) for number, pair in enumerate(words)]


def _sections(binary: bytes) -> list[tuple[str, bytes]]:
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    size, count, names = struct.unpack_from("<HHH", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", binary, table + i * size) for i in range(count)]
    start = headers[names][4]

    def name(at: int) -> str:
        return binary[start + at : binary.index(b"\0", start + at)].decode()

    nothing = 8  # a section that takes no space in the file
    return [(name(h[0]), binary[h[4] : h[4] + h[5]]) for h in headers if h[1] != nothing]


def _instruction(number: int, low: int, high: int) -> Instruction:
    operation, target = low & OPERATION, None
    if operation == BRANCH:
        offset = (low >> 16 & 0xFF) | (low >> 34) << 8 | (high & 0x3FFFF) << 38
        offset -= (offset >> 55) << 56  # its sign
        target = number + 1 + offset // 4
    return Instruction(operation, high >> 41 & 0xF, target)


# ------------------------------------------------------------------ loops


def loops(code: list[Instruction]) -> list[tuple[int, int]]:
    """First and last instruction of every loop, by where its branch back stands."""
    return [
        (i.target, at)
        for at, i in enumerate(code)
        if i.operation == BRANCH and i.target is not None and i.target <= at
    ]


def main_loop(code: list[Instruction]) -> tuple[int, int]:
    """The smallest loop that holds every matrix product."""
    products = [at for at, i in enumerate(code) if i.operation == HGMMA]
    holding = [(a, b) for a, b in loops(code) if a <= products[0] and products[-1] <= b]
    return min(holding, key=lambda loop: loop[1] - loop[0])


def work(code: list[Instruction], loop: tuple[int, int], products: int) -> Work:
    """Of one turn of a loop that is to issue so many products.

    Loops inside with products turn as often as that takes, alike; those without count once: they
    wait for a barrier, or clear what is not live, which few tiles need. Instructions that are
    branched over count as if they ran.
    """
    inner = [(a, b) for a, b in loops(code) if loop[0] < a and b < loop[1]]
    outermost = [
        x for x in inner if not any(y[0] <= x[0] and x[1] <= y[1] for y in inner if y != x)
    ]
    inside = {at for a, b in outermost for at in range(a, b + 1)}
    outside = _sum(code, [at for at in range(loop[0], loop[1] + 1) if at not in inside])
    turning = [_sum(code, range(a, b + 1)) for a, b in outermost]
    rolled = sum(w.products for w in turning)
    times = (products - outside.products) / rolled if rolled else 0
    total = outside
    for w in turning:
        total += w * (times if w.products else 1)
    return total


def _sum(code: list[Instruction], numbers) -> Work:
    mine = [code[at] for at in numbers]
    return Work(
        len(mine), sum(max(i.stall, 1) for i in mine), sum(i.operation == HGMMA for i in mine)
    )
