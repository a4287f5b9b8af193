"""The first stage: the target itself writes the answers that its drafter learns from.

Requests of all prompts flow through the engine without a pause between files, so that the batch stays full. Every answer has a
fixed place, shard and seed; a shard is written when its last answer arrives, and a killed run goes on with the missing shards.
"""

import gzip
import hashlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers

from drafters.training.config import TrainConfig
from drafters.training.prompts import PromptSet, TrainingPrompt, few_shot_text, make_prompts
from drafters.training.state import write_atomically
from specdec import __version__
from specdec.config import SamplingParams
from specdec.core import Request, Status
from specdec.decoder import SpecDecoder
from specdec.errors import CheckpointError, InvalidInputError, SpecDecError
from specdec.text import IncrementalDecoder

PROVENANCE = "provenance.json"
FEW_SHOT_STOP = "Question:"
"""Where a few-shot answer ends, as in lm-eval."""
TEMPLATE_BYTES = 1024
"""Room for what a chat template adds, system message included, when lengths are estimated."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to be written."""

    prompt: TrainingPrompt
    temperature: float
    seed: int


def write_answers(config: TrainConfig, load_decoder: Callable[[], SpecDecoder], say: Say, *, rank: int = 0, world: int = 1) -> bool:
    """Writes all answers that are missing.

    Args:
        config: the run.
        load_decoder: gives the target when something is missing; without a drafter, from which large batches gain nothing.
        say: told about the progress.
        rank, world: this process of those that torchrun started; each writes every `world`-th file.

    Returns:
        Whether all answers of this process are there; False when `stop_after` ended it.

    Raises:
        InvalidInputError: the folder holds answers of other settings, or a prompt does not fit.
        CapacityError: the disk is full; finished shards are kept.
        SpecDecError: the target fails.
    """
    folder = config.folder / "answers"
    prompts = make_prompts(config)
    shards = plan_shards(config, prompts)
    origin = _origin(config)
    _check_origin(folder, origin)
    own = dict(list(shards.items())[rank::world])
    missing = {name: jobs for name, jobs in own.items() if not (folder / name).exists()}
    if not missing:
        return True
    decoder = load_decoder()
    writer = _Writer(config, decoder, prompts)
    writer.check_lengths(missing)
    if rank == 0 and not (folder / PROVENANCE).exists():
        text = json.dumps(origin | _versions(decoder), indent=2) + "\n"
        write_atomically(folder / PROVENANCE, lambda path: path.write_text(text))
    total = sum(map(len, missing.values()))
    say(f"answers: {total:,} to write in {len(missing)} of {len(own)} files")
    stop_at = None if config.stop_after is None else time.monotonic() + 60 * config.stop_after
    started, done, tokens = time.monotonic(), 0, 0
    for name, records in writer.run(missing):
        lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        write_atomically(folder / name, partial(_write_bytes, gzip.compress(lines.encode(), compresslevel=3)))
        done += len(records)
        tokens += sum(len(record["answer_ids"]) for record in records)
        seconds = time.monotonic() - started
        left = (total - done) * seconds / max(done, 1) / 60
        say(f"answers: {done:,} of {total:,}, {tokens / seconds:,.0f} tokens/s, {left:.1f} minutes left")
        if stop_at is not None and time.monotonic() >= stop_at and done < total:
            return False
    if writer.num_skipped:
        say(f"answers: {writer.num_skipped} prompts did not fit the target's context and were left out")
    return True


def plan_shards(config: TrainConfig, prompts: PromptSet) -> dict[str, list[Job]]:
    """File names and the answers each holds, held-out ones first; a prompt's seeds do not depend on the others."""

    def job(prompt: TrainingPrompt, temperature: float, sample: int) -> Job:
        return Job(prompt, temperature, _stable_seed(config.seed, sample, prompt))

    heldout = [job(prompt, 0.0, 0) for prompt in prompts.heldout]
    # All answers to a prompt in a row: the engine finds the prompt in its cache.
    train = [job(prompt, temperature, i) for prompt in prompts.train for i, temperature in enumerate(config.temperatures)]
    shards = {}
    for split, jobs in (("heldout", heldout), ("train", train)):
        for number, start in enumerate(range(0, len(jobs), config.shard_size)):
            shards[f"{split}-{number:05d}.jsonl.gz"] = jobs[start : start + config.shard_size]
    return shards


