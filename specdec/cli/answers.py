"""Where the answers of `specdec generate` come from: an engine here or those of a cluster, and what
an earlier run has left.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.base.config import EngineConfig
from specdec.base.errors import InvalidInputError
from specdec.base.packages import require_ours
from specdec.base.registry import drafter_name
from specdec.cli.line_fields import sampled
from specdec.cli.options import load_decoder, load_pool, prompt_reader
from specdec.cli.prompts import Prompt, model_inputs
from specdec.cli.summary import counted, describe_drafts
from specdec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specdec.session.outputs import GenerationResult, StreamChunk

COMMAND = "generate"


class LocalAnswers:
    """Chunks of one engine in this process, finished answers of an earlier run first.

    Args:
        args: options of `specdec generate`.
        prompts, sampling, engine: made of them.

    Raises:
        SpecDecError: the model, the drafter or the journal is wrong.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        engine: EngineConfig,
    ) -> None:
        from specdec.base.journal import Journal
        from specdec.cluster.origin import origin

        decoder = load_decoder(args, args.drafter, engine)
        self._decoder = decoder
        self._samplings = [sampled(prompt.asked, sampling, prompt.source) for prompt in prompts]
        self._inputs = model_inputs(prompts, decoder.tokenizer, raw=args.raw, system=args.system)
        self._empty = [not prompt.label for prompt in prompts]
        self._keys = _keys(self._inputs, self._samplings)
        settings = _asked(args) | origin(decoder) if args.out else {}
        self._journal = Journal(Path(args.out) if args.out else None, settings, command=COMMAND)
        self.drafts = describe_drafts(decoder, drafter_name(args.drafter, args.model))
        self.timer = decoder.engine.timer

    def __iter__(self) -> Iterator[StreamChunk]:
        """Chunks as they come."""
        missing = []
        for index, key in enumerate(self._keys):
            if self._empty[index]:
                yield _refused(index)
            elif result := self._journal.read(key, _first_result):
                yield _chunk(index, result)
            else:
                missing.append(index)
        if not missing:
            return
        inputs, samplings = (
            [self._inputs[index] for index in missing],
            [self._samplings[index] for index in missing],
        )
        # One input alone raises what is wrong with it; among several, it fails without stopping the
        # others.
        alone = len(self._inputs) == 1
        for chunk in self._decoder.stream(
            inputs[0] if alone else inputs, samplings[0] if alone else samplings
        ):
            chunk.index = missing[chunk.index]
            if chunk.result is not None and chunk.result.error is None:
                self._journal.add(self._keys[chunk.index], {"results": [asdict(chunk.result)]})
            yield chunk


class ClusterAnswers:
    """The same of a cluster, where an answer is one chunk; the tokenizer alone is loaded here."""

    timer = None

    def __init__(
        self,
        args: argparse.Namespace,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        engine: EngineConfig,
    ) -> None:
        from specdec.cluster.journal import ClusterJournal
        from specdec.cluster.rows import Row

        require_ours("drafters", "verifiers")
        reader = prompt_reader(args)
        inputs = model_inputs(prompts, reader.tokenizer, raw=args.raw, system=args.system)
        samplings = [sampled(prompt.asked, sampling, prompt.source) for prompt in prompts]
        keyed = zip(_keys(inputs, samplings), inputs, samplings, prompts, strict=True)
        self._rows = {
            index: Row(*row) for index, (*row, prompt) in enumerate(keyed) if prompt.label
        }
        self._num_prompts = len(prompts)
        self._journal = ClusterJournal(
            Path(args.out) if args.out else None, _asked(args), command=COMMAND
        )
        self._pool = load_pool(args, args.drafter, engine)
        engines = counted(self._pool.config.engines or 0, "engine")
        self.drafts = f"drafter {drafter_name(args.drafter, args.model)}, {engines}"

    def __iter__(self) -> Iterator[StreamChunk]:
        """Answers as they come."""
        yield from (
            _refused(index) for index in range(self._num_prompts) if index not in self._rows
        )
        index_of = {row.key: index for index, row in self._rows.items()}
        for key, index in index_of.items():
            if record := self._journal.get(key):
                yield _chunk(index, record["results"][0])
        for answer in self._journal.run(self._pool, list(self._rows.values())):
            yield _chunk(index_of[answer.key], answer.results[0])


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """What answers depend on beside their keys, as far as the command says it."""
    return {
        "model": args.model,
        "drafter": drafter_name(args.drafter, args.model),
        "tree_nodes": args.tree_nodes,
    }


def _refused(index: int) -> StreamChunk:
    from specdec.session.outputs import GenerationResult

    return _chunk(
        index, GenerationResult.refused(InvalidInputError("the prompt is empty; give it some text"))
    )


def _keys(inputs: Sequence[Any], samplings: Sequence[SamplingParams]) -> list[str]:
    """One key per input: of its place, of what the tokenizer is given, and of how it is decoded."""
    pairs = enumerate(zip(inputs, samplings, strict=True))
    parts = (json.dumps([index, given, repr(sampling)]) for index, (given, sampling) in pairs)
    return [hashlib.sha256(part.encode()).hexdigest()[:32] for part in parts]


def _first_result(record: dict[str, Any]) -> GenerationResult:
    from specdec.base.journal import made
    from specdec.session.outputs import GenerationResult

    return made(GenerationResult, record["results"][0])


def _chunk(index: int, result: Any) -> StreamChunk:
    from specdec.session.outputs import StreamChunk

    return StreamChunk(index, result.text, result.token_ids, result)
