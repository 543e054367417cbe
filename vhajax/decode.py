"""Prefill, decode step and generate: pure functions over an explicit cache.

    model, tokenizer = load("runs/my_run")
    cache = init_cache(model, batch, capacity)
    logits, cache = prefill(model, tokens, cache, valid)
    logits, cache = decode_step(model, token, cache)

The cache is donated: after a call only the returned one may be used.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import Backend
from vhajax.cache import LayerCache, Layout
from vhajax.errors import UserError
from vhajax.layers import compute_dtype
from vhajax.sampling import GREEDY, Sampling, sample
from vhajax.sharding import axis_for, reshard
from vhajax.transformer import Transformer, unstacked, windows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """What decoding keeps: one cache a layer, and how many slots are live, once for all layers.

    layers: what each layer stores. lengths: [B] int32.
    """

    layers: tuple[LayerCache, ...]
    lengths: jax.Array


def init_cache(
    model: Transformer,
    batch: int,
    capacity: int,
    layout: Layout | None = None,
    backend: Backend = "auto",
) -> Cache:
    """An empty cache for `batch` sequences of at most `capacity` tokens, in compute dtype.

    Args:
      layout: see `cache.LayerCache`; the one that this machine reads best by default.
      backend: who decodes a token: `tpu` or `gpu`, the Pallas kernels; `tpu_interpret` or
        `gpu_interpret`, the same in JAX's interpreters (for tests); `jnp`, XLA; `auto`, the kernels
        on a TPU or a Hopper GPU where they can (MLA has none yet, and the GPU's none for float32),
        XLA elsewhere.
    Raises:
      UserError: an empty cache, or a backend that cannot decode this model here.
    """
    if batch < 1 or capacity < 1:
        raise UserError(f"A cache of {batch} × {capacity} (batch × capacity) holds nothing.")
    dtype = compute_dtype(model.cfg)
    layers = tuple(
        b.attention.init_cache(batch, capacity, dtype, layout, backend) for b in unstacked(model)
    )
    return Cache(layers, jnp.zeros(batch, jnp.int32))


@functools.partial(jax.jit, donate_argnames="cache", static_argnames="extend")
def prefill(
    model: Transformer,
    tokens: jax.Array,
    cache: Cache,
    valid: jax.Array | None = None,
    *,
    extend: bool = False,
) -> tuple[jax.Array, Cache]:
    """Reads prompts of unequal length, padded left or right.

    Args:
      tokens: [B, T] int32.
      cache: an empty cache, or with extend=True one that holds earlier chunks.
      valid: [B, T] bool, False for padding, which stands on one side of a row only; None: all.
        Left-padded rows are shifted, so that every sequence starts at slot 0.
      extend: continue a cache that is not empty (a chunked prompt).
    Returns:
      float32 logits [B, V] after each row's last valid token (padded ids −inf), and the cache.
      A row without valid tokens gets no meaningful logits: keep those of its earlier chunk.
    Raises:
      UserError: more tokens than the cache has slots, before anything compiles. A chunk's fit
        cannot be seen there: tokens past the last slot are dropped, so check lengths yourself.
    """
    _check_fits(tokens, cache)
    if valid is None:
        valid = jnp.ones(tokens.shape, bool)
    tokens, valid = _shift_left(tokens, valid)
    x, cache = _blocks(model, tokens, cache, valid, "extend" if extend else "prefill")
    last = jnp.maximum(valid.sum(axis=1) - 1, 0)
    x = jnp.take_along_axis(_whole(x), last[:, None, None], axis=1)
    return model.logits(x)[:, 0], cache


@functools.partial(jax.jit, donate_argnames="cache")
def decode_step(model: Transformer, token: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """One more token a sequence.

    Args:
      token: [B] int32.
    Returns:
      float32 logits [B, V] and the cache, one slot longer. A full cache drops the token: the caller
      counts (`generate` refuses beforehand).
    """
    valid = jnp.ones((token.shape[0], 1), bool)
    x, cache = _blocks(model, token[:, None], cache, valid, "extend")
    return model.logits(x)[:, 0], cache


def _blocks(model: Transformer, tokens: jax.Array, cache: Cache, valid: jax.Array, form: str):
    batch = axis_for("data", tokens.shape[0])
    tokens = reshard(tokens, (batch, None))
    positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    x = model.embed(tokens)
    layers = []
    stack = zip(unstacked(model), cache.layers, windows(model.cfg), strict=True)
    for block, held, window in stack:

        def attend(layer, h, held=held, window=window):
            return getattr(layer, form)(h, held, positions, valid, window)

        x, held = block(x, attend)
        layers.append(held)
    lengths = cache.lengths + valid.sum(axis=1, dtype=jnp.int32)
    return x, Cache(tuple(layers), lengths)


def _whole(x: jax.Array) -> jax.Array:
    return reshard(x, (None,) * x.ndim)


def _shift_left(tokens: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows with their padding, if any on the left, moved to the right."""
    T = tokens.shape[1]
    source = jnp.argmax(valid, axis=1)[:, None] + jnp.arange(T)
    take = lambda x: jnp.take_along_axis(x, jnp.minimum(source, T - 1), axis=1)  # noqa: E731
    return take(tokens), take(valid) & (source < T)


def _check_fits(tokens: jax.Array, cache: Cache) -> None:
    capacity = cache.layers[0].capacity
    if tokens.shape[1] > capacity:
        raise UserError(
            f"{tokens.shape[1]} prompt tokens do not fit a cache of {capacity}; "
            "make the cache longer or the prompt shorter."
        )


@functools.partial(jax.jit, donate_argnames="cache", static_argnames="sampling")
def sample_step(
    model: Transformer, logits: jax.Array, cache: Cache, keys: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array, Cache]:
    """Draws a token from logits and decodes it: (token [B], next logits [B, V], cache)."""
    token = sample(logits, jax.vmap(jax.random.fold_in)(keys, cache.lengths), sampling)
    logits, cache = decode_step(model, token, cache)
    return token, logits, cache


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    eos: int | None = None,
    sampling: Sampling = GREEDY,
    seeds: Sequence[int] | None = None,
    capacity: int | None = None,
) -> Iterator[list[int | None]]:
    """Streams one list a step: the next token of every prompt, None for those that have ended.

    Args:
      prompts: token ids, one non-empty list a sequence.
      eos: ends a sequence; it is not yielded.
      sampling: greedy by default.
      seeds: one a prompt (default 0, 1, …); a row's tokens depend on its own seed and prompt only.
      capacity: slots of the cache (default: what is needed, rounded up to 128).
    Raises:
      UserError: an empty prompt, or prompt + new tokens past the capacity; before compiling.
    """
    check_request(model, prompts, max_new_tokens, capacity)
    if seeds is not None and len(seeds) != len(prompts):
        raise UserError(f"There are {len(seeds)} seeds for {len(prompts)} prompts; give one each.")
    chosen = list(range(len(prompts)) if seeds is None else seeds)
    for seed in chosen:
        if not 0 <= seed < 2**32:
            raise UserError(f"The seed {seed} must lie between 0 and 2³² − 1.")
    return _stream(model, prompts, max_new_tokens, eos, sampling, chosen, capacity)


