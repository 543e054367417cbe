"""Every mechanism over eight devices, in training and decode, and saved and resumed exactly.

GQA and VHA in training: see `test_step.py`.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import variants
from oracle import assert_near, assert_trees_near, mesh_of

from vhajax import checkpoint, config, runs, step, transformer
from vhajax.config import GQA, LRKV, MFA, MLA, VHA, Data, Experiment, Optim, Train
from vhajax.decode import decode_step, init_cache, prefill
from vhajax.sharding import shardings

pytestmark = pytest.mark.filterwarnings("ignore:a dimension of", "ignore:the mesh uses")

V = variants.V
B, T, CAPACITY = 8, 8, 10
LENGTHS = [[8], [3, 5], [8], [2, 6], [4, 4], [8], [7, 1], [1, 7]]
TOKENS = oracle.random_tokens((B, T), V)
MANY = {"head_dim": 16, "value_dim": 12, "qkv_bias": True, "output_gate": True}
MECHANISMS = {
    "gqa": GQA(num_heads=8, num_kv_heads=2, **MANY),
    "mqa": GQA(num_heads=8, num_kv_heads=1, **MANY),
    "gqa 18": GQA(num_heads=18, num_kv_heads=2, head_dim=6),  # 18 divides over 2, not over 4
    "mla": MLA(num_heads=8, latent_dim=24, rope_dim=8, query_latent_dim=12, **MANY),
    "mla full": MLA(num_heads=8, latent_dim=24, position="full", **MANY),
    "mfa": MFA(num_heads=8, query_latent_dim=12, **MANY),
    "vha": VHA(num_physical_heads=4, num_kv_heads=2, **MANY),
    "lrkv": LRKV(num_heads=8, rank=3, **MANY),
    "lrkv shared": LRKV(num_heads=4, rank=3, position="shared", **MANY),
    "lrkv 18": LRKV(num_heads=18, rank=2, head_dim=6),
    "gqa rows": GQA(num_heads=8, num_kv_heads=4, head_dim=64),  # unpadded: rows split into heads
}
MESHES = ((2, 4), (4, 2))


def cases(quick: dict[str, int], choices: tuple) -> list:
    """Every mechanism with every choice; all but one choice of each are for `make test-slow`."""
    return [
        pytest.param(
            name,
            choice,
            marks=[] if quick.get(name) == i else pytest.mark.slow,
            id=f"{name}-{'-'.join(map(str, choice))}",
        )
        for name in MECHANISMS
        for i, choice in enumerate(choices)
    ]


def model_of(name: str) -> config.Model:
    size = {"vocab_size": V, "vocab_multiple": 64, "dim": 32, "num_layers": 2, "ffn_dim": 40}
    return config.Model(attention=MECHANISMS[name], **size)


def experiment_of(name: str) -> Experiment:
    """LRKV under Muon, whose matrices of it have heads in front; others under AdamW, for speed."""
    # As in test_step.py: Adam's usual eps turns rounding of a gradient near 0 into a whole step.
    kind = {"name": "muon"} if "lrkv" in name else {"name": "adamw", "matrix_lr": 0.02}
    optim = Optim(eps=1e-3, clip_norm=0.0, warmup_steps=2, embedding_lr=0.02, **kind)
    train = Train(steps=20, loss_chunk=16)
    return Experiment(model_of(name), Data(seq_len=T, batch_size=B), optim, train)


class Case:
    """A mechanism, its first state and the first step of one device."""

    def __init__(self, name: str):
        self.experiment = experiment_of(name)
        params = oracle.random_params(self.experiment.model)
        self.state = step.fresh_state(
            self.experiment, {n: jnp.asarray(x) for n, x in params.items()}
        )
        self.batch = oracle.random_batch(self.experiment.model, LENGTHS)
        self.step = jax.jit(step.make_train_step(self.experiment))
        self.after, self.metrics = self.step(self.state, self.batch)


case_of = functools.cache(Case)


def gradients(state: step.TrainState) -> dict[str, np.ndarray]:
    """What the optimizer was given in the first step, by path, read from its moments."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
        where = jax.tree_util.keystr(path)
        if ".momentum" in where:
            found[path[-1].key] = np.asarray(leaf)
        elif ".mu" in where:
            found[path[-1].key] = np.asarray(leaf) / (1 - Optim.beta1)
    return found


