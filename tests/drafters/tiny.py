"""A tiny target, DFlash drafters for it, and a hand-driven paged cache around them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from drafters.dflash.config.checkpoint import tensor_shapes, write_checkpoint
from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.config.layout import Layout
from drafters.dflash.drafter import DFlashDrafter
from drafters.dflash.model import DFlashModel
from drafters.load import load_drafter
from specdec.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec
from specdec.attention.torch_ref.fa import TorchRefBackend
from specdec.base.blocks import BlockShape
from specdec.kv_cache import PagedKVCache
from specdec.model.batch import DecodeBatch, ForwardInput, PrefillBatch
from specdec.model.core import (
    AcceptOutput,
    ContextLimits,
    Drafter,
    DraftOutput,
    LengthRule,
    Verifier,
    VerifyOutput,
)
from specdec.sampling.params import SamplingDefaults, SamplingParams
from specdec.sampling.tensors import SamplingTensors
from tests.helpers.engines import run_all, tiny_engine
from tests.helpers.tiny_models import plain_greedy

TARGET_LAYERS, HIDDEN, VOCAB, BLOCK = 6, 32, 61, 4

TINY = DFlashConfig(
    block_size=8,
    mask_token_id=VOCAB - 1,
    target_layer_ids=(1, 2, 4),
    windows=(None, None, None),
    causal=(False, False, False),
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=VOCAB,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    max_position_embeddings=512,
    num_target_layers=TARGET_LAYERS,
)
"""A drafter that fits `tiny_target`; vary it with `dataclasses.replace`."""


def tiny_target(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """A random Qwen3 in float32 whose greedy output is not constant."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        **{
            "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48,
            "num_hidden_layers": TARGET_LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.3,
            "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
            "tie_word_embeddings": False,
        }
        | changes
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval().requires_grad_(False)


def tiny_tensors(config: DFlashConfig = TINY, seed: int = 1) -> dict[str, Tensor]:
    """Random weights, norms around 1, and for a reduced vocabulary a map to every second token."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        random = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.3 * random if "norm" in name else 0.3 * random
    if config.draft_vocab_size is not None:
        # draft token i is target token 2 * i
        tensors["d2t"] = torch.arange(config.draft_vocab_size)
    return tensors


def tiny_model(config: DFlashConfig = TINY, seed: int = 1) -> DFlashModel:
    """The module with `tiny_tensors`."""
    model = DFlashModel(config)
    model.load_state_dict(tiny_tensors(config, seed))
    return model


def write_tiny_dflash(
    path: Path,
    config: DFlashConfig = TINY,
    *,
    layout: Layout = "z-lab",
    seed: int = 1,
    tensors: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes a random drafter, or `tensors`, to `path` and returns it."""
    write_checkpoint(path, config, tensors or tiny_tensors(config, seed), layout=layout)
    return path


def tapped(target: Qwen3ForCausalLM, token_ids: Sequence[int], layer_ids: Sequence[int]) -> Tensor:
    """Outputs [len(token_ids), taps * H] of decoder layers, 0-based, side by side."""
    states = target(torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1][0] for i in layer_ids], dim=-1)


def input_table(target: Qwen3ForCausalLM) -> Tensor:
    """The input embeddings [V, H] of a target."""
    return target.model.embed_tokens.weight


