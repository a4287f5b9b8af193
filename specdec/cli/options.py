"""The options that several commands share: models, engine, sampling; and what they make."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from specdec.base.config import CacheConfig, EngineConfig, LoadConfig
from specdec.base.errors import InvalidInputError
from specdec.base.files import read_text, user_path
from specdec.base.packages import require_ours
from specdec.base.registry import TOKENIZERS, resolve
from specdec.cli.fields import add_options, from_options, kinds_of
from specdec.cluster.config import ClusterConfig
from specdec.grammar.grammar import Grammar
from specdec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec.cluster.pool import Pool
    from specdec.session.decoder import SpecDecoder
    from specdec.session.prompts import PromptReader

GRAMMAR_HELP = (
    "what the output must look like: json_object, json_schema:SCHEMA, regex:PATTERN, choice:A|B or"
    " ebnf:RULES; @FILE in place of the text reads it from a file"
)


_ELSEWHERE = {"prediction", "num_draft_tokens", "tree_nodes", "store"}
"""Fields of a request that are no options of sampling: those of drafts are of the engine."""


MEASURED = (
    "num_draft_tokens", "tree_nodes", "verify_budget", "draft_sampling", "max_num_seqs",
    "max_model_len", "max_prefill_tokens", "graphs", "memory_bytes",
)  # fmt: skip
"""Fields of an engine that is measured which are options."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which models take part.

    Attributes:
        model: the target: embedded, a folder, a GGUF file, or a hub name (owner/name,
            owner/name:folder, owner/name:Q4_K_M, with @revision at its end).
        drafter: auto (smollm2-dflash for the embedded model, else ngram), smollm2-dflash, ngram,
            suffix, mtp, a checkpoint of a drafter or a small language model (as --model),
            module:function, several of these with + between them, or none.
    """

    model: str = "embedded"
    drafter: str = "auto"


def model_options(parser: argparse.ArgumentParser, *, several: Collection[str] = ()) -> None:
    """The group of options that say which models run, and where."""
    group = parser.add_argument_group("model")
    add_options(group, ModelConfig, several=several)
    revision_option(group)
    add_options(group, LoadConfig)


def revision_option(group: argparse._ActionsContainer) -> None:
    """The option for the revision of the target, which `specdec.cli.main` puts behind its name."""
    what = "branch, tag or commit of the target on the hub, as in owner/name@NAME"
    group.add_argument("--revision", metavar="NAME", help=what)


def engine_options(
    parser: argparse.ArgumentParser, names: Collection[str] | None = None, **options: Any
) -> None:
    """The options of engine and cache; `names` and `options` as `add_options` takes them."""
    group = parser.add_argument_group("engine")
    for config in (EngineConfig, CacheConfig):
        wanted = [name for name in _own(config) if names is None or name in names]
        add_options(group, config, wanted, **options)


def sampling_options(
    parser: argparse.ArgumentParser, names: Collection[str] | None = None, **options: Any
) -> None:
    """The group of options that say how requests are decoded, by default all, which leave no trace
    where they are not given; see `add_options`.
    """
    group = parser.add_argument_group("sampling")
    if names is None:
        names = [name for name in kinds_of(SamplingParams) if name not in _ELSEWHERE]
        add_options(group, SamplingParams, names, defaults=dict.fromkeys(names, argparse.SUPPRESS))
        group.add_argument("--grammar", metavar="KIND[:TEXT]", help=GRAMMAR_HELP)
    else:
        add_options(group, SamplingParams, names, **options)


def ray_options(parser: argparse.ArgumentParser) -> None:
    """The group of options about a cluster."""
    group = parser.add_argument_group("cluster")
    ray_option(group, "decode with the engines of a Ray cluster")
    add_options(group, ClusterConfig)


def ray_option(group: argparse._ArgumentGroup, purpose: str) -> None:
    """The option that names a cluster."""
    which = "the one at ADDRESS, else that of this machine or of RAY_ADDRESS, else a new one here"
    about = f"{purpose}: {which}"
    group.add_argument("--ray", nargs="?", const="", metavar="ADDRESS", help=about)


def cluster_config(args: argparse.Namespace) -> ClusterConfig:
    """The engines that the options describe.

    Raises:
        InvalidInputError: there is no cluster that they would be about.
    """
    config = ClusterConfig(**from_options(ClusterConfig, args))
    if args.ray is None and config != ClusterConfig():
        what = "--engines, --gpus-per-engine and --cpus-per-engine are about a cluster"
        raise InvalidInputError(f"{what}; add --ray")
    return config


def load_pool(args: argparse.Namespace, drafter: str | None, engine: EngineConfig) -> Pool:
    """The engines of a cluster that decode as the options say; each loads with its first work."""
    from specdec.cluster.config import EngineSpec
    from specdec.cluster.pool import Pool

    load = LoadConfig(**from_options(LoadConfig, args))
    return Pool.of(args.ray, cluster_config(args), EngineSpec(args.model, drafter, load, engine))


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine that the options describe."""
    engine, cache = (from_options(one, args, _own(one)) for one in (EngineConfig, CacheConfig))
    return EngineConfig(**engine, cache=CacheConfig(**cache))


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The sampling that the options describe."""
    grammar = None if args.grammar is None else grammar_of(args.grammar)
    file = getattr(args, "prediction", None)
    way_out = "--prediction takes a file of text that the output will be like"
    text = None if file is None else read_text(user_path(file, "--prediction"), way_out=way_out)
    return SamplingParams(**_given(args), grammar=grammar, prediction=text)


def given_sampling(args: argparse.Namespace, sampling: SamplingParams) -> dict[str, Any]:
    """What of `sampling_params` options were given for, be it as it is by default."""
    given = {*_given(args), "grammar", "prediction"}
    return {name: value for name in given if (value := getattr(sampling, name)) is not None}


def _given(args: argparse.Namespace) -> dict[str, Any]:
    every = kinds_of(SamplingParams).keys() - _ELSEWHERE
    values = from_options(SamplingParams, args, every)
    return {name: value for name, value in values.items() if value != ()}


def grammar_of(option: str) -> Grammar:
    """The grammar that an option describes, such as "regex:[0-9]+".

    Raises:
        SpecDecError: no such kind, its text is wrong, or its file cannot be read.
    """
    kind, _, text = option.partition(":")
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            what = f"the grammar's file {text[1:]!r} cannot be read"
            raise InvalidInputError(f"{what}: {error}") from error
    kind = {"json": "json_schema", "grammar": "ebnf"}.get(kind, kind)
    if kind == "json_object" and text:
        kind = "json_schema"
    if kind == "choice":
        return Grammar.choice(text.split("|"))
    return Grammar(cast(Any, kind), text)


def prompt_reader(args: argparse.Namespace) -> PromptReader:
    """What reads prompts as the options say, without the target's weights.

    Raises:
        SpecDecError: the tokenizer cannot be read, or an option about its template is wrong.
    """
    from specdec.session.prompts import PromptReader

    load = LoadConfig(**from_options(LoadConfig, args))
    return PromptReader.of(resolve(TOKENIZERS, "hf", "tokenizer")(args.model), args.model, load)


def load_decoder(
    args: argparse.Namespace, drafter: str | None, engine: EngineConfig
) -> SpecDecoder:
    """The target that the options name, with a drafter and an engine."""
    load = LoadConfig(**from_options(LoadConfig, args))
    require_ours("drafters", "verifiers")
    from transformers.utils import logging

    from specdec.session.decoder import SpecDecoder

    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # it would fill a log file with carriage returns
    say_unseen(load.device)
    return SpecDecoder.from_pretrained(args.model, drafter=drafter, **asdict(load), engine=engine)


def say_gpu(name: str) -> None:
    """One line on standard error about the GPU that `--device` names, or why none is used."""
    from specdec.device.device import describe_device, resolve_device

    device = resolve_device(name)
    if device.type == "cuda":
        say(f"on {describe_device(device)}")
    say_unseen(name)


def say_unseen(name: str) -> None:
    """One line on standard error if a GPU is here and none is used."""
    from specdec.device.device import unseen_gpu

    if name == "auto" and (reason := unseen_gpu()):
        say(f"no GPU is used: {reason}")


def say(line: str) -> None:
    """One line on standard error."""
    print(f"specdec: {line}", file=sys.stderr, flush=True)


def _own(config: type) -> list[str]:
    """Fields with an option of their own; for `--seed` is a request's, no engine's."""
    return [name for name in kinds_of(config) if (config, name) != (EngineConfig, "seed")]
