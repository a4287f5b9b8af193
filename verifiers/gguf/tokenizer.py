"""The tokenizer of a GGUF file, as the files of a tokenizer of Transformers.

Files hold tokens, merges or scores, and a name for how text is split before merges: what a name
stands for is in `llama-vocab.cpp` of llama.cpp, and in the tokenizer.json of the models that it is
of.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from specdec.base.errors import CheckpointError, UnsupportedModelError
from verifiers.gguf.file import GgufFiles

KEYS = "tokenizer.ggml."

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""Types of tokens."""

Pair = tuple[str, str]

SPACE = "\u2581"
"""How SentencePiece writes a space."""

SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

ENDS = frozenset({
    "<EOT>", "_<EOT>", "[EOS]", "[EOT]", "<eos>", "<end_of_turn>", "<end_of_utterance>", "<turn|>",
    "<|tool_response>", "<|call|>", "<|end_of_text|>", "<|end|>", "<|endoftext|>", "<|eom_id|>",
    "<|eot_id|>", "<|im_end|>", "<|return|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
})  # fmt: skip
"""Control tokens that end an answer by their names: files name one or two."""

_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_SIGNS}|{_LINES}"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}"
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_QWEN35 = rf"{_SUFFIX}|{_MARKED}|{_LINES}"
_DIGITS, _GPT2 = r"\p{N}", None
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    _CJK,
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    rf"{_LINES}",
)


def _cased(digits: str, suffix: str = "", without: str = "") -> str:
    """Words that begin with capitals and go on without."""
    start, upper, lower = r"[^\r\n\p{L}\p{N}]?", f"[{_UPPER}{without}]", f"[{_LOWER}{without}]"
    words = f"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}"
    signs = r" ?[^\s\p{L}\p{N}]+[\r\n/]*" if not without else _SIGNS
    return rf"{words}|{digits}|{signs}|{_LINES}"


_TEKKEN = _cased(r"\p{N}")
_GPT4O = _cased(r"\p{N}{1,3}", f"{_SUFFIX}?")
_KIMI = r"[\p{Han}]+|" + _cased(r"\p{N}{1,3}", f"{_SUFFIX}?", r"&&[^\p{Han}]")

Splits = tuple[str | None, ...]

SPLITS: Mapping[str, Splits] = {
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "gigachat", "a.x-4.0", "mellum"),
        (_GPT2,),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        (_DIGITS, _GPT2),
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "grok-2"),
        (_QWEN2,),
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        (_LLAMA3,),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"), (_LLAMA3,)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (_GPT4O,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    "kimi-k2": (_KIMI,),
    "seed-coder": (rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}",),
    "bailingmoe": (rf"{_WORDS}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+",),
    "deepseek-coder": (
        r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        _DIGITS, _GPT2,
    ),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}  # fmt: skip
"""How text is split, by name: expressions one after the other; `_GPT2` stands for GPT-2's own."""

WHOLE_WORDS = frozenset({
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "tekken", "glm4", "glm5",
})  # fmt: skip
"""Names of splits whose words are tokens where there are such tokens, whatever merges say."""

BEGINS = WHOLE_WORDS - {"glm4", "glm5"}
"""Tokenizers whose texts begin with a token of their own, where the file does not say."""

COMPOSES = frozenset({"qwen2", "qwen35", "deepseek-r1-qwen"})
"""Tokenizers whose models compose letters and marks first."""


def tokenizer_files(files: GgufFiles) -> dict[str, bytes]:
    """Content of tokenizer.json and tokenizer_config.json.

    Raises:
        CheckpointError: the file holds no tokenizer, or a damaged one.
        UnsupportedModelError: one of a kind that is not read.
    """
    made = _Vocabulary(files)
    config = json.dumps(made.config(), indent=2, ensure_ascii=False).encode()
    return {"tokenizer.json": made.tokenizer().to_str().encode(), "tokenizer_config.json": config}


