"""Sequences of unequal length over the multiprocessors of a GPU, and their partial results merged.

All tiles of all sequences lie in one line, sequence after sequence. A team is one block for each
part of a call; every team takes an equal stretch of the line, wherever sequences end, and its
blocks read the same tiles at the same time, so that lanes which several parts want come from HBM
once. Where team t meets sequence b it leaves one partial result a part, in place t + b, which is no
other pair's: along the line each step raises t, b or both.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.core import Attended

FEWEST = 2  # tiles of a team's stretch: one for each of its consumers


class Schedule(NamedTuple):
    """Who reads what.

    blocks: [blocks, 6] int32 first tile in the line, end; first sequence, end; part; team.
    line: [B + 1] int32 tiles before each sequence.
    live: [B, 3] int32 the tile of the first live slot; first live slot, end.
    mine: [B, places] bool which partial results are a sequence's; others are not written.
    """

    blocks: jax.Array
    line: jax.Array
    live: jax.Array
    mine: jax.Array


def schedule(
    live: tuple[jax.Array, jax.Array],
    needed: jax.Array | np.ndarray,
    *,
    tile: int,
    blocks: int,
    splits: int | None,
) -> Schedule:
    """An equal stretch for each of as many teams as there are, or `splits` teams a sequence.

    Args:
      live: first live slot and end, [B] int32. needed: [parts] bool; others have no blocks. What
        is known before the program runs (NumPy) saves places.
      blocks: at most; splits have as many as they need.
    """
    low, high = live
    first = low // tile
    tiles = jnp.where(high > low, -(-high // tile) - first, 0)
    line = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(tiles, dtype=jnp.int32)])
    known = isinstance(needed, np.ndarray)
    members = int(needed.sum()) if known else jnp.sum(needed, dtype=jnp.int32)
    if splits is None:
        most = max(blocks // (members if known else 1), 1)
        teams = jnp.maximum(blocks // members, 1)
        share = jnp.maximum(-(-line[-1] // teams), FEWEST)
        begin = jnp.minimum(share * jnp.arange(most, dtype=jnp.int32), line[-1])
        end = jnp.minimum(begin + share, line[-1])
    else:
        most = splits * len(tiles)
        share = -(-tiles // splits)
        at = jnp.arange(splits, dtype=jnp.int32) * share[:, None]
        begin = jnp.minimum(line[:-1, None] + at, line[1:, None]).reshape(-1)
        end = jnp.minimum(begin + jnp.repeat(share, splits), jnp.repeat(line[1:], splits))
    sequence = (
        jnp.searchsorted(line, begin, side="right", method="compare_all").astype(jnp.int32) - 1
    )
    stop = jnp.searchsorted(line, end, method="compare_all").astype(jnp.int32)
    stop = jnp.where(end > begin, stop, sequence)
    teams = jnp.stack([begin, end, sequence, stop], axis=1)
    # More parts than blocks: one team all the same.
    most_blocks = None if known or splits is not None else max(blocks, len(needed))
    return Schedule(
        _blocks(teams, needed, members, most_blocks),
        line,
        jnp.stack([first, low, high], axis=1),
        _mine(begin, end, line),
    )


def _blocks(teams: jax.Array, needed, members, most: int | None) -> jax.Array:
    """Blocks from teams [teams, 4], whose members are the needed parts; at most so many."""
    known = isinstance(needed, np.ndarray)
    parts = np.flatnonzero(needed) if known else jnp.argsort(~needed, stable=True)
    block = np.arange(most or len(teams) * len(parts), dtype=np.int32)
    team, part = block // members, jnp.asarray(parts, jnp.int32)[block % members]
    stretch = jnp.where((team < len(teams))[:, None], teams[team.clip(max=len(teams) - 1)], 0)
    return jnp.concatenate([stretch, part[:, None], jnp.asarray(team)[:, None]], axis=1)


def _mine(begin: jax.Array, end: jax.Array, line: jax.Array) -> jax.Array:
    """[B, places] whether team place − b meets sequence b."""
    teams, B = len(begin), len(line) - 1
    team = jnp.arange(teams + B) - jnp.arange(B)[:, None]
    first, stop = begin[team.clip(0, teams - 1)], end[team.clip(0, teams - 1)]
    low, high = line[:-1, None], line[1:, None]
    return (team >= 0) & (team < teams) & (first < high) & (stop > low) & (high > low)


def merge(values: jax.Array, peak: jax.Array, total: jax.Array, mine: jax.Array) -> Attended:
    """Weighted means from unnormalised sums of parts of sequences, all float32.

    Args:
      values: [places, consumers, M, V] sums of exp2(logit − peak) · value, logits in base 2.
      peak, total: [places, consumers, M] the largest logit, and the sum of those weights.
      mine: [B, places]. What belongs to no sequence may hold anything.
    Returns:
      out [B, M, V], lse [B, M] natural; 0 and −inf where nothing is live. What is not finite
      shows in its own sequence only.
    """
    written = mine.any(axis=0)[:, None, None]
    peaks = jnp.max(jnp.where(written, peak, -jnp.inf), axis=1)
    highest = jnp.max(jnp.where(mine[:, :, None], peaks, -jnp.inf), axis=1)
    owner = jnp.argmax(mine, axis=0)
    weight = jnp.where(written, jnp.exp2(peak - highest[owner][:, None]), 0)
    total = jnp.sum(jnp.where(written, weight * total, 0), axis=1)
    sums = jnp.sum(jnp.where(written[..., None], weight[..., None] * values, 0), axis=1)
    sums = jnp.concatenate([sums, total[..., None]], axis=-1)
    # A product with 0 and 1 adds places in a fixed order, as scattered sums would not; but 0 · NaN
    # is NaN, so what is not finite is kept out of it.
    sound = jnp.all(jnp.isfinite(sums), axis=-1)
    spoilt = jnp.any(mine[:, :, None] & ~sound, axis=1)
    sums = jnp.where(sound[..., None], sums, 0)
    sums = jnp.einsum("sp,pmv->smv", mine.astype(jnp.float32), sums, precision="highest")
    total = sums[..., -1]
    out = sums[..., :-1] / jnp.where(total == 0, 1, total)[..., None]
    lse = (highest + jnp.log2(total)) * np.float32(np.log(2))
    lse = jnp.where(total == 0, -jnp.inf, lse)
    return Attended(jnp.where(spoilt[..., None], jnp.nan, out), jnp.where(spoilt, jnp.nan, lse))
