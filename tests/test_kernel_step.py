"""Decode steps of whole models on the kernels, compiled for chips that nobody here owns."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from test_kernel_compile import pytestmark  # noqa: F401 (libtpu's wheels)

from pallas_kernels import ahead
from vhajax import cache, config, transformer
from vhajax.cache import LayerCache
from vhajax.config import GQA, LRKV, MFA, MLA, VHA
from vhajax.decode import decode_step, init_cache
from vhajax.errors import UserError
from vhajax.sharding import AXES

CHIPS = pytest.mark.parametrize(
    "chip", ["v5e", *(pytest.param(c, marks=pytest.mark.slow) for c in ("v6e", "h100", "h200"))]
)
B, S = 8, 32_768
MADE = {"v5e": 8 * 2**20, "v6e": 8 * 2**20, "h100": 48 * 2**20, "h200": 48 * 2**20}
"""Bytes that weights, logits and rotors may take, on a GPU also partial results and 32 MiB that
cuBLAS keeps for itself; a shard of a layer's cache has 64 MiB or more."""
WIDE = {"num_heads": 16, "head_dim": 128}
MECHANISMS = {
    "gqa": GQA(num_kv_heads=2, logit_cap=30.0, **WIDE),
    "vha": VHA(num_physical_heads=8, num_kv_heads=2, head_dim=128),
    "mfa": MFA(num_heads=16, query_latent_dim=64),
    "lrkv none": LRKV(rank=64, position="none", **WIDE),
    "lrkv shared": LRKV(rank=64, position="shared", **WIDE),
    "lrkv full": LRKV(rank=64, **WIDE),
    "lrkv full N 6": LRKV(num_heads=6, rank=46, head_dim=128),
}


def mesh_of(chip: str, data: int = 1, model: int = 1) -> Mesh:
    devices = np.array(ahead.devices(chip, data * model)).reshape(data, 1, model)
    return Mesh(devices, AXES, axis_types=(AxisType.Explicit,) * 3)


def placed(tree, mesh: Mesh):
    """Abstract arrays on devices, as they lie already or whole."""

    def place(x):
        spec = PartitionSpec() if x.sharding is None else x.sharding.spec
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)


def model_of(attention: config.Attention, **more) -> config.Model:
    size = {"vocab_size": 256, "dim": 256, "num_layers": 2, "ffn_dim": 256, "dtype": "bfloat16"}
    return config.Model(attention=attention, **size | more)


def lowered(cfg: config.Model, mesh: Mesh, slots: int = S, **options):
    """The decode step for a mesh, and its cache."""
    with jax.set_mesh(mesh):
        make = lambda: transformer.unstack(transformer.Transformer(cfg, jax.random.key(0)))  # noqa: E731
        model = placed(jax.eval_shape(make), mesh)
        held = placed(jax.eval_shape(lambda m: init_cache(m, B, slots, **options), model), mesh)
        token = placed(jax.ShapeDtypeStruct((B,), jnp.int32), mesh)
        return decode_step.lower(model, token, held), held


def kernels_in(text: str) -> int:
    return len(re.findall(r'custom_call_target="(tpu_custom_call|mosaic_gpu_v2)"', text))


def copies_in(text: str, held: LayerCache) -> list[str]:
    """Instructions that move as much as a cache's rows or scales, but for appends in place."""
    elements = held.arrays[0].size
    scales = None if held.scales is None else sorted(held.scales.shape)
    moving = r"= (.*) (?:copy|copy-start|slice-start|transpose|convert|pad|concatenate)\("
    found = []
    for line in text.splitlines():
        match = re.search(moving, line)
        for sizes in re.findall(r"\w+\[([\d,]+)\]", match[1]) if match else ():
            shape = sorted(map(int, sizes.split(",")))
            if np.prod(shape) >= elements or shape == scales:
                found.append(line.strip())
    return found


@CHIPS
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_decode_step_runs_the_kernels_and_copies_no_cache(name, chip):
    step, held = lowered(model_of(MECHANISMS[name]), mesh_of(chip))
    compiled = step.compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    arrays = jax.tree.leaves(held.layers)
    assert kernels_in(text) == 2  # one a layer
    assert copies_in(text, held.layers[0]) == []
    assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in arrays)
    assert memory.temp_size_in_bytes < MADE[chip]