@pytest.mark.parametrize("name", ["mla", "mfa", "lrkv"])
def test_gradients_equal_finite_differences_of_the_oracle(name):
    """In float64 and for every weight apart, along a random direction."""
    case = case_of(name)
    cfg, found = case.experiment.model, gradients(case.after)
    exact = {n: np.asarray(x, np.float64) for n, x in case.state.params.items()}
    assert found.keys() == exact.keys()
    rng, h = np.random.default_rng(0), 1e-4
    for weight, gradient in found.items():
        direction = rng.standard_normal(gradient.shape)
        direction /= np.linalg.norm(direction)
        up, down = (
            oracle.objective(cfg, exact | {weight: exact[weight] + move * direction}, case.batch)
            for move in (h, -h)
        )
        # float32 sums, and h² times a third derivative.
        error = abs((up - down) / (2 * h) - np.vdot(gradient, direction))
        assert error < 1e-5 * np.linalg.norm(gradient), weight


@pytest.mark.parametrize(
    ("name", "mesh"),
    cases({"mla": 0, "mfa": 1, "lrkv": 1}, MESHES),
)
def test_gradients_and_a_step_equal_those_of_one_device(name, mesh):
    case, devices = case_of(name), mesh_of(*mesh)
    with jax.set_mesh(devices):
        where = step.state_shardings(case.experiment, devices)
        state = jax.device_put(case.state, where)
        batch = jax.device_put(case.batch, step.batch_sharding(devices))
        state, metrics = jax.jit(step.make_train_step(case.experiment))(state, batch)
    assert_trees_near(gradients(state), gradients(case.after))
    assert_trees_near(state.params, case.after.params)
    assert_trees_near(metrics, case.metrics)
    for (path, leaf), place in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(where), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim), jax.tree_util.keystr(path)


# ------------------------------------------------------------------ decode

LAYOUTS = [(*mesh, layout) for mesh in MESHES for layout in ("rows", "columns")]
DECODED = {
    "gqa rows": 2,
    "mla": 1,
    "mla full": 2,
    "mfa": 2,
    "lrkv": 3,
    "lrkv shared": 1,
    "lrkv 18": 0,
}


KERNELS = [
    pytest.param(
        name,
        (*mesh, "kernels"),
        marks=[] if (name, mesh) == ("lrkv", (2, 4)) else pytest.mark.slow,
        id=f"{name}-{mesh[0]}-{mesh[1]}-kernels",
    )
    for name in MECHANISMS
    if not name.startswith("mla")
    for mesh in MESHES
]


@pytest.mark.parametrize(("name", "layout"), cases(DECODED, tuple(LAYOUTS)) + KERNELS)
def test_prefill_and_decode_over_devices_equal_the_oracle(name, layout):
    data, model, way = layout
    kind = {"backend": "tpu_interpret"} if way == "kernels" else {"layout": way}
    cfg, mesh = model_of(name), mesh_of(data, model)
    params = oracle.random_params(cfg)
    expected = oracle.forward(cfg, params, TOKENS, *oracle.documents([[T]] * B))
    sizes = np.array([5, 6, 2, 5, 1, 6, 3, 4])
    with jax.set_mesh(mesh):
        where = shardings(transformer.abstract(cfg), mesh)
        sharded = oracle.build(cfg, jax.device_put(params, where))
        cache = init_cache(sharded, B, 128 if way == "kernels" else CAPACITY, **kind)
        valid = np.arange(6) < sizes[:, None]
        logits, cache = jax.jit(prefill)(sharded, TOKENS[:, :6], cache, valid)
        run = jax.jit(decode_step)
        for done in (sizes, sizes + 1):
            assert_near(logits, expected[range(B), done - 1])
            logits, cache = run(sharded, TOKENS[range(B), done], cache)
        assert_near(logits, expected[range(B), sizes + 1])
    for layer in cache.layers:
        for x in jax.tree.leaves(layer):
            assert x.addressable_shards[0].data.shape[0] == B // data


# ------------------------------------------------------------------ resuming


@pytest.mark.parametrize("name", ["mla", "mfa", "lrkv"])
def test_a_saved_and_restored_state_goes_on_bit_for_bit(name, tmp_path):
    case, run = case_of(name), tmp_path / "run"
    run.mkdir()
    (run / runs.TOKENIZER).write_text("a tokenizer")
    saver = checkpoint.Checkpointer(run, case.experiment, keep=1)
    saver.save(case.after)
    saver.finish()
    shapes = jax.eval_shape(lambda: case.after)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), shapes)
    restored = checkpoint.restore_state(run, 1, target)
    chex.assert_trees_all_equal(restored, case.after)
    assert config.from_json(config.to_json(case.experiment), "text") == case.experiment
    restored = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), restored)  # no new program
    went_on = case.step(case.after, case.batch)
    chex.assert_trees_all_equal(case.step(restored, case.batch), went_on)
    assert float(went_on[1]["loss"]) != float(case.metrics["loss"])
