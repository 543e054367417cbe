"""What converts into what, and what `vhajax convert` refuses. No JAX here: it answers at once."""

from dataclasses import dataclass
from typing import Literal

from vhajax import config
from vhajax.config import GQA, LRKV, VHA
from vhajax.errors import UserError
from vhajax.mechanisms import require

Target = Literal["gqa", "mha", "lrkv", "vha"]


@dataclass(frozen=True)
class Request:
    """What to make of a run.

    kv_heads: of GQA or VHA. rank: R of LRKV, or of VHA's Postmix (None: N/4). premix: VHA with N/K
    physical heads. rows: rows of training text to fit merged heads on (0: from weights alone).
    eval_rows: held-out rows that an inexact map is measured on (0: none). data: a prepared folder
    instead of the run's own.
    """

    to: Target
    kv_heads: int | None = None
    rank: int | None = None
    rows: int = 0
    eval_rows: int = 32
    data: str | None = None
    premix: bool = False


def check(source: config.Attention, request: Request) -> bool:
    """Whether the conversion is exact.

    Raises:
      UserError: it is impossible, or an option has no meaning for it.
    """
    to = request.to
    require(
        isinstance(source, GQA | VHA | LRKV),
        f"{source.summary()} has no counterpart with separate keys and values a head here; convert "
        "GQA, VHA or LRKV.",
    )
    for name, value, meant in (
        ("--kv-heads", request.kv_heads, ("gqa", "vha")),
        ("--rank", request.rank, ("lrkv", "vha")),
    ):
        require(
            value is None or to in meant,
            f"{name} is {value}, which --to {to} has no use for; leave it out.",
        )
    require(
        not request.premix or to == "vha",
        f"--premix is a part of VHA, which --to {to} has no use for; leave it out.",
    )
    require(to != "lrkv" or request.rank is not None, "--to lrkv needs a --rank R.")
    require((request.rank or 0) >= 0, f"--rank is {request.rank}; it must not be negative.")
    require(
        to != "vha" or (request.rank or 0) <= source.num_heads,
        f"--rank is {request.rank}; a Postmix over {source.num_heads} heads has at most that rank.",
    )
    if isinstance(source, LRKV):
        check_expands(source)
    if isinstance(source, VHA):
        folds = to == "gqa" and request.kv_heads in (None, source.num_kv_heads)
        require(
            folds,
            f"{source.summary()} converts to the GQA that it equals only; fold it first "
            "(vhajax fold RUN --out RUN2) and convert that.",
        )
    return _check_heads(source, request)


def _check_heads(source: config.Attention, request: Request) -> bool:
    needs = request.to in ("gqa", "vha") and not isinstance(source, VHA)
    require(not needs or request.kv_heads is not None, f"--to {request.to} needs --kv-heads K.")
    have = source.num_kv_heads if isinstance(source, GQA | VHA) else source.num_heads
    N, K = source.num_heads, kv_heads(source, request)
    require(
        K > 0 and N % K == 0 and (have % K == 0 or K % have == 0),
        f"--kv-heads is {K}; it must divide the {N} query heads, and divide, or be a multiple of, "
        f"the {have} KV heads.",
    )
    same = isinstance(source, GQA) and request.to in ("gqa", "mha") and have == K
    require(not same, f"{source.summary()} has {K} KV heads already; there is nothing to convert.")
    require(
        not request.rows or have > K,
        f"--calibrate fits merged KV heads, and {have} → {K} merges none; leave it out.",
    )
    if request.to == "lrkv":
        return (request.rank or 0) >= full_rank(source)
    return have <= K and (K == 1 or not request.premix)


def kv_heads(source: config.Attention, request: Request) -> int:
    """KV heads of the GQA that the target is made of: all for MHA and LRKV."""
    if request.to in ("mha", "lrkv"):
        return source.num_heads
    if request.kv_heads is None and isinstance(source, GQA | VHA):
        return source.num_kv_heads
    return request.kv_heads or 0


def note(source: config.Attention, request: Request) -> str:
    full = full_rank(source)
    if request.to == "lrkv" and (request.rank or 0) > full:
        return f"Rank {request.rank} is more than heads of {full} can use; the rest is zero."
    return ""


def full_rank(source: config.Attention) -> int:
    """The rank from which on LRKV represents any MHA."""
    return max(source.head_dim, source.v_dim)


def check_expands(lrkv: config.LRKV) -> None:
    """Refuses positions that MHA lacks here; with no residual, `shared` rotates the whole key."""
    if lrkv.position == "none" or (lrkv.position == "shared" and lrkv.rank):
        raise UserError(
            f"attention.position is {lrkv.position!r}, and MHA rotates whole keys here; only LRKV "
            "with position 'full' has an MHA that equals it."
        )
