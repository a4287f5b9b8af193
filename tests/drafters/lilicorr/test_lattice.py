"""LiLiCorr's head: its formulas candidate by candidate, what is drawn from its table, and the
anchor's context, which follows a run.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.dflash.config.checkpoint import read_checkpoint, tensor_shapes
from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.config.config_json import config_json
from drafters.dflash.config.layout import parse_config
from drafters.head import Lattice
from drafters.lilicorr.lattice import LatticeConfig
from specdec.base.blocks import BlockShape
from specdec.base.errors import CheckpointError
from specdec.model.core import AcceptOutput, VerifyOutput
from specdec.sampling.noise import Purpose, gumbel, stream
from tests.drafters.heads import ANCHORS, LENGTHS, backbone, context, head_tensors, headed
from tests.drafters.tiny import (
    HIDDEN,
    TINY,
    VOCAB,
    FakeVerifier,
    drafted_paths,
    tiny_model,
    write_tiny_dflash,
)

HEAD = LatticeConfig(
    hidden_size=16, top_k=4, num_layers=2, num_heads=2, factor_dim=6, logit_scale=5.0
)
K = TINY.max_draft_tokens


def lilicorr(**changes: Any) -> DFlashConfig:
    return replace(TINY, head=replace(HEAD, **changes))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + TINY.rms_norm_eps).sqrt() * weight


class Paper:
    """The formulas, one candidate after the other, in float64.

    Args:
        config: the drafter.
    """

    def __init__(self, config: DFlashConfig) -> None:
        assert isinstance(config.head, LatticeConfig)
        self.config = config.head
        weights = head_tensors(config).items()
        start = "lilicorr."
        self.w = {n.removeprefix(start): t.double() for n, t in weights if n.startswith(start)}
        self.table = FakeVerifier().embed(torch.arange(VOCAB)).double()

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.w[f"{name}.weight"] @ x + self.w[f"{name}.bias"]

    def mlp(self, name: str, x: Tensor) -> Tensor:
        up = self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", up / (1 + (-up).exp()))

    def attention(self, layer: int, rows: list[Tensor], slots: list[int]) -> list[Tensor]:
        w, name, found = self.w, f"layers.{layer}.attn", []
        normed = [norm(row, w[f"layers.{layer}.attn_norm.weight"]) for row in rows]
        sides = [w[f"{name}.in_proj_weight"] @ row + w[f"{name}.in_proj_bias"] for row in normed]
        size = len(rows[0]) // self.config.num_heads
        middle = w["relative_slot_bias"].shape[1] // 2
        for query, at in zip(sides, slots, strict=True):
            heads = []
            for head in range(self.config.num_heads):
                part = slice(head * size, (head + 1) * size)
                q = query.chunk(3)[0][part]
                scores = torch.stack(
                    [
                        q @ key.chunk(3)[1][part] / size**0.5
                        + w["relative_slot_bias"][head, middle + at - slot]
                        + (at == slot) * w["same_slot_bias"][head]
                        for key, slot in zip(sides, slots, strict=True)
                    ]
                ).softmax(0)
                values = torch.stack([key.chunk(3)[2][part] for key in sides])
                heads.append(scores @ values)
            found.append(self.linear(f"{name}.out_proj", torch.cat(heads)))
        return [row + one for row, one in zip(rows, found, strict=True)]

    def edges(self, hidden: Tensor, tokens: Tensor, scores: Tensor, state: Tensor) -> Tensor:
        """[K, C, C] of one block."""
        w, count, rows, slots = self.w, self.config.top_k, [], []
        for slot in range(len(hidden)):
            for rank in range(count):
                told = scores[slot, rank]
                five = [told, told.exp(), told - scores[slot, 0]]
                five += [torch.tensor(rank / (count - 1)), torch.tensor(float(rank == 0))]
                x = torch.stack([one.double() for one in five])
                x = (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt()
                x = self.mlp("feature_mlp", x * w["feature_norm.weight"] + w["feature_norm.bias"])
                x = x + self.linear("token_proj", self.table[tokens[slot, rank]])
                x = x + self.linear("pass_hidden_proj", hidden[slot].double())
                x = x + w["slot_embedding"][0, 0, slot, 0] + w["rank_embedding"][0, 0, 0, rank]
                rows.append(x)
                slots.append(slot)
        for layer in range(self.config.num_layers):
            rows = self.attention(layer, rows, slots)
            weight = w[f"layers.{layer}.mlp_norm.weight"]
            rows = [row + self.mlp(f"layers.{layer}.mlp", norm(row, weight)) for row in rows]
        anchor = torch.zeros_like(rows[0])
        if state.any():
            anchor = norm(self.linear("context_proj", state.double()), w["anchor_norm.weight"])
        outs, ins = [], []
        for row in rows:
            row = norm(row, w["output_norm.weight"])
            x = self.linear("factor_input_proj", torch.cat([row, anchor, row * anchor]))
            x = x / (1 + (-x).exp())
            outs.append(self.unit(self.linear("out_head", x)))
            ins.append(self.unit(self.linear("in_head", x)))
        first = self.unit(self.linear("anchor_out_head", anchor))
        table = torch.zeros(len(hidden), count, count, dtype=torch.float64)
        for slot in range(len(hidden)):
            for before in range(count):
                out = first if slot == 0 else outs[(slot - 1) * count + before]
                for rank in range(count):
                    table[slot, before, rank] = out @ ins[slot * count + rank]
        return self.config.logit_scale * table

    def unit(self, x: Tensor) -> Tensor:
        return x / max(x.norm(), self.config.vector_eps)


def of_paper(config: DFlashConfig, request: int, depth: int = K) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates [depth, C], their log-probabilities, and the table of a request of `headed`."""
    hidden, logits = (rows[:depth] for rows in backbone(config, request))
    scores, tokens = logits.log_softmax(-1).topk(HEAD.top_k)
    model = tiny_model(config)
    model.load_state_dict(head_tensors(config))
    state = model.context_state(context(config)[request][-1:])[0]
    return tokens, scores, Paper(config).edges(hidden, tokens, scores, state)


