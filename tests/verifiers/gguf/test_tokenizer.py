"""Tokenizers of GGUF files, beside Transformers' reading of the same files."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.helpers.gguf_files import write_gguf
from tests.helpers.tiny_models import plain_model
from verifiers.gguf.file import GgufFiles
from verifiers.gguf.tokenizer import COMPOSES, SPACE, SPLITS, WHOLE_WORDS, end_ids
from verifiers.weights.gguf_folder import unpacked
from verifiers.weights.tokenizer import tokenizer_in

beside_transformers = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"),
    reason="Transformers 5.17 reads tokens of files as characters and bytes",
)

TEXT = """It's 12345 o'clock; we'LL see   what  they've  got: x_1=3.14!

    def f(a, b):\n\treturn {a: b}\r\n
Größe naïve Żółw 日本語テキスト 한국어 русский язык café
1,234,567 $5.00 (CamelCaseWord HTTPServer) --- ... <tag> a@b.c
"""
CORPUS = [
    TEXT,
    TEXT.lower(),
    TEXT.upper(),
    "the of and to in is that it was for on are with as his they be at one have this",
] * 3


def trained(pieces: Any) -> tuple[list[str], list[str]]:
    """Tokens and merges that a byte-level tokenizer learns from the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pieces
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    vocabulary = tokenizer.get_vocab()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return sorted(vocabulary, key=vocabulary.__getitem__), [" ".join(pair) for pair in merges]


def byte_level(pre: str) -> dict[str, Any]:
    """Keys of a file with such a tokenizer."""
    tokens, merges = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": [*tokens, "<think>"],
        "ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3) + [4],
        "ggml.merges": merges,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "chat_template": "{{ messages[0]['content'] }}",
    }


def opened(folder: Path, keys: dict[str, Any]) -> tuple[Path, PreTrainedTokenizerFast]:
    """A file with a tokenizer, and the tokenizer as we read it."""
    write_gguf(folder / "m.gguf", plain_model("llama"), "llama", tokenizer=keys)
    own: Any = tokenizer_in(unpacked(folder / "m.gguf", folder / "cache"), "m")
    return folder / "m.gguf", own


@beside_transformers
@pytest.mark.parametrize("pre", ["llama-bpe", "tekken", "gpt-4o", "gpt-2", "qwen35"])
def test_texts_are_split_as_by_transformers(pre: str, tmp_path: Path) -> None:
    """Of the byte-level kinds that it knows; their first token as llama.cpp has it."""
    path, own = opened(tmp_path, byte_level(pre))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in (TEXT, f"<|im_start|>{TEXT}<|im_end|> <think>\n"):
        ids = own.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert own.decode(ids) == text
        assert own.encode(text) == [1] * (pre in ("llama-bpe", "tekken")) + ids
    assert own.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


KINDS = {(splits, pre in WHOLE_WORDS, pre in COMPOSES): pre for pre, splits in SPLITS.items()}
"""A name of each way to split and to merge."""


@pytest.mark.parametrize("pre", KINDS.values())
def test_every_split_keeps_texts_whole(pre: str, tmp_path: Path) -> None:
    keys = byte_level(pre) | {"ggml.add_bos_token": False}
    _, own = opened(tmp_path, keys)
    assert own.decode(own.encode(TEXT)) == TEXT or pre in ("qwen2", "qwen35", "deepseek-r1-qwen")


def test_rows_that_only_fill_the_embeddings_up_are_no_tokens(tmp_path: Path) -> None:
    """As in the model's own tokenizer; one that has a word of its own stays."""
    keys = byte_level("qwen2")
    count = len(keys["ggml.tokens"])
    keys["ggml.tokens"] += [f"[PAD{count}]", "kept", *(f"[PAD{count + i}]" for i in (2, 3))]
    keys["ggml.token_type"] += [5] * 4
    _, own = opened(tmp_path, keys)
    assert len(own) == count + 2
    assert own.convert_ids_to_tokens(count + 1) == "kept"


