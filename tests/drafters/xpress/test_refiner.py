"""XPress's head: its formulas row by row, the chain that a few passes make, trees and sampled
drafts of it, and the token before the anchor, which follows a run.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafters.choice import MAX_CANDIDATES
from drafters.dflash import drafts as drafting
from drafters.dflash.config.checkpoint import read_checkpoint
from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.config.config_json import config_json
from drafters.dflash.config.layout import Layout, parse_config
from drafters.dflash.drafter import BoundDFlash
from drafters.head import Refiner, left_sides
from drafters.training.loss.blocks import SequenceBatch, before_anchors, make_blocks
from drafters.training.loss.losses import LossConfig
from drafters.training.loss.objective import Objective
from drafters.xpress.refiner import XPressConfig
from specdec.base.blocks import BlockShape
from specdec.base.errors import CheckpointError
from specdec.model.core import AcceptOutput, VerifyOutput
from specdec.sampling.noise import Purpose, gumbel, stream
from tests.drafters.heads import ANCHORS, LENGTHS, block_rows, headed, with_head
from tests.drafters.tiny import (
    HIDDEN,
    TINY,
    VOCAB,
    FakeVerifier,
    Rig,
    drafted_paths,
    tiny_model,
    tiny_tensors,
    write_tiny_dflash,
)

HEAD = XPressConfig(rank=6, mlp_ratio=3, num_passes=4)
B, K = TINY.block_size, TINY.max_draft_tokens
BEFORE = tuple(length - 1 for length in LENGTHS)
"""The tokens before the anchors of `headed`."""

AUTHORS = {
    "w1.weight": [VOCAB, 6],
    "down_h.weight": [6, HIDDEN],
    "down_g.weight": [6, HIDDEN],
    "in_proj.weight": [6, 18],
    "mix.L": [6, B, B],
    "mlp.gate_proj.weight": [18, 6],
    "mlp.up_proj.weight": [18, 6],
    "mlp.down_proj.weight": [6, 18],
    "w2.weight": [VOCAB, 6],
}
"""The tensors of the authors' checkpoints below `xpress_head.`, as their converter writes them."""
SPECULATORS = dict(
    zip(
        ("token_embed.weight", "down_h.weight", "down_g.weight", "in_proj.weight", "mix_l",
         "mlp_gate.weight", "mlp_up.weight", "mlp_down.weight", "readout.weight"),
        AUTHORS.values(),
        strict=True,
    )
)  # fmt: skip
"""The same below `refiner_head.`, as speculators 0.9 has them."""


def xpress(**changes: Any) -> DFlashConfig:
    return with_head(replace(HEAD, **changes))


def weights(config: DFlashConfig) -> dict[str, Tensor]:
    """Random ones, under which tokens before and the whole block decide much."""
    factors = {"refiner_head.token_embed.weight": 12, "refiner_head.down_g.weight": 3}
    return {name: factors.get(name, 1) * t for name, t in tiny_tensors(config).items()}


def drafting_rig(
    path: Path, config: DFlashConfig, draft_sampling: str = "greedy"
) -> tuple[BoundDFlash, Rig]:
    return headed(path, config, draft_sampling, weights(config))


