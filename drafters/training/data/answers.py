"""The first stage: the target writes the answers that its drafter learns from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from drafters.training.config import TrainConfig
from drafters.training.data.own import Own, chained, own_answers, tokenized, write_own
from drafters.training.data.prompts import PromptSet, TrainingPrompt, few_shot_text, make_prompts
from drafters.training.data.rows import Messages
from drafters.training.data.self_prompts import read_self_prompts
from drafters.training.data.shards import (
    Row,
    Say,
    fill_shards,
    missing_shards,
    plan_shards,
    stable_seed,
)
from drafters.training.data.source import Source
from drafters.training.provenance import check_origin, origin_of, write_origin
from specdec.base.errors import InvalidInputError
from specdec.sampling.params import SamplingParams
from specdec.session.outputs import GenerationResult

FEW_SHOT_STOP = "Question:"
"""Where a few-shot answer ends, as in lm-eval."""
TEMPLATE_BYTES = 1024
"""Room for what a chat template adds, system message included, when lengths are estimated."""
_SETTINGS = (
    "model", "chat_template", "chat_template_kwargs",
    "seed", "max_prompts", "variations", "self_prompts", "few_shot_share", "few_shot",
    "temperatures", "top_p", "max_tokens", "heldout", "heldout_temperature", "shard_size",
)  # fmt: skip


def sampling_of(
    config: TrainConfig, temperature: float, seed: int, few_shot: bool
) -> SamplingParams:
    """How an answer is drawn, and drawn again."""
    top_p = config.top_p if temperature > 0 else 1.0
    stop = (FEW_SHOT_STOP,) if few_shot else ()
    return SamplingParams(
        max_tokens=config.max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop
    )


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to be written.

    Attributes:
        prompt: what is asked.
        temperature, seed: of the sampling.
        said: what the target answered to the turns before, of which `rows` are the records.
    """

    prompt: TrainingPrompt
    temperature: float
    seed: int
    said: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()

    @property
    def messages(self) -> Messages:
        """The chat, up to the turn to be answered."""
        pairs = zip(self.said, self.prompt.later, strict=False)
        later = [one for answer, turn in pairs for one in (("assistant", answer), ("user", turn))]
        return (*self.prompt.messages, *later)


def write_answers(
    config: TrainConfig,
    load_source: Callable[[], Source],
    say: Say,
    *,
    rank: int = 0,
    world: int = 1,
) -> bool:
    """Writes all answers that are missing.

    Args:
        config: the run.
        load_source: gives the target when something is missing.
        say: told about the progress.
        rank, world: this process of those that torchrun started; each writes every `world`-th file.

    Returns:
        Whether all answers of this process are there; False when `stop_after` ended it.

    Raises:
        InvalidInputError: the folder holds answers of other settings, or a prompt does not fit.
        CapacityError: the disk is full; finished shards are kept.
        SpecDecError: the target fails.
    """
    folder, own = config.folder / "answers", list[Own]()
    if config.answers_from:
        prompts, own = own_answers(config)
    else:
        prompts = make_prompts(config, read_self_prompts(config))
    shards = plan_answers(config, prompts)
    origin = origin_of(config, _SETTINGS)
    check_origin(folder, origin)
    missing = missing_shards(folder, shards, rank, world)
    brought = missing_shards(folder, plan_shards("train", own, config.shard_size), rank, world)
    if not missing and not brought:
        return True
    source = load_source()
    writer = _Writer(config, source, prompts)
    writer.check_lengths(missing)
    if rank == 0:
        write_origin(folder, origin | source.origin)
    write_own(source, folder, brought, say)
    complete = fill_shards(
        source.answers,
        folder,
        missing,
        start=writer.start,
        record=writer.record,
        say=say,
        title="answers",
        minutes=config.stop_after,
    )
    if complete and writer.num_skipped:
        say(
            f"answers: {writer.num_skipped} prompts did not fit the target's context and were left"
            f" out"
        )
    return complete


