"""The training loop: random anchors, the target's features online, one step after the other."""

import math
import signal
import time
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from drafters.dflash.layers import compile_layer
from drafters.dflash.model import DFlashModel
from drafters.training.config import TrainConfig
from drafters.training.data.dataset import AnswerSet
from drafters.training.families.choice import TrainedModel, trained
from drafters.training.log import TrainLog
from drafters.training.loss.blocks import (
    FLEX_CONTEXT,
    Blocks,
    SequenceBatch,
    make_blocks,
    next_anchors,
    sample_anchors,
)
from drafters.training.loss.evaluate import ReplayResult, replay
from drafters.training.loss.losses import ChunkedLoss, LossConfig, default_gamma
from drafters.training.loss.objective import Objective
from drafters.training.loss.packing import Packing
from drafters.training.loss.sharding import is_sharded, shard
from drafters.training.loss.vocabulary import DraftLabels, fingerprint
from drafters.training.optimizer import MasterOptimizer, lr_factor
from drafters.training.processes import termination
from drafters.training.provenance import alike
from drafters.training.state import load_state, save_state
from drafters.training.target import Target
from specdec.base.errors import InvalidInputError, SpecDecError
from specdec.base.writing import make_folder

FREE_TO_CHANGE = {
    "out", "device", "stop_after", "mask_path", "compile", "loss_rows", "log_every", "eval_every",
    "save_every", "attention", "kv_memory", "max_num_seqs", "shard_size", "skip_long", "tolerance",
    "finish_prompts", "epochs", "max_steps", "max_minutes", "prompts", "answers_from",
    "answer_server", "init", "accumulation", "shard",
}  # fmt: skip
"""Options that change a resumed run's speed or its end, not what it computes."""
_MANY = 4  # passes over the answers behind which tau rises little