class Paper:
    """The formulas, number by number of a row, in float64; rows are those of a block, the anchor's
    the first.

    Args:
        config: the drafter.
        request: of `headed`.
    """

    def __init__(self, config: DFlashConfig, request: int) -> None:
        start = "refiner_head."
        found = weights(config).items()
        self.w = {n.removeprefix(start): t.double() for n, t in found if n.startswith(start)}
        rows = block_rows(config, request).detach()
        self.base = FakeVerifier().head(rows).double()
        self.rows, self.request = rows.double(), request

    def logits(self, drafts: list[int]) -> Tensor:
        """[n, V] of the first n slots, behind the anchor and these drafts, the last left out."""
        w, before = self.w, [BEFORE[self.request], ANCHORS[self.request], *drafts]
        mean = sum(self.rows) / B
        given = []
        for row in range(len(drafts) + 1):
            parts = w["down_h.weight"] @ self.rows[row], w["down_g.weight"] @ mean
            token = w["token_embed.weight"][before[row]]
            given.append(w["in_proj.weight"] @ torch.cat([*parts, token]))
        found = []
        for row in range(1, len(given)):
            x = given[row].clone()
            for channel in range(len(x)):
                for earlier in range(row + 1):
                    x[channel] += w["mix_l"][channel, row, earlier] * given[earlier][channel]
            gate, up = w["mlp_gate.weight"] @ x, w["mlp_up.weight"] @ x
            x = x + w["mlp_down.weight"] @ (gate / (1 + (-gate).exp()) * up)
            found.append(self.base[row] + w["readout.weight"] @ x)
        return torch.stack(found)

    def jacobi(self, passes: int, depth: int = K, noise: Tensor | None = None) -> list[int]:
        """The drafts after so many passes, chosen by logits, or by these and some noise [K, V]."""
        extra = torch.zeros(K, VOCAB) if noise is None else noise
        drafts = (self.base[1 : depth + 1] + extra[:depth]).argmax(-1).tolist()
        for _ in range(passes):
            drafts = (self.logits(drafts) + extra[:depth]).argmax(-1).tolist()
        return drafts

    def serial(self, depth: int = K) -> list[int]:
        """What slot by slot drafts."""
        drafts = list[int]()
        for _ in range(depth):
            drafts.append(int(self.logits([*drafts, 0])[-1].argmax()))
        return drafts


@pytest.mark.parametrize(
    ("layout", "prefix", "names"),
    [("z-lab", "xpress_head.", AUTHORS), ("speculators", "refiner_head.", SPECULATORS)],
)
def test_both_layouts_are_the_public_ones(
    layout: Layout, prefix: str, names: dict[str, list[int]], tmp_path: Path
) -> None:
    """Names and shapes, and what is written is what is read."""
    config = xpress()
    tensors = weights(config)
    write_tiny_dflash(tmp_path / "drafter", config, layout=layout, tensors=tensors)
    stored = load_file(tmp_path / "drafter" / "model.safetensors")
    own = {n.removeprefix(prefix): list(t.shape) for n, t in stored.items() if "_head." in n}
    assert own == names
    read, again = read_checkpoint(tmp_path / "drafter")
    assert read.head == config.head and again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_the_authors_config_is_read() -> None:
    """Their converter adds these keys to a file of z-lab's DFlash; vLLM has the last two."""
    raw = config_json(TINY, "z-lab", dtype="float32") | {
        "architectures": ["Qwen3XPressModel"],
        "xpress_rank": 6,
        "xpress_mlp_hidden": 18,
        "xpress_block_size": B,
        "xpress_num_passes": 4,
        "sample_from_anchor": False,
        "xpress_candidate_topc": 0,
        "xpress_fused_kernel": False,
    }
    config = parse_config(raw)
    assert config.head == HEAD and config.algorithm == "xpress"
    del raw["xpress_num_passes"]
    assert parse_config(raw).head == replace(HEAD, num_passes=6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"xpress_rank": None}, "lacks xpress_rank"),
        ({"xpress_rank": 0, "xpress_mlp_hidden": None}, "xpress_rank is 0; it must lie in"),
        ({"xpress_mlp_ratio": None, "xpress_mlp_hidden": None}, "lacks xpress_mlp_ratio"),
        ({"xpress_mlp_ratio": 0, "xpress_mlp_hidden": None}, "xpress_mlp_ratio is 0"),
        ({"xpress_mlp_hidden": 20}, "xpress_mlp_hidden is 20, but xpress_rank times"),
        ({"xpress_mlp_ratio": None, "xpress_mlp_hidden": 20}, "xpress_mlp_hidden is 20, but"),
        ({"xpress_num_passes": 5}, "xpress_num_passes is 5, but num_jacobi_passes is 4"),
        ({"xpress_num_passes": 0, "num_jacobi_passes": 0}, "xpress_num_passes is 0"),
        ({"xpress_block_size": 16}, "xpress_block_size is 16, but block_size is 8"),
        ({"sample_from_anchor": True}, "xpress with sample_from_anchor is not supported"),
        ({"xpress_selector": True}, "xpress_selector, which this loader does not know"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    raw = config_json(xpress(), "z-lab", dtype="float32")
    raw["dflash_config"] |= changes
    raw = {name: value for name, value in raw.items() if name not in changes}
    with pytest.raises(CheckpointError, match=message) as error:
        parse_config(raw)
    assert "\n" not in str(error.value)


def test_slots_together_and_one_by_one(tmp_path: Path) -> None:
    """Catches a wrong projection, mean, channel, place of L, or token before, in both forms."""
    config = xpress()
    model = tiny_model(config)
    model.load_state_dict(weights(config))
    head = HEAD.head(model, lambda tokens: tokens)
    assert isinstance(head, Refiner)
    rows = torch.stack([block_rows(config, request) for request in (0, 1)])
    tokens = torch.randint(VOCAB, (2, K), generator=torch.Generator().manual_seed(4))
    previous = torch.cat([torch.tensor(ANCHORS)[:, None], tokens[:, :-1]], dim=1)
    state: Tensor | None = head.start(rows, torch.tensor(BEFORE))
    together, parts = left_sides(head, rows[:, 1:], previous, state), []
    for slot in range(K):
        left, state = head.left(rows[:, slot + 1], previous[:, slot], state)
        parts.append(left)
    assert state is not None and state.shape[-1] == 0
    for request in (0, 1):
        paper = Paper(config, request)
        expected = paper.logits(tokens[request].tolist()) - paper.base[1:]
        for sides in (together[request], torch.stack([part[request] for part in parts])):
            ours = (sides @ head.right.T).double()
            torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("passes", "depth"), [(1, K), (2, K), (4, K), (K, K), (100, K), (4, 3)])
