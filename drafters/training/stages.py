"""The stages of a run: answers, train, finish; each goes on from what is in the run's folder."""

import gc
import sys
from functools import cache
from typing import Any

import torch
from torch import distributed as dist

from drafters.dflash.model import DFlashModel
from drafters.training.config import TrainConfig
from drafters.training.data.answers import write_answers
from drafters.training.data.dataset import Answer, AnswerSet
from drafters.training.data.documents import answers_of, documents_run, write_documents
from drafters.training.data.self_prompts import write_self_prompts
from drafters.training.data.source import Source
from drafters.training.families.choice import TrainedModel, takes_stack, trained
from drafters.training.finish import Agreement, engine_run, write_report
from drafters.training.loss.evaluate import replay, shapes_of
from drafters.training.loss.vocabulary import give_vocabulary, most_frequent
from drafters.training.processes import process_group
from drafters.training.shape import make_drafter
from drafters.training.state import load_state, load_weights
from drafters.training.target import Target
from drafters.training.trainer import Trainer
from drafters.vocabulary import target_ids
from specdec.base.config import CacheConfig, EngineConfig, LoadConfig
from specdec.base.errors import CheckpointError, InvalidInputError
from specdec.base.registry import VERIFIERS, resolve
from specdec.device.device import resolve_device, resolve_dtype
from specdec.session.decoder import SpecDecoder

PREFILL_TOKENS = 8192
"""Per engine step of the answers stage: a full batch matters, a smooth stream does not."""


def run_stages(stages: tuple[str, ...], config: TrainConfig) -> bool:
    """Runs stages in order.

    Returns:
        Whether all of them are complete; False when `stop_after` or a termination signal ended one.

    Raises:
        SpecDecError: an input is wrong, the disk is full, the loss is not finite, or tau in the
            engine is not that of training.
    """
    with process_group(resolve_device(config.device)) as device:
        if "finish" in stages and dist.is_initialized() and (count := dist.get_world_size()) > 1:
            what = f"the finish stage runs in one process and this run has {count}"
            way_out = "give them the stages answers and train, then run finish without torchrun"
            raise InvalidInputError(f"{what}; {way_out}")
        for stage in stages:
            # None goes on before all have finished: the next stage reads what they have written.
            run = {"answers": _answers, "train": _train, "finish": _finish}[stage]
            complete = _everywhere(run(config, device), device)
            # a model and its hooks refer to each other, and the next stage needs the memory
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if not complete:
                say(f"{stage}: stopped as asked; the same command goes on from here")
                return False
    return True


def say(text: str) -> None:
    """A line for the user."""
    print(text, file=sys.stderr, flush=True)


def _answers(config: TrainConfig, device: torch.device) -> bool:
    cache_config = CacheConfig(memory_bytes=config.kv_memory)
    engine = EngineConfig(
        max_num_seqs=config.max_num_seqs, max_prefill_tokens=PREFILL_TOKENS, cache=cache_config
    )

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    @cache
    def load_source() -> Source:
        if config.answer_server is not None:
            return Source.of_server(
                config.answer_server,
                config.model,
                max_model_len=config.max_length,
                at_once=config.max_num_seqs,
                load=LoadConfig(
                    chat_template=config.chat_template,
                    chat_template_kwargs=config.chat_template_kwargs,
                ),
            )
        decoder = SpecDecoder.from_pretrained(
            config.model,
            drafter=None,  # large batches gain nothing from one
            device=str(device),
            dtype=config.dtype,
            attention=config.attention,
            chat_template=config.chat_template,
            chat_template_kwargs=config.chat_template_kwargs,
            engine=engine,
        )
        # What cannot work must not wait for the answers.
        make_drafter(config, decoder.verifier, decoder.tokenizer)
        if rank == 0 and not decoder.reader.has_template:
            text = f"answers: {config.model!r} has no chat template"
            say(f"{text}, so it goes on with prompts as plain text")
        return Source.of_engine(decoder)

    where = {"rank": rank, "world": world}
    if config.self_prompts:
        written = write_self_prompts(config, load_source, say, **where)
        if not _everywhere(written, device):
            return False
    complete = write_answers(config, load_source, say, **where)
    if not config.documents:
        return complete
    if not _everywhere(complete, device):
        return False
    if rank == 0:
        write_documents(
            config, lambda ids: load_source().tokenizer.decode(ids, skip_special_tokens=True)
        )
    _everywhere(True, device)
    return write_answers(documents_run(config), load_source, say, **where)


