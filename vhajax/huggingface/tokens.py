"""Tokenizers in the layout of transformers: written for AutoTokenizer, read with their names."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from vhajax import runs
from vhajax.errors import UserError
from vhajax.tokenizer import Tokenizer, load_tokenizer, read_library

CONFIG, GENERATION = "tokenizer_config.json", "generation_config.json"


def to_texts(run: Path, tokenizer: Tokenizer, context: int) -> dict[str, str]:
    """The tokenizer's files and `generation_config.json`, by name.

    A run that was imported gives back those that it came with.
    """
    kept = runs.read_companions(run)
    if CONFIG in kept:
        return {runs.TOKENIZER: tokenizer.to_json(), GENERATION: _generation(tokenizer)} | kept
    made = {
        runs.TOKENIZER: _starting_with_bos(tokenizer),
        CONFIG: _pretty(_config(tokenizer, context)),
        "special_tokens_map.json": _pretty(_names(tokenizer)),
        GENERATION: _generation(tokenizer),
    }
    return made | kept


def _starting_with_bos(tokenizer: Tokenizer) -> str:
    """`tokenizer.json` that puts BOS before a prompt, as `vhajax generate` does."""
    library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    if name := tokenizer.bos_name:
        library.post_processor = processors.TemplateProcessing(
            single=f"{name} $A",
            pair=f"{name} $A {name} $B:1",
            special_tokens=[(name, tokenizer.bos)],
        )
    return library.to_str()


def _config(tokenizer: Tokenizer, context: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        **_names(tokenizer),
    }


def _names(tokenizer: Tokenizer) -> dict[str, str]:
    bos = {"bos_token": tokenizer.bos_name} if tokenizer.bos_name else {}
    return {**bos, "eos_token": tokenizer.eos_name, "pad_token": tokenizer.eos_name}


def _generation(tokenizer: Tokenizer) -> str:
    return _pretty(ids(tokenizer))


def ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Special tokens as `config.json` has them; batches are padded with EOS."""
    eos = tokenizer.eos
    return {"bos_token_id": tokenizer.bos, "eos_token_id": eos, "pad_token_id": eos}


def _pretty(tree: dict[str, Any]) -> str:
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


# ------------------------------------------------------------------ in


def from_folder(folder: Path, tree: dict[str, Any]) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of a model, and the files of text that a run keeps of it, by name.

    BOS is what its `tokenizer.json` puts before a text, if anything; EOS is what
    `tokenizer_config.json` names, or else the first `eos_token_id` of `config.json`.

    Args:
      tree: `config.json`.
    Raises:
      UserError: no `tokenizer.json`, a broken file, or no end-of-text token.
    """
    path = folder / runs.TOKENIZER
    if not path.exists():
        raise UserError(
            f"{folder} has no {runs.TOKENIZER}; load its tokenizer with transformers' "
            "AutoTokenizer and save it with save_pretrained."
        )
    library = read_library(path)
    kept = runs.read_companions(folder)
    eos = _eos(library, _parse(folder / CONFIG, kept.get(CONFIG, "{}")), tree)
    bos = _bos(library)
    tokenizer = load_tokenizer(path, eos, bos)
    names = runs.special_tokens(tokenizer.eos_name, bos)
    return tokenizer, {runs.TOKENIZER: tokenizer.to_json(), runs.SPECIAL_TOKENS: names} | kept


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is not JSON as expected ({error}); copy it again.") from error


def _eos(
    library: tokenizers.Tokenizer, settings: dict[str, Any], tree: dict[str, Any]
) -> str | None:
    named = settings.get("eos_token")
    if isinstance(named, dict):
        named = named.get("content")
    if named and isinstance(named, str):
        return named
    ids = tree.get("eos_token_id")
    first = ids[0] if isinstance(ids, list) and ids else ids
    return library.id_to_token(first) if type(first) is int and 0 <= first < 2**32 else None


def _bos(library: tokenizers.Tokenizer) -> str:
    """What is put before a text; empty for nothing."""
    bare = library.encode("a", add_special_tokens=False).ids
    whole = library.encode("a").ids
    first = library.id_to_token(whole[0]) if whole[1 : 1 + len(bare)] == bare else None
    return first or ""