def test_a_chain_is_what_so_many_passes_draft(passes: int, depth: int, tmp_path: Path) -> None:
    """Catches passes that are left out, that begin elsewhere, or a block that is cut short."""
    config = xpress(num_passes=passes)
    drafter, rig = drafting_rig(tmp_path / "drafter", config)
    found = drafter.propose(rig.batch(ANCHORS, LENGTHS, depth)).token_ids.tolist()
    papers = [Paper(config, request) for request in (0, 1)]
    assert found == [paper.jacobi(passes, depth) for paper in papers]
    serial = [paper.serial(depth) for paper in papers]
    assert found == serial if passes >= depth else found != serial or passes > 2
    assert all(a[:passes] == b[:passes] for a, b in zip(found, serial, strict=True))
    before = [paper.jacobi(passes - 1, depth) for paper in papers]
    assert found != before or passes > 2


def test_the_whole_block_runs_whatever_is_drafted(tmp_path: Path) -> None:
    """Also where no row sees those after it: catches a mean of fewer rows."""
    config = replace(xpress(), causal=(True,) * len(TINY.causal))
    drafter, rig = drafting_rig(tmp_path / "drafter", config)
    found = drafter.propose(rig.batch(ANCHORS, LENGTHS, 3)).token_ids.tolist()
    assert found == [Paper(config, request).jacobi(HEAD.num_passes, 3) for request in (0, 1)]