def _everywhere(complete: bool, device: torch.device) -> bool:
    """Whether `complete` holds in all processes; waits for them."""
    flag = torch.tensor(int(complete), device=device)
    if dist.is_initialized():
        dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def _train(config: TrainConfig, device: torch.device) -> bool:
    verifier, tokenizer = load_target(config, device)
    model = make_drafter(config, verifier, tokenizer)
    target = Target(
        verifier,
        model.config.target_layer_ids,
        distribution=config.uses_teacher,
        compile=config.compile,
    )
    train = answer_set(config, model, answers_of(config, "train"), device, config.max_length)
    # long ones included: the engine has to draft for them too
    longest = verifier.max_model_len
    heldout = answer_set(config, model, answers_of(config, "heldout"), device, longest)
    count = model.config.draft_vocab_size
    if isinstance(model, DFlashModel) and config.init is None and count is not None:
        tokens, share = most_frequent(train, count, verifier.vocab_size)
        give_vocabulary(model, verifier, tokens)
        say(f"train: {count:,} tokens can be drafted, {share:.2%} of those of the answers")
    trainer = Trainer(config, model, target, train, heldout)
    if trainer.rank == 0:
        size = sum(parameter.numel() for parameter in model.parameters())
        say(
            f"train: {size / 1e6:.1f} M parameters, {len(train):,} answers, {len(heldout)} held"
            f" out; left out: {train.num_too_long} too long, {train.num_too_short} too short,"
            f" {train.num_masked} with the mask token"
        )
        length = -(-max(train.lengths) // config.bucket) * config.bucket
        if config.pack_length:
            length = -(-sum(train.lengths) // len(train))
        needs = trainer.drafter.memory(length, trainer.world)
        say(f"train: {needs} on each device; --accumulation and --loss-rows lower the last two")
        if trainer.step:
            say(f"train: resumed at step {trainer.step}")
    return trainer.run()


def _finish(config: TrainConfig, device: torch.device) -> bool:
    stored = [a for a in answers_of(config, "heldout") if len(a.answer_ids) >= 2]
    greedy, drawn = (
        [a for a in stored if (a.temperature > 0) == sampled][: config.finish_prompts]
        for sampled in (False, True)
    )
    verifier, tokenizer = load_target(config, device)
    model = make_drafter(config, verifier, tokenizer)
    target = Target(verifier, model.config.target_layer_ids, distribution=config.uses_teacher)
    state = load_state(config.folder / "training", device)
    if state is None:
        what = f"{config.folder / 'training'} holds no trained drafter"
        raise CheckpointError(f"{what}; run the train stage first")
    if not state["complete"]:
        say(f"finish: training stopped at step {state['step']}, before its end")
    if isinstance(model, DFlashModel) and config.init is None and state.get("d2t") is not None:
        give_vocabulary(model, verifier, target_ids(state["d2t"].cpu()))
    load_weights(model, state)
    model.to(device, target.dtype)
    drafter = trained(model, target, config)
    folder, *others = drafter.export(config.folder)
    vocab_size = model.config.draft_vocab_size or verifier.vocab_size
    draws = drafter.draws_trees and not target.tree_reasons
    chain, *trees = shapes_of(model.config.max_draft_tokens, vocab_size, trees=draws)
    if target.tree_reasons:
        say(f"finish: drafts are checked in chains alone: {'; '.join(target.tree_reasons)}")
    sampled = trees[0] if trees else chain
    runs = [(greedy, chain), *((greedy, shape) for shape in trees[:1]), (drawn, sampled)]
    agreements = {}
    for answers, shape in (run for run in runs if run[0]):
        tau, answered = engine_run(config, folder, answers, shape)
        heldout = answer_set(config, model, answered, verifier.device, verifier.max_model_len)
        name = f"{'sampled ' * (answers is drawn)}{shape}"
        replayed = replay(model, target, heldout, config).tau(shape, sampled=answers is drawn)
        pairs = zip(answered, answers, strict=True)
        same = sum(a.answer_ids == list(b.answer_ids) for a, b in pairs) / len(answers)
        agreements[name] = Agreement(replayed, tau, same)
        text = f"finish: drafts {name}: tau {replayed:.3f} in training, {tau:.3f} in the engine"
        say(f"{text}; {same:.0%} of answers as before")
    about = {
        "step": state["step"], "num_prompts": len(greedy), "max_tokens": config.max_tokens,
        "num_draft_tokens": model.config.max_draft_tokens, "target": config.model,
        "dtype": str(target.dtype).removeprefix("torch."), "device": str(device),
    }  # fmt: skip
    report = write_report(config, agreements, about)
    for name, agreement in agreements.items():
        agreement.check(config.tolerance, name)
    if drafter.unwritten:
        say(f"finish: not written in the layout of speculators: {drafter.unwritten}")
    say(
        f"finish: the drafter is {' and, for other programs, '.join(map(str, [folder, *others]))};"
        f" figures: {report}"
    )
    return True


def load_target(config: TrainConfig, device: torch.device) -> tuple[Any, Any]:
    """The target in a form of its own: training may change its attention and drop layers.

    Raises:
        InvalidInputError: no gradient goes through its output head.
        CheckpointError: see `specdec.base.registry.VERIFIERS`.
    """
    load = resolve(VERIFIERS, "hf", "verifier")
    where = {"device": device, "dtype": resolve_dtype(config.dtype, device)}
    fuse = takes_stack(config.init)
    options = {"attention": config.attention, "fuse": fuse, "generation_config": None}
    verifier, tokenizer = load(config.model, **where, **options)
    row = torch.zeros(1, verifier.hidden_size, dtype=verifier.dtype, device=verifier.device)
    if not verifier.head(row.requires_grad_()).requires_grad:
        raise InvalidInputError(
            f"the output head of {verifier.name!r} is stored in fewer bits than a gradient goes"
            f" through; train beside its checkpoint in plain numbers"
        )
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    return verifier, tokenizer


def answer_set(
    config: TrainConfig,
    model: TrainedModel,
    answers: list[Answer],
    device: torch.device,
    max_length: int,
) -> AnswerSet:
    """Answers of at most `max_length` tokens, prompt included, without the drafter's mask."""
    mask, bucket = model.config.mask_token_id, config.bucket
    return AnswerSet(
        answers, device=device, max_length=max_length, bucket=bucket, mask_token_id=mask
    )
