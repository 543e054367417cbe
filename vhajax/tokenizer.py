"""Text to token ids and back, over a `tokenizer.json` of the Hugging Face tokenizers library.

A token stands for bytes, and a character may be split between tokens. Decoding therefore joins
bytes, never strings, and bits per byte divides by the bytes counted here.
"""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from vhajax.errors import UserError

BOS, EOS = "<|bos|>", "<|eos|>"
"""Special tokens of the tokenizers trained here: ids 0 and 1."""

EOS_NAMES = (
    EOS,
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
)
BOS_NAMES = (BOS, "<|begin_of_text|>", "<s>", "<bos>", "<｜begin▁of▁sentence｜>")

# GPT-4's split: contractions, words with one leading character, up to three digits, punctuation,
# line ends, and spaces short of the one that leads the next word.
SPLIT = (
    r"(?i:'[sdmt]|'ll|'ve|'re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """A tokenizer whose tokens stand for exact bytes, with its document boundaries.

    Attributes:
      vocab_size: V, the largest id plus one.
      eos, eos_name: the token that ends a document.
      bos, bos_name: the token that starts one, or None where the tokenizer has none.
    """

    def __init__(self, library: tokenizers.Tokenizer, *, eos: str, bos: str | None) -> None:
        """Wraps and adjusts `library`; both names must be in its vocabulary.

        Raises:
          UserError: its tokens do not stand for bytes (neither byte-level nor SentencePiece-like).
        """
        # What a file says of these would cut documents short, or fill them up.
        library.no_truncation()
        library.no_padding()
        # Text that spells a special token stays text, also if the file does not call it special.
        library.add_special_tokens([name for name in (bos, eos) if name])
        library.encode_special_tokens = True
        self._library = library
        vocabulary = library.get_vocab()
        self.eos_name, self.eos = eos, vocabulary[eos]
        self.bos_name, self.bos = bos, vocabulary[bos] if bos else None
        self.vocab_size = max(vocabulary.values()) + 1
        self._pieces = _pieces(library, self.vocab_size)
        self._drops_first_space = _drops_first_space(_decoder(library))

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of the text alone.

        Args:
          special: whether text that spells a special token stands for it, as in a chat's template;
            from a stranger's text that would let him end the turn.
        """
        self._library.encode_special_tokens = not special
        try:
            return self._encode([text])[0]
        finally:
            self._library.encode_special_tokens = True

    def encode_prompt(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of a text that is to go on: BOS if there is one, and the text; see `encode`."""
        start = [] if self.bos is None else [self.bos]
        return [*start, *self.encode(text, special=special)]

    def encode_document(self, text: str) -> list[int]:
        """Ids of a whole document: BOS if there is one, the text, EOS."""
        return self.encode_documents([text])[0]

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_document` of each text, on all cores."""
        start = [] if self.bos is None else [self.bos]
        return [[*start, *ids, self.eos] for ids in self._encode(texts)]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:  # what the library raises for a lone surrogate
            raise UserError("The text is not valid Unicode (a lone surrogate); fix it.") from error
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, special tokens skipped; bytes that are not UTF-8 become U+FFFD."""
        data = b"".join(self.piece(i) for i in ids)
        if self._drops_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def piece(self, token: int) -> bytes:
        """The bytes of an id; a model may have more ids than its tokenizer, without bytes."""
        return self._pieces[token] if token < self.vocab_size else b""

    @property
    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes that each id stands for, 0 for special ids: int32 [V].

        Over the ids of a document they sum to its UTF-8 bytes. A SentencePiece-like tokenizer that
        puts a space before the text counts one byte more, one with a Unicode normaliser counts
        the normalised text.
        """
        return np.array([len(piece) for piece in self._pieces], np.int32)

    def to_json(self) -> str:
        """The text of a `tokenizer.json`, which does not say which token is EOS or BOS."""
        return self._library.to_str()

    def save(self, path: Path) -> None:
        path.write_text(self.to_json(), encoding="utf-8")


class StreamDecoder:
    """Decodes ids one at a time; the texts joined are `Tokenizer.decode` of all of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._piece = tokenizer.piece
        self._drop_space = tokenizer._drops_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The text that this id makes certain: whole characters, often none."""
        piece = self._piece(token)
        if self._drop_space and piece:
            piece = piece.removeprefix(b" ")
            self._drop_space = False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """The end of the text: U+FFFD where the ids stopped inside a character."""
        return self._utf8.decode(b"", final=True)


def load_tokenizer(path: Path, eos: str | None = None, bos: str | None = None) -> Tokenizer:
    """Reads a `tokenizer.json`; EOS and BOS are the names given, or else the first common name.

    Args:
      bos: "" where documents begin with none, although the vocabulary has a common name.
    Raises:
      UserError: no such file, not a tokenizer, a name it lacks, or no EOS.
    """
    library = read_library(path)
    for name in (eos, bos):
        if name and library.token_to_id(name) is None:
            raise UserError(f"The tokenizer {path} has no token {name!r}; name one that it has.")
    eos = eos or _first_known(library, EOS_NAMES)
    if eos is None:
        raise UserError(f"{path} has no end-of-text token of a common name; name it with --eos.")
    if bos is None:
        bos = _first_known(library, BOS_NAMES)
    return Tokenizer(library, eos=eos, bos=bos or None)


def read_library(path: Path) -> tokenizers.Tokenizer:
    """A `tokenizer.json` as its library reads it.

    Raises:
      UserError: no such file, or not a tokenizer.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read the tokenizer {path} ({error}).") from error
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{path} is not a tokenizer.json ({error}).") from error


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of at most `vocab_size` tokens (fewer if the texts hold fewer pairs).

    It has every byte, no normaliser and no unknown token, so any text survives a round trip.

    Raises:
      UserError: vocab_size cannot hold the 256 bytes and two special tokens.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + 2
    if vocab_size < least:
        raise UserError(f"The vocabulary size is {vocab_size}; byte-level BPE needs {least}.")
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return Tokenizer(library, eos=EOS, bos=BOS)


def _first_known(library: tokenizers.Tokenizer, names: Iterable[str]) -> str | None:
    return next((name for name in names if library.token_to_id(name) is not None), None)


def _decoder(library: tokenizers.Tokenizer) -> list[dict]:
    """The decoder's steps, as `tokenizer.json` writes them."""
    if library.decoder is None:
        return []
    step = json.loads(library.decoder.__getstate__())
    return step["decoders"] if step["type"] == "Sequence" else [step]


def _pieces(library: tokenizers.Tokenizer, vocab_size: int) -> list[bytes]:
    """The bytes of each id; empty for special ids and for ids that no token has."""
    kinds = {step["type"] for step in _decoder(library)}
    if "ByteLevel" in kinds:
        to_bytes = _byte_level_piece
    elif kinds & {"Metaspace", "ByteFallback"}:
        to_bytes = _sentencepiece_piece
    else:
        raise UserError(
            f"The tokenizer's decoder is {' + '.join(sorted(kinds)) or 'missing'}, whose tokens do "
            "not stand for bytes; use a byte-level or a SentencePiece-like tokenizer."
        )
    pieces = [b""] * vocab_size
    added = library.get_added_tokens_decoder()
    for token, i in library.get_vocab(with_added_tokens=False).items():
        if i not in added:
            pieces[i] = to_bytes(token)
    for i, token in added.items():
        # Added tokens are matched in the text itself, so they are spelled as they read.
        pieces[i] = b"" if token.special else token.content.encode()
    return pieces


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's character for each byte: itself if it prints, else one from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    alphabet = {chr(byte): byte for byte in printing}
    return alphabet | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


def _byte_level_piece(token: str) -> bytes:
    if all(character in BYTE_OF for character in token):
        return bytes(BYTE_OF[character] for character in token)
    return token.encode()  # as the library decodes a token that is not in the alphabet


def _sentencepiece_piece(token: str) -> bytes:
    if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
        return bytes.fromhex(byte[1])
    return token.replace("▁", " ").encode()


def _drops_first_space(steps: list[dict]) -> bool:
    """Whether decoding undoes the space that encoding put before the text."""
    return any(
        (step["type"] == "Metaspace" and step["prepend_scheme"] != "never")
        or (step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
        for step in steps
    )