def test_a_tree_has_the_likeliest_paths(tmp_path: Path) -> None:
    """Catches a state of another path than the best chain, or one that misses the whole block."""
    config = xpress()
    drafter, rig = drafting_rig(tmp_path / "drafter", config)
    output = drafter.propose(replace(rig.batch(ANCHORS, LENGTHS, 3), shape=BlockShape(9, 3)))
    assert output.tree is not None
    for request in (0, 1):
        paper = Paper(config, request)
        count = min(9, MAX_CANDIDATES)
        scores, tokens = paper.base[1:4].log_softmax(-1).topk(count)
        chain, tables, rank = list[int](), [], 0
        for slot in range(3):
            before = [[*chain[:-1], int(one), 0] for one in tokens[slot - 1]] if slot else [[0]]
            of_slot = [paper.logits(path)[-1] - paper.base[slot + 1] for path in before]
            table = scores[slot] + torch.stack([one[tokens[slot]] for one in of_slot])
            together = scores[slot].logsumexp(-1)
            tables.append((table.log_softmax(-1) + together).clamp(max=0))
            rank = int(table[rank if slot else 0].argmax())
            chain.append(int(tokens[slot, rank]))
        paths = dict[tuple[int, ...], float]()
        for first in range(count):
            one = float(tables[0][0, first])
            paths[(first,)] = one
            for second in range(count):
                two = one + float(tables[1][first, second])
                paths[first, second] = two
                for third in range(count):
                    paths[first, second, third] = two + float(tables[2][second, third])
        best = sorted(paths, key=lambda path: -paths[path])[:9]
        wanted = {tuple(int(tokens[slot, rank]) for slot, rank in enumerate(p)) for p in best}
        assert drafted_paths(output, request) == wanted


def test_a_sampled_chain_knows_the_noise(tmp_path: Path) -> None:
    """In every pass, from the first drafts on."""
    config = xpress(num_passes=2)
    drafter, rig = drafting_rig(tmp_path / "drafter", config, "coupled")
    batch = rig.batch(ANCHORS, LENGTHS, K, temperature=1.5)
    found = drafter.propose(batch).token_ids.tolist()
    positions = batch.positions(K + 1)[:, 1:]
    noise = gumbel(stream(batch.sampling.seeds, positions, Purpose.SAMPLE), VOCAB)
    papers = [Paper(config, request) for request in (0, 1)]
    assert found == [p.jacobi(2, noise=1.5 * n) for p, n in zip(papers, noise, strict=True)]
    assert found != [paper.jacobi(2) for paper in papers]


def test_what_is_drawn_says_its_distribution(tmp_path: Path) -> None:
    """Of passes that settle every slot: the one behind the tokens that were drawn."""
    config = xpress(num_passes=K)
    drafter, rig = drafting_rig(tmp_path / "drafter", config, "probabilistic")
    draft = drafter.propose(rig.batch(ANCHORS, LENGTHS, K, temperature=8.0))
    assert draft.probs is not None
    for request, drafts in enumerate(draft.token_ids.tolist()):
        expected = (Paper(config, request).logits(drafts) / 8.0).softmax(-1)
        torch.testing.assert_close(draft.probs[request].double(), expected, atol=1e-4, rtol=1e-3)