class FakeVerifier:
    """What a drafter sees of a target: embeddings, head, shapes and an attention backend."""

    def __init__(self, target: Qwen3ForCausalLM | None = None) -> None:
        self.target = target or tiny_target()
        config = self.target.config
        self.name = "tiny"
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.num_layers = config.num_hidden_layers
        self.max_model_len, self.context = 512, ContextLimits(512, 512)
        self.eos_token_ids: tuple[int, ...] = ()
        self.defaults, self.random_weights = SamplingDefaults(), False
        self.weight_bytes, self.routed_experts = 0, None
        self.kv_specs: list[Any] = []
        self.windows: list[int | None] = []
        self.embedding_scale = 1.0
        self.final_softcap: float | None = None
        self.media_token_ids: Mapping[int, str] = {}
        self.length_rule: LengthRule | None = None
        self.weight_codes: tuple[str, ...] = ()
        spec = AttentionSpec(
            self.device, self.dtype, num_heads=4, num_kv_heads=2, head_dim=8, block_size=BLOCK
        )
        self.attention: AttentionBackend = TorchRefBackend(spec)
        self.embedded: list[Tensor] = []

    def forward(
        self, rows: ForwardInput, caches: Sequence[Any], aux_layer_ids: Sequence[int] = ()
    ) -> VerifyOutput:
        raise AssertionError("a drafter never runs the target")

    def embed(self, token_ids: Tensor) -> Tensor:
        self.embedded.append(token_ids)
        return F.embedding(token_ids, input_table(self.target))

    def head(self, hidden: Tensor) -> Tensor:
        return self.target.lm_head(hidden)


def sampling_tensors(num_reqs: int, temperature: float = 0.0) -> SamplingTensors:
    """One sampling state for all requests."""
    return SamplingTensors.of(
        [SamplingParams(temperature=temperature)] * num_reqs, range(7, 7 + num_reqs)
    )


class Rig:
    """Drives a drafter by hand as an engine would: slots, blocks, chunks, steps."""

    def __init__(
        self,
        drafter: Drafter,
        verifier: Any,
        *,
        num_reqs: int = 2,
        max_len: int = 96,
        draft_sampling: str = "greedy",
    ) -> None:
        self.drafter, self.num_reqs, self.max_len = drafter, num_reqs, max_len
        num_blocks = max_len // BLOCK
        cache = PagedKVCache(
            drafter.kv_specs,
            num_blocks=num_reqs * num_blocks + 1,
            block_size=BLOCK,
            dtype=verifier.dtype,
            device=verifier.device,
        )
        for layer in cache.layers:  # what was never written must never matter
            for tensor in layer:
                if tensor.is_floating_point():
                    tensor.normal_(std=30)
        order = (
            torch.randperm(num_reqs * num_blocks, generator=torch.Generator().manual_seed(5)) + 1
        )
        self.block_table = order.int().view(num_reqs, num_blocks)
        self.bound = drafter.bind(
            verifier,
            cache.layers,
            max_num_seqs=num_reqs,
            max_len=max_len,
            draft_sampling=draft_sampling,  # type: ignore[arg-type]
        )

    def prefill(
        self, request: int, features: Tensor, start: int, token_ids: Tensor | None = None
    ) -> None:
        """Hands over features [n, taps * H] from `start` on, and tokens int64 [n]."""
        n = features.shape[0]
        tokens = torch.zeros(n, dtype=torch.long) if token_ids is None else token_ids
        positions = torch.arange(start, start + n)
        blocks = self.block_table[request][positions // BLOCK]
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, n], dtype=torch.int32),
            seq_lens=torch.tensor([start + n], dtype=torch.int32),
            block_table=self.block_table[request : request + 1],
            slot_mapping=blocks.long() * BLOCK + positions % BLOCK,
            num_reqs=1,
            num_tokens=n,
            max_query_len=n,
            max_seq_len=start + n,
        )
        rows = ForwardInput(tokens, positions, metadata)
        self.bound.prefill(
            PrefillBatch(rows, torch.tensor([request]), torch.tensor([0])),
            VerifyOutput(torch.zeros(0), features),
        )

    def batch(
        self, anchors: Sequence[int], seq_lens: Sequence[int], k: int, temperature: float = 0.0
    ) -> DecodeBatch:
        """The step of all requests."""
        return DecodeBatch(
            slots=torch.arange(self.num_reqs),
            anchors=torch.tensor(list(anchors)),
            seq_lens=torch.tensor(list(seq_lens)),
            block_table=self.block_table,
            shape=BlockShape(k),
            max_seq_len=max(seq_lens) + max(k + 1, self.drafter.num_lookahead_tokens),
            block_size=BLOCK,
            max_model_len=self.max_len,
            sampling=sampling_tensors(self.num_reqs, temperature),
        )

    def commit(
        self,
        batch: DecodeBatch,
        token_ids: Tensor,
        num_accepted: Sequence[int],
        features: Tensor | None = None,
    ) -> None:
        """Ends the step with verified rows [num_reqs, k + 1] and their features."""
        self.commit_tensors(batch, token_ids, torch.tensor(list(num_accepted)), features)

    def commit_tensors(
        self,
        batch: DecodeBatch,
        token_ids: Tensor,
        accepted: Tensor,
        features: Tensor | None = None,
    ) -> None:
        """`commit` without values from the host."""
        output = AcceptOutput(
            token_ids, accepted, batch.anchors, torch.ones_like(accepted, dtype=torch.bool)
        )
        self.bound.commit(batch, token_ids, output, VerifyOutput(torch.zeros(0), features))


