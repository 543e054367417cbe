"""Configurations: what is refused, what defaults mean, and the round trip through JSON."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vhajax import transformer
from vhajax.config import (
    GQA,
    LRKV,
    MFA,
    MLA,
    VHA,
    Data,
    Experiment,
    Mesh,
    Model,
    Optim,
    Train,
    from_json,
    to_json,
)
from vhajax.errors import UserError
from vhajax.mechanisms import CacheRow, RopeScaling

# ------------------------------------------------------------------ refusals

REFUSED = [
    (GQA, {"num_heads": 0}, "attention.num_heads is 0"),
    (GQA, {"num_kv_heads": -1}, "attention.num_kv_heads is -1"),
    (GQA, {"head_dim": 0}, "attention.head_dim is 0"),
    (GQA, {"head_dim": 7}, "attention.head_dim is 7"),
    (GQA, {"num_heads": 6, "num_kv_heads": 4}, "attention.num_heads is 6"),
    (GQA, {"rope_theta": 0.0}, "attention.rope_theta is 0.0"),
    (GQA, {"qk_norm": "layer"}, "attention.qk_norm is 'layer'"),
    (VHA, {"num_physical_heads": 0}, "attention.num_physical_heads is 0"),
    (VHA, {"num_kv_heads": 0}, "attention.num_kv_heads is 0"),
    (VHA, {"head_dim": -2}, "attention.head_dim is -2"),
    (VHA, {"head_dim": 9}, "attention.head_dim is 9"),
    (VHA, {"query_dim": -1}, "attention.query_dim is -1"),
    (VHA, {"query_dim": 65}, "attention.query_dim is 65"),
    (VHA, {"postmix_rank": -2}, "attention.postmix_rank is -2"),
    (VHA, {"postmix_rank": 9}, "attention.postmix_rank is 9"),
    (VHA, {"rope_theta": float("nan")}, "attention.rope_theta is nan"),
    (VHA, {"qk_norm": ""}, "attention.qk_norm is ''"),
    (VHA, {"premix": False, "query_dim": 32}, "attention.query_dim is 32"),
    (VHA, {"premix": False, "num_physical_heads": 3}, "attention.num_physical_heads is 3"),
    (VHA, {"premix": False, "postmix_rank": 5}, "attention.postmix_rank is 5"),
    *[
        refusal
        for kind in (GQA, MLA, MFA, VHA, LRKV)
        for refusal in (
            (kind, {"value_dim": -1}, "attention.value_dim is -1"),
            (kind, {"logit_cap": -0.5}, "attention.logit_cap is -0.5"),
            (kind, {"head_dim": -3}, "attention.head_dim is -3"),
            (kind, {"qk_norm": "layer"}, "attention.qk_norm is 'layer'"),
        )
    ],
    (MLA, {"num_heads": 0}, "attention.num_heads is 0"),
    (MLA, {"latent_dim": 0}, "attention.latent_dim is 0"),
    (MLA, {"query_latent_dim": -1}, "attention.query_latent_dim is -1"),
    (MLA, {"position": "shared"}, "attention.position is 'shared'"),
    (MLA, {"latent_norm": "rms"}, "attention.latent_norm is 'rms'"),
    (MLA, {"rope_dim": 0}, "attention.rope_dim is 0"),
    (MLA, {"rope_dim": 31}, "attention.rope_dim is 31"),
    (MLA, {"position": "full", "head_dim": 63}, "attention.head_dim is 63"),
    (MFA, {"num_heads": 0}, "attention.num_heads is 0"),
    (MFA, {"query_latent_dim": 0}, "attention.query_latent_dim is 0"),
    (MFA, {"head_dim": 255}, "attention.head_dim is 255"),
    (LRKV, {"num_heads": 0}, "attention.num_heads is 0"),
    (LRKV, {"rank": -1}, "attention.rank is -1"),
    (LRKV, {"position": "decoupled"}, "attention.position is 'decoupled'"),
    (LRKV, {"position": "shared", "head_dim": 63}, "attention.head_dim is 63"),
    *[
        (
            kind,
            {"position": "none", "rope_scaling": RopeScaling(kind="llama3", factor=2.0)},
            "attention.rope_scaling.kind is 'llama3'",
        )
        for kind in (MLA, LRKV)
    ],
    (RopeScaling, {"kind": "linear"}, "attention.rope_scaling.kind is 'linear'"),
    (RopeScaling, {"factor": 0.5}, "attention.rope_scaling.factor is 0.5"),
    (RopeScaling, {"original_length": 0}, "attention.rope_scaling.original_length is 0"),
    (RopeScaling, {"low_freq_factor": 4.0}, "attention.rope_scaling.low_freq_factor is 4.0"),
    (RopeScaling, {"beta_slow": 32.0}, "attention.rope_scaling.beta_slow is 32.0"),
    (RopeScaling, {"attention_factor": -1.0}, "attention.rope_scaling.attention_factor is -1.0"),
    (RopeScaling, {"factor": 8.0}, "attention.rope_scaling.factor is 8.0"),
    (
        RopeScaling,
        {"kind": "llama3", "attention_factor": 2.0},
        "attention.rope_scaling.attention_factor is 2.0",
    ),
    (LRKV, {"rope_theta": 1.0}, "attention.rope_theta is 1.0"),
    (MLA, {"rope_theta": float("inf")}, "attention.rope_theta is inf"),
    (GQA, {"logit_cap": float("inf")}, "attention.logit_cap is inf"),
    (Model, {"windows": (4, -1)}, "model.windows is (4, -1)"),
    (Model, {"vocab_size": 0}, "model.vocab_size is 0"),
    (Model, {"dim": 0}, "model.dim is 0"),
    (Model, {"num_layers": 0}, "model.num_layers is 0"),
    (Model, {"ffn_dim": -4}, "model.ffn_dim is -4"),
    (Model, {"norm_eps": 0.0}, "model.norm_eps is 0.0"),
    (Model, {"vocab_multiple": 0}, "model.vocab_multiple is 0"),
    (Model, {"ffn": "gelu"}, "model.ffn is 'gelu'"),
    (Model, {"norm": "none"}, "model.norm is 'none'"),
    (Model, {"dtype": "float16"}, "model.dtype is 'float16'"),
    (Model, {"vocab_size": 2**21, "dim": 1024}, "model.vocab_size × model.dim is 2147483648"),
    (Data, {"seq_len": 0}, "data.seq_len is 0"),
    (Data, {"batch_size": 0}, "data.batch_size is 0"),
    (Data, {"seed": -1}, "data.seed is -1"),
    (Data, {"seed": 2**32}, "data.seed is 4294967296"),
    (
        Data,
        {"batch_size": 2**16, "seq_len": 2**15},
        "data.batch_size × data.seq_len is 2147483648",
    ),
    (Optim, {"name": "sgd"}, "optim.name is 'sgd'"),
    (Optim, {"schedule": "linear"}, "optim.schedule is 'linear'"),
    (Optim, {"matrix_lr": 0.0}, "optim.matrix_lr is 0.0"),
    (Optim, {"embedding_lr": -0.1}, "optim.embedding_lr is -0.1"),
    (Optim, {"unembedding_lr": float("nan")}, "optim.unembedding_lr is nan"),
    (Optim, {"eps": 0.0}, "optim.eps is 0.0"),
    (Optim, {"beta1": 1.0}, "optim.beta1 is 1.0"),
    (Optim, {"beta2": -0.1}, "optim.beta2 is -0.1"),
    (Optim, {"momentum": 1.5}, "optim.momentum is 1.5"),
    (Optim, {"weight_decay": -0.1}, "optim.weight_decay is -0.1"),
    (Optim, {"clip_norm": -1.0}, "optim.clip_norm is -1.0"),
    (Optim, {"warmup_steps": -1}, "optim.warmup_steps is -1"),
    (Optim, {"decay_steps": -1}, "optim.decay_steps is -1"),
    (Optim, {"final_fraction": -0.5}, "optim.final_fraction is -0.5"),
    (Train, {"steps": 0}, "train.steps is 0"),
    (Train, {"grad_accum": 0}, "train.grad_accum is 0"),
    (Train, {"loss_chunk": 0}, "train.loss_chunk is 0"),
    (Train, {"checkpoint_every": 0}, "train.checkpoint_every is 0"),
    (Train, {"keep_checkpoints": 0}, "train.keep_checkpoints is 0"),
    (Train, {"log_every": 0}, "train.log_every is 0"),
    (Train, {"remat": "some"}, "train.remat is 'some'"),
    (Train, {"seed": -1}, "train.seed is -1"),
    (Train, {"z_loss": -1e-4}, "train.z_loss is -0.0001"),
    (Train, {"eval_every": -1}, "train.eval_every is -1"),
    (Train, {"eval_rows": -1}, "train.eval_rows is -1"),
    (Mesh, {"data": 0}, "mesh.data is 0"),
    (Mesh, {"model": -1}, "mesh.model is -1"),
    (Mesh, {"context": 0}, "mesh.context is 0"),
    (Mesh, {"context": 2}, "mesh.context is 2"),
    (
        Experiment,
        {"data": Data(batch_size=6), "train": Train(grad_accum=2), "mesh": Mesh(data=2)},
        "data.batch_size is 6",
    ),
    (
        Experiment,
        {"model": Model(vocab_size=100, vocab_multiple=10), "mesh": Mesh(model=8)},
        "model.padded_vocab is 100",
    ),
    (Experiment, {"model": Model(ffn_dim=100), "mesh": Mesh(model=8)}, "model.ffn_dim is 100"),
    (Experiment, {"model": Model(dim=36), "mesh": Mesh(data=8)}, "model.dim is 36"),
    (
        Experiment,
        {"optim": Optim(warmup_steps=60, decay_steps=50)},
        "optim.warmup_steps + optim.decay_steps is 110",
    ),
]


@pytest.mark.parametrize(("kind", "fields", "sentence"), REFUSED)
def test_a_refusal_names_the_field_and_its_value(kind, fields, sentence):
    with pytest.raises(UserError) as refusal:
        kind(**fields)
    assert sentence in str(refusal.value)


def test_fields_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Model().dim = 3  # type: ignore[misc]


# ------------------------------------------------------------------ defaults


@pytest.mark.parametrize(
    ("P", "K", "rank"), [(8, 2, 4), (16, 2, 8), (4, 3, 3), (1, 2, 1), (1, 1, 1)]
)
def test_postmix_rank_defaults_to_a_quarter_of_the_heads_and_at_least_one(P, K, rank):
    assert VHA(num_physical_heads=P, num_kv_heads=K).rank == rank


def test_explicit_vha_sizes_are_taken_as_they_are():
    vha = VHA(num_physical_heads=3, num_kv_heads=2, head_dim=8, query_dim=4, postmix_rank=6)
    assert (vha.num_heads, vha.q_dim, vha.rank) == (6, 4, 6)
    assert VHA(head_dim=8).q_dim == 8
    # Without Premix the physical heads are the query heads; rank 0 is no Postmix.
    assert VHA(num_physical_heads=8, num_kv_heads=2, premix=False).num_heads == 8
    assert VHA(postmix_rank=0).rank == 0


def test_windows_repeat_over_the_layers():
    assert Model(num_layers=5, windows=(8, 4, 0)).layer_windows == (8, 4, 0, 8, 4)
    assert Model(num_layers=3).layer_windows == ()
    assert Model(num_layers=3, windows=(0, 0)).layer_windows == ()


LRKV_PAPER = LRKV(num_heads=18, head_dim=128, rank=55)
ROWS = [  # elements a token and layer as papers count them, an accelerator's row, scales
    (GQA(num_heads=16, num_kv_heads=16, head_dim=128), 2 * 16 * 128, 4096, 0),
    (GQA(num_heads=16, num_kv_heads=2, head_dim=128), 512, 512, 0),
    (VHA(num_physical_heads=8, num_kv_heads=2, head_dim=128), 512, 512, 0),
    (MFA(num_heads=64, head_dim=256), 512, 512, 0),
    (MLA(num_heads=16, latent_dim=512, rope_dim=64, qk_norm="none"), 576, 640, 0),
    (MLA(num_heads=16, latent_dim=512, rope_dim=64), 576, 640, 16),
    (MLA(num_heads=6, latent_dim=128, position="full", qk_norm="weightless"), 128, 128, 6),
    (LRKV(num_heads=6, head_dim=128, rank=46, qk_norm="none"), 2 * (128 + 6 * 46), 896, 0),
    (LRKV_PAPER, 2 * (128 + 18 * 55), 2304, 18),
    (LRKV(num_heads=6, head_dim=128, rank=0), 256, 256, 0),
    (GQA(num_heads=4, num_kv_heads=2, head_dim=40, value_dim=24), 128, 128, 0),
]


@pytest.mark.parametrize(("attention", "elements", "padded", "scales"), ROWS)
def test_what_a_token_costs_in_the_cache(attention, elements, padded, scales):
    row = attention.cache_row()
    assert (row.elements, row.padded, row.scales) == (elements, padded, scales)
    assert row.logical_bytes(2) == 2 * elements
    assert row.stored_bytes(2) == 2 * padded + 4 * (scales + -scales % 8)
    assert row.stored_bytes(2, packed=False) == 2 * elements + 4 * scales


def test_the_papers_share_of_the_cache_of_mha():
    """LRKV, Table 7: N, R and what remains of MHA's cache at head dim 128."""
    for N, R, share in [(6, 46, 52.60), (12, 51, 48.18), (18, 55, 48.52), (32, 54, 45.31)]:
        mha = GQA(num_heads=N, num_kv_heads=N, head_dim=128).cache_row().elements
        lrkv = LRKV(num_heads=N, head_dim=128, rank=R).cache_row().elements
        assert 100 * lrkv / mha == pytest.approx(share, abs=0.01)


