"""An independent draft model (arXiv 2211.17192): a small one writes ahead of the large one."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafters.checkpoint import CONFIG, called, find_folder, read_json
from drafters.draft_model.network import DraftModelNetwork
from drafters.draft_model.vocabulary import common_tokens
from drafters.sequential.drafter import USUAL_DRAFTS, BoundSequential, SequentialDrafter
from specdec.attention.mla import MlaBackend
from specdec.base.config import DraftSampling
from specdec.base.errors import InvalidInputError
from specdec.base.registry import TOKENIZERS, VERIFIERS, resolve
from specdec.model.batch import DecodeBatch
from specdec.model.core import BoundDrafter, DraftOutput, Verifier


class DraftModel(SequentialDrafter):
    """A language model made ready to draft for a target; see `specdec.model.core.Drafter`.

    Args:
        model: the draft model, loaded as a target is, with the target's kind of cache.
        verifier: the target.
        num_tokens: ids that both vocabularies share, from 0 on; None for the smaller one's.
        max_draft_tokens: largest k.

    Raises:
        CheckpointError: a model that cannot draft.
    """

    def __init__(
        self,
        model: Verifier,
        verifier: Verifier,
        *,
        num_tokens: int | None = None,
        max_draft_tokens: int = USUAL_DRAFTS,
    ) -> None:
        vocab_size = model.vocab_size if num_tokens is None else num_tokens
        network = DraftModelNetwork(model, verifier, vocab_size)
        super().__init__(network, verifier, max_draft_tokens=max_draft_tokens)
        self.longest = model.length_rule.start if model.length_rule else model.context.extended

    def bound(
        self, caches: Sequence[Any], max_num_seqs: int, draft_sampling: DraftSampling
    ) -> BoundDrafter:
        return BoundDraftModel(self, caches, max_num_seqs, draft_sampling)


class BoundDraftModel(BoundSequential):
    """A `DraftModel` in one engine; it drafts nothing beyond the length it was made for."""

    drafter: DraftModel

    def propose(self, batch: DecodeBatch) -> DraftOutput:
        """Drafts a chain or a tree, one token after another."""
        output = super().propose(batch)
        longest = self.drafter.longest
        if batch.max_seq_len <= longest:
            return output
        room = longest - batch.seq_lens
        num_drafts = (
            (room >= batch.shape.depth) * batch.k if batch.shape.is_tree else room.clamp(0, batch.k)
        )
        forecast = None if output.forecast is None else output.forecast.minimum(num_drafts)
        return replace(output, num_drafts=num_drafts, forecast=forecast)


def load_draft_model(path: str | Path | None, *, verifier: Verifier) -> DraftModel:
    """Loads a language model from a folder, or the hub, to draft for `verifier`.

    Raises:
        InvalidInputError: no path.
        SpecDecError: a model that cannot be read or draft, or has another tokenizer.
    """
    if path is None:
        raise InvalidInputError("a draft model needs a checkpoint; give its folder or hub name")
    folder, shared = find_folder(path), verifier.attention.spec
    latent = "kv_lora_rank" in read_json(folder / CONFIG)
    same_kind = not latent or isinstance(verifier.attention, MlaBackend)
    named = verifier.attention.name if latent else verifier.attention.mha_backend.name
    with called(folder, path, kind="draft model"):
        model, tokenizer = resolve(VERIFIERS, "hf", "verifier")(
            folder,
            device=verifier.device,
            dtype=verifier.dtype,
            attention=named if same_kind else "auto",
            block_size=shared.block_size,
            cache_dtype=shared.cache_dtype,
            generation_config=None,
        )
    model.name = str(path)
    target_tokenizer = resolve(TOKENIZERS, "hf", "tokenizer")(verifier.name)
    return DraftModel(model, verifier, num_tokens=common_tokens(target_tokenizer, tokenizer))
