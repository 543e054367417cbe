"""Chunked float32 cross-entropy: no batch × sequence × vocabulary array ever exists.

Our own rather than tokamax's fused loss: that one has no z-loss, token weights, padded ids or
vocabulary sharded over a mesh. The gradients are made in the forward pass, chunk by chunk (as in
Liger Kernel, arXiv 2410.10989, sec. 3.2), so that logits are computed once, not twice.
"""

import functools

import jax
import jax.numpy as jnp

from vhajax.sharding import Whole, local, model_size, reduce_scatter, reshard


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def cross_entropy(
    x: jax.Array,
    table: jax.Array | Whole,
    targets: jax.Array,
    weights: jax.Array,
    vocab_size: int,
    z_loss: float,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Weighted sums over tokens of the objective and of the cross-entropy, in nats.

    Args:
      x: [B, T, D] normed hidden states.
      table: [V, D] unembedding, whole along D (or that and what it was gathered from).
      targets: [B, T] int32.
      weights: [B, T] float32, 0 for tokens that are not scored.
      vocab_size: ids from here on are padding and get no probability.
      z_loss: weight of logsumexp² in the objective (PaLM, arXiv 2204.02311, sec. 5).
      chunk: tokens a device scores at one time.
    Returns:
      Σ w·(nll + z_loss·logsumexp²) and Σ w·nll, float32 scalars; only the first is differentiable.
    """
    objective, nll, _, _ = _run(x, table, targets, weights, vocab_size, z_loss, chunk, False)
    return objective, nll


def _forward(x, table, targets, weights, vocab_size, z_loss, chunk):
    objective, nll, dx, dtable = _run(x, table, targets, weights, vocab_size, z_loss, chunk, True)
    return (objective, nll), (dx, dtable)


def _backward(_vocab_size, _z_loss, _chunk, gradients, cotangents):
    scaled = jax.tree.map(lambda d: (d * cotangents[0]).astype(d.dtype), gradients)
    return *scaled, None, None


cross_entropy.defvjp(_forward, _backward)


def _run(x, table, targets, weights, vocab_size, z_loss, chunk, with_gradients):
    tokens, hidden, vocab = ("data", "context"), ("data", "context", None), ("model", None)
    table, stored = table if isinstance(table, Whole) else (table, None)
    shards = model_size()
    # The functions of a mesh have no meaning without one: `local` then runs on whole arrays.
    meshed = not jax.sharding.get_abstract_mesh().empty
    sum_tokens = functools.partial(jax.lax.psum, axis_name=("data", "context") if meshed else ())
    sum_vocab = functools.partial(jax.lax.psum, axis_name=("model",) if meshed else ())
    max_vocab = functools.partial(jax.lax.pmax, axis_name=("model",) if meshed else ())

    zero = jnp.zeros((), jnp.float32)

    def score(table, first_id, x, targets, weights):
        """One chunk: [c, D], [c], [c] → objective, nll and the gradients of the objective."""
        logits = jnp.einsum("cD,VD->cV", x, table, preferred_element_type=jnp.float32)
        ids = first_id + jnp.arange(table.shape[0])
        if table.shape[0] * shards > vocab_size:
            logits = jnp.where(ids < vocab_size, logits, -jnp.inf)
        top = max_vocab(logits.max(axis=-1, keepdims=True))
        exp = jnp.exp(logits - top)
        total = sum_vocab(exp.sum(axis=-1, keepdims=True))
        lse = (jnp.log(total) + top)[:, 0]
        hit = ids == targets[:, None]
        nll = lse - sum_vocab(jnp.where(hit, logits, 0).sum(axis=-1))
        objective = jnp.sum(weights * (nll + z_loss * lse * lse))
        if not with_gradients:
            return objective, jnp.sum(weights * nll), zero, zero
        slope = (weights * (1 + 2 * z_loss * lse))[:, None] / total
        dlogits = (exp * slope - jnp.where(hit, weights[:, None], 0)).astype(x.dtype)
        dtable = jnp.einsum("cV,cD->VD", dlogits, x, preferred_element_type=jnp.float32)
        dx = jnp.einsum("cV,VD->cD", dlogits, table, preferred_element_type=jnp.float32)
        return objective, jnp.sum(weights * nll), dx, dtable

    def whole(x, table, targets, weights):
        """This device's tokens and vocabulary, chunk after chunk."""
        B, T, D = x.shape
        first_id = jax.lax.axis_index("model") * table.shape[0] if meshed else 0
        size = min(chunk, B * T)
        flat = [_chunks(a.reshape(B * T, *a.shape[2:]), size) for a in (x, targets, weights)]
        start = (zero, zero, jnp.zeros(table.shape if with_gradients else (), jnp.float32))

        def body(sums, one):
            objective, nll, dx, dtable = score(table, first_id, *one)
            return jax.tree.map(jnp.add, sums, (objective, nll, dtable)), dx

        sums, dx = jax.lax.scan(body, start, tuple(flat))
        objective, nll = sum_tokens(sums[:2])
        if not with_gradients:
            return objective, nll, zero, zero
        dtable = sums[2] if stored is None else sums[2].astype(table.dtype)
        dtable = sum_tokens(dtable) if stored is None else reduce_scatter(dtable, 1)
        dx = sum_vocab(dx.reshape(-1, D)[: B * T].reshape(B, T, D))
        return objective, nll, dx.astype(x.dtype), dtable.astype(table.dtype)

    of_table = vocab if stored is None else ("model", "data")
    outs = [(), (), hidden, of_table] if with_gradients else [(), (), (), ()]
    shard = local(whole, [hidden, vocab, tokens, tokens], outs, differentiable=False)
    *values, dtable = shard(x, reshard(table, vocab), targets, weights)
    return *values, dtable if stored is None else Whole(None, dtable.astype(stored.dtype))


def _chunks(x: jax.Array, size: int) -> jax.Array:
    """[n, …] → [⌈n / size⌉, size, …], zeros (weight 0) at the end."""
    short = -x.shape[0] % size
    x = jnp.pad(x, ((0, short), *((0, 0) for _ in x.shape[1:])))
    return x.reshape(-1, size, *x.shape[1:])