def _stable_seed(seed: int, sample: int, prompt: TrainingPrompt) -> int:
    """In [0, 2**63), the same in every process."""
    digest = hashlib.blake2b(f"{seed}|{sample}|{prompt.source}|{prompt.question}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class _Writer:
    """Runs jobs through the engine and yields shards as they complete."""

    def __init__(self, config: TrainConfig, decoder: SpecDecoder, prompts: PromptSet) -> None:
        self.config, self.decoder, self.prompts = config, decoder, prompts
        self.limit = decoder.engine.max_model_len - 1
        self.num_skipped = 0

    def check_lengths(self, shards: dict[str, list[Job]]) -> None:
        """Refuses a prompt that is too long before any work starts.

        Raises:
            InvalidInputError: one is, and such prompts may not be left out.
        """
        if self.config.skip_long:
            return
        # A token is at least one byte, so only prompts with many bytes need a look.
        for job in (job for jobs in shards.values() for job in jobs):
            prompt = job.prompt
            texts = [self._few_shot_text(prompt)] if prompt.few_shot else [text for _, text in prompt.messages]
            if sum(len(text.encode()) for text in texts) + TEMPLATE_BYTES > self.limit:
                self._fits(job, self._tokenize(job))

    def run(self, shards: dict[str, list[Job]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Name and records of every shard, in the order in which they complete."""
        engine = self.decoder.engine
        records: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in shards}
        left = {name: len(jobs) for name, jobs in shards.items()}
        queue = ((name, index, job) for name, jobs in shards.items() for index, job in enumerate(jobs))
        work: dict[int, tuple[str, int, Job]] = {}
        more = True
        try:
            while more or work:
                while more and len(work) < 2 * self.config.max_num_seqs:
                    item = next(queue, None)
                    more = item is not None
                    if item is None:
                        break
                    request = self._add(item[2])
                    if request is None:
                        left[item[0]] -= 1
                    else:
                        work[request.request_id] = item
                for request in engine.step():
                    if request.status is Status.FINISHED and request.request_id in work:
                        name, index, job = work.pop(request.request_id)
                        records[name][index] = _record(request, job)
                        left[name] -= 1
                for name in [name for name, count in left.items() if count == 0]:
                    del left[name]
                    yield name, [record for _, record in sorted(records.pop(name).items())]
        finally:
            engine.abort_all(work)

    def _add(self, job: Job) -> Request | None:
        """Queues an answer; None when its prompt is too long and may be left out."""
        prompt_ids = self._tokenize(job)
        if not self._fits(job, prompt_ids):
            self.num_skipped += 1
            return None
        stop = (FEW_SHOT_STOP,) if job.prompt.few_shot else ()
        sampling = SamplingParams(
            max_tokens=self.config.max_tokens,
            temperature=job.temperature,
            top_p=self.config.top_p if job.temperature > 0 else 1.0,
            seed=job.seed,
            stop=stop,
        )
        text = IncrementalDecoder(self.decoder.tokenizer, stop) if stop else None
        return self.decoder.engine.add_request(
            prompt_ids, sampling, on_tokens=None if text is None else lambda request, tokens: text.push(tokens)
        )

    def _fits(self, job: Job, prompt_ids: list[int]) -> bool:
        """Whether the target can answer the prompt with 2 tokens at least."""
        if len(prompt_ids) < self.limit or self.config.skip_long:
            return len(prompt_ids) < self.limit
        raise InvalidInputError(
            f"{job.prompt.source} has {len(prompt_ids)} tokens and the target's context is {self.limit + 1} for prompt and answer;"
            " shorten it, or leave such prompts out with --skip-long"
        )

    def _tokenize(self, job: Job) -> list[int]:
        prompt = job.prompt
        if prompt.few_shot:
            return self.decoder.tokenize(self._few_shot_text(prompt))
        if getattr(self.decoder.tokenizer, "chat_template", None):
            return self.decoder.tokenize([{"role": role, "content": content} for role, content in prompt.messages])
        return self.decoder.tokenize("\n".join(content for _, content in prompt.messages))

    def _few_shot_text(self, prompt: TrainingPrompt) -> str:
        """Worked examples of the prompt's own choice, none of them the prompt itself."""
        random = Random(_stable_seed(self.config.seed, 0, prompt))
        drawn = random.sample(self.prompts.examples, self.config.few_shot + 1)
        others = [example for example in drawn if example.question != prompt.question]
        return few_shot_text(others[: self.config.few_shot], prompt.question)


def _record(request: Request, job: Job) -> dict[str, Any]:
    if request.finish_reason == "error":
        raise SpecDecError(f"the target failed on {job.prompt.source}: {request.error}")
    return {
        "prompt_ids": request.prompt_token_ids,
        "answer_ids": request.output_token_ids,
        "source": job.prompt.source,
        "template": "few-shot" if job.prompt.few_shot else "chat",
        "temperature": job.temperature,
        "seed": job.seed,
        "finish_reason": request.finish_reason,
    }


def _origin(config: TrainConfig) -> dict[str, Any]:
    """What decides the answers: settings and the content of the prompt files."""
    names = (
        "model", "seed", "max_prompts", "variations", "instructions", "few_shot_share", "few_shot", "temperatures", "top_p",
        "max_tokens", "heldout", "shard_size",
    )  # fmt: skip
    hashes = {Path(file).name: _sha256(Path(file).expanduser()) for file in config.prompts}
    origin: dict[str, Any] = json.loads(json.dumps({"settings": {n: getattr(config, n) for n in names}, "prompt_files": hashes}))
    return origin


def _check_origin(folder: Path, origin: dict[str, Any]) -> None:
    """Refuses to mix answers of different origin in one folder.

    Raises:
        InvalidInputError: the folder holds others.
        CheckpointError: its provenance cannot be read.
    """
    path = folder / PROVENANCE
    if not path.exists():
        return
    try:
        then = json.loads(path.read_text())
        settings, files = then["settings"], then["prompt_files"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); delete {folder} to write the answers again") from error
    changed = [name for name, value in origin["settings"].items() if settings.get(name) != value]
    if files != origin["prompt_files"]:
        changed.append("prompts")
    if changed:
        raise InvalidInputError(
            f"{folder} holds answers that were written with another {changed[0].replace('_', '-')}; give the same settings to go on"
            " with them, or another --out"
        )


def _versions(decoder: SpecDecoder) -> dict[str, str]:
    """What wrote the answers."""
    return {
        "command": shlex.join(["specdec", *sys.argv[1:]]),
        "specdec": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "target": decoder.verifier.name,
        "dtype": str(decoder.verifier.dtype).removeprefix("torch."),
        "device": str(decoder.verifier.device),
    }


def _write_bytes(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
