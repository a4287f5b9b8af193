"""Transformers' own `generate` as a peer: plain, and with its prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, __version__

from evals.peers.peer import only_greedy, weights_of
from specdec.base.errors import InvalidInputError, one_line
from specdec.model.core import Verifier
from specdec.sampling.params import SamplingParams

LOOKUP_TOKENS = 10
"""Drafts per step of prompt lookup, the number in Transformers' own examples."""


class TransformersPeer:
    """`generate` on batches padded on the left.

    Args:
        lookup: draft by prompt lookup, which takes one conversation at a time.

    Raises:
        InvalidInputError: Transformers cannot load the target.
    """

    version, tau = __version__, None

    def __init__(self, name: str, verifier: Verifier, *, lookup: bool) -> None:
        self.name = name
        self.max_concurrency = 1 if lookup else None
        folder, file = weights_of(verifier)
        options: dict[str, Any] = {"dtype": verifier.dtype}
        options |= {} if file is None else {"gguf_file": file}
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
        except Exception as error:  # Transformers raises what it likes
            what = f"peer {name!r} cannot load {verifier.name!r}: {one_line(error)}"
            raise InvalidInputError(what) from error
        self._model = model.to(verifier.device).eval()
        self._model.generation_config = GenerationConfig()  # it is told all that holds
        self._eos = list(verifier.eos_token_ids)
        self._options: dict[str, Any] = {"do_sample": False, "pad_token_id": self._eos[0]}
        if lookup:
            self._options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[list[int]], samplings: Sequence[SamplingParams], *, concurrency: int
    ) -> list[list[int]]:
        """See `Peer.generate`."""
        only_greedy(self.name, samplings)
        outputs: list[list[int]] = []
        asked = list(zip(prompts, samplings, strict=True))
        for start in range(0, len(asked), concurrency):
            group = asked[start : start + concurrency]
            plans = [sampling for _, sampling in group]
            controls = {(one.repetition_penalty or 1.0, one.min_tokens or 0) for one in plans}
            if len(controls) > 1:
                what = f"peer {self.name!r} takes one least length and penalty per batch"
                raise InvalidInputError(f"{what}; use concurrency 1")
            ((penalty, least),) = controls
            ids, mask = _padded([prompt for prompt, _ in group])
            ids, mask = ids.to(self._model.device), mask.to(self._model.device)
            result = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(sampling.max_tokens for _, sampling in group),
                repetition_penalty=penalty,
                min_new_tokens=least,
                eos_token_id=self._eos,
                **self._options,
            )
            new = result[:, ids.shape[1] :].tolist()
            lengths = [sampling.max_tokens for _, sampling in group]
            outputs += [self._cut(*pair) for pair in zip(new, lengths, strict=True)]
        return outputs

    def _cut(self, tokens: list[int], most: int) -> list[int]:
        """The tokens up to the first end token; what follows is padding."""
        ends = [index for index, token in enumerate(tokens) if token in self._eos]
        return tokens[: min(most, ends[0] + 1 if ends else most)]


def load_plain(detail: str | None, *, verifier: Verifier) -> TransformersPeer:
    """Plain decoding."""
    return TransformersPeer("transformers", verifier, lookup=False)


def load_lookup(detail: str | None, *, verifier: Verifier) -> TransformersPeer:
    """Drafts looked up in the prompt and the output so far."""
    return TransformersPeer("transformers-lookup", verifier, lookup=True)


def _padded(prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids and attention mask [num_prompts, longest], padded on the left with the first token.

    A repetition penalty may count what pads.
    """
    longest = max(map(len, prompts))
    ids = torch.tensor([[prompt[0]] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask
