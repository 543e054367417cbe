"""Log-likelihoods of continuations, each given its own context."""

from collections.abc import Iterator, Sequence
from itertools import batched

import jax
import jax.numpy as jnp
import numpy as np

from vhajax.decode import pad
from vhajax.transformer import Transformer, residual

CHUNK = 256
"""Positions whose logits exist at one time."""

Pair = tuple[Sequence[int], Sequence[int]]
"""Ids of a context, at least one, and of its continuation."""


def score(
    model: Transformer, pairs: Sequence[Pair], max_length: int, batch_size: int
) -> Iterator[tuple[int, tuple[float, bool]]]:
    """Scores each continuation, the longest pairs first.

    A pair's result does not depend on the others, but for rounding. The model reads all of a pair
    but its last token, cut on the left to `max_length` tokens.

    Args:
      model: with a list of blocks (`inference.load`).
      pairs: an empty continuation has the result (0.0, True).
      max_length: no continuation is longer.
      batch_size: pairs read at one time.
    Yields:
      The number of a pair, and its result: log p(continuation | context) in nats, and whether each
      of its tokens is the most likely one.
    """
    lengths = [len(context) + len(continuation) for context, continuation in pairs]
    order = sorted(range(len(pairs)), key=lambda i: -lengths[i])
    yield from ((i, (0.0, True)) for i in order if not pairs[i][1])
    for batch in batched([i for i in order if pairs[i][1]], batch_size):
        # A batch that is not full is filled up: another size would be another program.
        rows = [pairs[i] for i in batch] + [([0], [0])] * (batch_size - len(batch))
        yield from zip(batch, _score_batch(model, rows, max_length), strict=False)


def _score_batch(
    model: Transformer, rows: Sequence[Pair], max_length: int
) -> list[tuple[float, bool]]:
    read = [[*context, *continuation][-max_length - 1 : -1] for context, continuation in rows]
    tokens, valid = pad(read, max_length)
    targets, scored = pad([continuation for _, continuation in rows], max_length)
    first = valid.sum(axis=1) - scored.sum(axis=1)
    x = _read(model, tokens, valid)
    nats, greedy = map(np.asarray, _look_up(model, x, first, targets))
    total = np.where(scored, nats, 0).sum(axis=1, dtype=np.float64)
    return list(zip(total.tolist(), (greedy | ~scored).all(axis=1).tolist(), strict=True))


@jax.jit
def _read(model: Transformer, tokens: jax.Array, valid: jax.Array) -> jax.Array:
    """The training form: [B, T] int32, and bool, False for padding on the right → [B, T, D]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return residual(model, tokens, positions, valid.astype(jnp.int32))


@jax.jit
def _look_up(
    model: Transformer, x: jax.Array, first: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What a row gives to its targets, from its position `first` on, and only there.

    Apart from `_read`, so that the model compiles once for a length, whatever is scored there.

    Args:
      x: [B, T, D], see `transformer.residual`.
      first: [B] int32.
      targets: [B, S] int32.
    Returns:
      Log-probabilities, float32 [B, S], and whether none is higher, bool [B, S].
    """
    B, S = targets.shape
    where = jnp.minimum(first[:, None] + jnp.arange(S), x.shape[1] - 1)
    x = jnp.take_along_axis(x, where[..., None], axis=1)

    def one(at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        state, target = at
        logits = model.logits(state[None, None])[0, 0]
        return jax.nn.log_softmax(logits)[target], logits.argmax() == target

    flat = (x.reshape(B * S, -1), targets.reshape(B * S))
    found = jax.lax.map(one, flat, batch_size=min(CHUNK, B * S))
    return found[0].reshape(B, S), found[1].reshape(B, S)