class Trainer:
    """Trains one drafter for one target.

    Args:
        config: the run.
        model: the drafter; it moves to the target's device and type.
        target: the frozen target.
        train: answers to train on.
        heldout: the target's greedy answers, for tau.

    A state in the run's folder is taken over, so that the loss goes on as if nothing had happened.

    Raises:
        InvalidInputError: the state belongs to other settings, or the batch cannot be split.
        CheckpointError: the state is damaged.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: TrainedModel,
        target: Target,
        train: AnswerSet,
        heldout: AnswerSet,
    ) -> None:
        self.config, self.target, self.train, self.heldout = config, target, train, heldout
        joined = dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        if config.batch_size % (config.accumulation * self.world):
            raise InvalidInputError(
                f"batch-size is {config.batch_size}; it must be a multiple of accumulation x"
                f" processes, {config.accumulation} x {self.world}"
            )
        model.to(target.device)  # the masters take the weights before they are rounded
        sharded = config.shard and self.world > 1
        if sharded:
            assert isinstance(model, DFlashModel), "no other family divides its weights"
            shard(model, target.dtype)
        self.optimizer = MasterOptimizer(
            model,
            lr=config.lr,
            weight_decay=config.weight_decay,
            clip=config.clip,
            kind=config.optimizer,
            ema=config.ema,
        )
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not (sharded and is_sharded(name)) and tensor.is_floating_point():
                tensor.data = tensor.data.to(target.dtype)
        self.model, self.drafter = model, trained(model, target, config)
        gamma = config.gamma or default_gamma(model.config.block_size)
        factors = ("ce", "kl", "tv", "nla", "selector", "confidence", "base_until", "base_share")
        shared = (*factors, "dpace_alpha", "dpace_candidates", "first_error", "head_loss")
        decays = config.loss != "dpace"
        decay = gamma if decays else None
        losses = LossConfig(gamma=decay, **{name: getattr(config, name) for name in shared})
        self._labels = DraftLabels(model.d2t, target.verifier.vocab_size)
        self.objective = Objective(
            self.drafter.logits,
            losses,
            head=self.drafter.head,
            teacher=target.head,
            columns=self._labels.columns,
        )
        compiled = config.compile and self.drafter.compiles
        self.loss = ChunkedLoss(
            self.objective, rows=config.loss_rows, weights=self.drafter.weights, compile=compiled
        )
        for layer in self.drafter.layers if config.compile and not sharded else ():
            compile_layer(layer)
        self.step, self.seconds = 0, 0.0  # of the steps of all runs, up to the last line
        self.tau: float | None = None
        self.replays: list[ReplayResult] = []  # of the held-out answers, in this run
        self._best_tau = 0.0  # of this run
        self._generator = torch.Generator(target.device)
        self._steps_per_epoch = max(len(train) // config.batch_size, 1)
        self._epoch: tuple[int, list[list[int]], Tensor, list[Packing]] | None = None
        self._folder = config.folder / "training"
        state = load_state(self._folder, torch.device("cpu"))  # each process keeps a part of it
        if state is not None:
            self._resume(state)

    @property
    def progress(self) -> float:
        """How much of the run is done, in [0, 1]; by the clock when minutes limit it."""
        if self.config.max_minutes is not None:
            return min(self.seconds / (60 * self.config.max_minutes), 1.0)
        return min(self.step / self._num_steps, 1.0)

    @property
    def _num_steps(self) -> int:
        return self.config.max_steps or max(round(self.config.epochs * self._steps_per_epoch), 1)

    def run(self) -> bool:
        """Trains until the end, or until it is told to stop; the state is saved either way.

        Returns:
            Whether the run is complete.

        Raises:
            KeyboardInterrupt: by Ctrl-C, behind the save.
            SpecDecError: the loss is not finite, or the state cannot be written.
        """
        if self.progress >= 1:
            return True
        config = self.config
        make_folder(self._folder)
        log = TrainLog(self._folder, last_step=self.step, quiet=self.rank > 0)
        stop_at = time.perf_counter() + 60 * (config.stop_after or math.inf)
        late = False  # told behind steps, so that every run gets some
        try:
            with termination() as stopping:
                if config.compile or self.drafter.flex:
                    self._compile(log)
                if self.tau is None:
                    log.say(f"train: measures tau on {len(self.heldout)} held-out answers first")
                    self._evaluate(log, {"step": 0, "minutes": 0.0})
                    self._save()
                last_save = last_eval = self.seconds
                while self.progress < 1 and not self._agreed(bool(stopping) or late):
                    row = self.steps(config.log_every)
                    late = time.perf_counter() >= stop_at
                    done = self.progress >= 1
                    if self.seconds - last_eval >= 60 * config.eval_every and not done:
                        self._evaluate(log, row)
                        last_eval = self.seconds
                    else:
                        log.write(row, self.progress)
                    if self.seconds - last_save >= 60 * config.save_every and not done:
                        self._save()
                        last_save = self.seconds
            if self.progress >= 1:
                self._evaluate(log, {"step": self.step, "minutes": self.seconds / 60})
                log.close()  # a complete run that is killed behind its save draws nothing any more
            self._save()
            if signal.SIGINT in stopping:
                raise KeyboardInterrupt
        finally:
            log.close()
        return self.progress >= 1

    def steps(self, count: int) -> dict[str, Any]:
        """Runs up to `count` steps without waiting for the device, then reads how they went."""
        started, first = time.perf_counter(), self.step
        totals = torch.zeros(4, device=self.target.device)
        norm = torch.zeros((), device=self.target.device)
        factor = 0.0
        timed = self.config.max_minutes is not None
        while self.step < first + count and (timed or self.step < self._num_steps):
            factor = lr_factor(
                self._step_progress(),
                warmup=self.config.warmup,
                floor=self.config.min_lr,
                linear=self.config.schedule == "linear",
            )
            self.objective.move(self._step_progress())
            weight_sum = torch.zeros((), device=self.target.device)
            for micro in range(self.config.accumulation):
                weight_sum += self._forward_backward(micro, totals)
                self.optimizer.accumulate()
            norm = self.optimizer.step(weight_sum, factor)
            self.step += 1
        if self.world > 1:
            dist.all_reduce(totals)
        loss, weight, blocks, accepted = totals.tolist()
        grad_norm = norm.item()
        seconds = self._from_first(time.perf_counter() - started)
        self.seconds += seconds
        if not (math.isfinite(loss) and math.isfinite(grad_norm) and self.optimizer.finite()):
            raise SpecDecError(
                f"the loss is not finite after step {self.step}; the state of the last save is"
                " kept, so run again with a lower --lr or --dtype float32"
            )
        return {
            "step": self.step,
            "minutes": self.seconds / 60,
            "epoch": self.step / self._steps_per_epoch,
            "loss": loss / max(weight, 1e-9),
            "train_tau": 1 + accepted / max(blocks, 1),
            "lr": self.config.lr * factor,
            "grad_norm": grad_norm,
            "sequences_per_second": (self.step - first) * self.config.batch_size / seconds,
        }

    def _compile(self, log: TrainLog) -> None:
        """Compiles before the clock of the steps runs: a forward and backward of each length."""
        started, step = time.perf_counter(), self.step
        batches, _, packings = self._batches(0)
        longest = map(self.train.longest, batches)
        shapes: dict[Any, int] = {-(-n // FLEX_CONTEXT): step for step, n in enumerate(longest)}
        if packings:
            first = packings[:: self.config.accumulation]
            shapes = {packing.slots.shape: step for step, packing in enumerate(first)}
        log.say(f"train: compiles for {len(shapes)} shapes; the first takes a minute or two")
        self.objective.move(self._step_progress())
        for self.step in shapes.values():
            self._forward_backward(0, torch.zeros(4, device=self.target.device))
        self.step = step
        self.model.zero_grad()
        log.say(f"train: compiled in {time.perf_counter() - started:.0f} s")

    def _step_progress(self) -> float:
        """Progress at the middle of the step to come, or the first learning rate were 0."""
        if self.config.max_minutes is not None:
            return max(self.progress, 1e-3)
        return (self.step + 0.5) / self._num_steps

    def _forward_backward(self, micro: int, totals: Tensor) -> Tensor:
        """Leaves the summed loss's gradient, adds to `totals`; returns the weights' sum."""
        batch, share = self.batch(micro)
        features, final_hidden = self.target.features(batch)
        # Drawn for the whole batch, so that a step is the same however it is split.
        self._generator.manual_seed(hash((self.config.seed, self.step)) % 2**63)
        width = batch.token_ids.shape[1]
        scores = torch.rand(
            self.config.batch_size, width, device=features.device, generator=self._generator
        )
        context = self.drafter.context(batch, features)
        count, num_rows = self.config.anchors, self.model.config.max_draft_tokens
        replayed = min(round(count * self.config.replay), count - 1)
        anchors, valid = sample_anchors(batch, count - replayed, scores[share])
        blocks = make_blocks(batch, anchors, valid, num_rows=num_rows)
        seen = batch, context, features, final_hidden
        loss, weight, matches = self._loss(blocks, *seen)
        accepted = matches.cumprod(dim=-1).sum(dim=-1)
        told = [valid.sum().float(), accepted.sum().float()]
        while replayed:
            anchors, valid = next_anchors(blocks, accepted.view_as(blocks.anchors), batch)
            some = slice(min(replayed, anchors.shape[1]))
            blocks = make_blocks(batch, anchors[:, some], valid[:, some], num_rows=num_rows)
            part, part_weight, matches = self._loss(blocks, *seen)
            accepted = matches.cumprod(dim=-1).sum(dim=-1)
            loss, weight = loss + part, weight + part_weight
            replayed -= anchors[:, some].shape[1]
        torch.autograd.backward(loss)
        totals += torch.stack([loss.detach(), weight, *told])
        return weight

    def _loss(
        self,
        blocks: Blocks,
        batch: SequenceBatch,
        context: Any,
        features: Tensor,
        final_hidden: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, its weight and the matches of blocks; see `ChunkedLoss`."""
        hidden = self.drafter.hidden(batch, blocks.anchors, context)
        teacher = None
        if self.config.uses_teacher:
            # The target's distribution for the token at position p is what it says at position p -
            # 1.
            first = blocks.anchors[:, :, None]
            before = first + torch.arange(blocks.labels.shape[2], device=hidden.device)
            rows = before.flatten(1).minimum(batch.lengths[:, None] - 1)
            teacher = batch.at(final_hidden, rows).view(*before.shape, -1).flatten(0, 1)
        parts = (blocks.labels, blocks.valid, blocks.previous)
        labels, valid_rows, previous = (part.flatten(0, 1) for part in parts)
        labels, valid_rows = self._labels(labels, valid_rows)
        told = self.drafter.before(batch, features, blocks.anchors)
        told = None if told is None else told.flatten(0, 1)
        return self.loss(hidden.flatten(0, 1), labels, valid_rows, previous, teacher, told)

    def batch(self, micro: int) -> tuple[SequenceBatch, slice]:
        """Sequences of a forward, padded as the whole batch, and their place in it."""
        epoch, position = divmod(self.step, self._steps_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, *self._batches(epoch))
        _, batches, on_device, packings = self._epoch
        share, chosen = self._share(micro), batches[position]
        own = chosen[share]
        batch = self.train.take(own, on_device[position, share], self.train.longest(chosen))
        if packings:
            batch.packing = packings[position * self.config.accumulation + micro]
        return batch, share

    def _share(self, micro: int) -> slice:
        """What this process takes of a batch in a forward."""
        size = self.config.batch_size // (self.config.accumulation * self.world)
        start = (micro * self.world + self.rank) * size
        return slice(start, start + size)

    def _batches(self, epoch: int) -> tuple[list[list[int]], Tensor, list[Packing]]:
        """Batches of an epoch, on host and device, and how this process packs its shares."""
        config, device = self.config, self.target.device
        seed = hash((config.seed, epoch))
        batches = self.train.epoch(seed, config.batch_size, mixed=config.pack_length > 0)
        packings = list[Packing]()
        if config.pack_length:
            shares = [self._share(micro) for micro in range(config.accumulation)]
            lengths = [
                [self.train.lengths[i] for i in b[share]] for b in batches for share in shares
            ]
            packings = Packing.of(lengths, config.pack_length, device)
        return batches, torch.tensor(batches).to(device), packings

    def _evaluate(self, log: TrainLog, row: dict[str, Any]) -> None:
        """Writes `row` with tau; all processes evaluate, so that none runs into a timeout."""
        started = time.perf_counter()
        with self.optimizer.averaged():
            result = replay(self.model, self.target, self.heldout, self.config)
        self.replays.append(result)
        self.tau = result.tau(sampled=0.0 not in result.temperatures)
        rates = " ".join(f"{rate:.2f}" for rate in result.row_rates)
        figures = result.figures()
        tree = next((str(shape) for shape in result.shapes if shape.is_tree), None)
        sampled = f"sampled {tree or result.shapes[0]}"
        trees = {"tree": figures.get(tree or ""), "sampled": figures.get(sampled)}
        log.write(row | {"tau": self.tau, "row1": result.row_rates[0]} | trees, self.progress)
        taus = ", ".join(f"{name}: {tau:.3f}" for name, tau in figures.items())
        recall = " ".join(f"{rate:.2f}" for rate in result.recall)
        took = time.perf_counter() - started
        about = f"tau on {len(self.heldout)} held-out answers by drafts"
        log.say(f"step {self.step}: {about}: {taus} ({took:.0f} s)")
        log.say(f"  accepted up to row: {rates}; held by the candidates: {recall}")
        passes = self.step / self._steps_per_epoch
        if self.tau <= self._best_tau and passes >= _MANY:
            log.say(
                f"  tau no longer rises, and all answers have been seen {passes:.0f} times: more"
                f" answers will help, not more steps"
            )
        self._best_tau = max(self.tau, self._best_tau)

    def _save(self) -> None:
        optimizer = self.optimizer.state_dict()  # of all processes
        if self.rank == 0:
            state = {
                "optimizer": optimizer, "step": self.step, "seconds": self.seconds,
                "complete": self.progress >= 1, "tau": self.tau, "identity": self._identity(),
                "d2t": None if self.model.d2t is None else self.model.d2t.cpu(),
            }  # fmt: skip
            save_state(self._folder, state)

    def _resume(self, state: dict[str, Any]) -> None:
        """Takes over a saved state."""
        now, then = self._identity(), state["identity"]
        changed = sorted(name for name in now if not alike(name, now[name], then.get(name)))
        if changed:
            name = changed[0]
            raise InvalidInputError(
                f"{self._folder} holds a run with {name.replace('_', '-')} {then.get(name)}, not"
                f" {now[name]}; give the same settings to resume it, or another --out"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.tau = state["step"], state["seconds"], state["tau"]

    def _identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one that was killed."""
        settings = {
            name: value for name, value in asdict(self.config).items() if name not in FREE_TO_CHANGE
        }
        count = len(self.train)
        answers = {"number of answers": count, "draft tokens": fingerprint(self.model.d2t)}
        return settings | {"drafter": repr(self.model.config)} | answers

    def _from_first(self, value: float) -> float:
        """The first process's value, for all: clocks differ."""
        if self.world == 1:
            return value
        shared = torch.tensor(value, device=self.target.device, dtype=torch.float64)
        dist.broadcast(shared, 0)
        return shared.item()

    def _agreed(self, stop: bool) -> bool:
        """Whether the first process wants to stop."""
        return bool(self._from_first(float(stop)))