def test_what_a_slot_is_drawn_from_does_not_know_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where slots are not settled: another number for slot 3 changes no distribution up to it,
    and some behind it. Else what is accepted would not be drawn from the target.
    """
    found, choose, slot = [], drafting.choose, 3
    for moved in (False, True):
        calls = 0

        def chosen(*args: Any, moved: bool = moved, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            choice = choose(*args, **options)
            if moved:
                choice.token_ids[:, slot] = (choice.token_ids[:, slot] + 1) % VOCAB
            return choice

        monkeypatch.setattr(drafting, "choose", chosen)
        drafter, rig = drafting_rig(tmp_path / str(moved), xpress(num_passes=2), "probabilistic")
        draft = drafter.propose(rig.batch(ANCHORS, LENGTHS, K, temperature=8.0))
        assert draft.probs is not None and calls == 3
        found.append(draft.probs)
    assert torch.equal(found[0][:, : slot + 1], found[1][:, : slot + 1])
    assert not torch.equal(found[0][:, slot + 1], found[1][:, slot + 1])


def test_a_forecast_is_of_the_last_pass(tmp_path: Path) -> None:
    """How likely each draft is behind those before it, multiplied up."""
    config = xpress(num_passes=K)
    drafter, rig = drafting_rig(tmp_path / "drafter", config)
    drafter.forecasts = True
    draft = drafter.propose(rig.batch(ANCHORS, LENGTHS, K))
    assert draft.forecast is not None
    for request, drafts in enumerate(draft.token_ids.tolist()):
        probs = Paper(config, request).logits(drafts).softmax(-1).amax(-1)
        expected = probs.cumprod(0).sum()
        torch.testing.assert_close(draft.forecast[request].double(), expected, atol=1e-4, rtol=1e-4)


def test_the_token_before_the_anchor_follows_the_accepted_path(tmp_path: Path) -> None:
    """Catches the token of a refused row, or of another request; a step without drafts counts."""
    drafter, rig = drafting_rig(tmp_path / "drafter", xpress())
    assert drafter._before is not None and drafter._before.tolist() == list(BEFORE)
    for k, accepted, wanted in ((3, [2, 0], [12, 20]), (0, [0, 0], [10, 40])):
        batch = rig.batch(ANCHORS, LENGTHS, k)
        tokens = torch.arange(2 * (k + 1)).view(2, k + 1) + torch.tensor([[10], [16 if k else 39]])
        features = torch.zeros(2 * (k + 1), TINY.feature_size)
        count = torch.tensor(accepted)
        accept = AcceptOutput(tokens, count, tokens[:, 0], count >= 0)
        verify = VerifyOutput(torch.zeros(len(features), VOCAB), features)
        drafter.commit(replace(batch, context="later" if not k else "now"), tokens, accept, verify)
        assert drafter._before.tolist() == wanted


def test_training_is_behind_the_answers_tokens() -> None:
    """The loss is that of the paper's logits, and everything of the head learns from it, and the
    anchor's row. Catches another token before the anchor, or a block without that row.
    """
    config = xpress()
    model = tiny_model(config)
    model.load_state_dict(weights(config))
    head = HEAD.head(model, lambda tokens: tokens)
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(VOCAB, (2, 20), generator=generator)
    tokens[[0, 1], [3, 4]], tokens[[0, 1], [2, 3]] = torch.tensor(ANCHORS), torch.tensor(BEFORE)
    ends = torch.full_like(tokens, 20)
    batch = SequenceBatch(tokens, torch.tensor([1, 1]), torch.tensor([20, 20]), [20, 20], ends)
    anchors, valid = torch.tensor([[3], [4]]), torch.ones(2, 1, dtype=torch.bool)
    blocks = make_blocks(batch, anchors, valid, num_rows=K)
    before = before_anchors(head, model, batch, torch.zeros(0), anchors)
    assert before is not None and before.flatten().tolist() == list(BEFORE)
    first = before_anchors(head, model, batch, torch.zeros(0), torch.zeros_like(anchors))
    assert first is not None and torch.equal(first, tokens[:, :1])
    rows = torch.stack([block_rows(config, request) for request in (0, 1)]).detach()
    rows.requires_grad_()
    objective = Objective(FakeVerifier().head, LossConfig(gamma=None, dpace_alpha=1.0), head=head)
    labels, previous = blocks.labels[:, 0], blocks.previous[:, 0]
    loss, _, matches = objective(rows, labels, blocks.valid[:, 0], previous, None, before[:, 0])
    expected, weight = torch.zeros((), dtype=torch.float64), torch.arange(K, 0, -1)
    for request in (0, 1):
        logprobs = Paper(config, request).logits(labels[request].tolist()).log_softmax(-1)
        expected -= (weight * logprobs.gather(1, labels[request][:, None])[:, 0]).sum()
        assert torch.equal(matches[request], logprobs.argmax(-1) == labels[request])
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-3)
    loss.backward()
    module = model.get_submodule("refiner_head")
    assert all(weight.grad is not None and weight.grad.any() for weight in module.parameters())
    assert rows.grad is not None and rows.grad[:, 0].any(dim=-1).all()
