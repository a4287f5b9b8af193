"""Against the public `dflash` package: hidden states, logits, and whole generations."""

import copy
import time
from dataclasses import replace
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.drafter import BoundDFlash, load_dflash
from specdec.engine.requests.request import Request
from specdec.sampling.params import SamplingParams
from tests.drafters.tiny import (
    BLOCK,
    TINY,
    VOCAB,
    FakeVerifier,
    Rig,
    input_table,
    overfit,
    tapped,
    tiny_model,
    tiny_target,
    write_tiny_dflash,
)
from tests.helpers.bounds import Float64, assert_as_exact
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.tiny_models import paged_verifier, plain_greedy

reference: Any = pytest.importorskip("dflash.model")

WINDOW = 6
KINDS: dict[str, DFlashConfig] = {
    "full": TINY,
    "full_causal": replace(TINY, causal=(True,) * 3),
    "sliding_causal": replace(TINY, windows=(WINDOW,) * 3, causal=(True,) * 3),
    "sliding_non_causal": replace(TINY, windows=(WINDOW,) * 3),
    "mixed": replace(TINY, windows=(WINDOW, WINDOW, None), causal=(True, True, False)),
    "yarn": replace(
        TINY,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "convolutions": replace(TINY, conv_kernel_size=2, conv_group_size=4, windows=(WINDOW,) * 3),
    "softcap": replace(
        TINY, output_multiplier=2.0, final_logit_softcapping=3.0, input_embedding_scale=1.5
    ),
}
# k, accepted of either request
ROUNDS = [(7, 3, 0), (7, 0, 7), (3, 3, 1), (7, 7, 2), (1, 1, 0), (7, 2, 5), (7, 5, 6)]


class ReferenceRequest:
    """One sequence through the public package, round by round, in the type of `model`."""

    def __init__(self, model: Any, embedding: torch.Tensor, mask_token_id: int) -> None:
        self.model, self.embedding, self.mask = model, embedding, mask_token_id
        self.cache = reference._make_cache(model.config)
        self.start = 0

    @torch.inference_mode()
    def draft_hidden(self, context: torch.Tensor, anchor: int, k: int) -> torch.Tensor:
        """Hidden states [k, H] of a block's first masks; `context` are new features."""
        first, self.start = self.start, self.start + context.shape[0]
        width = TINY.block_size
        tokens = torch.tensor([[anchor] + [self.mask] * (width - 1)])
        scale = float(reference._draft_value(self.model.config, "input_embedding_scale", 1.0))
        hidden = self.model(
            target_hidden=context[None],
            noise_embedding=torch.nn.functional.embedding(tokens, self.embedding) * scale,
            position_ids=torch.arange(first, self.start + width)[None],
            past_key_values=self.cache,
            use_cache=True,
        )
        reference._crop_to(self.cache, self.start)
        return hidden[0, 1 : k + 1]


def their_model(path: Path, config: DFlashConfig) -> Any:
    """The public class of this kind; DFlash 2's selector has no part in hidden states."""
    if not config.convolves:
        return reference.DFlashDraftModel.from_pretrained(path, dtype=torch.float32).eval()
    raw = Qwen3Config.from_pretrained(path)
    raw.dflash_config |= {"selector_rank": 4, "selector_top_k": 2}
    return reference.DFlash2DraftModel.from_pretrained(path, config=raw, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_and_logits(kind: str, tmp_path: Path) -> None:
    """Every kind of layer, unlike requests, a context beyond the window, k that varies."""
    target, verifier = tiny_target(), FakeVerifier()
    path = write_tiny_dflash(tmp_path / "drafter", KINDS[kind])
    theirs = their_model(path, KINDS[kind])
    wide = copy.deepcopy(theirs).double()
    rig = Rig(load_dflash(path, verifier=verifier), verifier)
    ours = rig.bound
    assert isinstance(ours, BoundDFlash)
    text = torch.randint(0, VOCAB - 1, (2, 90), generator=torch.Generator().manual_seed(3)).tolist()
    embedding = input_table(target)
    requests = [ReferenceRequest(theirs, embedding, TINY.mask_token_id) for _ in text]
    exact_requests = [ReferenceRequest(wide, embedding.double(), TINY.mask_token_id) for _ in text]
    head = target.lm_head.weight
    seq_lens = [13, 22]
    contexts = [tapped(target, text[r][: seq_lens[r]], TINY.target_layer_ids) for r in range(2)]
    for r in range(2):
        rig.prefill(r, contexts[r][:9], 0)
        rig.prefill(r, contexts[r][9:], 9)
    for k, *accepted in ROUNDS:
        batch = rig.batch([text[r][seq_lens[r]] for r in range(2)], seq_lens, k)
        hidden = ours.draft_hidden(batch)
        rows, features = [], []
        for r in range(2):
            plain = requests[r].draft_hidden(contexts[r], text[r][seq_lens[r]], k)
            with Float64():
                exact = exact_requests[r].draft_hidden(
                    contexts[r].double(), text[r][seq_lens[r]], k
                )
            # Our norms round twice more, a whole row alike, and these rows are few: 2.6 was seen
            # with vectors of 256 bits.
            assert_as_exact(hidden[r], plain, exact, factor=4)
            logits = theirs.compute_logits(hidden[r], target.lm_head)
            exact_logits = theirs.compute_logits(
                hidden[r].double(), lambda rows: rows @ head.double().T
            )
            assert_as_exact(ours.logits(hidden[r]), logits, exact_logits)
            end = seq_lens[r] + accepted[r] + 1
            junk = [(token + 5) % VOCAB for token in text[r][end : end + k - accepted[r]]]
            rows.append(text[r][seq_lens[r] : end] + junk)
            states = tapped(target, text[r][:end] + junk, TINY.target_layer_ids)
            features.append(states[seq_lens[r] :])
            contexts[r] = states[seq_lens[r] : end]
            seq_lens[r] = end
        rig.commit(batch, torch.tensor(rows), accepted, torch.cat(features))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that knows some of the greedy output: it accepts none to all of a block."""
    target = tiny_target()
    text = [0, 1, 2, 3, 4, *plain_greedy(target, range(5), 60)]
    model = tiny_model()
    overfit(model, target, text)
    return write_tiny_dflash(
        tmp_path_factory.mktemp("trained") / "drafter", tensors=model.state_dict()
    )


PROMPTS = [list(range(n)) for n in (3, 5, 9)] + [[7, 7, 20, 11]]
NEW_TOKENS = 40


def generate(trained: Path, k: int) -> list[Request]:
    """All prompts in one batch of our engine."""
    verifier = paged_verifier(tiny_target(), block_size=BLOCK)
    drafter = load_dflash(trained, verifier=verifier)
    engine = tiny_engine(verifier, drafter, max_num_seqs=4, max_model_len=128, num_draft_tokens=k)
    requests = [
        engine.add_request(prompt, SamplingParams(max_tokens=NEW_TOKENS)) for prompt in PROMPTS
    ]
    finish(engine)
    return requests


def before_the_end(num_emitted: list[int]) -> list[int]:
    """Steps with room for a whole block; the public loop runs shorter ones later."""
    starts = accumulate(num_emitted, initial=1)
    return [
        count
        for count, start in zip(num_emitted, starts, strict=False)
        if start + TINY.block_size <= NEW_TOKENS
    ]


def test_whole_generations(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens and the same number of them at every step as the public generation loop."""
    monkeypatch.setattr(reference, "_cuda_time", time.perf_counter)
    target = tiny_target()
    model = reference.DFlashDraftModel.from_pretrained(trained, dtype=torch.float32).eval()
    seen = set()
    for prompt, request in zip(PROMPTS, generate(trained, TINY.block_size - 1), strict=True):
        expected = reference.dflash_generate(
            model, target, torch.tensor([prompt]), NEW_TOKENS, None, return_stats=True
        )
        assert request.output_token_ids == expected.output_ids[0, len(prompt) :].tolist()
        assert before_the_end(request.num_emitted) == before_the_end(expected.acceptance_lengths)
        seen |= set(request.num_emitted)
    assert {1, TINY.block_size} <= seen, (
        f"the drafter accepts {sorted(seen)}: too uniform to show anything"
    )


@pytest.mark.parametrize("k", [1, 3])
def test_generations_that_use_a_part_of_the_block(trained: Path, k: int) -> None:
    """At a smaller k, steps accept what the first k of the public whole block deserve."""
    target = tiny_target()
    model = reference.DFlashDraftModel.from_pretrained(trained, dtype=torch.float32).eval()
    seen = set()
    for prompt, request in zip(PROMPTS, generate(trained, k), strict=True):
        output = plain_greedy(target, prompt, NEW_TOKENS)
        features = tapped(target, prompt + output, TINY.target_layer_ids)
        theirs = ReferenceRequest(model, input_table(target), TINY.mask_token_id)
        known, committed, expected = 1, 0, []
        while known < NEW_TOKENS:
            position = len(prompt) + known - 1
            hidden = theirs.draft_hidden(features[committed:position], output[known - 1], k)
            drafts = model.compute_logits(hidden, target.lm_head).argmax(-1).tolist()
            right = takewhile(
                lambda pair: pair[0] == pair[1], zip(drafts, output[known:], strict=False)
            )
            expected.append(min(len(list(right)) + 1, NEW_TOKENS - known))
            known, committed = known + expected[-1], position
        assert request.output_token_ids == output
        assert request.num_emitted == expected
        seen |= set(expected)
    assert {1, k + 1} <= seen, f"the drafter accepts {sorted(seen)}: too uniform to show anything"
