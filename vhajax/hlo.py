"""Reads the text of a compiled (optimised, partitioned) HLO program: what it sends, how often.

Pure functions of strings. XLA's cost analysis counts the body of a loop once; here a collective in
a loop counts as often as it runs.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
_KIND = re.compile(rf"(?:ragged-)?({'|'.join(KINDS)})(-start)?")
_ARRAY = re.compile(r"\b([a-z]+\d*)\w*\[([\d,]*)\]")
_LAYOUT = re.compile(r"\{[^{}]*\}")
_AXIS = re.compile(r"'([^']+)'(?:=(\d+)|:\(\d+\)(\d+))?")


@dataclass(frozen=True)
class Collective:
    """One instruction that sends between devices.

    kind: of KINDS. name: the path of named scopes that it comes from ("" where XLA lost it).
    size: devices of a group. times: how often a step runs it.
    sent: bytes that each device sends when it runs once over a ring of the group's n devices:
      (n−1)/n of the whole array for an all-gather, reduce-scatter or all-to-all, twice that for an
      all-reduce, the operand for a collective-permute.
    """

    kind: str
    name: str
    size: int
    sent: float
    times: int = 1

    @property
    def total(self) -> float:
        """Bytes a device and step."""
        return self.sent * self.times


@dataclass
class _Instruction:
    name: str
    shape: str
    opcode: str
    rest: str

    @property
    def scope(self) -> str:
        return _first(r'op_name="([^"]*)"', self.rest)


@dataclass
class _Module:
    entry: str = ""
    devices: int = 1
    computations: dict[str, list[_Instruction]] = field(default_factory=dict)


def collectives(text: str) -> list[Collective]:
    """Every collective of a program, each with how often one call of the program runs it.

    Raises:
      ValueError: a loop with a collective in it tells nobody how often it runs.
    """
    module = _parse(text)
    return list(_walk(module, module.entry, 1))


def sent(whole: float, kind: str, size: int) -> float:
    """Bytes each device of a ring sends, see `Collective`; whole: bytes of the whole array."""
    if kind == "collective-permute":
        return whole
    share = whole * (size - 1) / size
    return 2 * share if kind == "all-reduce" else share


def _parse(text: str) -> _Module:
    module, body = _Module(), []
    header = text.partition("\n")[0]
    counts = [_first(rf"{name}=(\d+)", header) for name in ("num_partitions", "replica_count")]
    module.devices = math.prod(int(count or 1) for count in counts)
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            body = module.computations[head[2]] = []
            module.entry = head[2] if head[1] else module.entry
        elif found := _INSTRUCTION.match(line):
            body.append(_Instruction(*found.groups()))
    return module


def _walk(module: _Module, computation: str, times: int) -> Iterator[Collective]:
    begun: set[tuple[str, ...]] = set()
    body = module.computations.get(computation, [])
    for made in body:
        if kind := _KIND.fullmatch(made.opcode):
            yield replace(_read(module, made, body, kind[1]), times=times)
        elif made.opcode == "while":
            inner = _first(r"body=%?([\w.\-]+)", made.rest)
            found = list(_walk(module, inner, times))
            if found:
                count = _trips(module, made)
                yield from (replace(one, times=one.times * count) for one in found)
        else:
            yield from _called(module, made, times, begun)


def _called(
    module: _Module, made: _Instruction, times: int, begun: set[tuple[str, ...]]
) -> Iterator[Collective]:
    """What other computations send in an instruction's name.

    XLA:TPU spreads an asynchronous collective over several fusions, which all hold it; a chain_id
    says which belong together. A fusion of an all-reduce and a slice, `all-reduce-scatter`, is its
    reduce-scatter.
    """
    for name in re.findall(
        r"(?:calls|called_computations|branch_computations)=\{?([^}=]*)", made.rest
    ):
        for inner in re.findall(r"%([\w.\-]+)", name):
            body = module.computations.get(inner, [])
            chains = [_chain(one) for one in body if _KIND.fullmatch(one.opcode)]
            if any(chain in begun for chain in chains if chain):
                continue
            begun.update(chain for chain in chains if chain)
            for one in _walk(module, inner, times):
                if inner.startswith("all-reduce-scatter") and one.kind == "all-reduce":
                    one = replace(one, kind="reduce-scatter", sent=one.sent / 2)
                yield replace(one, name=one.name or made.scope)


def _chain(made: _Instruction) -> tuple[str, ...]:
    chain = _first(r'chain_id="(\d+)"', made.rest)
    return (made.opcode, _first(r"channel_id=(\d+)", made.rest), chain) if chain else ()


def _read(module: _Module, made: _Instruction, body: list[_Instruction], kind: str) -> Collective:
    size = _group(made.rest, module.devices)
    arrays = [_bytes(dtype, sizes) for dtype, sizes in _ARRAY.findall(_bare(made.shape))]
    if made.opcode.endswith("-start") and made.shape.startswith("("):
        arrays = _of_start(arrays, kind, made.shape)
    whole = sum(arrays) * (size if kind == "reduce-scatter" else 1)
    return Collective(kind, made.scope or _neighbour(made, body), size, sent(whole, kind, size))


def _of_start(arrays: list[int], kind: str, shape: str) -> list[int]:
    """Of (operands, results, …): the results, or what a permute sends; an all-reduce has one."""
    if kind == "collective-permute":
        return arrays[:1]
    if kind == "all-reduce" and not shape.startswith("(("):
        return arrays
    return arrays[len(arrays) // 2 :]


def _neighbour(made: _Instruction, body: list[_Instruction]) -> str:
    """The scope of what a collective without one reads: XLA splits a collective and forgets."""
    operands = set(re.findall(r"%([\w.\-]+)", made.rest.partition(")")[0]))
    return next((one.scope for one in body if one.name in operands and one.scope), "")


def _trips(module: _Module, loop: _Instruction) -> int:
    if known := _first(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known)
    condition = module.computations.get(_first(r"condition=%?([\w.\-]+)", loop.rest), [])
    limits = [one.rest for one in condition if one.opcode == "constant"]
    limits = [int(found) for rest in limits if (found := _first(r"^(\d+)\)", rest))]
    if len(limits) != 1:
        raise ValueError(f"{loop.name} sends, and does not say how often it runs")
    return limits[0]


def _group(rest: str, devices: int) -> int:
    """Devices that take part in one run of a collective together."""
    if pairs := _first(r"source_target_pairs=\{(\{.*?\})\}", rest):
        return pairs.count("{")
    if mesh := re.search(r"replica_groups=(?:mesh|@\w+)\[([^\]]*)\] \{([^}]*)\}", rest):
        sizes = {name: int(size) for name, size, _ in _AXIS.findall(mesh[1])}
        return math.prod(int(part or sizes[name]) for name, _, part in _AXIS.findall(mesh[2]))
    if listed := _first(r"replica_groups=\{\{([\d,]+)\}", rest):
        return listed.count(",") + 1
    return int(_first(r"replica_groups=\[\d+,(\d+)\]<=", rest) or devices)


def _bare(shape: str) -> str:
    """Without layouts, whose tiles may look like arrays."""
    while (shorter := _LAYOUT.sub("", shape)) != shape:
        shape = shorter
    return shape


def _bytes(dtype: str, sizes: str) -> int:
    bits = int(re.sub(r"^[a-z]+", "", dtype) or 8)  # pred takes a byte
    return math.prod(int(size) for size in sizes.split(",") if size) * bits // 8


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""
