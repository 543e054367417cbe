"""What decoding holds: caches of the size that is promised, and no keys of all heads."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import variants
from variants import VARIANTS

from vhajax import config
from vhajax.config import GQA, LRKV, MFA, MLA, VHA
from vhajax.decode import decode_step, init_cache

S = 1024  # slots, more than one tile of `rotated_scores`
LAYOUTS = pytest.mark.parametrize("layout", ["rows", "columns"])


def abstract_cache(cfg: config.Model, batch: int, slots: int, layout: str) -> Any:
    return jax.eval_shape(lambda m: init_cache(m, batch, slots, layout), oracle.template(cfg))


# ------------------------------------------------------------------ bytes


@LAYOUTS
@pytest.mark.parametrize("name", VARIANTS)
def test_a_cache_has_the_bytes_that_its_row_promises(name, layout):
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        for options in range(2):
            cfg = variants.model(name, options, dtype=dtype)
            cache = abstract_cache(cfg, 3, 7, layout)
            held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.layers))
            row = cfg.attention.cache_row()
            assert held == row.stored_bytes(itemsize, layout == "rows") * 7 * 3 * cfg.num_layers


def test_an_allocated_cache_has_them_too():
    cfg = variants.model("lrkv")
    model = oracle.build(cfg, oracle.random_params(cfg))
    for layout in ("rows", "columns"):
        real, promised = init_cache(model, 3, 7, layout), abstract_cache(cfg, 3, 7, layout)
        same = lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype)  # noqa: E731
        assert all(jax.tree.leaves(jax.tree.map(same, real, promised)))


# ------------------------------------------------------------------ nothing is expanded

WIDE = {  # N·H far above what a row holds
    "gqa": GQA(num_heads=16, num_kv_heads=2, head_dim=32),
    "mqa": GQA(num_heads=16, num_kv_heads=1, head_dim=64, logit_cap=2.0),
    "mla": MLA(num_heads=16, head_dim=64, latent_dim=96, rope_dim=16),
    "mla full": MLA(num_heads=16, head_dim=64, latent_dim=96, position="full"),
    "mla none": MLA(num_heads=16, head_dim=64, latent_dim=96, position="none", qk_norm="none"),
    "mfa": MFA(num_heads=16, head_dim=64, query_latent_dim=24),
    "vha": VHA(num_physical_heads=8, num_kv_heads=2, head_dim=32),
    "lrkv": LRKV(num_heads=16, head_dim=64, rank=2),
    "lrkv shared": LRKV(num_heads=16, head_dim=64, rank=2, position="shared"),
    "lrkv none": LRKV(num_heads=16, head_dim=64, rank=2, position="none", qk_norm="none"),
    "lrkv of rank 0": LRKV(num_heads=16, head_dim=64, rank=0),
}


def wide_model(name: str) -> config.Model:
    size = {"vocab_size": 50, "vocab_multiple": 64, "dim": 32, "num_layers": 2, "ffn_dim": 40}
    return config.Model(attention=WIDE[name], **size)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation, of inner jaxprs too, but for the bodies of loops over tiles."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name in ("scan", "while"):
            continue
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(value, "eqns"):
                yield from equations(getattr(value, "jaxpr", value))


def largest(jaxpr: Any) -> tuple[int, str]:
    """Elements of the largest result of an equation, and the equation."""
    sizes = [
        (int(np.prod(out.aval.shape)), str(equation.primitive))
        for equation in equations(jaxpr)
        for out in equation.outvars
        if hasattr(out.aval, "shape")
    ]
    return max(sizes)


def limit(cfg: config.Model, layout: str) -> int:
    row = cfg.attention.cache_row()
    width = row.padded if layout == "rows" else row.elements
    return S * max(cfg.attention.num_heads, width)


@LAYOUTS
@pytest.mark.parametrize("name", WIDE)
def test_decode_holds_nothing_larger_than_the_cache_or_the_logits(name, layout):
    cfg = wide_model(name)
    heads, bound = cfg.attention.num_heads * cfg.attention.head_dim, limit(cfg, layout)
    assert S * heads > 1.5 * bound  # so that keys of all heads would be seen
    token = jax.ShapeDtypeStruct((1,), jnp.int32)
    traced = decode_step.trace(oracle.template(cfg), token, abstract_cache(cfg, 1, S, layout))
    size, what = largest(traced.jaxpr.jaxpr)
    assert size <= bound, what


@pytest.mark.parametrize("name", ["mla", "mla full", "lrkv", "lrkv shared"])
def test_forming_the_keys_of_all_heads_would_be_seen(name):
    """The training form of as many tokens, by the same measure."""
    cfg = wide_model(name)
    model = oracle.template(cfg)

    def expand(model, x, positions):
        layer = jax.tree.map(lambda w: w[0], model.blocks).attention
        return layer.expand(layer.project(x, positions), positions)

    x = jax.ShapeDtypeStruct((1, S, cfg.dim), jnp.float32)
    positions = jax.ShapeDtypeStruct((1, S), jnp.int32)
    size, _ = largest(jax.make_jaxpr(expand)(model, x, positions).jaxpr)
    assert size > limit(cfg, "columns")