def end_ids(files: GgufFiles) -> list[int]:
    """Tokens that end an answer, the one of texts first."""
    metadata = files.metadata
    found = [metadata.get(f"{KEYS}{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, kinds = metadata.get(f"{KEYS}tokens") or [], metadata.get(f"{KEYS}token_type") or []
    numbered = zip(range(len(tokens)), tokens, kinds, strict=False)
    named = {token: number for number, token, kind in numbered if kind == CONTROL}
    found += [number for token, number in named.items() if token in ENDS]
    if {"<|return|>", "<|call|>"} <= named.keys():  # gpt-oss ends parts of an answer with it
        found = [number for number in found if number != named.get("<|end|>")]
    return list(dict.fromkeys(number for number in found if isinstance(number, int)))


class _Vocabulary:
    """What a file says of its tokenizer; errors are those of `tokenizer_files`."""

    def __init__(self, files: GgufFiles) -> None:
        self._name, self._metadata = files.path.name, files.metadata
        self._architecture = files.architecture
        self._model, tokens = self._get("model"), self._get("tokens")
        if not self._model or self._model == "none" or not isinstance(tokens, list):
            way_out = "take a file that does, as those of llama.cpp's converter"
            raise CheckpointError(f"{self._name!r} holds no tokenizer; {way_out}")
        tokens = self._tokens = list(tokens)
        kinds = list(self._get("token_type") or [NORMAL] * len(tokens))
        if len(kinds) != len(tokens):
            counts = f"{len(tokens)} tokens and types of {len(kinds)}"
            raise CheckpointError(f"{self._name!r} has {counts}; fetch it again")
        self._kinds = kinds
        # The converter names rows that only fill the embeddings up; the model's tokenizer has none.
        while tokens and kinds[-1] == UNUSED and tokens[-1] == f"[PAD{len(tokens) - 1}]":
            del tokens[-1], kinds[-1]
        self._pre = self._get("pre") or "default"

    def tokenizer(self) -> Tokenizer:
        """It, with its special tokens."""
        if self._model == "gpt2":
            tokenizer = self._byte_level()
        elif self._model in ("llama", "gemma4"):
            tokenizer = self._sentence_piece()
        else:
            raise UnsupportedModelError(
                f"the tokenizer of {self._name!r} is of kind {str(self._model)[:60]!r}, and gpt2,"
                f" llama and gemma4 are read; take the model's safetensors files"
            )
        pairs = list(zip(self._tokens, self._kinds, strict=True))
        control = [token for token, kind in pairs if kind == CONTROL]
        whole = [token for token, kind in pairs if kind == USER_DEFINED and token.strip(" ")]
        tokenizer.add_special_tokens([AddedToken(one, normalized=False) for one in control])
        tokenizer.add_tokens([AddedToken(one, normalized=False, special=False) for one in whole])
        self._frame(tokenizer)
        return tokenizer

    def config(self) -> dict[str, Any]:
        """The content of tokenizer_config.json."""
        tokens = ((name, self._token(key)) for name, key in SPECIAL.items())
        found: dict[str, Any] = {name: token for name, token in tokens if token is not None}
        found["tokenizer_class"] = "PreTrainedTokenizerFast"
        length = f"{self._architecture}.context_length"
        found["model_max_length"] = self._metadata.get(length, 10**30)
        # Decoding must not touch the spaces before punctuation.
        found["clean_up_tokenization_spaces"] = False
        begin = "tokenizer.chat_template"
        keys = [key for key in self._metadata if key.startswith(f"{begin}.")]
        named = {key.removeprefix(f"{begin}."): self._metadata[key] for key in keys}
        default = self._metadata.get(begin)
        if named and default:
            named["default"] = default
        templates = [{"name": name, "template": text} for name, text in named.items()]
        return found | {"chat_template": templates or default}

    def _get(self, key: str) -> Any:
        return self._metadata.get(KEYS + key)

    def _token(self, key: str) -> str | None:
        number = self._get(f"{key}_token_id")
        known = isinstance(number, int) and 0 <= number < len(self._tokens)
        return self._tokens[number] if known else None

    def _merges(self) -> list[Pair] | None:
        merges = self._get("merges")
        if merges is None:
            return None
        pairs = [(one[:cut], one[cut + 1 :]) for one in merges if (cut := one.find(" ", 1)) > 0]
        if len(pairs) < len(merges):
            raise CheckpointError(f"{self._name!r} has a merge that is no pair; fetch it again")
        return pairs

    def _bpe(self, vocabulary: dict[str, int], merges: list[Pair], **options: Any) -> Tokenizer:
        known = [pair for pair in merges if {*pair, "".join(pair)} <= vocabulary.keys()]
        return Tokenizer(models.BPE(vocab=vocabulary, merges=known, **options))

    def _byte_level(self) -> Tokenizer:
        """GPT-2's: text as bytes, each of which is written as a letter."""
        splits, merges = SPLITS.get(self._pre), self._merges()
        if splits is None or merges is None:
            unknown = f"splits text as {self._pre[:60]!r} does, which is not known"
            what = "has no merges" if merges is None else unknown
            message = f"the tokenizer of {self._name!r} {what}"
            raise UnsupportedModelError(f"{message}; take the model's safetensors files")
        vocabulary = {token: number for number, token in enumerate(self._tokens)}
        tokenizer = self._bpe(vocabulary, merges, ignore_merges=self._pre in WHOLE_WORDS)
        if self._pre in COMPOSES:
            tokenizer.normalizer = normalizers.NFC()
        steps = [_split(expression) for expression in splits if expression is not None]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=_GPT2 in splits)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentence_piece(self) -> Tokenizer:
        """SentencePiece's pairs of characters, with bytes for what no token has."""
        tokens = [one if one.strip(" ") else SPACE * len(one) for one in self._tokens]
        vocabulary = {token: number for number, token in enumerate(tokens)}
        merges = self._merges()
        if merges is None:
            scores = self._get("scores")
            if not isinstance(scores, list) or len(scores) != len(tokens):
                what = "neither merges nor a score for each token"
                raise CheckpointError(f"{self._name!r} has {what}; fetch it again")
            if self._architecture.startswith("gemma"):  # whose scores are in another order
                scores = [-number for number in range(len(tokens))]
            merges = _merges_of(vocabulary, scores)
        options = {"unk_token": self._token("unknown"), "fuse_unk": True, "byte_fallback": True}
        tokenizer = self._bpe(vocabulary, merges, **options)
        prefixed = self._model == "llama" and self._get("add_space_prefix") is not False
        begin = [normalizers.Prepend(SPACE)] if prefixed else []
        tokenizer.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", SPACE)])
        end = [decoders.Strip(" ", 1, 0)] if prefixed else []
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *end]
        tokenizer.decoder = decoders.Sequence(steps)
        return tokenizer

    def _frame(self, tokenizer: Tokenizer) -> None:
        """What a text begins and ends with."""
        default = self._model == "llama" or self._pre in BEGINS
        # Gemma 4's template writes the first token itself.
        begins = self._get("add_bos_token") if self._get("add_bos_token") is not None else default
        begin = self._token("bos") if begins and self._model != "gemma4" else None
        end = self._token("eos") if self._get("add_eos_token") else None
        if begin is None and end is None:
            return
        special = [(one, self._tokens.index(one)) for one in (begin, end) if one is not None]
        single = " ".join(part for part in (begin, "$A", end) if part is not None)
        second = (begin and f"{begin}:1", "$B:1", end and f"{end}:1")
        pair = " ".join(part for part in (begin, "$A", end, *second) if part)
        frame = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
        tokenizer.post_processor = frame


def _split(expression: str) -> Any:
    if expression == _DIGITS:
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Split(Regex(expression), behavior="isolated")


def _merges_of(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[Pair]:
    """The pairs that tokens are made of, the best ones first."""
    found = []
    for token, number in vocabulary.items():
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in cuts if pair[0] in vocabulary and pair[1] in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(scores[number], pair) for pair in pairs]
    found.sort(key=lambda one: (one[0], len(one[1][0]), len(one[1][1])), reverse=True)
    return [pair for _, pair in found]
