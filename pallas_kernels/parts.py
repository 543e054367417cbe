"""How the GPU kernel divides a call: the queries that a block answers at once, and their lanes.

A part is up to 64 queries; a block walks over a sequence for one part at a time. Its queries are
the columns of the logits [rows of a tile, columns]; its share of a row is a list of chunks of 64
lanes, each of which meets some of the columns:

    GQA   K_k and V_k meet the columns of their group
    LRKV  k_shared and v_shared meet all columns, latents of up to 8 heads the columns of those

so that of LRKV's block-diagonal queries only blocks of 8 heads are stored and multiplied. Chunks
begin at multiples of 64 lanes, as a swizzled copy must; what one holds beside the lanes it is read
for meets zeros. B sequences, N queries, K KV heads, H head dim, V value dim, R rank, W row.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.check import UnsupportedError
from pallas_kernels.core import Attended, Problem, Solved
from pallas_kernels.rows import padded, up

LANES = 64  # of a chunk: 128 bytes, the widest swizzle
EIGHT = 8  # columns come in eights
MOST_COLUMNS = 64
MOST_GROUPS = 4
MOST_SUMS = 64  # registers of a thread that hold weighted values, where groups are put together
MOST_GROUP = 128  # the same, of one group
ROTOR_BYTES = 144 * 1024  # of shared memory that A may take (RoPE)


@dataclass(frozen=True)
class Run:
    """Chunks side by side in a row, and the columns first … first + count − 1 that they meet.

    index: of the run in `Places`. chunks: how many. lane: where the first stands in laid-out
      queries (keys), in A (latents) or in results (values, own).
    """

    index: int
    chunks: int
    lane: int
    first: int
    count: int

    @property
    def lanes(self) -> int:
        return self.chunks * LANES


@dataclass(frozen=True)
class Plan:
    """What is static of the division.

    parts: of the call. groups: of columns in a part, `width` each, of which `heads` are used.
    keys: runs that meet queries. latents: those that meet the rotation instead (RoPE).
    values: runs of which every column keeps all lanes. own: those of which a column keeps the lanes
      of its head.
    rank: R, or 0. offsets: least and most lanes in a run of latents before those of its first head.
    edge: whether keys' runs may reach the padding of a row.
    """

    parts: int
    groups: int
    heads: int
    width: int
    keys: tuple[Run, ...]
    latents: tuple[Run, ...]
    values: tuple[Run, ...]
    own: tuple[Run, ...]
    rank: int
    offsets: tuple[int, int]
    edge: bool

    @property
    def columns(self) -> int:
        return self.groups * self.width

    @property
    def runs(self) -> tuple[Run, ...]:
        """Of a row, in the order in which they are read."""
        return self.keys + self.latents + self.values + self.own

    @property
    def aligned(self) -> bool:
        """Whether no chunk of latents holds those of two heads."""
        return self.offsets == (0, 0) and self.rank % LANES == 0

    @property
    def flipped(self) -> bool:
        """Whether queries, 64 of them, are the rows of products instead of their columns."""
        return self.width == MOST_COLUMNS and not self.rank

    @property
    def meeting(self) -> int:
        """Most heads whose latents one chunk holds."""
        return 1 if self.aligned else min((LANES - 2) // self.rank + 2, self.heads)

    @property
    def sums(self) -> int:
        """Registers of a thread that hold weighted values."""
        return sum(r.count * r.lanes // 128 for r in self.values + self.own)


@dataclass(frozen=True)
class Places:
    """Where things lie, which `heads` may make known only as the program runs: int32 arrays.

    starts: [parts, runs] chunks of a row before each run. offsets: [parts, runs] lanes in a run
    before those that it is read for. queries: [parts, groups, heads] indices into q, N for none.
    needed: [parts] bool, False where there is none.
    """

    starts: Any
    offsets: Any
    queries: Any
    needed: Any


def lanes_of(runs: tuple[Run, ...]) -> int:
    """Of the array that these are laid out in."""
    return max((r.lane + r.lanes for r in runs), default=0)


def chunks_of(runs: tuple[Run, ...]) -> int:
    return sum(r.chunks for r in runs)


def divide(problem: Problem) -> tuple[Plan, Places]:
    """The division of a call.

    Raises:
      UnsupportedError: one head's latents are too many for a block.
    """
    heads = _heads(problem)
    known = isinstance(problem.first, int | np.integer)
    last = problem.total - problem.q.shape[1]
    possible = [
        _runs(problem, heads, f)[1] for f in ([problem.first] if known else range(last + 1))
    ]
    plan = _plan(problem, heads, np.stack(possible))
    queries, lanes = _runs(problem, heads, problem.first)
    return plan, _places(problem, plan, queries, lanes)


def _heads(problem: Problem) -> int:
    """Queries of a group: as many as registers and shared memory allow, evenly."""
    N, R, V = problem.q.shape[1], problem.rank, problem.value_dim
    alike = N if problem.partial or R else N // problem.num_kv_heads
    values = _chunks(V, LANES - 1)
    for most in (EIGHT, 7, 6, 5, 4, 3, 2, 1) if R else (64, 32, 16, EIGHT):
        own = _chunks(most * R, LANES - 1) if R else 0
        sums = (own + values) * up(most, EIGHT) // 2
        rotor = own * LANES * problem.rotor_width * problem.cache.dtype.itemsize
        if sums <= MOST_GROUP and rotor <= ROTOR_BYTES:
            return -(-alike // -(-alike // most))
    raise UnsupportedError(
        f"value_dim {V} and rank {R} are too much for the registers and shared memory of a GPU's "
        "multiprocessor even for the fewest heads at a time; use backend='jnp'."
    )


def _chunks(lanes: int, offset: int) -> int:
    return up(offset + lanes, LANES) // LANES


def _runs(problem: Problem, heads: int, first: Any) -> tuple[Any, Any]:
    """Queries [groups, heads] (N: none), and lanes [groups, 2] of their own keys and values."""
    xp = np if isinstance(first, int | np.integer) else jnp
    (_, N, H), V, R, K = problem.q.shape, problem.value_dim, problem.rank, problem.num_kv_heads
    if R:
        head = np.arange(0, N, heads)
        keys = xp.asarray(H + (first + head) * R)
        values = keys + problem.total * R + V
        queries = np.minimum(head[:, None] + np.arange(heads), N)
        return queries, xp.stack([keys, values], axis=1)
    share = problem.total // K
    alike = N if problem.partial else share
    # A block of queries that begins anywhere in a KV head may touch more than one.
    touched = min(K, -(-(heads - 1) // share) + 1) if problem.partial else 1
    blocks = [
        (start + at, start + min(at + heads, alike), touch)
        for start in range(0, N, alike)
        for at in range(0, alike, heads)
        for touch in range(touched)
    ]
    head, stop, touch = np.array(blocks).T
    kv = (first + head) // share + touch
    queries = head[:, None] + np.arange(heads)
    mine = (queries < stop[:, None]) & ((first + queries) // share == kv[:, None])
    keys = xp.minimum(kv, K - 1) * (H + V)
    return xp.where(mine, queries, N), xp.stack([keys, keys + H], axis=1)


def _plan(problem: Problem, heads: int, lanes: np.ndarray) -> Plan:
    """lanes: [possible firsts, groups, 2]."""
    H, V, R, row = problem.q.shape[2], problem.value_dim, problem.rank, padded(problem.elements)
    width = up(heads, EIGHT)
    own_sizes = (heads * R, heads * R) if R else (H, V)
    counts = [
        min(_chunks(size, int((lanes[..., i] % LANES).max())), row // LANES)
        for i, size in enumerate(own_sizes)
    ]
    shared_value = H + problem.total * R
    shared = (_chunks(H, 0), _chunks(V, shared_value % LANES)) if R else (0, 0)
    starts = _starts(lanes, np.array(counts), row)
    offsets = lanes - LANES * starts
    most = min(MOST_COLUMNS // width, MOST_GROUPS)
    while most > 1 and most * counts[1] * width // 2 + shared[1] * most * width // 2 > MOST_SUMS:
        most -= 1
    if problem.rotation is not None:
        most = 1
    parts = -(-lanes.shape[1] // most)
    groups = -(-lanes.shape[1] // parts)
    columns = groups * width

    def each(side: int, lane: int, step: int) -> tuple[Run, ...]:
        return tuple(
            Run(2 + 2 * g + side, counts[side], lane + g * step, g * width, width)
            for g in range(groups)
        )

    keys, values = ((Run(i, shared[i], 0, 0, columns),) if R else () for i in (0, 1))
    rotated = problem.rotation is not None
    ends = [shared[0], *([] if rotated else (starts[..., 0] + counts[0]).ravel())]
    own_keys = each(0, 0, counts[0] * LANES) if rotated else each(0, lanes_of(keys), 0)
    own_values = each(1, 0, counts[1] * LANES if R else 0)
    return Plan(
        parts,
        groups,
        heads,
        width,
        keys if rotated else keys + own_keys,
        own_keys if rotated else (),
        values if R else own_values,
        own_values if R else (),
        R,
        (int(offsets[..., 0].min()), int(offsets[..., 0].max())),
        bool(max(ends) * LANES > problem.elements),
    )


def _starts(lanes: Any, counts: Any, row: int) -> Any:
    """Chunks of a row before runs of so many, none of which may reach beyond the row."""
    xp = np if isinstance(lanes, np.ndarray) else jnp
    return xp.minimum(lanes // LANES, row // LANES - counts)


def _places(problem: Problem, plan: Plan, queries: Any, lanes: Any) -> Places:
    H, R, row = problem.q.shape[2], problem.rank, padded(problem.elements)
    N, spare = problem.q.shape[1], plan.parts * plan.groups - len(lanes)
    xp = np if isinstance(lanes, np.ndarray) else jnp
    queries = xp.pad(xp.asarray(queries), ((0, spare), (0, 0)), constant_values=N)
    queries = queries.reshape(plan.parts, plan.groups, plan.heads)
    lanes = xp.pad(lanes, ((0, spare), (0, 0)), mode="edge").reshape(plan.parts, -1)
    shared = np.broadcast_to(np.array([0, H + problem.total * R]), (plan.parts, 2))
    lanes = xp.concatenate([shared, lanes], axis=1).astype(np.int32)
    counts = np.zeros(lanes.shape[1], np.int32)
    for run in plan.runs:
        counts[run.index] = run.chunks
    starts = _starts(lanes, counts, row)
    return Places(starts, lanes - LANES * starts, queries, (queries < N).any(axis=(1, 2)))


# ------------------------------------------------------------------ operands and results


def _take(x: jax.Array, lanes: Any, offset: jax.Array, width: int) -> jax.Array:
    """x[..., lane − offset] within its width, else 0; offset [...]."""
    at = jnp.asarray(lanes) - offset[..., None]
    found = jnp.take_along_axis(x, jnp.clip(at, 0, width - 1), axis=-1)
    return jnp.where((at >= 0) & (at < width), found, 0)


def grouped(x: jax.Array, places: Places) -> jax.Array:
    """[B, N, …] → [B, parts, groups, heads, …], zero where there is no query."""
    x = jnp.pad(x, [(0, 0), (0, 1), *[(0, 0)] * (x.ndim - 2)])
    return x[:, places.queries]


def lay_queries(problem: Problem, plan: Plan, places: Places) -> jax.Array:
    """[B, parts, columns, lanes of keys] in the cache's dtype."""
    sides = []
    R, runs = plan.rank, places.offsets[:, 2::2]  # of own keys
    q = grouped(problem.q, places)
    shape = q.shape[:4]
    if R:
        sides.append(jnp.pad(q, [*[(0, 0)] * 4, (0, up(q.shape[-1], LANES) - q.shape[-1])]))
    if problem.rotation is None:
        own = q if problem.absorbed is None else grouped(problem.absorbed, places)
        offset = runs[:, :, None] + jnp.arange(plan.heads) * R
        lanes = np.arange(lanes_of(plan.keys) - sum(s.shape[-1] for s in sides))
        sides.append(_take(own, lanes, jnp.broadcast_to(offset, shape), own.shape[-1]))
    laid = jnp.concatenate(sides, axis=-1)
    laid = jnp.pad(laid, [*[(0, 0)] * 3, (0, plan.width - plan.heads), (0, 0)])
    return laid.reshape(*shape[:2], plan.columns, -1).astype(problem.cache.dtype)