@pytest.mark.slow
@pytest.mark.parametrize("shards", [(2, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("name", ["gqa", "lrkv full", "lrkv full N 6", "mfa"])
@pytest.mark.parametrize("chip", ["v5e", "h200"])
def test_so_it_is_on_each_of_four_chips(name, shards, chip):
    step, held = lowered(model_of(MECHANISMS[name]), mesh_of(chip, *shards))
    compiled = step.compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert kernels_in(text) == 2
    assert memory.temp_size_in_bytes < MADE[chip]
    everything = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held.layers))
    assert memory.alias_size_in_bytes >= everything // 4


@CHIPS
@pytest.mark.parametrize("name", ["gqa", "lrkv full"])
def test_an_append_is_in_place(name, chip):
    attention, mesh = MECHANISMS[name], mesh_of(chip)
    row = attention.cache_row()

    def append(held: LayerCache, parts, scales, positions):
        valid = jnp.ones_like(positions, bool)
        return cache.append(held, parts, scales, positions, valid, attention.num_heads)

    with jax.set_mesh(mesh):
        make = lambda: cache.create(row, attention.num_heads, B, S, jnp.bfloat16)  # noqa: E731
        held = placed(jax.eval_shape(make), mesh)
        widths = [(row.groups * heads, width) for heads, width in row.parts]
        parts = [jax.ShapeDtypeStruct((B, 1, *w), jnp.bfloat16) for w in widths]
        scales = jax.ShapeDtypeStruct((B, 1, row.scales), jnp.float32) if row.scales else None
        new = placed((parts, scales, jax.ShapeDtypeStruct((B, 1), jnp.int32)), mesh)
        compiled = jax.jit(append, donate_argnums=0).lower(held, *new).compile()
    arrays = jax.tree.leaves(held)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 2**20
    assert memory.alias_size_in_bytes == sum(x.size * x.dtype.itemsize for x in arrays)
    assert copies_in(compiled.as_text(), held) == []


def test_a_copy_of_the_cache_would_be_seen():
    """XLA's own einsums on the same rows make one."""
    step, held = lowered(model_of(MECHANISMS["gqa"]), mesh_of("v5e"), backend="jnp")
    text = step.compile().as_text()
    assert kernels_in(text) == 0
    assert copies_in(text, held.layers[0]) != []


# ------------------------------------------------------------------ who decodes


def test_what_the_kernels_cannot_do_is_decoded_by_xla_and_said_once(caplog):
    cfg = model_of(MECHANISMS["gqa"])
    with caplog.at_level(logging.WARNING):
        step, _ = lowered(cfg, mesh_of("v5e"), slots=1001)
    assert "tpu_custom_call" not in step.as_text()
    (record,) = caplog.records
    assert "cache has 1001 slots" in record.getMessage()
    with pytest.raises(UserError, match=r"1001 slots.*make it 1008"):
        lowered(cfg, mesh_of("v5e"), slots=1001, backend="tpu")


def test_mla_is_decoded_by_xla_on_a_tpu():
    cfg = model_of(MLA(num_heads=4, head_dim=32))
    step, _ = lowered(cfg, mesh_of("v5e"))
    assert "tpu_custom_call" not in step.as_text()


REFUSED = {
    "backend is 'triton'; choose one of": {"backend": "triton"},
    "backend is 'tpu', but this program is for a cpu": {"backend": "tpu"},
    "backend is 'gpu', but this program is for a cpu; use auto, or gpu_interpret": {
        "backend": "gpu"
    },
    "layout is 'columns', but backend 'tpu_interpret' reads rows": {
        "backend": "tpu_interpret",
        "layout": "columns",
    },
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_backend_that_cannot_is_refused_with_the_reason(sentence):
    model = oracle.template(model_of(MECHANISMS["gqa"]))
    with pytest.raises(UserError, match=sentence):
        jax.eval_shape(lambda m: init_cache(m, 1, 128, **REFUSED[sentence]), model)


def test_a_kernel_for_mla_is_refused_with_the_reason():
    model = oracle.template(model_of(MLA(num_heads=4, head_dim=32)))
    with pytest.raises(UserError, match=r"MLA has no decode kernel yet; use auto"):
        jax.eval_shape(lambda m: init_cache(m, 1, 128, backend="tpu_interpret"), model)