def plan_answers(config: TrainConfig, prompts: PromptSet) -> dict[str, Sequence[Job]]:
    """File names and the answers each holds, held-out ones first; seeds are a prompt's own."""

    def job(prompt: TrainingPrompt, temperature: float, sample: int) -> Job:
        seed = stable_seed(config.seed, sample, prompt.source, prompt.question)
        return Job(prompt, temperature, seed)

    drawn = (config.heldout_temperature,) if config.heldout_temperature > 0 else ()
    heldout = [
        job(prompt, temperature, i)
        for i, temperature in enumerate((0.0, *drawn))
        for prompt in prompts.heldout
    ]
    # All answers to a prompt in a row: the engine finds the prompt in its cache.
    train = [
        job(prompt, temperature, i)
        for prompt in prompts.train
        for i, temperature in enumerate(config.temperatures)
    ]
    shards = plan_shards("heldout", heldout, config.shard_size)
    return shards | plan_shards("train", train, config.shard_size)


class _Writer:
    """Turns jobs into prompts."""

    def __init__(self, config: TrainConfig, source: Source, prompts: PromptSet) -> None:
        self.config, self.source, self.prompts = config, source, prompts
        self.limit = source.max_model_len - 1
        self.num_skipped = 0
        self._last: tuple[TrainingPrompt, list[int]] | None = None

    def check_lengths(self, shards: Mapping[str, Sequence[Job]]) -> None:
        """Refuses a prompt that is too long before any work starts.

        Raises:
            InvalidInputError: one is, and such prompts may not be left out.
        """
        if self.config.skip_long:
            return
        # A token is at least one byte, so only prompts with many bytes need a look.
        for job in (job for jobs in shards.values() for job in jobs):
            prompt = job.prompt
            texts = [text for _, text in prompt.messages]
            if prompt.few_shot:
                texts = [self._few_shot_text(prompt)]
            if sum(len(text.encode()) for text in texts) + TEMPLATE_BYTES > self.limit:
                self._fits(job, self._tokenize(job))

    def start(self, job: Job) -> tuple[list[int], SamplingParams] | None:
        """Prompt and sampling of an answer; None when its prompt is too long and left out."""
        prompt_ids = self._tokenize(job)
        if not self._fits(job, prompt_ids):
            self.num_skipped += 1
            return None
        how = job.temperature, job.seed, job.prompt.few_shot
        return prompt_ids, sampling_of(self.config, *how)

    def _fits(self, job: Job, prompt_ids: list[int]) -> bool:
        """Whether the target can answer the prompt with 2 tokens at least."""
        if len(prompt_ids) < self.limit or self.config.skip_long:
            return len(prompt_ids) < self.limit
        raise InvalidInputError(
            f"{job.prompt.source} has {len(prompt_ids)} tokens and the target's context is"
            f" {self.limit + 1} for prompt and answer;"
            " shorten it, or leave such prompts out with --skip-long"
        )

    def record(self, result: GenerationResult, job: Job) -> tuple[list[Row], Job | None]:
        """What an answer leaves in its file, and the job of the user's next turn, if any."""
        row: Row = {
            "prompt_ids": result.prompt_token_ids, "answer_ids": result.token_ids,
            "source": job.prompt.source, "template": "few-shot" if job.prompt.few_shot else "chat",
            "temperature": job.temperature, "seed": job.seed, "finish_reason": result.finish_reason,
        }  # fmt: skip
        rows = chained(job.rows, row)
        if len(job.said) == len(job.prompt.later) or result.finish_reason != "stop":
            return rows, None
        text = self.source.tokenizer.decode(result.token_ids, skip_special_tokens=True)
        seed = stable_seed(job.seed, "turn", len(job.said) + 1)
        following = Job(job.prompt, job.temperature, seed, (*job.said, text), tuple(rows))
        fits = len(self._tokenize(following)) < self.limit
        return rows, following if fits else None

    def _tokenize(self, job: Job) -> list[int]:
        prompt = job.prompt
        if prompt.token_ids:
            return list(prompt.token_ids)
        if job.said:
            return tokenized(self.source, job.messages, prompt.source)
        # a prompt's answers come one after the other
        if self._last is None or self._last[0] is not prompt:
            if prompt.few_shot:
                ids = self.source.tokenize(self._few_shot_text(prompt))
            else:
                ids = tokenized(self.source, job.messages, prompt.source)
            self._last = prompt, ids
        return list(self._last[1])

    def _few_shot_text(self, prompt: TrainingPrompt) -> str:
        """Worked examples of the prompt's own choice, none of them the prompt itself."""
        random = Random(stable_seed(self.config.seed, 0, prompt.source, prompt.question))
        drawn = random.sample(self.prompts.examples, self.config.few_shot + 1)
        others = [example for example in drawn if example.question != prompt.question]
        return few_shot_text(others[: self.config.few_shot], prompt.question)
