"""Least squares for one attention layer with fewer KV heads, in float64 NumPy.

Letters: M tokens of the text, K KV heads of the teacher in K' groups of g.
"""

import numpy as np

Arrays = dict[str, np.ndarray]
RIDGE = 1e-3  # of the mean eigenvalue: what the text does not show stays as the weights say


def fit_keys(part: Arrays, x: np.ndarray, k: np.ndarray, num_kv_heads: int, normed: bool) -> Arrays:
    """W_K' whose keys come closest to all keys of a group, each in the best RoPE-proof basis.

    A rotation inside a plane (i, i + H/2) commutes with RoPE and with RMSNorm, and queries can
    undo it: a head's planes are first turned so that the heads of a group agree, its queries'
    alike. (A weight of QK-norm that differs inside a plane makes this approximate.)

    Args:
      part: the layer's attention weights of the teacher.
      x: [M, D] the student's normed input. k: [M, K, H] the teacher's keys before their norm.
      normed: whether keys meet normed; then heads count alike, however large they are.
    """
    M, K, H = k.shape
    size = np.sqrt(np.mean(np.float64(k) ** 2, axis=(0, 2)))[:, None]
    scale = np.sqrt(np.mean(size**2)) / np.maximum(size, 1e-30) if normed else np.ones((K, 1))
    turns = alignment((scale * k).reshape(M, num_kv_heads, -1, H)).reshape(K, H // 2)
    merged = lambda a: _grouped(turn(scale * a, turns), num_kv_heads).mean(axis=-2)  # noqa: E731
    prior = {n: merged(part[n]) for n in ("key", "key_bias") if n in part}
    of_queries = np.repeat(turns, part["query"].shape[1] // K, axis=0)
    made = {n: turn(part[n], of_queries) for n in ("query", "query_bias") if n in part}
    return made | _projection("key", prior, x, merged(k))


def alignment(keys: np.ndarray) -> np.ndarray:
    """Turns of each head's planes towards its group: [M, K', g, H] → [K', g, H / 2], |turn| = 1.

    A plane's two channels are one complex number; the heads' numbers are closest to multiples of
    one sequence where the multiples are the leading eigenvector of their second moments.
    """
    z = np.transpose(_planes(keys), (1, 3, 2, 0))  # [K', H/2, g, M]
    moments = z @ z.conj().swapaxes(-1, -2)
    lead = np.linalg.eigh(moments)[1][..., -1]  # [K', H/2, g]
    lead = lead * lead[..., :1].conj()  # the first head stays as it is
    size = np.abs(lead)
    turns = np.where(size > 1e-12, lead.conj() / np.maximum(size, 1e-12), 1)
    return np.moveaxis(turns, 1, 2)


def turn(heads: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """Planes (i, i + H/2) of [..., heads, H] turned by complex [heads, H / 2]."""
    z = np.asarray(_planes(heads) * turns)
    return np.concatenate([np.real(z), np.imag(z)], axis=-1)


def fit_values(part: Arrays, x: np.ndarray, v: np.ndarray, num_kv_heads: int) -> Arrays:
    """W_V' whose values are the leading components of all values of a group, and W_O to match.

    v_k ≈ v' E_kᵀ with E the first H_v eigenvectors of the values' second moments: then
    W_O'[n] = E_kᵀ W_O[n]. With an output gate, which acts on channels, values are averaged instead.

    Args:
      part, x: as for `fit_keys`. v: [M, K, H_v] the teacher's values.
    """
    M, K, H = v.shape
    g = K // num_kv_heads
    if "gate" in part:
        basis = np.broadcast_to(np.eye(H), (K, H, H)) / g
        back = np.broadcast_to(np.eye(H), (K, H, H))
    else:
        groups = np.float64(v).reshape(M, num_kv_heads, g * H)
        moments = np.transpose(groups, (1, 2, 0)) @ np.transpose(groups, (1, 0, 2))
        basis = np.linalg.eigh(moments)[1][..., ::-1][..., :H].reshape(K, H, H)
        back = basis.swapaxes(1, 2)
    change = lambda a: _grouped((a[..., None, :] @ basis)[..., 0, :], num_kv_heads).sum(axis=-2)  # noqa: E731
    prior = {n: change(np.float64(part[n])) for n in ("value", "value_bias") if n in part}
    out = np.repeat(back, len(part["out"]) // K, axis=0) @ part["out"]
    return _projection("value", prior, x, change(np.float64(v))) | {"out": out}


def fit_output(prior: np.ndarray, o: np.ndarray, target: np.ndarray) -> np.ndarray:
    """W_O with Σ_n o_n W_O[n] closest to the target: o [M, N, H_v], target [M, D] → [N, H_v, D]."""
    rows = o.reshape(len(o), -1)
    return ridge(rows, target, prior.reshape(rows.shape[1], -1)).reshape(prior.shape)


def ridge(x: np.ndarray, y: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """argmin ‖x W − y‖² + λ ‖W − prior‖² in float64: [M, a], [M, b], [a, b] → [a, b]."""
    x, y, prior = (np.asarray(a, np.float64) for a in (x, y, prior))
    gram = x.T @ x
    weight = RIDGE * np.trace(gram) / len(gram) + np.finfo(np.float64).tiny
    left = gram + weight * np.eye(len(gram))
    return prior + np.linalg.solve(left, x.T @ y - gram @ prior)


def _projection(name: str, prior: Arrays, x: np.ndarray, target: np.ndarray) -> Arrays:
    """Weights, and bias where the prior has one, that make the target [M, K', H] of x [M, D]."""
    shape, bias = prior[name].shape, prior.get(f"{name}_bias")
    start = prior[name].reshape(shape[0], -1)
    if bias is not None:  # one more row of the projection
        x = np.concatenate([x, np.ones((len(x), 1), x.dtype)], axis=1)
        start = np.concatenate([start, bias.reshape(1, -1)])
    whole = ridge(x, target.reshape(len(x), -1), start)
    fitted = {name: whole[: shape[0]].reshape(shape)}
    return fitted if bias is None else fitted | {f"{name}_bias": whole[-1].reshape(bias.shape)}


def _planes(x: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    return np.float64(x[..., :half]) + 1j * x[..., half:]


def _grouped(heads: np.ndarray, num_kv_heads: int) -> np.ndarray:
    """[..., K, H] → [..., K', g, H]."""
    return heads.reshape(*heads.shape[:-2], num_kv_heads, -1, heads.shape[-1])