def lay_rotor(problem: Problem, plan: Plan, places: Places) -> jax.Array:
    """Aᵀ [B, parts, lanes of latents, P] in the cache's dtype; P as a table's row."""
    assert problem.rotation is not None
    rotor = grouped(problem.rotation.rotor, places)  # [B, parts, groups, heads, R, P]
    B, parts, groups, heads, R, P = rotor.shape
    flat = rotor.reshape(B, parts, groups, heads * R, P).swapaxes(-1, -2)
    offset = jnp.broadcast_to(places.offsets[:, 2::2, None], (B, parts, groups, P))
    laid = _take(flat, np.arange(lanes_of(plan.latents) // groups), offset, heads * R)
    laid = laid.swapaxes(-1, -2).reshape(B, parts, -1, P).astype(problem.cache.dtype)
    return jnp.pad(laid, [*[(0, 0)] * 3, (0, up(P, LANES) - P)])


def gather_values(
    problem: Problem, plan: Plan, places: Places, whole: jax.Array, own: jax.Array | None
) -> jax.Array:
    """[parts, …, columns, V + R] of what blocks wrote.

    Args:
      whole: [parts, …, lanes, columns], flipped [parts, …, columns, lanes]. own: [parts, …, lanes],
        or None at rank 0.
    """
    lead = whole.shape[:-2]
    offsets = places.offsets.reshape(plan.parts, *[1] * (len(lead) - 1), -1)  # [parts, …, runs]
    start = offsets[..., 1:2] if plan.rank else offsets[..., 3::2]
    wide = whole if plan.flipped else whole.swapaxes(-1, -2)
    wide = wide.reshape(*lead, plan.groups, plan.width, -1)
    found = _cut(wide, start[..., None], problem.value_dim)
    if own is not None:
        own = own.reshape(*lead, plan.groups, -1)
        latents = _cut(own, offsets[..., 3::2], plan.heads * plan.rank)
        latents = latents.reshape(*lead, plan.groups, plan.heads, plan.rank)
        spare = (0, plan.width - plan.heads)
        latents = jnp.pad(latents, [*[(0, 0)] * (len(lead) + 1), spare, (0, 0)])
        found = jnp.concatenate([found, latents], axis=-1)
    return found.reshape(*lead, plan.columns, -1)


def _cut(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """x[..., start : start + size], start as x without its last axis."""
    at = jnp.broadcast_to(start, x.shape[:-1])[..., None] + np.arange(size)
    return jnp.take_along_axis(x, at, axis=-1, mode="clip")


def ungroup(problem: Problem, plan: Plan, places: Places, merged: Attended) -> Solved:
    """Heads in order again, from out [parts, B, columns, V + R] and lse [parts, B, columns]."""
    (B, N, _), V = problem.q.shape, problem.value_dim
    spare = ((0, 0), (0, 0), (0, plan.width - plan.heads))
    columns = jnp.pad(places.queries, spare, constant_values=N).reshape(-1)
    where = jnp.argmax(columns == jnp.arange(N)[:, None], axis=1)
    out, lse = (x.swapaxes(0, 1).reshape(B, len(columns), *x.shape[3:])[:, where] for x in merged)
    return Solved(out[..., :V], out[..., V:] if plan.rank else None, lse)
