"""Prompts that the target writes itself: it goes on with a user's turn as users would.

The method is Magpie's (Xu et al., arXiv 2406.08464). It needs no data, and reaches whatever the
target was taught to answer. Some turns are begun for it (`drafters.training.data.openings`).
"""

from collections.abc import Callable
from random import Random
from typing import Any

from drafters.training.config import TrainConfig
from drafters.training.data.openings import KINDS, opening
from drafters.training.data.shards import (
    Say,
    fill_shards,
    missing_shards,
    plan_shards,
    read_shard,
    stable_seed,
)
from drafters.training.data.source import Source
from drafters.training.provenance import check_origin, origin_of, write_origin
from specdec.base.errors import InvalidInputError
from specdec.sampling.params import SamplingParams
from specdec.session.outputs import GenerationResult

MAX_PROMPT_TOKENS = 256
TEMPERATURE = 0.9
"""At 1 a small target's prompts are often gibberish, at 0.8 they are often the same."""
_SETTINGS = (
    *("model", "chat_template", "chat_template_kwargs"),
    *("seed", "self_prompts", "opening_share", "openings", "shard_size"),
)
_MARK = "THE-PROMPT"


def write_self_prompts(
    config: TrainConfig,
    load_source: Callable[[], Source],
    say: Say,
    *,
    rank: int = 0,
    world: int = 1,
) -> bool:
    """Writes the prompts that are missing; arguments and result as of `write_answers`.

    Raises:
        InvalidInputError: no chat template, or the folder holds prompts of other settings.
        CapacityError: the disk is full; finished files are kept.
        SpecDecError: the target fails.
    """
    folder = config.folder / "prompts"
    shards = _plan(config)
    origin = origin_of(config, _SETTINGS)
    check_origin(folder, origin)
    missing = missing_shards(folder, shards, rank, world)
    if not missing:
        return True
    source = load_source()
    prefix, stop = user_turn(source)

    def begun(index: int) -> list[int]:
        encoded = source.tokenizer(_opening(config, index)[1], add_special_tokens=False)
        ids: list[int] = encoded["input_ids"]
        return ids

    def start(index: int) -> tuple[list[int], SamplingParams]:
        seed = stable_seed(config.seed, "prompt", index)
        sampling = SamplingParams(
            max_tokens=MAX_PROMPT_TOKENS, temperature=TEMPERATURE, seed=seed, stop_token_ids=stop
        )
        return [*prefix, *begun(index)], sampling

    def record(result: GenerationResult, index: int) -> tuple[list[dict[str, Any]], None]:
        token_ids = [*begun(index), *result.token_ids]
        text = source.tokenizer.decode(token_ids, skip_special_tokens=True).strip()
        said = source.tokenizer.decode(result.token_ids, skip_special_tokens=True).strip()
        whole = said and result.finish_reason == "stop"
        row = {"index": index, "kind": _opening(config, index)[0], "prompt": text}
        return [row] if whole else [], None

    if rank == 0:
        write_origin(folder, origin | source.origin)
    return fill_shards(
        source.answers,
        folder,
        missing,
        start=start,
        record=record,
        say=say,
        title="prompts",
        minutes=config.stop_after,
    )


def read_self_prompts(config: TrainConfig) -> list[str]:
    """The prompts that the target wrote, each once, without those that had no end.

    Raises:
        InvalidInputError: some are not written yet.
        CheckpointError: a file is damaged.
    """
    paths = [config.folder / "prompts" / name for name in _plan(config)]
    if not all(path.exists() for path in paths):
        what = f"{str(paths[0].parent)!r} lacks prompts of the target"
        raise InvalidInputError(f"{what}; run the answers stage again")
    texts = [
        text
        for path in paths
        for text in read_shard(path, lambda record: str(record["prompt"]), stage="answers")
    ]
    return list(dict.fromkeys(texts))


def user_turn(source: Source) -> tuple[list[int], tuple[int, ...]]:
    """Token ids before a user's first words in the chat template, and those behind them.

    Raises:
        InvalidInputError: there is no template, or it leaves the user's words out.
    """
    tokenizer = source.tokenizer
    if not source.reader.has_template:
        what = f"{source.name!r} has no chat template, so it cannot write a user's prompts"
        raise InvalidInputError(f"{what}; set self-prompts to 0")
    message = {"role": "user", "content": _MARK}
    text = source.reader.chat_text([message], {"add_generation_prompt": True})
    before, found, after = text.partition(_MARK)
    if not found:
        what = f"the chat template of {source.name!r} drops a user's words"
        raise InvalidInputError(f"{what}; set self-prompts to 0")
    sides = (before, after)
    prefix, suffix = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in sides)
    return prefix, tuple(token for token in suffix[:1] if token in tokenizer.all_special_ids)


def _opening(config: TrainConfig, index: int) -> tuple[str, str]:
    """Kind and beginning of prompt `index`: an opening, or nothing."""
    random = Random(stable_seed(config.seed, "opening", index))
    begun = random.random() < config.opening_share
    return opening(random, config.openings or KINDS) if begun else ("", "")


def _plan(config: TrainConfig) -> dict[str, Any]:
    return plan_shards("prompts", range(config.self_prompts), config.shard_size)