def walked(tokens: Tensor, table: Tensor) -> list[int]:
    rank, path = 0, []
    for slot, candidates in enumerate(tokens):
        rank = int(table[slot, rank].argmax())
        path.append(int(candidates[rank]))
    return path


def test_the_checkpoint_is_the_public_one(tmp_path: Path) -> None:
    """Names and shapes, and what is written is what is read."""
    config = lilicorr()
    write_tiny_dflash(tmp_path / "drafter", config)
    assert read_checkpoint(tmp_path / "drafter")[0] == config
    shapes = tensor_shapes(config)
    block, width, top = config.block_size, HEAD.hidden_size, HEAD.top_k
    assert shapes["lilicorr.slot_embedding"] == (1, 1, block - 1, 1, width)
    assert shapes["lilicorr.rank_embedding"] == (1, 1, 1, top, width)
    assert shapes["lilicorr.relative_slot_bias"] == (HEAD.num_heads, 2 * block - 1)
    assert shapes["lilicorr.layers.1.attn.in_proj_weight"] == (3 * width, width)
    assert shapes["lilicorr.layers.0.mlp.up_proj.bias"] == (2 * width,)
    assert shapes["lilicorr.factor_input_proj.weight"] == (width, 3 * width)
    assert "lilicorr.token_proj.weight" not in tensor_shapes(lilicorr(hidden_size=0))
    with pytest.raises(CheckpointError, match="sample_from_anchor"):
        replace(config, sample_from_anchor=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lilicorr_candidate_topk": None}, "lacks lilicorr_candidate_topk"),
        ({"lilicorr_logit_scale": None}, "lacks lilicorr_logit_scale"),
        ({"lilicorr_num_heads": 3}, "lilicorr_num_heads is 3"),
        ({"lilicorr_candidate_topk": VOCAB + 1}, "the vocabulary has 61 tokens"),
        ({"lilicorr_enabled": False}, "lilicorr_enabled is false"),
        ({"lilicorr_vector_eps": -1}, "must be positive"),
        ({"lilicorr_new": 1}, "lilicorr_new"),
    ],
)
def test_what_is_not_said_is_refused(changes: dict[str, Any], message: str) -> None:
    raw = config_json(lilicorr(), "z-lab", dtype="float32")
    raw["dflash_config"] |= changes
    with pytest.raises(CheckpointError, match=message):
        parse_config(raw)


