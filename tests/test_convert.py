"""Conversions: each map against NumPy written apart, what calibration gains, the command line."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import oracle
import pytest
import tiny
from tiny import run_json

from vhajax import (
    calibrate,
    cli,
    config,
    convert,
    fit,
    fold,
    low_rank,
    merge,
    runs,
    transformer,
    weights,
)
from vhajax.config import GQA, LRKV, MFA, MLA, VHA
from vhajax.errors import PREEMPTED, UserError

pytestmark = [
    pytest.mark.usefixtures("programs_kept"),
    pytest.mark.filterwarnings("ignore:the mesh uses:UserWarning"),
]

L, D, N, K, H, T, R = 2, 24, 4, 2, 8, 11, 3
ODD = {"value_dim": 6, "qkv_bias": True, "out_bias": True, "output_gate": True, "logit_cap": 5.0}
PART = "blocks.attention."


def model_of(attention: config.Attention, **more) -> config.Model:
    fields = {"vocab_size": 50, "dim": D, "num_layers": L, "ffn_dim": 20, "vocab_multiple": 8}
    return config.Model(attention=attention, dtype="float32", **(fields | more))


def gqa(num_kv_heads: int = K, **more) -> config.Model:
    return model_of(GQA(num_heads=N, num_kv_heads=num_kv_heads, head_dim=H, **more))


def batch_of(seed: int, rows: int = 3, length: int = T) -> dict[str, np.ndarray]:
    """Two documents a row, the last row with padding."""
    cut = length // 3
    positions = np.r_[np.arange(cut), np.arange(length - cut)]
    segments = np.r_[np.full(cut, 1), np.full(length - cut, 2)]
    batch = {
        "tokens": oracle.random_tokens((rows, length), 50, seed),
        "positions": np.tile(positions, (rows, 1)).astype(np.int32),
        "segments": np.tile(segments, (rows, 1)).astype(np.int32),
    }
    batch["segments"][-1, -2:] = 0
    return batch


def logits(model: config.Model, params: dict, batch: dict | None = None) -> np.ndarray:
    batch = batch or batch_of(0)
    run = jax.jit(transformer.forward)
    out = run(oracle.build(model, params), *(batch[n] for n in ("tokens", "positions", "segments")))
    return np.asarray(out)[batch["segments"] > 0]


def assert_same_model(one, other, tolerance: float = 1e-5) -> None:
    """The second pair fits its own configuration and gives the same logits."""
    model, params = other
    wanted = transformer.init_shapes(model, None)
    assert {n: np.shape(x) for n, x in params.items()} == {n: x.shape for n, x in wanted.items()}
    oracle.assert_near(logits(model, params), logits(*one), tolerance)


# Exact maps.


@pytest.mark.parametrize(
    "more",
    [
        {"query_dim": 4, "postmix_rank": 2},
        {"premix": False, "num_physical_heads": N},
        {"postmix_rank": 0, **ODD},
        {"query_dim": 6, "qk_norm": "none", **ODD},
    ],
    ids=str,
)
def test_vha_to_gqa(more):
    vha = VHA(**{"num_physical_heads": N // K, "num_kv_heads": K, "head_dim": H, **more})
    model = model_of(vha)
    params = oracle.random_params(model)
    folded_model, folded = fold.to_gqa(model, params)
    common = {n: more[n] for n in (*ODD, "qk_norm") if n in more}
    assert folded_model.attention == GQA(num_heads=N, num_kv_heads=K, head_dim=H, **common)
    for layer in range(L):
        query, out = params[f"{PART}query"][layer], params[f"{PART}out"][layer]
        bias = params.get(f"{PART}query_bias")
        for n in range(N):
            k, p = (
                (n // vha.num_physical_heads, n % vha.num_physical_heads) if vha.premix else (0, n)
            )
            W = params[f"{PART}premix"][layer, k] if vha.premix else np.eye(H)
            oracle.assert_near(folded[f"{PART}query"][layer, :, n], query[:, p] @ W)
            if bias is not None:
                oracle.assert_near(folded[f"{PART}query_bias"][layer, n], bias[layer, p] @ W)
        mixed = np.zeros(out.shape)
        for j in range(N):
            for h in range(N):
                m = float(h == j)
                if vha.rank:
                    u, v = params[f"{PART}postmix_u"][layer], params[f"{PART}postmix_v"][layer]
                    m += v[h] @ u[j]
                mixed[j] += m * out[h]
        oracle.assert_near(folded[f"{PART}out"][layer], mixed)
    assert_same_model((model, params), (folded_model, folded), 2e-5)


@pytest.mark.parametrize(
    "more",
    [{"rank": R, **ODD}, {"rank": 0, **ODD}, {"rank": 0, "position": "shared"}],
    ids=str,
)
def test_lrkv_to_mha(more):
    model = model_of(LRKV(num_heads=N, head_dim=H, **more))
    params = oracle.random_params(model)
    mha_model, mha = fold.lrkv_to_mha(model, params)
    assert mha_model.attention.num_kv_heads == mha_model.attention.num_heads == N
    for name in ("key", "value"):
        for layer in range(L):
            for n in range(N):
                W = np.float64(params[f"{PART}{name}"][layer])
                if more["rank"]:
                    down, up = (params[f"{PART}{name}_{s}"][layer, n] for s in ("down", "up"))
                    W = W + np.float64(down) @ up
                oracle.assert_near(mha[f"{PART}{name}"][layer, :, n], W)
                if "qkv_bias" in more:
                    bias = params[f"{PART}{name}_bias"][layer]
                    np.testing.assert_array_equal(mha[f"{PART}{name}_bias"][layer, n], bias)
    assert_same_model((model, params), (mha_model, mha))


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_repeated_heads(kv_heads):
    model = gqa(1 if kv_heads == 2 else 2, **ODD)
    params = oracle.random_params(model)
    wider = fold.repeat_heads(model, params, kv_heads)
    for n in range(N):  # what query head n reads
        old, new = n // (N // model.attention.num_kv_heads), n // (N // kv_heads)
        for name in ("key", "value"):
            one, other = params[PART + name][:, :, old], wider[1][PART + name][:, :, new]
            np.testing.assert_array_equal(one, other)
    assert_same_model((model, params), wider)


# MHA → LRKV.


def one_shot(W: np.ndarray, rank: int) -> float:
    """‖W_n − mean − SVD_R‖² over all heads, relative."""
    left = 0.0
    for head in W:
        s = np.linalg.svd(np.float64(head) - np.float64(W).mean(axis=0), compute_uv=False)
        left += (s[rank:] ** 2).sum()
    return left / (np.float64(W) ** 2).sum()


@pytest.mark.parametrize("rank", [0, 1, 3, 5])
def test_the_alternation_never_loses_and_beats_mean_and_svd(rank):
    rng = np.random.default_rng(rank)
    W = rng.standard_normal((1, D, H)) + rng.standard_normal((N, D, H)) * np.logspace(0, -1, H)
    found = low_rank.factor(W, rank)
    assert found.rounds[0] == pytest.approx(one_shot(W, rank))
    assert all(b <= a * (1 + 1e-12) for a, b in zip(found.rounds, found.rounds[1:], strict=False))
    if rank:
        assert found.rounds[-1] < 0.99 * found.rounds[0]
    for n in range(N):
        left = W[n] - found.shared - found.down[n] @ found.up[n]
        assert found.error[n] == pytest.approx(np.linalg.norm(left) / np.linalg.norm(W[n]))
        np.testing.assert_allclose(  # balanced
            np.linalg.norm(found.down[n], axis=0), np.linalg.norm(found.up[n], axis=1)
        )
    total = (found.error**2 * (W**2).sum(axis=(1, 2))).sum() / (W**2).sum()
    assert total == pytest.approx(found.rounds[-1])


def test_heads_that_are_shared_plus_low_rank_are_found():
    rng = np.random.default_rng(0)
    shared = rng.standard_normal((40, 16))
    W = shared + 0.5 * rng.standard_normal((8, 40, 2)) @ rng.standard_normal((8, 2, 16))
    found = low_rank.factor(W, 2)
    assert found.error.max() < 0.02
    assert np.sqrt(one_shot(W, 2)) > 10 * found.error.max()
    assert np.linalg.norm(found.shared - shared) < 0.05 * np.linalg.norm(shared)


@pytest.mark.parametrize(
    ("rank", "more"), [(H, {}), (H + 3, {**ODD, "qkv_bias": False})], ids=["H", "more, odd"]
)
def test_full_rank_is_exact(rank, more):
    model = gqa(N, **more)
    params = oracle.random_params(model)
    lrkv, made, errors = low_rank.to_lrkv(model, params, rank)
    assert lrkv.attention.rank == rank
    assert max(x.max() for x in errors.values()) < 1e-12
    assert errors["key"].shape == errors["value"].shape == (L, N)
    assert_same_model((model, params), (lrkv, made))


def test_lrkv_through_mha_and_back():
    """The factors are those of the expanded heads: expanding them gives the fitted heads."""
    model = gqa(N, qkv_bias=True)
    params = oracle.random_params(model)
    for name in ("key_bias", "value_bias"):  # one for all heads: LRKV can hold it
        params[PART + name] = np.repeat(params[PART + name][:, :1], N, axis=1)
    lrkv, made, errors = low_rank.to_lrkv(model, params, R)
    back_model, back = fold.lrkv_to_mha(lrkv, made)
    assert back_model == model
    for name in ("key", "value"):
        np.testing.assert_array_equal(back[f"{PART}{name}_bias"], params[f"{PART}{name}_bias"])
        left, whole = back[PART + name] - params[PART + name], params[PART + name]
        size = lambda x: np.sqrt((np.float64(x) ** 2).sum(axis=(1, 3)))  # noqa: E731
        np.testing.assert_allclose(size(left) / size(whole), errors[name], rtol=1e-5)
    assert_same_model((lrkv, made), (back_model, back))


def test_different_biases_have_no_lrkv():
    model = gqa(N, qkv_bias=True)
    with pytest.raises(UserError, match=r"heads' key biases differ by up to .* one bias for all"):
        low_rank.to_lrkv(model, oracle.random_params(model), H)


# Fewer KV heads.


def test_merged_heads_are_means():
    model = gqa(4, **ODD)
    params = oracle.random_params(model)
    merged_model, merged = merge.merge_heads(model, params, 2)
    assert merged_model.attention == dataclasses.replace(model.attention, num_kv_heads=2)
    for name in ("key", "value", "key_bias", "value_bias"):
        old, new = np.float64(params[PART + name]), merged[PART + name]
        for k in range(2):
            mean = (old[..., 2 * k, :] + old[..., 2 * k + 1, :]) / 2
            oracle.assert_near(new[..., k, :], mean)
    same = fold.repeat_heads(*merge.merge_heads(model, params, 2), 4)
    assert_same_model((merged_model, merged), same)
    # Heads that are alike lose nothing.
    assert_same_model(same, merge.merge_heads(*same, 2))


def test_postmix_starts_as_the_identity():
    model = gqa(2, **ODD)
    params = oracle.random_params(model)
    for rank, r in ((-1, 1), (0, 0)):
        vha, made = merge.add_postmix(model, params, rank)
        assert (vha.attention.rank, vha.attention.premix, vha.attention.num_heads) == (r, False, N)
        if r:
            assert np.abs(made[f"{PART}postmix_u"]).max() > 0
        assert_same_model((model, params), (vha, made))


@pytest.mark.parametrize("more", [{}, ODD], ids=["plain", "odd"])
def test_premix_is_found_again(more):
    """GQA that Premix made becomes that again; a bias goes with its heads."""
    vha = VHA(num_physical_heads=2, num_kv_heads=2, head_dim=H, postmix_rank=0, **more)
    folded = fold.to_gqa(model_of(vha), oracle.random_params(model_of(vha)))
    mixed, made, errors = low_rank.to_premix(*merge.add_postmix(*folded, 0))
    assert mixed.attention == vha
    assert errors["query"].shape == (L, 4)
    assert errors["query"].max() < 1e-6
    assert_same_model(folded, (mixed, made))
    sizes = (np.float64(made[f"{PART}premix"]) ** 2).sum(axis=(1, 2, 3))
    np.testing.assert_allclose(sizes, 2 * H, rtol=1e-5)  # two matrices as large as the identity


def test_premix_is_the_closest():
    """The squared error is that of the singular values that rank H leaves out (Eckart–Young)."""
    query = np.random.default_rng(0).standard_normal((D, 6, H))
    physical, premix = low_rank.share_queries(query, 3)
    assert (physical.shape, premix.shape) == ((D, 2, H), (3, H, H))
    wide = np.block([[query[:, k * 2 + p] for k in range(3)] for p in range(2)])  # [P·D, K·H]
    left = (np.linalg.svd(wide, compute_uv=False)[H:] ** 2).sum()
    found = sum(
        ((query[:, k * 2 + p] - physical[:, p] @ premix[k]) ** 2).sum()
        for k in range(3)
        for p in range(2)
    )
    np.testing.assert_allclose(found, left, rtol=1e-9)


def planted(qk_norm: str, **more) -> tuple[config.Model, dict]:
    """GQA-4 that equals a GQA-2 whose heads were split in two, each in a basis of its own."""
    windows = (5, 0) if qk_norm == "none" else ()
    model = dataclasses.replace(gqa(2, qk_norm=qk_norm, **more), windows=windows)
    wide, params = fold.repeat_heads(model, oracle.random_params(model), 4)
    if qk_norm == "weighted":  # alike within a plane, so that turning it changes nothing
        for side in ("query", "key"):
            scale = params[f"{PART}{side}_norm.scale"]
            params[f"{PART}{side}_norm.scale"] = np.concatenate([scale[:, : H // 2]] * 2, axis=-1)
    rng = np.random.default_rng(1)
    angles = rng.uniform(0, 2 * np.pi, (L, 4, H // 2))
    cos, sin = np.cos(angles), np.sin(angles)
    for name in ("query", "query_bias", "key", "key_bias"):
        if (path := PART + name) in params:
            one, two = np.split(np.float64(params[path]), 2, axis=-1)
            c, s = (a[:, None] if "bias" not in name else a for a in (cos, sin))
            params[path] = np.concatenate([one * c - two * s, two * c + one * s], axis=-1)
    for layer in range(L):
        for k in range(4):  # N = 4: query head k reads KV head k
            A = np.eye(H) if "output_gate" in more else rng.standard_normal((H, H))
            for name in ("value", "value_bias"):
                if (path := PART + name) in params:
                    params[path] = np.array(params[path])
                    params[path][layer, ..., k, :] = params[path][layer, ..., k, :] @ A
            out = np.linalg.solve(A, params[f"{PART}out"][layer, k])
            params[f"{PART}out"][layer, k] = out
    return wide, {name: np.float32(x) for name, x in params.items()}


@pytest.mark.parametrize(
    ("qk_norm", "more"),
    [
        ("none", {"qkv_bias": True, "out_bias": True}),
        ("weighted", {}),
        ("weighted", {"output_gate": True}),
    ],
    ids=["biases", "normed", "gate"],
)
def test_calibration_sees_through_changed_bases(qk_norm, more):
    teacher = planted(qk_norm, **more)
    student = calibrate.merge_on_text(*teacher, 2, [batch_of(5, 12), batch_of(6, 12)])
    # The text, and float32 factors of which one is an inverse, are what rounds.
    assert_same_model(teacher, student, 1e-3)
    with pytest.raises(AssertionError):
        assert_same_model(teacher, merge.merge_heads(*teacher, 2), 0.1)


def attention_outputs(model: config.Model, params: dict, batch: dict) -> list[np.ndarray]:
    """What the attention of every layer adds to the residual stream."""

    @jax.jit
    def run(built, tokens, *places):
        h, outs = built.embed(tokens), []
        for block in transformer.unstacked(built):
            outs.append(block.attention(block.attention_norm(h), *places))
            h, _ = block(h, lambda att, x: (att(x, *places), None))
        return outs

    arrays = [batch[n] for n in ("tokens", "positions", "segments")]
    found = run(oracle.build(model, params), *arrays)
    return [np.asarray(out)[batch["segments"] > 0] for out in found]


def test_calibration_beats_weights_alone():
    model = gqa(4, **{**ODD, "output_gate": False})
    params = oracle.random_params(model)
    text, other = batch_of(1, 50, 20), batch_of(2, 50, 20)
    mean = merge.merge_heads(model, params, 2)
    fitted = calibrate.merge_on_text(model, params, 2, [text])
    assert fitted[0] == mean[0]
    changed = {n for n in params if not np.array_equal(params[n], fitted[1][n])}
    assert {n.removeprefix(PART).removesuffix("_bias") for n in changed} == {
        "query",
        "key",
        "value",
        "out",
    }
    for batch in (text, other):
        truth, plain, best = (
            attention_outputs(*pair, batch) for pair in ((model, params), mean, fitted)
        )
        for layer in range(L):
            errors = [np.square(found[layer] - truth[layer]).sum() for found in (plain, best)]
            assert errors[1] < 0.9 * errors[0]


def test_output_fit_is_least_squares():
    rng = np.random.default_rng(0)
    o, target = rng.standard_normal((90, N, H)), rng.standard_normal((90, D))
    prior = rng.standard_normal((N, H, D))
    rows, start = o.reshape(90, -1), prior.reshape(-1, D)
    root = np.sqrt(fit.RIDGE * (rows**2).sum() / rows.shape[1])
    stacked = np.concatenate([rows, root * np.eye(rows.shape[1])])
    wanted = np.linalg.lstsq(stacked, np.concatenate([target, root * start]))[0]
    oracle.assert_near(fit.fit_output(prior, o, target), wanted.reshape(prior.shape), 1e-10)
    # With no text at all the weights stay.
    np.testing.assert_allclose(fit.fit_output(prior, o * 0, target), prior)


# The command line.


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A folder with prepared `data` and runs of GQA, VHA, MLA and others."""
    folder = tmp_path_factory.mktemp("convert")
    data = tiny.prepare_texts(folder / "data", tiny.TEXTS)
    for name, attention in {
        "gqa": GQA(num_heads=4, num_kv_heads=4, head_dim=H),
        "vha": VHA(num_physical_heads=2, num_kv_heads=2, head_dim=H),
        "lrkv": LRKV(num_heads=4, rank=2, head_dim=H),
        "none": LRKV(num_heads=4, rank=2, head_dim=H, position="none"),
        "mla": MLA(num_heads=4, latent_dim=8, rope_dim=4, head_dim=H),
        "mfa": MFA(num_heads=4, query_latent_dim=8, head_dim=H),
        "biased": GQA(num_heads=4, num_kv_heads=4, head_dim=H, qkv_bias=True),
    }.items():
        what = tiny.changed(tiny.gqa_experiment(data), {"model.attention": attention})
        tiny.save_weights(folder / name, what, oracle.random_params(what.model))
    return folder


