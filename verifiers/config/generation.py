"""What a checkpoint asks of requests in its generation_config.json, and the ends of its texts.

Transformers' `generate` applies the file to every call, and the entries of config.json where there
is no such file.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformers import GenerationConfig

from specdec.base.checkpoint.hub import CONFIG, json_object
from specdec.base.config import GenerationSource
from specdec.base.errors import CheckpointError, InvalidInputError, shown
from specdec.base.validation import as_integer, require
from specdec.sampling.params import SamplingDefaults, SamplingParams

logger = logging.getLogger(__name__)

FILE = "generation_config.json"

_SAMPLED = ("temperature", "top_k", "top_p", "min_p")

_OFF = {
    "diversity_penalty": 0, "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0, "eta_cutoff": 0, "guidance_scale": 1, "no_repeat_ngram_size": 0,
    "num_beam_groups": 1, "num_beams": 1, "penalty_alpha": 0, "typical_p": 1,
}  # fmt: skip
"""Numbers that ask for nothing, of entries that change outputs."""

OF_GGUF = {
    "general.sampling.mirostat": 0,
    "general.sampling.penalty_repeat": 1,
    "general.sampling.xtc_probability": 0,
}
"""Keys of GGUF files that llama.cpp samples by and we do not, with the values that ask for nothing;
its penalty sees the last tokens alone.
"""

_CHANGES_NOTHING = {
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight",
    "assistant_lookbehind", "bos_token_id", "cache_config", "compile_config",
    "continuous_batching_config", "decoder_start_token_id", "disable_compile", "do_sample",
    "early_stopping", "eos_token_id", "is_assistant", "length_penalty", "low_memory",
    "max_cache_len", "max_length", "max_matching_ngram_size", "max_new_tokens", "min_length",
    "min_new_tokens", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_logits",
    "output_scores", "pad_token_id", "prefill_chunk_size", "prompt_lookup_num_tokens",
    "remove_invalid_values", "renormalize_logits", "repetition_penalty", "return_dict_in_generate",
    "speculation_type", "target_lookbehind", "transformers_version", "use_cache", "use_mtp",
    *_SAMPLED,
}  # fmt: skip
"""Entries that are honored, that the caller says (how long, how many), or that change no token."""


class Generation(NamedTuple):
    """What a checkpoint asks.

    Attributes:
        ends: end-of-sequence ids.
        defaults: for requests that do not say it themselves.
        notes: what a user should know of both, in lines.
    """

    ends: tuple[int, ...]
    defaults: SamplingDefaults
    notes: list[str]

    def say(self) -> None:
        """Logs the notes."""
        for note in self.notes:
            logger.warning("%s", note)


def read_generation(
    name: str,
    folder: Path,
    *,
    vocab_size: int,
    tokenizer: Any = None,
    source: GenerationSource = "model",
) -> Generation:
    """What the checkpoint in a folder asks; the other arguments are those of `generation_of`.

    Raises:
        CheckpointError: a file is damaged, or an entry holds what none can.
    """
    paths = (folder / FILE, folder / CONFIG)
    file, config = (json_object(p, name, what="target") if p.is_file() else None for p in paths)
    return generation_of(
        name, file, config or {}, vocab_size=vocab_size, tokenizer=tokenizer, source=source
    )


def generation_of(
    name: str,
    file: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    *,
    vocab_size: int,
    tokenizer: Any = None,
    source: GenerationSource = "model",
) -> Generation:
    """What a checkpoint asks.

    Args:
        file: its generation_config.json; None where there is none.
        tokenizer: the target's, which may end texts, too; None where it is not known.
        source: "none" leaves all but the ends aside.

    Raises:
        CheckpointError: an entry holds what none can.
    """
    nested = config.get("text_config")
    stated = dict(nested) if isinstance(nested, dict) else {}
    stated |= {key: value for key, value in config.items() if value is not None}
    ends, served, notes = _ends(name, file, stated, vocab_size, tokenizer)
    if source == "none":
        return Generation(ends, SamplingDefaults(served_ends=served), notes)
    where = f"{'config.json' if file is None else FILE} of target {name!r}"
    entries = stated if file is None else file
    try:
        defaults = _defaults(entries, served, sampled=file is not None)
    except InvalidInputError as error:
        what = f"{where}: {error}; correct it, or leave it aside with generation_config 'none'"
        raise CheckpointError(what) from error
    return Generation(ends, defaults, [*notes, *_effect(where, entries, defaults)])


def _ends(
    name: str,
    file: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    vocab_size: int,
    tokenizer: Any,
) -> tuple[tuple[int, ...], tuple[int, ...], list[str]]:
    """The ends from the first source that names any, the tokenizer's where it is none of them, and
    notes.
    """
    sources = [] if file is None else [(FILE, file.get("eos_token_id"))]
    sources += [
        ("config.json", config.get("eos_token_id")),
        ("the tokenizer", getattr(tokenizer, "eos_token_id", None)),
    ]
    notes: list[str] = []
    for where, value in sources:
        ids = _ids(f"eos_token_id in {where} of target {name!r}", value)
        ends = tuple(token for token in ids if 0 <= token < vocab_size)
        if strange := [token for token in ids if token not in ends]:
            text = f"{where} of {name!r} ends texts with {_listed(strange)}, which no text has"
            notes.append(f"{text}: ids lie in [0, {vocab_size})")
        if ends:
            break
    else:
        if tokenizer is not None:
            text = f"nothing in {name!r} names a token that ends texts: outputs go on to max_tokens"
            notes.append(f"{text}; see stop_token_ids")
        return (), (), notes
    if where != sources[0][0]:
        notes.append(
            f"{sources[0][0]} of {name!r} names no token that ends texts, so generate would go on;"
            f" outputs end with {_listed(ends)}, as {where} has it"
        )
    own = _ids(f"eos_token_id in the tokenizer of target {name!r}", sources[-1][1])
    further = tuple(token for token in own if 0 <= token < vocab_size and token not in ends)
    if further:
        notes.append(
            f"the tokenizer of {name!r} ends texts with {_listed(further)}"
            f" ({tokenizer.eos_token!r}), which {where} does not name:"
            " specdec serve stops there, too; all else goes on, as generate does, unless"
            " stop_token_ids names it"
        )
    return ends, further, notes


def _ids(place: str, value: Any) -> list[int]:
    """The token ids that an entry names.

    Raises:
        CheckpointError: it holds something else.
    """
    found = []
    for one in value if isinstance(value, list | tuple) else [] if value is None else [value]:
        if isinstance(one, bool) or not isinstance(one, int | float) or one % 1:  # inf % 1 is NaN
            what = f"{place} is {shown(value)}"
            way_out = "it must be a token id or a list of them, so correct the file"
            raise CheckpointError(f"{what}; {way_out}")
        found.append(int(one))
    return found


def _listed(tokens: Any) -> str:
    return ", ".join(shown(token) for token in tokens)


def _defaults(
    entries: Mapping[str, Any], served_ends: tuple[int, ...], *, sampled: bool
) -> SamplingDefaults:
    """What the entries say of decoding; `sampled` is whether how they sample counts, where they do
    not rule sampling out.

    Raises:
        InvalidInputError: a value is of another type, or out of range.
    """
    names = ("repetition_penalty", *(_SAMPLED if sampled else ()))
    given = {name: entries[name] for name in names if entries.get(name) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    params = SamplingParams(**given)
    least = {}
    for name in ("min_new_tokens", "min_length"):
        least[name] = None if entries.get(name) is None else as_integer(name, entries[name])
        require((least[name] or 0) >= 0, f"{name} is {least[name]}; it must be 0 or more")
    samples = entries.get("do_sample")
    said = f"do_sample is {shown(samples)}; it must be true or false"
    require(samples in (None, True, False), said)
    kept = [name for name in _SAMPLED if name in given and samples is not False]
    return SamplingDefaults(
        repetition_penalty=1.0 if params.repetition_penalty is None else params.repetition_penalty,
        min_tokens=least["min_new_tokens"],
        min_length=least["min_length"] or 0,
        sampled=tuple((name, getattr(params, name)) for name in kept),
        served_ends=served_ends,
    )


def _effect(where: str, entries: Mapping[str, Any], defaults: SamplingDefaults) -> Iterator[str]:
    """The line that says what of the entries holds, and what is not to be had here; none where
    there is nothing of it.
    """
    holds = [f"{name} {value:g}" for name, value in defaults.stated.items() if name not in _SAMPLED]
    lost = [f"{name} {shown(value)}" for name, value in entries.items() if _changes(name, value)]
    parts = [f"{', '.join(holds)} where a request names none, as in generate"] if holds else []
    reader = "llama.cpp" if OF_GGUF.keys() & entries.keys() else "generate"
    if lost:
        parts.append(f"{reader} would apply {', '.join(lost)}, which specdec does not have")
    if parts:
        yield f"{where}: {'; '.join(parts)}; generation_config 'none' leaves it aside"


def _changes(name: str, value: Any) -> bool:
    """Whether `generate` would write otherwise because of an entry, and we do not."""
    if name in OF_GGUF:
        return bool(value != OF_GGUF[name])
    if name == "cache_implementation":
        return bool(value == "quantized")
    if name in _CHANGES_NOTHING or name.startswith("_") or name not in vars(GenerationConfig()):
        return False
    nothing = value is None or value is False or value in ("", [], {})
    return not nothing and not (name in _OFF and value == _OFF[name])
