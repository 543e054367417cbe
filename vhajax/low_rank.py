"""Heads by factors: MHA → LRKV, and the query heads of GQA as those that VHA's Premix makes."""

import dataclasses
from typing import NamedTuple

import numpy as np

from vhajax import config
from vhajax.errors import UserError
from vhajax.fold import HEADS, Params

FALL = 0.01  # a round that lowers the squared error by less than this share is the last
ROUNDS = 200


class Factors(NamedTuple):
    """W_n ≈ shared + down_n up_n, all float64.

    shared: [D, H]. down: [N, D, R]. up: [N, R, H]. error: [N], ‖W_n − …‖ / ‖W_n‖ (Frobenius).
    rounds: the squared error over all heads, relative, after each round; it never rises.
    """

    shared: np.ndarray
    down: np.ndarray
    up: np.ndarray
    error: np.ndarray
    rounds: list[float]


def factor(heads: np.ndarray, rank: int) -> Factors:
    """Alternates the best residuals for a shared matrix and the best shared matrix for residuals.

    Starts at the mean over heads, which with its residuals is the usual one-shot answer. Either
    half of a round minimises the same error, so it falls or stays.

    heads: [N, D, H].
    """
    W = np.asarray(heads, np.float64)
    total = max((W**2).sum(), np.finfo(np.float64).tiny)
    shared, rounds = W.mean(axis=0), []
    while True:
        down, up = truncated(W - shared, rank)
        left = W - shared - down @ up
        rounds.append(float((left**2).sum() / total))
        done = len(rounds) > 1 and rounds[-1] > (1 - FALL) * rounds[-2]
        if done or rounds[-1] < 1e-24 or len(rounds) == ROUNDS:
            break
        shared = shared + left.mean(axis=0)
    size = np.maximum(np.sqrt((W**2).sum(axis=(1, 2))), np.finfo(np.float64).tiny)
    return Factors(shared, down, up, np.sqrt((left**2).sum(axis=(1, 2))) / size, rounds)


def truncated(residual: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The best rank-R factors of each head by SVD (Eckart–Young), √S in either of them.

    Balanced factors get gradients of one size; beyond min(D, H) they are zero.
    residual: [N, D, H] → down [N, D, R], up [N, R, H].
    """
    N, D, H = residual.shape
    down, up = np.zeros((N, D, rank)), np.zeros((N, rank, H))
    U, S, Vt = np.linalg.svd(residual, full_matrices=False)
    kept = min(rank, D, H)
    root = np.sqrt(S[:, :kept])
    down[..., :kept] = U[..., :kept] * root[:, None]
    up[:, :kept] = root[..., None] * Vt[:, :kept]
    return down, up


def to_lrkv(
    model: config.Model, params: Params, rank: int
) -> tuple[config.Model, Params, dict[str, np.ndarray]]:
    """MHA → LRKV of rank R with position `full`, layer by layer; exact from R = min(D, H) on.

    Returns:
      The configuration, its parameters, and the relative error of `key` and `value`, [L, N] each.
    Raises:
      UserError: heads' biases differ, which the one bias of LRKV cannot hold.
    """
    mha = model.attention
    assert isinstance(mha, config.GQA)
    assert mha.num_heads == mha.num_kv_heads
    lrkv = config.LRKV(num_heads=mha.num_heads, rank=rank, **mha.common())
    made, errors = dict(params), {}
    for name in ("key", "value"):
        heads = np.moveaxis(np.asarray(params[f"{HEADS}{name}"]), 2, 1)  # [L, N, D, H]
        layers = [factor(layer, rank) for layer in heads]
        parts = {"": [f.shared for f in layers]}
        if rank:
            parts |= {"_down": [f.down for f in layers], "_up": [f.up for f in layers]}
        for suffix, arrays in parts.items():
            made[f"{HEADS}{name}{suffix}"] = np.stack(arrays).astype(np.float32)
        if (bias := f"{HEADS}{name}_bias") in params:
            made[bias] = _shared_bias(name, np.asarray(params[bias]))
        errors[name] = np.stack([f.error for f in layers])
    return dataclasses.replace(model, attention=lrkv), made, errors


def _shared_bias(name: str, bias: np.ndarray) -> np.ndarray:
    """[L, N, H] → [L, H], where all heads have one bias."""
    if not np.allclose(bias, bias[:, :1], rtol=1e-6, atol=0):
        raise UserError(
            f"The heads' {name} biases differ by up to {np.abs(bias - bias[:, :1]).max():.2g}, and "
            "LRKV has one bias for all heads; convert a model with qkv_bias false."
        )
    return bias[:, 0]


def share_queries(query: np.ndarray, num_kv_heads: int) -> tuple[np.ndarray, np.ndarray]:
    """The P = N/K physical heads and K Premix matrices that come closest to N query heads.

    W_Q[k·P + p] ≈ W_Q[p] W[k] for all k and p is one matrix of P·D × K·H as a product of rank H,
    so truncated SVD is the best there is (Eckart–Young). W has the size of the identity.

    Args:
      query: [D, N, H] float64; a bias is one more row.
    Returns:
      [D, P, H] and [K, H, H].
    """
    D, N, H = query.shape
    K, P = num_kv_heads, N // num_kv_heads
    whole = query.reshape(D, K, P, H).transpose(2, 0, 1, 3).reshape(1, P * D, K * H)
    down, up = (x[0] for x in truncated(whole, H))
    size = np.linalg.norm(up, axis=1)  # √S: all of the scale goes to the physical heads
    scale = np.sqrt(K) / np.maximum(size, np.finfo(np.float64).tiny)
    physical = (down / scale).reshape(P, D, H).transpose(1, 0, 2)
    return physical, (up * scale[:, None]).reshape(H, K, H).transpose(1, 0, 2)


def to_premix(
    model: config.Model, params: Params
) -> tuple[config.Model, Params, dict[str, np.ndarray]]:
    """VHA without Premix → VHA with it, whose N/K physical heads come closest to its query heads.

    Returns:
      The configuration, its parameters, and the relative error of `query`, [L, N].
    """
    vha = model.attention
    assert isinstance(vha, config.VHA)
    K, N = vha.num_kv_heads, vha.num_heads
    bias, made = f"{HEADS}query_bias", dict(params)
    queries = np.asarray(params[f"{HEADS}query"], np.float64)  # [L, D, N, H]
    if bias in params:
        row = np.asarray(params[bias], np.float64)[:, None]
        queries = np.concatenate([queries, row], axis=1)
    shared = [share_queries(layer, K) for layer in queries]
    physical, premix = (np.stack(parts) for parts in zip(*shared, strict=True))
    virtual = np.einsum("LDPQ,LKQH->LDKPH", physical, premix).reshape(queries.shape)
    size = np.sqrt((queries**2).sum(axis=(1, 3)))
    error = np.sqrt(((queries - virtual) ** 2).sum(axis=(1, 3))) / size
    D = model.dim
    made[f"{HEADS}query"] = physical[:, :D].astype(np.float32)
    made[f"{HEADS}premix"] = premix.astype(np.float32)
    if bias in params:
        made[bias] = physical[:, D].astype(np.float32)
    mixed = dataclasses.replace(vha, num_physical_heads=N // K, premix=True)
    return dataclasses.replace(model, attention=mixed), made, {"query": error}