def check_request(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    capacity: int | None,
) -> None:
    if not prompts:
        raise UserError("There is no prompt; give at least one.")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"Prompt {i} has no tokens; write something or begin with BOS.")
        bad = [t for t in prompt if not 0 <= t < model.cfg.vocab_size]
        if bad:
            raise UserError(
                f"Prompt {i} has token id {bad[0]}, outside the vocabulary of "
                f"{model.cfg.vocab_size}; use this run's tokenizer."
            )
    longest = max(map(len, prompts)) + max_new_tokens
    if capacity is not None and longest > capacity:
        raise UserError(
            f"The prompt and the new tokens are {longest} tokens, past the maximum of {capacity}; "
            "shorten the prompt, ask for fewer tokens or raise the maximum."
        )


def _stream(model, prompts, max_new_tokens, eos, sampling, seeds, capacity):
    capacity = capacity or _round_up(max(map(len, prompts)) + max_new_tokens, 128)
    tokens, valid = pad(prompts, capacity)
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))

    def draws() -> Iterator[jax.Array]:
        cache = init_cache(model, len(prompts), capacity)
        logits, cache = prefill(model, tokens, cache, valid)
        for _ in range(max_new_tokens):
            token, logits, cache = sample_step(model, logits, cache, keys, sampling)
            yield token

    done = np.zeros(len(prompts), bool)
    for token in _one_late(draws()):
        ids = np.asarray(token)
        done |= ids == (-1 if eos is None else eos)
        if done.all():
            return
        yield [None if ended else int(i) for i, ended in zip(ids, done, strict=True)]


def _one_late(items: Iterator[jax.Array]) -> Iterator[jax.Array]:
    """Each item once the next has begun: the host waits for a token while the device goes on."""
    previous = next(items)
    for item in items:
        yield previous
        previous = item
    yield previous


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def pad(prompts: Sequence[Sequence[int]], capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded tokens [B, T] int32 and valid [B, T] bool.

    T is a power of two from 16 on, at most the capacity: few lengths mean few compilations.
    """
    longest = max(16, *map(len, prompts))
    T = min(capacity, 1 << (longest - 1).bit_length())
    tokens, valid = np.zeros((len(prompts), T), np.int32), np.zeros((len(prompts), T), bool)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = prompt
        valid[i, : len(prompt)] = True
    return tokens, valid
