"""A target's tokenizer: read from its files, and refused where they do not say how text splits."""

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specdec.base.checkpoint.hub import (
    checkpoint_folder,
    files_of,
    json_file,
    json_object,
    unpinned,
)
from specdec.base.errors import UnsupportedModelError
from specdec.base.files import user_path
from verifiers.config.reading import NO_FOREIGN_CODE, read
from verifiers.weights.embedded import EMBEDDED, embedded_model_path

WHOLE, STATED = "tokenizer.json", "tokenizer_config.json"

_VOCABULARIES = (
    "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json",
)  # fmt: skip
"""Files from which a class of Transformers makes a tokenizer."""

_WAY_OUT = (
    f"put a {WHOLE} of the model beside it, as conversions and other copies of the checkpoint have"
)


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a target, by the target's name as in `verifiers.load.load_verifier`.

    Raises:
        UnsupportedModelError: it is code, or its files do not say how text is split.
        CheckpointError: nothing there, or damaged files.
    """
    if str(name) == EMBEDDED:
        return tokenizer_in(embedded_model_path(), EMBEDDED)
    return tokenizer_in(checkpoint_folder(name, what="target", weights=False), str(name))


def tokenizer_in(
    folder: Path, name: str, kind: Sequence[str] | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of the target that the user calls `name`, whose files are in a folder; errors
    are those of `load_tokenizer`.

    Args:
        folder: with its files.
        name: for messages, and for transformers' choice of a class.
        kind: module and name of its class, where an earlier start has kept them.
    """
    if name == EMBEDDED:
        load = partial(PreTrainedTokenizerFast.from_pretrained, str(folder))
        return read(name, "tokenizer", load)
    tokenizer = read(name, "tokenizer", partial(_read, folder, name, kind))
    of_processor = folder / "chat_template.json"  # which transformers leaves to processors
    if not tokenizer.chat_template and of_processor.is_file():
        template = json_object(of_processor, name, what="target").get("chat_template")
        tokenizer.chat_template = template if isinstance(template, str) else None
    return tokenizer


def _read(folder: Path, name: str, kind: Sequence[str] | None) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase
    if kind is not None:
        tokenizer = getattr(import_module(kind[0]), kind[1]).from_pretrained(str(folder))
        return tokenizer
    from transformers import AutoTokenizer

    from verifiers.config.wrappers import read_config

    path = folder / STATED
    stated = json_object(path, name, what="target") if path.is_file() else {}
    if not (folder / WHOLE).is_file():
        if reason := _reason([path.name for path in folder.iterdir()], stated, folder):
            raise UnsupportedModelError(f"the tokenizer of target {name!r} {reason}; {_WAY_OUT}")
    elif _foreign_class(stated):  # all that its code would do is in the file
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
        return tokenizer
    config = read_config(str(folder))
    # by which transformers knows whose entries are wrong
    config.name_or_path = unpinned(name).partition(":")[0]
    tokenizer = AutoTokenizer.from_pretrained(str(folder), config=config, **NO_FOREIGN_CODE)
    return tokenizer


def tokenizer_reasons(name: str) -> list[str]:
    """Why the tokenizer of a target cannot be read, told from the names of its files; empty when
    nothing speaks against it.
    """
    files, folder = files_of(name), user_path(name)
    if WHOLE in files:
        return []
    stated = json_file(name, STATED, what="target") or {} if STATED in files else {}
    if reason := _reason(files, stated, folder if folder.is_dir() else None):
        return [f"its tokenizer {reason}; {_WAY_OUT}"]
    # A config alone is looked at as a config alone.
    whole = any(file.endswith((".safetensors", ".bin", ".gguf")) for file in files)
    if not whole or {*_VOCABULARIES} & {*files}:
        return []
    return [f"it has no tokenizer: neither {WHOLE} nor another vocabulary"]


def _reason(files: list[str], stated: Mapping[str, Any], folder: Path | None) -> str | None:
    """Why a tokenizer without `WHOLE` cannot be read; `folder` is where its files lie, None where
    they are far away.
    """
    if own := _foreign_class(stated):
        return f"is {own}, code from its repository, which is never run"
    ranks = [file for file in files if file == "tiktoken.model" or file.endswith(".tiktoken")]
    if folder is not None and _holds_ranks(folder / "tokenizer.model"):
        ranks.append("tokenizer.model")
    if not ranks:
        return None
    return f"is {ranks[0]} of tiktoken alone, which does not say where text is split"


def _foreign_class(stated: Mapping[str, Any]) -> str | None:
    """The class that a tokenizer_config.json names, where Transformers has none such."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    named = stated.get("tokenizer_class")
    if not isinstance(named, str) or not named:
        codes = stated.get("auto_map")
        own = isinstance(codes, Mapping) and "AutoTokenizer" in codes
        return "a class of its own" if own else None
    plain = named.removesuffix("Fast")
    known = any(tokenizer_class_from_name(one) for one in (named, plain, f"{plain}Fast"))
    return None if known else named


def _holds_ranks(path: Path) -> bool:
    """Whether a file holds tiktoken's lines, a token and its rank; SentencePiece's are no text."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        token, _, rank = file.readline(400).strip().partition(b" ")
    return rank.isdigit() and token.rstrip(b"=").replace(b"+", b"").replace(b"/", b"").isalnum()