def test_a_row_without_parts_beside_it_has_one_group():
    assert CacheRow(((1, 3), (2, 5))).elements == 13
    assert CacheRow(((1, 3), (2, 5)), groups=4).elements == 52


@pytest.mark.parametrize(
    ("vocab", "multiple", "padded"), [(100, 128, 128), (256, 128, 256), (7, 1, 7)]
)
def test_vocabulary_is_padded_up_to_the_multiple(vocab, multiple, padded):
    assert Model(vocab_size=vocab, vocab_multiple=multiple).padded_vocab == padded


# ------------------------------------------------------------------ published sizes

QWEN3 = [  # D, layers, FFN, N → parameters of GQA with K = 8 and of VHA with P = N / 2, K = 2
    (1024, 28, 3072, 16, 596_049_920, 523_570_688),
    (2048, 28, 6144, 16, 1_720_574_976, 1_574_695_424),
    (2560, 36, 9728, 32, 4_022_468_096, 3_693_364_736),
]


@pytest.mark.parametrize(("D", "L", "F", "N", "gqa", "vha"), QWEN3)
def test_published_shapes_have_the_published_parameter_counts(D, L, F, N, gqa, vha):
    def count(attention) -> int:
        return transformer.num_params(
            Model(
                vocab_size=151_936,
                dim=D,
                num_layers=L,
                ffn_dim=F,
                attention=attention,
                tied=True,
                vocab_multiple=1000,  # padding rows must not be counted
            )
        )

    assert count(GQA(num_heads=N, num_kv_heads=8, head_dim=128)) == gqa
    assert count(VHA(num_physical_heads=N // 2, num_kv_heads=2, head_dim=128)) == vha


def test_untied_padding_is_taken_off_both_tables():
    size = {"vocab_size": 100, "dim": 32, "num_layers": 2, "ffn_dim": 64}
    unpadded = transformer.num_params(Model(**size, vocab_multiple=1))
    assert transformer.num_params(Model(**size, vocab_multiple=128)) == unpadded


# ------------------------------------------------------------------ JSON

norms = st.sampled_from(["none", "weightless", "weighted"])
small = st.integers(1, 5)
theta = st.floats(1.5, 1e7)
scalings = st.builds(
    RopeScaling,
    kind=st.sampled_from(["llama3", "yarn"]),
    factor=st.floats(1, 64),
    original_length=st.integers(1, 2**20),
)
common = {
    "head_dim": st.sampled_from([8, 16]),
    "value_dim": st.integers(0, 9),
    "qk_norm": norms,
    "rope_theta": theta,
    "qkv_bias": st.booleans(),
    "out_bias": st.booleans(),
    "logit_cap": st.floats(0, 50),
    "output_gate": st.booleans(),
}
gqas = st.builds(
    lambda group, kv, **more: GQA(num_heads=group * kv, num_kv_heads=kv, **more),
    group=small,
    kv=small,
    rope_scaling=scalings,
    **common,
)
mlas = st.builds(
    MLA,
    num_heads=small,
    latent_dim=small,
    query_latent_dim=st.integers(0, 5),
    position=st.sampled_from(["decoupled", "full", "none"]),
    rope_dim=st.just(4),
    latent_norm=norms,
    **common,
)
mfas = st.builds(MFA, num_heads=small, query_latent_dim=small, rope_scaling=scalings, **common)
vhas = st.builds(
    VHA,
    num_physical_heads=st.integers(2, 5),
    num_kv_heads=small,
    query_dim=st.integers(0, 8),
    postmix_rank=st.sampled_from([-1, 0, 1, 2]),
    rope_scaling=scalings,
    **common,
)
lrkvs = st.builds(
    LRKV,
    num_heads=small,
    rank=st.integers(0, 5),
    position=st.sampled_from(["full", "none", "shared"]),
    **common,
)
experiments = st.builds(
    Experiment,
    model=st.builds(
        Model,
        attention=gqas | mlas | mfas | vhas | lrkvs,
        windows=st.lists(st.integers(0, 100), max_size=3).map(tuple),
        ffn=st.sampled_from(["swiglu", "relu2"]),
        norm_eps=st.floats(1e-12, 1e-3),
        tied=st.booleans(),
    ),
    data=st.builds(Data, path=st.text(max_size=20), seed=st.integers(0, 2**32 - 1)),
    optim=st.builds(
        Optim,
        name=st.sampled_from(["muon", "adamw"]),
        matrix_lr=st.floats(1e-6, 1),
        clip_norm=st.floats(0, 10),
    ),
    train=st.builds(Train, z_loss=st.floats(0, 1), eval_rows=st.integers(0, 2**40)),
)


@given(experiments)
@settings(max_examples=50, deadline=None)
def test_json_gives_back_an_equal_experiment(experiment):
    assert from_json(to_json(experiment), "text") == experiment


TREE = json.loads(to_json(Experiment()))


def refusal_of(tree) -> str:
    with pytest.raises(UserError) as refusal:
        from_json(tree if isinstance(tree, str) else json.dumps(tree), "runs/a/config.json")
    assert "runs/a/config.json" in str(refusal.value)
    return str(refusal.value)


def test_another_format_version_is_refused():
    assert "format version 99" in refusal_of(TREE | {"format_version": 99})


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "{}"])
def test_text_that_is_no_configuration_is_refused(text):
    refusal_of(text)