def tiny_drafter(verifier: Any, config: DFlashConfig = TINY) -> DFlashDrafter:
    """A random drafter of `verifier`."""
    return DFlashDrafter(tiny_model(config), verifier)


def overfit(
    model: DFlashModel,
    target: Qwen3ForCausalLM,
    token_ids: Sequence[int],
    *,
    steps: int = 60,
    lr: float = 0.01,
) -> float:
    """Trains `model` until it knows one text, every position an anchor; the last loss."""
    config, length = model.config, len(token_ids)
    width = config.block_size
    tokens, positions = torch.tensor(list(token_ids)), torch.arange(length)
    features = tapped(target, token_ids, config.target_layer_ids)
    anchors = torch.arange(4, length - width)
    block = anchors[:, None] + torch.arange(width)  # [blocks, width]
    inputs = torch.full(block.shape, config.mask_token_id)
    inputs[:, 0] = tokens[anchors]
    embeddings = F.embedding(inputs, input_table(target))
    in_context = (positions < anchors[:, None])[:, None, None].expand(-1, 1, width, length)
    mask = torch.cat(
        [in_context, torch.ones(len(anchors), 1, width, width, dtype=torch.bool)], dim=-1
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        keys, values = model.context_kv(features, positions)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            layers = (x[:, layer] for x in (keys, values))  # noqa: B023
            context = (x.expand(len(anchors), -1, -1, -1) for x in layers)
            k, v = (
                torch.cat(pair, dim=1).transpose(1, 2)
                for pair in zip(context, (key, value), strict=True)
            )
            return F.scaled_dot_product_attention(
                query.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=True
            ).transpose(1, 2)

        logits = target.lm_head(model.block_forward(embeddings, block, attend)[:, 1:])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[block[:, 1:]].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def drafted_paths(output: DraftOutput, request: int) -> set[tuple[int, ...]]:
    """The tokens on the way to each node of a request's tree."""
    assert output.tree is not None
    found: list[tuple[int, ...]] = [()]
    tokens, parents = output.token_ids[request].tolist(), output.tree.parents[request].tolist()
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*found[parent], token))
    return {*found[1:]}


def check_lossless(model: PreTrainedModel, verifier: Verifier, folder: Path) -> None:
    """A drafter's chains and trees leave what Transformers' `generate` writes."""
    prompts = [[1, 2, 3], list(range(20, 31))]
    expected = [plain_greedy(model, prompt, 12) for prompt in prompts]
    shapes: list[dict[str, Any]] = [{"num_draft_tokens": 5}, {"tree_nodes": 6}]
    for shape in shapes:
        drafter = load_drafter(folder, verifier=verifier)
        engine = tiny_engine(verifier, drafter, max_num_seqs=2, max_model_len=64, **shape)
        assert run_all(engine, prompts, max_tokens=12) == expected
