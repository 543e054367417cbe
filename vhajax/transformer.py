"""The decoder: blocks stacked for a scan in training, a tuple of them for decoding."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vhajax import attention, config
from vhajax.layers import (
    ACTIVATIONS,
    FeedForward,
    RMSNorm,
    compute_dtype,
    embed,
    embedding_weight,
)
from vhajax.sharding import (
    einsum,
    named_arrays,
    named_params,
    operand,
    platform,
    reshard,
    shardings,
    with_arrays,
)

POLICIES: dict[str, Callable | None] = {
    "dots": jax.checkpoint_policies.save_only_these_names("product"),
    "full": None,
}


class Block(nnx.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, cfg: config.Model, key: jax.Array):
        attention_key, ffn_key = jax.random.split(key)
        self.attention_norm = RMSNorm(cfg.dim, cfg.norm, cfg.norm_eps)
        self.attention = attention.build(cfg, attention_key)
        self.ffn_norm = RMSNorm(cfg.dim, cfg.norm, cfg.norm_eps)
        self.ffn = FeedForward(cfg, ffn_key)

    def __call__(self, x: jax.Array, attend: Callable) -> tuple[jax.Array, Any]:
        """x: [B, T, D]; attend(attention module, normed x) → (its output, what else it returns)."""
        with jax.named_scope("attention"):
            out, extra = attend(self.attention, self.attention_norm(x))
            x = x + out
        with jax.named_scope("ffn"):
            return x + self.ffn(self.ffn_norm(x)), extra


class Transformer(nnx.Module):
    """Parameters of a whole model.

    blocks: one Block whose arrays have a leading layer axis (training), or a list of Blocks
    (`unstack`, for decoding).
    """

    def __init__(self, cfg: config.Model, key: jax.Array):
        embed_key, unembed_key, block_key = jax.random.split(key, 3)
        self.cfg = cfg
        group = "unembedding" if cfg.tied else "embedding"
        self.embedding = embedding_weight(cfg, embed_key, group)
        self.blocks: Any = jax.vmap(lambda k: Block(cfg, k))(
            jax.random.split(block_key, cfg.num_layers)
        )
        self.norm = RMSNorm(cfg.dim, cfg.norm, cfg.norm_eps)
        if not cfg.tied:
            self.unembedding = embedding_weight(cfg, unembed_key, "unembedding")

    @property
    def output_table(self) -> nnx.Param:
        """[V, D]: the unembedding, or the embedding of a tied model."""
        return self.embedding if self.cfg.tied else self.unembedding

    def embed(self, tokens: jax.Array) -> jax.Array:
        """[B, T] → [B, T, D] in compute dtype."""
        return embed(operand(self.embedding, compute_dtype(self.cfg)), tokens)

    def logits(self, x: jax.Array) -> jax.Array:
        """[B, T, D] → [B, T, V] float32, padded ids at −inf."""
        x = self.norm(x).astype(jnp.float32)
        table = operand(self.output_table, compute_dtype(self.cfg)).astype(jnp.float32)
        logits = einsum("BTD,VD->BTV", x, table, out=("data", "context", "model"))
        ids = jnp.arange(logits.shape[-1])
        return jnp.where(ids < self.cfg.vocab_size, logits, -jnp.inf)


def hidden(
    model: Transformer,
    tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    *,
    remat: str = "none",
    unroll: int = 0,
) -> jax.Array:
    """The training forward up to the last norm: [B, T] int32 each → [B, T, D], normed.

    Args:
      remat: what a block's backward pass recomputes, see `config.Train.remat`.
      unroll: layers of one scan iteration; 0 chooses. XLA on CPU runs a loop's body on fewer
        threads, so shallow models are unrolled there (1.3x faster at 2 layers).
    """

    def body(x: jax.Array, layer: tuple[Block, jax.Array | None]) -> tuple[jax.Array, None]:
        block, window = layer
        x, _ = block(x, lambda layer, h: (layer(h, positions, segments, window), None))
        return reshard(x, ACTIVATIONS), None

    if remat != "none":
        body = jax.checkpoint(body, policy=POLICIES[remat])
    x = reshard(model.embed(tokens), ACTIVATIONS)
    sizes = model.cfg.layer_windows
    layers = (model.blocks, jnp.array(sizes, jnp.int32) if sizes else None)
    x, _ = jax.lax.scan(body, x, layers, unroll=unroll or _unroll(model.cfg))
    return model.norm(x)


def _unroll(cfg: config.Model) -> int:
    shallow = platform() == "cpu" and cfg.num_layers <= 8
    return cfg.num_layers if shallow else 1


def residual(
    model: Transformer, tokens: jax.Array, positions: jax.Array, segments: jax.Array
) -> jax.Array:
    """The training form block by block, up to the last norm: [B, T] int32 each → [B, T, D]."""
    x = reshard(model.embed(tokens), ACTIVATIONS)
    for block, window in zip(unstacked(model), windows(model.cfg), strict=True):
        x, _ = block(x, lambda layer, h, w=window: (layer(h, positions, segments, w), None))
    return x


def forward(
    model: Transformer, tokens: jax.Array, positions: jax.Array, segments: jax.Array
) -> jax.Array:
    """All logits at once, for short texts and tests: [B, T] int32 each → [B, T, V] float32."""
    return model.logits(residual(model, tokens, positions, segments))


def windows(cfg: config.Model) -> tuple[int | None, ...]:
    """The window of every layer, None where a query sees all."""
    return tuple(window or None for window in cfg.layer_windows) or (None,) * cfg.num_layers


def unstacked(model: Transformer) -> list[Block]:
    """The blocks of a model one by one, whichever way it holds them."""
    if not isinstance(model.blocks, Block):
        return list(model.blocks)
    return [jax.tree.map(lambda x, i=i: x[i], model.blocks) for i in range(model.cfg.num_layers)]


def unstack(model: Transformer) -> Transformer:
    """The same model with a list of blocks: decoding slices no stacked weight at every step."""
    blocks = nnx.List(unstacked(model))
    copy = with_arrays(model, named_arrays(model))
    copy.blocks = blocks
    return copy


def abstract(cfg: config.Model) -> Transformer:
    """The model with shapes instead of arrays."""
    return jax.eval_shape(lambda: Transformer(cfg, jax.random.key(0)))


def init(cfg: config.Model, seed: int) -> dict[str, jax.Array]:
    """Initial float32 parameters by path, laid out over the mesh in use, if any."""

    def create() -> dict[str, jax.Array]:
        return named_arrays(Transformer(cfg, jax.random.key(seed)))

    mesh = jax.sharding.get_mesh()
    # Random bits unrolled by LLVM at full optimisation compile 8 times longer than they save.
    fast = {"xla_backend_optimization_level": 0} if platform() == "cpu" else None
    where = None if mesh.empty else shardings(abstract(cfg), mesh)
    return jax.jit(create, out_shardings=where, compiler_options=fast)()


def init_shapes(
    cfg: config.Model, where: dict[str, jax.sharding.NamedSharding] | None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of `init`'s parameters, with the shardings that a restore should give them."""
    arrays = named_arrays(abstract(cfg))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where[name] if where else one)
        for name, x in arrays.items()
    }


def num_params(cfg: config.Model) -> int:
    """Parameters, without the embedding rows that pad the vocabulary."""
    model = abstract(cfg)
    total = sum(param.get_value().size for param in named_params(model).values())
    tables = 1 if cfg.tied else 2
    return total - tables * (cfg.padded_vocab - cfg.vocab_size) * cfg.dim
