"""Incremental decoding against the definition it has to meet: decode everything so far, one token
at a time.
"""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specdec.session.text import IncrementalDecoder

CORPUS = [
    "the cat sat on the mat, the end of the story",
    "naïve café, über straße, déjà vu",
    "日本語の文章と 한국어 문장",
    "emoji 🎉🎊👩‍👩‍👧 and €uro signs €€",
    "### Question: what? ### Answer: that.\n\nUser:",
]
STOPS = ["the", "he c", "###", "\n\n", "é", "€€", "語の", "🎉", " ", "at", "tm"]


@cache
def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Like GPT-2's and SmolLM2's: a token may be any piece of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def _byte_fallback_vocab() -> dict[str, int]:
    pieces = ["<unk>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁the", "▁a", "the", "t", "h", "e", "é", "▁語", "の", "##", "#", "…"]
    return {piece: index for index, piece in enumerate(pieces)}


@cache
def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Like Llama 2's and Gemma's: spaces belong to words, the first one is dropped, rare characters
    are spelled in bytes.
    """
    vocab = _byte_fallback_vocab()
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")


@cache
def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Like T5's: as above, without bytes."""
    pieces = [piece for piece in _byte_fallback_vocab() if not piece.startswith("<0x")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")


TOKENIZERS = {
    "byte_level": byte_level_tokenizer,
    "byte_fallback": byte_fallback_tokenizer,
    "metaspace": metaspace_tokenizer,
}
each_tokenizer = pytest.mark.parametrize("kind", TOKENIZERS)
# special tokens
both_ways = pytest.mark.parametrize("skip", [True, False], ids=["hidden", "shown"])
quick = settings(max_examples=50, deadline=None, derandomize=True, database=None)


def token_streams(kind: str, *, skip: bool) -> st.SearchStrategy[list[int]]:
    """Noise, and real text with noise in it; hidden special tokens only where no run of bytes can
    be cut by one.
    """
    tokenizer = TOKENIZERS[kind]()
    never = tokenizer.all_special_ids if kind == "byte_fallback" and skip else ()
    ids = [i for i in range(len(tokenizer)) if i not in never]
    noise = st.lists(st.sampled_from(ids), max_size=12)
    real = st.sampled_from([tokenizer.encode(line, add_special_tokens=False) for line in CORPUS])
    return st.lists(st.one_of(noise, real), max_size=4).map(
        lambda parts: [i for part in parts for i in part]
    )


def groups_of(token_ids: list[int], data: st.DataObject) -> list[list[int]]:
    """Cuts a stream into groups as verify steps would deliver it, empty ones included."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=8)))
    return [token_ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(token_ids)], strict=True)]


def decode(kind: str, token_ids: list[int], *, skip: bool) -> str:
    text = TOKENIZERS[kind]().decode(
        token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


def plain_stop(
    kind: str, token_ids: list[int], stop: list[str], *, skip: bool
) -> tuple[int, str] | None:
    """The definition: after each token, decode everything and look for every stop string at every
    place, and for a special token that is one and does not show.
    """
    for num_tokens in range(1, len(token_ids) + 1):
        whole = decode(kind, token_ids[:num_tokens], skip=skip)
        text = whole.rstrip("\ufffd")
        found = [(i + len(s), i) for s in stop for i in range(len(text)) if text.startswith(s, i)]
        if found:
            return num_tokens, text[: min(found)[1]]
        if (
            skip
            and "<end>" in stop
            and token_ids[num_tokens - 1] == TOKENIZERS[kind]().eos_token_id
        ):
            return num_tokens, whole
    return None


@both_ways
@each_tokenizer
def test_pieces_add_up_to_the_whole_text(kind: str, skip: bool) -> None:
    """Catches lost or doubled spaces and characters at window borders."""

    @quick
    @given(st.data())
    def check(data: st.DataObject) -> None:
        token_ids = data.draw(token_streams(kind, skip=skip))
        decoder = IncrementalDecoder(TOKENIZERS[kind](), skip_special_tokens=skip)
        pieces = []
        for group in groups_of(token_ids, data):
            assert decoder.push(group) is None
            pieces.append(decoder.take())
        pieces.append(decoder.finish())
        assert "".join(pieces) == decoder.text == decode(kind, token_ids, skip=skip)

    check()


@both_ways
@each_tokenizer
def test_stops_where_plain_decoding_stops(kind: str, skip: bool) -> None:
    """Catches a stop that depends on grouping, on token borders, or on which of two stops is found
    first.
    """

    @quick
    @given(st.data())
    def check(data: st.DataObject) -> None:
        token_ids = data.draw(token_streams(kind, skip=skip))
        stop = data.draw(
            st.lists(st.sampled_from(["<end>", *STOPS]), min_size=1, max_size=3, unique=True)
        )
        expected = plain_stop(kind, token_ids, stop, skip=skip)
        decoder = IncrementalDecoder(TOKENIZERS[kind](), stop, skip_special_tokens=skip)
        num_kept, pieces = 0, []
        for group in groups_of(token_ids, data):
            keep = decoder.push(group)
            num_kept += len(group) if keep is None else keep
            pieces.append(decoder.take())
        pieces.append(decoder.finish())
        assert (num_kept, decoder.text) == (
            expected or (len(token_ids), decode(kind, token_ids, skip=skip))
        )
        assert "".join(pieces) == decoder.text
        assert decoder.stopped == (expected is not None)

    check()


def test_a_stop_string_that_can_never_match_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for skip in (True, True, False):
        IncrementalDecoder(
            byte_level_tokenizer(), ["<end>", "a<end>", "a"], skip_special_tokens=skip
        )
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "stop string 'a<end>' holds the special token '<end>', which texts leave out, so it never"
        " matches;"
    )


def character_tokens(text: str) -> list[int]:
    """One token per byte, whatever the tokenizer would merge."""
    vocab, alphabet = byte_level_tokenizer().get_vocab(), _byte_alphabet()
    return [vocab[alphabet[byte]] for byte in text.encode()]


@cache
def _byte_alphabet() -> dict[int, str]:
    tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ascii_bytes = {byte: tokenizer.pre_tokenize_str(chr(byte))[0][0] for byte in range(128)}
    two_byte = [tokenizer.pre_tokenize_str(chr(point))[0][0] for point in range(128, 0x800)]
    three_byte = [
        tokenizer.pre_tokenize_str(chr(point))[0][0] for point in range(0x800, 0xD800, 64)
    ]
    four_byte = [
        tokenizer.pre_tokenize_str(chr(point))[0][0]
        for point in (0x10000, 0x40000, 0x80000, 0xC0000, 0x100000)
    ]
    alphabet = dict(ascii_bytes)
    points = [
        *range(128, 0x800), *range(0x800, 0xD800, 64), 0x10000, 0x40000, 0x80000, 0xC0000, 0x100000,
    ]  # fmt: skip
    for point, spelled in zip(points, two_byte + three_byte + four_byte, strict=True):
        alphabet.update(zip(chr(point).encode(), spelled, strict=True))
    return alphabet


def test_an_unfinished_character_is_never_shown() -> None:
    """Catches replacement characters on the screen while a multi-byte character arrives."""
    decoder = IncrementalDecoder(byte_level_tokenizer())
    shown = []
    for token_id in character_tokens("a🎉b"):
        decoder.push([token_id])
        shown.append(decoder.take())
    assert shown == ["a", "", "", "", "🎉", "b"]


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    """Catches showing the start of a stop string, and holding back longer than needed."""
    decoder = IncrementalDecoder(byte_level_tokenizer(), ["\n\nUser:", "END"])
    shown = []
    for token_id in character_tokens("ab\nE\n\nUs x"):
        assert decoder.push([token_id]) is None
        shown.append(decoder.take())
    assert shown == ["a", "b", "", "\n", "E", "", "", "", "\n\nUs ", "x"]
    assert decoder.finish() == ""


def test_finish_hands_out_what_was_held_back() -> None:
    """Catches losing an ending that could have become a stop string, and the bytes of a character
    that never finished.
    """
    decoder = IncrementalDecoder(byte_level_tokenizer(), ["END"])
    decoder.push(character_tokens("the EN"))
    assert decoder.take() == "the "
    assert decoder.finish() == "EN"
    decoder = IncrementalDecoder(byte_level_tokenizer())
    decoder.push(character_tokens("a€")[:-1])
    assert (decoder.take(), decoder.finish(), decoder.text) == ("a", "\ufffd", "a\ufffd")


@pytest.mark.parametrize(
    ("stop", "text", "num_kept", "kept_text"),
    [
        (["bc", "abcd"], "xabcd", 4, "xa"),  # the one completed first wins
        (["bc", "abc"], "xabcd", 4, "x"),  # both completed by the same character: the longer one
        (["aab"], "aaab", 4, "a"),  # a false start inside the stop itself
        (["é"], "caféé", 5, "caf"),  # two bytes
        (["x"], "x", 1, ""),
    ],
)
def test_overlapping_stops(stop: list[str], text: str, num_kept: int, kept_text: str) -> None:
    decoder = IncrementalDecoder(byte_level_tokenizer(), stop)
    assert decoder.push(character_tokens(text)) == num_kept
    assert (decoder.text, decoder.finish()) == (kept_text, kept_text)


def test_nothing_is_kept_after_a_stop() -> None:
    """Catches surplus tokens of a step in flight reaching the text."""
    decoder = IncrementalDecoder(byte_level_tokenizer(), ["."])
    assert decoder.push(character_tokens("a.b")) == 2
    assert decoder.push(character_tokens("c")) == 0
    assert decoder.finish() == decoder.text == "a"


@pytest.mark.parametrize(
    ("min_tokens", "num_kept", "text"),
    [(0, 2, "a"), (1, 2, "a"), (2, 4, "a.b"), (4, None, "a.b.c")],
)
def test_no_stop_is_found_before_the_least_length(
    min_tokens: int, num_kept: int | None, text: str
) -> None:
    """Nor in the text of those tokens afterwards, however many tokens come at once."""
    for size in (1, 5):
        decoder, tokens = (
            IncrementalDecoder(byte_level_tokenizer(), ["."], min_tokens=min_tokens),
            character_tokens("a.b.c"),
        )
        kept = 0
        for start in range(0, len(tokens), size):
            keep = decoder.push(tokens[start : start + size])
            kept += keep if keep is not None else len(tokens[start : start + size])
        assert (kept, decoder.finish() or decoder.text) == (num_kept or 5, text)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_decodes_a_short_window_only(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches decoding all of the output for every token; bytes are joined, and nothing decoded."""
    tokenizer = TOKENIZERS[kind]()
    tokens = tokenizer("the cat sat 日本語 ", add_special_tokens=False)["input_ids"] * 20
    tokens += [tokenizer.eos_token_id] * 50
    lengths: list[int] = []
    real_decode = type(tokenizer).decode

    def counting_decode(
        self: PreTrainedTokenizerFast, token_ids: list[int], **options: bool
    ) -> str | list[str]:
        lengths.append(len(token_ids))
        return real_decode(self, token_ids, **options)

    monkeypatch.setattr(type(tokenizer), "decode", counting_decode)
    decoder = IncrementalDecoder(tokenizer, ["never"])
    for token_id in tokens:
        decoder.push([token_id])
    assert not lengths if kind == "byte_level" else 0 < max(lengths) <= 24