GOOD = {
    "fold": ("vha", "--to gqa", True, "GQA N 4, K 2, H 8"),
    "mha": ("lrkv", "--to mha", True, "GQA N 4, K 4, H 8"),
    "mean": ("gqa", "--to gqa --kv-heads 2 --eval-rows 0", False, "GQA N 4, K 2, H 8"),
    "text": ("gqa", "--to gqa --kv-heads 2 --calibrate --rows 9", False, "GQA N 4, K 2, H 8"),
    "postmix": (
        "lrkv",
        "--to vha --kv-heads 2 --rank 2 --eval-rows 0",
        False,
        "VHA P 4, K 2 (N 4), H 8",
    ),
    "premix": (
        "gqa",
        "--to vha --kv-heads 4 --premix --eval-rows 0",
        False,
        "VHA P 1, K 4 (N 4), H 8",
    ),
    "low": ("gqa", "--to lrkv --rank 2 --eval-rows 0", False, "LRKV N 4, H 8, R 2, full"),
    "full": ("gqa", "--to lrkv --rank 9", True, "LRKV N 4, H 8, R 9, full"),
}


@pytest.fixture(scope="module")
def converted(shared):
    """Every good conversion: what the command printed, and the run that it wrote."""
    made = {}

    def get(name: str, capsys) -> tuple[dict, Path]:
        if name not in made:
            source, args, _, _ = GOOD[name]
            out = shared / "converted" / name
            told = run_json(
                capsys, "convert", str(shared / source), "--out", str(out), *args.split()
            )
            made[name] = told, out
        return made[name]

    return get