@pytest.mark.parametrize("part", ["model", "data", "optim", "train", "mesh"])
def test_unknown_fields_are_refused(part):
    assert "surprise" in refusal_of(TREE | {part: TREE[part] | {"surprise": 1}})


def test_unknown_parts_and_mechanisms_are_refused():
    assert "surprise" in refusal_of(TREE | {"surprise": {}})
    attention = TREE["model"]["attention"] | {"mechanism": "alibi"}
    assert "alibi" in refusal_of(TREE | {"model": TREE["model"] | {"attention": attention}})


@pytest.mark.parametrize("part", [None, "model", "data", "optim", "train", "mesh"])
def test_missing_fields_are_refused_not_filled_with_todays_default(part):
    whole = TREE[part] if part else TREE
    for name in whole:
        fewer = {key: value for key, value in whole.items() if key != name}
        assert name in refusal_of(TREE | {part: fewer} if part else fewer)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("model", "dim", "256"),
        ("model", "dim", 256.0),
        ("model", "tied", 1),
        ("model", "windows", 8),
        ("model", "windows", ["8"]),
        ("train", "steps", True),
        ("train", "z_loss", "0"),
        ("optim", "beta1", False),
        ("data", "path", None),
        ("data", "seed", [0]),
    ],
)
def test_mistyped_fields_are_refused(part, name, value):
    assert name in refusal_of(TREE | {part: TREE[part] | {name: value}})


def test_a_whole_number_may_stand_for_a_float():
    tree = TREE | {"train": TREE["train"] | {"z_loss": 1}}
    assert from_json(json.dumps(tree), "text").train.z_loss == 1.0


@pytest.mark.parametrize(("name", "value"), [("dim", -1), ("ffn", 3), ("dtype", None)])
def test_a_value_out_of_range_is_refused_as_when_it_is_built(name, value):
    tree = TREE | {"model": TREE["model"] | {name: value}}
    with pytest.raises(UserError, match=rf"model\.{name} is {value}"):
        from_json(json.dumps(tree), "text")