def test_transformers_is_told_that_the_tokenizer_is_right(tmp_path: Path) -> None:
    """5.17 says of a model without this entry that it has a wrong tokenizer of Mistral's."""
    write_gguf(tmp_path / "m.gguf", plain_model("llama"), "llama", tokenizer=byte_level("tekken"))
    folder = unpacked(tmp_path / "m.gguf", tmp_path / "cache")
    config = json.loads((folder / "config.json").read_text())
    assert Version(config["transformers_version"]) >= Version("5.0.0")


def test_digits_and_han_are_split_by_name(tmp_path: Path) -> None:
    """What models were trained with: one, three or all digits at a time."""

    def pieces(pre: str) -> list[str]:
        folder = tmp_path / pre
        folder.mkdir()
        _, tokenizer = opened(folder, byte_level(pre))
        backend = tokenizer.backend_tokenizer
        assert backend.pre_tokenizer is not None
        return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("ab1234567 8")]

    assert pieces("llama-bpe") == pieces("deepseek-v3") == ["ab", "123", "456", "7", "\u0120", "8"]
    single = ["ab", *"1234567", "\u0120", "8"]
    assert pieces("qwen2") == pieces("tekken") == pieces("smollm") == single
    assert pieces("gpt-2") == ["ab", "1234567", "\u01208"]


def sentence_piece() -> dict[str, Any]:
    """Keys of a file with SentencePiece's pairs: scores, bytes, and no merges."""
    words = [
        "the", "that", "this", "then", "other", "he", "th", "at", "is", "er", "ot", "en", "hat",
        "her",
    ]  # fmt: skip
    plain = [
        SPACE, *"abcdefghijklmnopqrstuvwxyz", *words, *(SPACE + word for word in words),
        f"{SPACE}t", f"{SPACE}{SPACE}",
    ]  # fmt: skip
    tokens = [
        "<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(plain),
    ]  # fmt: skip
    kinds = [2, 3, 3, *[6] * 256]
    return {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.token_type": [*kinds, *[1] * (len(tokens) - len(kinds))],
        "ggml.scores": [0.0] * 259
        + [1 / len(one) + len(one) - len(tokens) for one in tokens[259:]],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    }


TEXTS = ["then the other is that", "  this   thing", "héllo 日本 then", "", "a\nb"]


@beside_transformers
@pytest.mark.parametrize("text", TEXTS)
def test_sentence_piece(text: str, tmp_path: Path) -> None:
    """Pairs by their scores, bytes where there is no token, a space first, as of Llama 2."""
    path, own = opened(tmp_path, sentence_piece())
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ids = own.encode(text, add_special_tokens=False)
    # Before a space Transformers puts none, where llama.cpp and the files of Llama 2 do.
    assert ids == theirs.encode(text, add_special_tokens=False) or text.startswith(" ")
    assert own.encode(text) == [1, *ids]
    assert own.decode(ids) == text


def test_ends(tmp_path: Path) -> None:
    """By their keys and by their names; what ends a part of gpt-oss's answers ends none."""

    def ends(tokens: list[str], **keys: int) -> list[int]:
        stated: dict[str, Any] = {f"ggml.{key}_token_id": keys[key] for key in keys}
        stated |= {"ggml.tokens": tokens, "ggml.token_type": [1, *[3] * (len(tokens) - 1)]}
        write_gguf(tmp_path / "m.gguf", plain_model("llama"), "llama", tokenizer=stated)
        return end_ids(GgufFiles(tmp_path / "m.gguf"))

    assert ends(["a", "</s>", "<end_of_turn>", "x"], eos=1, eot=3) == [1, 3, 2]
    assert ends(["<|im_end|>", "</s>"], eos=1) == [1]  # which is no control token
    assert ends(["a", "<|end|>", "<|return|>", "<|call|>"], eos=2) == [2, 3]
    assert ends(["a", "b"]) == []
