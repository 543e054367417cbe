"""Tokenizers: bytes are exact, text survives, special tokens stay apart from text."""

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers

from vhajax.errors import UserError
from vhajax.tokenizer import StreamDecoder, Tokenizer, load_tokenizer, train_bpe

TEXTS = [
    "def hello(world):\n    return 'naïve 日本語 😀👩‍👩‍👧'\n",
    "the theatre, the other <|eos|>\n",
] * 20
BPE = train_bpe(TEXTS, 320)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SPLITTING = "日本語 한국어 😀👩‍👩‍👧 a\u0301 \ufffd\x00\r\n\u2028"


def sentencepiece(prepend: bool) -> tokenizers.Tokenizer:
    """Llama-like (a space before the text) or Gemma-like, with bytes for unknown characters."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in [*"▁abcdefghijklmnopqrstuvwxyz", "th", "the", "▁the"]:
        vocabulary[piece] = len(vocabulary)
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    model = models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>")
    library = tokenizers.Tokenizer(model)
    first = [normalizers.Prepend("▁")] if prepend else []
    library.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    last = [decoders.Strip(" ", 1, 0)] if prepend else []
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


LLAMA = Tokenizer(sentencepiece(prepend=True), eos="</s>", bos="<s>")
GEMMA = Tokenizer(sentencepiece(prepend=False), eos="</s>", bos="<s>")


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.feed(i) for i in ids), decoder.flush()]


@settings(max_examples=100, deadline=None)
@given(ANY_TEXT)
@pytest.mark.parametrize("tokenizer", [BPE, GEMMA, LLAMA], ids=["bpe", "gemma", "llama"])
def test_round_trip_bytes_and_stream(tokenizer, text):
    ids = tokenizer.encode_document(text)
    if "▁" not in text or tokenizer is BPE:  # SentencePiece cannot tell its mark from a space
        assert tokenizer.decode(ids) == text
        spaces = tokenizer is LLAMA and bool(text)
        assert tokenizer.token_bytes[ids].sum() == len(text.encode()) + spaces
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, BPE.vocab_size - 1)))
def test_any_ids_decode_as_the_library_does(ids):
    assert BPE.decode(ids) == BPE._library.decode(ids, skip_special_tokens=True)
    assert "".join(streamed(BPE, ids)) == BPE.decode(ids)


def test_a_split_character_comes_out_whole():
    ids = BPE.encode(SPLITTING)
    texts = streamed(BPE, ids)
    assert "" in texts  # some token ended inside a character
    assert "".join(texts) == SPLITTING
    assert [text for text in streamed(BPE, BPE.encode("😀")[:-1]) if text] == ["�"]


def test_token_bytes():
    sizes = BPE.token_bytes
    assert sizes.dtype == np.int32
    assert sizes.shape == (BPE.vocab_size,)
    assert sizes[[BPE.bos, BPE.eos]].tolist() == [0, 0]
    assert sizes[BPE.encode(SPLITTING)].sum() == len(SPLITTING.encode())


def test_special_tokens_in_text_stay_text():
    text = "a<|eos|>b<|bos|>"
    assert not {BPE.bos, BPE.eos} & set(BPE.encode(text))
    assert BPE.decode(BPE.encode_document(text)) == text
    assert (BPE.bos, BPE.eos) == (0, 1)


def test_trained_bpe_is_deterministic_and_small_texts_give_fewer_tokens():
    assert BPE._library.to_str() == train_bpe(iter(TEXTS), 320)._library.to_str()
    assert train_bpe(["ab"], 5000).vocab_size < 5000
    with pytest.raises(UserError, match="257"):
        train_bpe(TEXTS, 257)


def test_save_and_load(tmp_path):
    path = tmp_path / "tokenizer.json"
    BPE.save(path)
    loaded = load_tokenizer(path)
    assert (loaded.bos, loaded.eos, loaded.vocab_size) == (BPE.bos, BPE.eos, BPE.vocab_size)
    assert loaded.encode_document(SPLITTING) == BPE.encode_document(SPLITTING)
    assert not {0, 1} & set(loaded.encode("<|bos|><|eos|>"))


def test_load_finds_or_takes_names_and_undoes_truncation(tmp_path):
    path = tmp_path / "tokenizer.json"
    library = sentencepiece(prepend=False)
    library.enable_truncation(2)
    library.enable_padding(length=9)
    library.save(str(path))
    found, named = load_tokenizer(path), load_tokenizer(path, eos="the", bos="<unk>")
    assert (found.bos, found.eos) == (1, 2)
    assert len(found.encode("abcdef")) == 6
    assert (named.bos_name, named.eos_name) == ("<unk>", "the")
    assert named.token_bytes[named.eos] == 0


def test_a_tokenizer_without_bos(tmp_path):
    library = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "</s>": 1}, merges=[]))
    library.decoder = decoders.ByteLevel()
    library.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert tokenizer.bos is None
    assert tokenizer.encode_document("aa") == [0, 0, 1]


def test_added_tokens_that_are_not_special_count_as_they_read():
    library = tokenizers.Tokenizer.from_str(BPE._library.to_str())
    library.add_tokens([AddedToken("é  日", special=False)])
    tokenizer = Tokenizer(library, eos="<|eos|>", bos=None)
    ids = tokenizer.encode("xé  日y")
    assert len(ids) == 3
    assert tokenizer.token_bytes[ids].sum() == len("xé  日y".encode())
    assert tokenizer.decode(ids) == "xé  日y"


def test_refusals(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(UserError, match="Cannot read"):
        load_tokenizer(path)
    path.write_text("{}")
    with pytest.raises(UserError, match=r"not a tokenizer\.json"):
        load_tokenizer(path)
    library = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    library.save(str(path))
    with pytest.raises(UserError, match="--eos"):
        load_tokenizer(path)
    with pytest.raises(UserError, match="'nope'"):
        load_tokenizer(path, bos="nope")
    with pytest.raises(UserError, match="missing"):
        load_tokenizer(path, eos="a")
    library.decoder = decoders.WordPiece()
    library.save(str(path))
    with pytest.raises(UserError, match="WordPiece"):
        load_tokenizer(path, eos="a")
    with pytest.raises(UserError, match="surrogate"):
        BPE.encode("\ud800")
