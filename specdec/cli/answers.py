"""Where answers of `specdec generate` come from: an engine here, a cluster, an earlier run."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from specdec.base.config import EngineConfig
from specdec.base.errors import InvalidInputError
from specdec.base.packages import require_ours
from specdec.base.registry import drafter_name
from specdec.cli.line_fields import OF_TEMPLATE, sampled, served
from specdec.cli.options import given_sampling, load_decoder, load_pool, prompt_reader
from specdec.cli.prompts import Prompt, model_inputs
from specdec.cli.summary import counted, describe_drafts
from specdec.sampling.params import SamplingDefaults, SamplingParams

if TYPE_CHECKING:
    from specdec.session.outputs import GenerationResult, StreamChunk

COMMAND = "generate"


class LocalAnswers:
    """Chunks of one engine in this process, finished answers of an earlier run first.

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
        self._decoder, self.reader = decoder, getattr(decoder, "reader", None)
        self._jobs = _jobs(args, prompts, sampling, decoder)
        settings = _asked(args) | origin(decoder) if args.out else {}
        self._journal = Journal(Path(args.out) if args.out else None, settings, command=COMMAND)
        self.drafts = describe_drafts(decoder, drafter_name(args.drafter, args.model))
        self.timer = decoder.engine.timer

    def key(self, index: int) -> str:
        return self._jobs[index].key

    def __iter__(self) -> Iterator[StreamChunk]:
        missing = []
        for index, job in self._jobs.items():
            if job.error is not None:
                yield _refused(index, job.error)
            elif result := self._journal.read(job.key, _first_result):
                yield _chunk(index, result)
            else:
                missing.append((index, job))
        if not missing:
            return
        inputs: Any = [job.prompt for _, job in missing]
        samplings: Any = [job.sampling for _, job in missing]
        # One input alone raises what is wrong with it; among several, it stops no others.
        if len(self._jobs) == 1 and not missing[0][1].in_batch:
            inputs, samplings = inputs[0], samplings[0]
        for chunk in self._decoder.stream(inputs, samplings):
            chunk.index, job = missing[chunk.index]
            if chunk.result is not None and chunk.result.error is None:
                self._journal.add(job.key, {"results": [asdict(chunk.result)]})
            yield chunk


class ClusterAnswers:
    """Answers of a cluster, where an answer is one chunk; the tokenizer alone is loaded here."""

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
        self.reader = prompt_reader(args)
        self._jobs = _jobs(args, prompts, sampling, SimpleNamespace(reader=self.reader))
        self._rows = {
            index: Row(job.key, job.prompt, job.sampling, said=job.said)
            for index, job in self._jobs.items()
            if job.error is None
        }
        path = Path(args.out) if args.out else None
        self._journal = ClusterJournal(path, _asked(args), command=COMMAND)
        self._pool = load_pool(args, args.drafter, engine)
        engines = counted(self._pool.config.engines or 0, "engine")
        self.drafts = f"drafter {drafter_name(args.drafter, args.model)}, {engines}"

    def key(self, index: int) -> str:
        return self._jobs[index].key

    def __iter__(self) -> Iterator[StreamChunk]:
        for index, job in self._jobs.items():
            if job.error is not None:
                yield _refused(index, job.error)
        index_of = {row.key: index for index, row in self._rows.items()}
        for key, index in index_of.items():
            if record := self._journal.get(key):
                yield _chunk(index, record["results"][0])
        for answer in self._journal.run(self._pool, list(self._rows.values())):
            yield _chunk(index_of[answer.key], answer.results[0])


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """What answers depend on beside their keys, as far as the command says it."""
    drafter = drafter_name(args.drafter, args.model)
    return {"model": args.model, "drafter": drafter, "tree_nodes": args.tree_nodes}


def _refused(index: int, error: str) -> StreamChunk:
    from specdec.session.outputs import GenerationResult

    return _chunk(index, GenerationResult.refused(InvalidInputError(error)))


@dataclass(frozen=True, slots=True)
class _Job:
    """One output.

    Attributes:
        key: of its place, of what the tokenizer is given, and of how it is decoded.
        prompt, sampling: what it is made of.
        error: why there is none.
        in_batch: its line is a request of a batch file.
        said: see `Row`.
    """

    key: str
    prompt: Any
    sampling: SamplingParams
    error: str | None = None
    in_batch: bool = False
    said: tuple[str, ...] | None = None


def _jobs(
    args: argparse.Namespace, prompts: Sequence[Prompt], sampling: SamplingParams, engine: Any
) -> dict[int, _Job]:
    """What is to be decoded, by the index of its prompt; `engine` has at least a `reader`."""
    jobs: dict[int, _Job] = {}
    requests: dict[int, list[Any]] = {}
    given = given_sampling(args, sampling)
    for index, prompt in enumerate(prompts):
        made, own, error = None, sampling, prompt.error
        if error is None and prompt.request is None and prompt.is_empty:
            error = "the prompt is empty; give it some text"
        try:
            if error is not None:
                pass
            elif prompt.request is not None:
                if id(prompt.request) not in requests:
                    requests[id(prompt.request)] = _request_jobs(prompt.request, given, engine)
                made, own = requests[id(prompt.request)][prompt.choice]
            else:
                made, own = _line_job(args, prompt, sampling, engine)
        except InvalidInputError as wrong:
            error = str(wrong).removeprefix(f"{prompt.source}: ")
            if prompt.request is None and not prompt.asked:  # an option is at odds with the prompt
                raise
        text = json.dumps([index, made, repr(own)])
        key = hashlib.sha256(text.encode()).hexdigest()[:32]
        said = tuple(prompt.request.said) if prompt.request is not None else None
        jobs[index] = _Job(key, made, own, error, prompt.request is not None, said)
    return jobs


def _line_job(
    args: argparse.Namespace, prompt: Prompt, sampling: SamplingParams, engine: Any
) -> tuple[Any, SamplingParams]:
    own = sampled(prompt.asked, sampling, prompt.source).choice(prompt.choice)
    tokenizer = getattr(engine, "tokenizer", None) or engine.reader.tokenizer
    (made,) = model_inputs([prompt], tokenizer, raw=args.raw, system=args.system)
    if not OF_TEMPLATE & prompt.asked.keys():
        return made, own
    if isinstance(made, str):
        raise InvalidInputError("the line has words for a chat template, and none is used")
    return served("line prompt")(engine.reader, made, prompt.asked), own.for_chat()


def _request_jobs(request: Any, given: Mapping[str, Any], engine: Any) -> list[Any]:
    """Jobs of a request of a batch file; options that were given hold where it says nothing."""
    if not hasattr(engine, "verifier"):  # where it is, the rest is looked at
        made: list[Any] = request.jobs(engine.reader, SamplingDefaults(), given, 2**31 - 1)
        return made
    admission, defaults = engine.engine.admission, engine.verifier.defaults
    made = request.jobs(engine.reader, defaults, given, admission.max_total_tokens, admission.check)
    return made


def _first_result(record: dict[str, Any]) -> GenerationResult:
    from specdec.base.journal import made
    from specdec.session.outputs import GenerationResult

    return made(GenerationResult, record["results"][0])


def _chunk(index: int, result: Any) -> StreamChunk:
    from specdec.session.outputs import StreamChunk

    return StreamChunk(index, result.text, result.token_ids, result)
