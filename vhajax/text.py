"""Text in, text out, over `decode.generate`."""

from collections.abc import Iterator
from pathlib import Path

from vhajax.decode import generate
from vhajax.inference import load
from vhajax.sampling import Sampling
from vhajax.tokenizer import StreamDecoder


def generate_text(
    run: Path,
    prompt: str,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    capacity: int | None = None,
    special: bool = False,
) -> Iterator[str]:
    """Streams the continuation of a prompt, never half a character; refuses before it starts.

    Args:
      special: whether the prompt may spell special tokens, see `Tokenizer.encode`.
    Raises:
      UserError: see `load` and `decode.generate`; text that is not Unicode.
    """
    model, tokenizer = load(run)
    ids = tokenizer.encode_prompt(prompt, special=special)
    tokens = generate(
        model,
        [ids],
        max_new_tokens,
        eos=tokenizer.eos,
        sampling=sampling,
        seeds=[seed],
        capacity=capacity,
    )
    return _texts(tokens, StreamDecoder(tokenizer))


def _texts(tokens: Iterator[list[int | None]], decoder: StreamDecoder) -> Iterator[str]:
    for (token,) in tokens:
        if token is not None:
            yield decoder.feed(token)
    yield decoder.flush()