def test_a_chain_is_the_walk_through_the_papers_table(tmp_path: Path) -> None:
    """Catches a wrong feature, bias, order of factors or anchor, and shorter blocks that differ."""
    config = lilicorr()
    drafter, rig = headed(tmp_path / "drafter", config)
    head = drafter.drafter.head
    assert isinstance(head, Lattice)
    papers = [of_paper(config, request) for request in (0, 1)]
    hidden = drafter.draft_hidden(rig.batch(ANCHORS, LENGTHS, K))
    tokens, scores, tables = (torch.stack(parts) for parts in zip(*papers, strict=True))
    assert drafter._before is not None
    ours = head.table(hidden, tokens, scores, drafter._before[:2])
    torch.testing.assert_close(ours.double(), tables, atol=1e-4, rtol=1e-4)
    drafts = drafter.propose(rig.batch(ANCHORS, LENGTHS, K)).token_ids.tolist()
    assert drafts == [walked(tokens, table) for tokens, _, table in papers]
    assert drafts != tokens[..., 0].tolist(), "the head decides something"


def test_a_tree_has_the_likeliest_paths(tmp_path: Path) -> None:
    """Catches tables that are not normalized, or lose what the candidates have together."""
    config = lilicorr()
    drafter, rig = headed(tmp_path / "drafter", config)
    output = drafter.propose(replace(rig.batch(ANCHORS, LENGTHS, 3), shape=BlockShape(9, 3)))
    assert output.tree is not None
    for request in (0, 1):
        tokens, scores, table = (part.detach() for part in of_paper(config, request, 3))
        sure = (table.log_softmax(-1) + scores.double().logsumexp(-1)[:, None, None]).clamp(max=0)
        paths = {
            path: sum(
                float(sure[slot, path[slot - 1] if slot else 0, rank])
                for slot, rank in enumerate(path)
            )
            for depth in (1, 2, 3)
            for path in _paths(depth)
        }
        best = sorted(paths, key=lambda path: -paths[path])[:9]
        wanted = {tuple(int(tokens[slot, rank]) for slot, rank in enumerate(p)) for p in best}
        assert drafted_paths(output, request) == wanted


def _paths(depth: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        paths = [(*path, rank) for path in paths for rank in range(HEAD.top_k)]
    return paths


def test_a_sampled_chain_knows_the_noise(tmp_path: Path) -> None:
    """Catches noise that is left out, of other positions, or added to unscaled scores."""
    config = lilicorr()
    drafter, rig = headed(tmp_path / "drafter", config, "coupled")
    batch = rig.batch(ANCHORS, LENGTHS, K, temperature=0.7)
    drafts = drafter.propose(batch).token_ids.tolist()
    positions = batch.positions(K + 1)[:, 1:]
    noise = gumbel(stream(batch.sampling.seeds, positions, Purpose.SAMPLE), VOCAB)
    for request in (0, 1):
        tokens, _, table = of_paper(config, request)
        of_candidates = noise[request].gather(-1, tokens).double()
        assert drafts[request] == walked(tokens, table / 0.7 + of_candidates[:, None])


def test_the_anchors_context_follows_the_accepted_path(tmp_path: Path) -> None:
    """Catches the state of a refused row, or of another request."""
    drafter, rig = headed(tmp_path / "drafter", lilicorr())
    batch = rig.batch(ANCHORS, LENGTHS, 3)
    features = torch.randn(2 * 4, TINY.feature_size, generator=torch.Generator().manual_seed(3))
    accepted = torch.tensor([2, 0])
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    accept = AcceptOutput(tokens, accepted, tokens[:, 0], accepted >= 0)
    verify = VerifyOutput(torch.zeros(8, VOCAB), features)
    drafter.commit(batch, tokens, accept, verify)
    rows = features[[2, 4]]
    model = tiny_model(lilicorr())
    model.load_state_dict(head_tensors(lilicorr()))
    assert drafter._before is not None
    torch.testing.assert_close(drafter._before[:2], model.context_state(rows))
    assert drafter._before.shape[1] == HIDDEN