@pytest.mark.parametrize("name", GOOD)
def test_convert(name, shared, converted, capsys):
    source, args, exact, summary = GOOD[name]
    told, out = converted(name, capsys)
    assert (told["run"], told["out"], told["exact"]) == (str(shared / source), str(out), exact)
    assert told["model"] == runs.read_config(out).model.attention.summary() == summary
    assert (told["max_logit_difference"] < 1e-4) == exact
    unmeasured = told["loss_before"] is None and told["loss_after"] is None
    assert unmeasured == (exact or "--eval-rows 0" in args)
    assert not [path for path in out.parent.iterdir() if path.name.startswith(".")]
    factored = {"lrkv": {"key", "value"}, "--premix": {"query"}}
    expected = next((names for word, names in factored.items() if word in args), set())
    assert set(told["relative_errors"]) == expected
    assert ("more than heads of 8 can use" in told["note"]) == (name == "full")


def test_losses_are_those_of_eval(shared, converted, capsys):
    told, out = converted("text", capsys)
    measured = [
        run_json(capsys, "eval", str(run), "--rows", "32")["loss"] for run in (shared / "gqa", out)
    ]
    assert measured == pytest.approx([told["loss_before"], told["loss_after"]], abs=1e-5)


def test_convert_in_words(shared, tmp_path, capsys):
    args = ["convert", str(shared / "gqa"), "--to", "lrkv", "--rank", "1", "--out"]
    assert cli.main([*args, str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "LRKV N 4, H 8, R 1, full, not equal, max logit difference" in lines[0]
    assert lines[1].startswith("held-out nats per token: ")
    assert len(lines) == 3 + 2 * L
    assert lines[3].split()[:3] == ["key", "layer", "0"]


def init_from(run: Path, out: Path, *more: str) -> int:
    """`vhajax train` of what a run is, with its weights."""
    file = out.with_suffix(".py")
    file.write_text(
        "from pathlib import Path\n\nfrom vhajax import runs\n\n"
        f"EXPERIMENT = runs.read_config(Path({str(run)!r}))\n"
    )
    return cli.main(["train", str(file), "--run-dir", str(out), "--init-from", str(run), *more])


@pytest.mark.parametrize("name", ["fold", "text", "low", "mha"])
def test_a_converted_run_starts_another(name, converted, tmp_path, capsys, monkeypatch):
    _, out = converted(name, capsys)
    begun = tiny.only_starts(monkeypatch)
    assert init_from(out, tmp_path / "run") == PREEMPTED
    ((state, start),) = begun
    assert start == 0
    for path, weight in weights.read(out)[1].items():
        np.testing.assert_array_equal(state.params[path], weight)


def test_training_moves_an_identity_postmix(converted, tmp_path, capsys):
    _, out = converted("postmix", capsys)
    assert init_from(out, tmp_path / "run", "--steps", "2") == 0
    assert not weights.read(out)[1][f"{PART}postmix_v"].any()
    assert np.asarray(weights.read(tmp_path / "run")[1][f"{PART}postmix_v"]).any()


BAD = {
    "mla": ("mla", "--to gqa --kv-heads 2", "MLA N 4, .* has no counterpart with separate keys"),
    "mfa": ("mfa", "--to mha", "has no counterpart with separate keys"),
    "vha to lrkv": ("vha", "--to lrkv --rank 2", "fold it first .vhajax fold RUN --out RUN2."),
    "vha to fewer": ("vha", "--to gqa --kv-heads 1", "fold it first"),
    "no rotation": ("none", "--to mha", "position is 'none', and MHA rotates whole keys here"),
    "no kv heads": ("gqa", "--to gqa", "--to gqa needs --kv-heads K"),
    "three": ("gqa", "--to gqa --kv-heads 3", "--kv-heads is 3; it must divide the 4 query heads"),
    "zero": ("gqa", "--to vha --kv-heads 0", "--kv-heads is 0; it must divide"),
    "mha already": ("gqa", "--to mha", "has 4 KV heads already; there is nothing to convert"),
    "no rank": ("gqa", "--to lrkv", "--to lrkv needs a --rank R"),
    "negative": ("gqa", "--to lrkv --rank -1", "--rank is -1; it must not be negative"),
    "postmix rank": ("gqa", "--to vha --kv-heads 2 --rank 5", "Postmix over 4 heads has at most"),
    "useless rank": ("gqa", "--to mha --rank 5", "--rank is 5, which --to mha has no use for"),
    "useless heads": ("gqa", "--to lrkv --rank 5 --kv-heads 2", "--kv-heads is 2, which --to lrkv"),
    "useless text": ("lrkv", "--to mha --calibrate", "--calibrate fits merged KV heads, and 4 → 4"),
    "biases": ("biased", "--to lrkv --rank 2", "heads' key biases differ"),
    "useless premix": ("gqa", "--to mha --premix", "--premix is a part of VHA, which --to mha"),
    "no rows": ("gqa", "--to gqa --kv-heads 2 --rows 0", "--rows is 0"),
    "no data": ("gqa", "--to gqa --kv-heads 2 --data no", "no is not a folder"),
    "no target": ("gqa", "", "required: --to"),
    "other target": ("gqa", "--to mqa", "invalid choice"),
    "no run": ("nothing", "--to mha", "does not exist"),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals(name, shared, tmp_path, capsys):
    source, args, words = BAD[name]
    out = tmp_path / "out"
    assert cli.main(["convert", str(shared / source), "--out", str(out), *args.split()]) == 2
    said, err = capsys.readouterr()
    assert said == ""
    assert err.count("\n") == 1
    with pytest.raises(UserError, match=words):
        raise UserError(err)
    assert not list(tmp_path.iterdir())


def test_impossible_targets_are_refused_before_jax(shared, tmp_path):
    code = f"""
import sys
from vhajax import cli
status = cli.main(["convert", {str(shared / "mla")!r}, "--to", "mha", "--out", {str(tmp_path)!r}])
print(status, sorted({{"jax", "numpy"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "2 []\n", done.stderr


def test_out_is_written_whole_or_not_at_all(shared, tmp_path, capsys, monkeypatch):
    args = ["convert", str(shared / "lrkv"), "--to", "mha", "--out"]
    (tmp_path / "there").mkdir()
    assert cli.main([*args, str(tmp_path / "there")]) == 2
    assert "exists; name a new folder" in capsys.readouterr().err

    write = runs.write_whole

    def full(path: Path, text: str) -> None:
        if path.name == runs.CONFIG:  # the last file
            raise OSError("disk full")
        write(path, text)

    monkeypatch.setattr(runs, "write_whole", full)
    assert cli.main([*args, str(tmp_path / "out")]) == 2
    assert "out cannot be written (disk full)" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_request_of_rows_is_evenly_spaced(shared):
    experiment = runs.read_config(shared / "gqa")
    text = convert._Text(shared / "gqa", experiment, None)
    sizes = [len(batch["tokens"]) for batch in text.calibration(9)]
    assert sizes == [4, 4, 1]
