"""A run from disk, ready to decode or to evaluate."""

import json
from pathlib import Path

import jax

from vhajax import config, fold, runs, transformer, weights
from vhajax.errors import UserError
from vhajax.layers import compute_dtype
from vhajax.sharding import named_params, with_arrays
from vhajax.tokenizer import Tokenizer, load_tokenizer


def load(run: str | Path, *, folded: bool = True) -> tuple[transformer.Transformer, Tokenizer]:
    """The newest weights of a run as a model for decoding, and its tokenizer.

    Args:
      run: a run directory.
      folded: turn VHA into the GQA that it equals, which is what decoding wants.
    Returns:
      A Transformer with a list of blocks, matrices in compute dtype, norms in float32.
    Raises:
      UserError: not a run, or a missing or corrupt checkpoint or tokenizer.
    """
    run = Path(run)
    cfg, params = weights.read(run)
    if folded and isinstance(cfg.attention, config.VHA):
        cfg, params = fold.to_gqa(cfg, params)
    return decoder(cfg, params), load_run_tokenizer(run)


def decoder(cfg: config.Model, params: dict[str, jax.Array]) -> transformer.Transformer:
    """Float32 parameters by path → a model for decoding."""
    template = transformer.abstract(cfg)
    dtype = compute_dtype(cfg)
    groups = {name: p.get_metadata("group") for name, p in named_params(template).items()}
    cast = {n: x if groups[n] == "vector" else x.astype(dtype) for n, x in params.items()}
    return transformer.unstack(with_arrays(template, cast))


def load_run_tokenizer(run: Path) -> Tokenizer:
    """The tokenizer of a run, with the special tokens that its data had."""
    path = run / runs.SPECIAL_TOKENS
    try:
        names = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        eos, bos = names.get("eos"), names.get("bos")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path} cannot be read ({error}); restore the file.") from error
    return load_tokenizer(run / runs.TOKENIZER, eos, bos)
