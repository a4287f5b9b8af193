"""How the drafts of a request fared, where clients look for it: in SGLang's words and in vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.base.metrics import occurrences, pooled
from specdec.session.outputs import GenerationResult


def meta_info(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """SGLang's figures of one output or several; `spec_accept_length` is `AcceptanceStats.tau`."""
    stats = pooled(result.stats for result in results)
    drafted, accepted = sum(stats.num_verified), sum(stats.num_accepted)
    return {
        "prompt_tokens": sum(len(result.prompt_token_ids) for result in results),
        "completion_tokens": sum(len(result.token_ids) for result in results),
        "spec_verify_ct": stats.num_steps,
        "spec_accept_length": stats.tau,
        "spec_accept_rate": accepted / drafted if drafted else 0.0,
        "spec_accept_token_num": accepted,
        "spec_draft_token_num": drafted,
        "spec_accept_histogram": occurrences(stats.num_accepted),
        "spec_draft_histogram": stats.drafted_histogram,
    }


def speculative_decoding(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """vLLM's figures: those of verify steps that had drafts."""
    stats = pooled(result.stats for result in results)
    accepted = [
        kept for kept, drafted in zip(stats.num_accepted, stats.num_drafted, strict=True) if drafted
    ]
    steps, drafts = len(accepted), sum(stats.num_verified)
    return {
        "mean_acceptance_length": 1 + sum(accepted) / steps if steps else 1.0,
        "draft_acceptance_rate": sum(accepted) / drafts if drafts else 0.0,
        "acceptance_histogram": occurrences(accepted, least=max(stats.num_drafted, default=0) + 1),
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": drafts,
    }


def prediction_details(results: Sequence[GenerationResult]) -> dict[str, int]:
    """OpenAI's figures: drafts that were copied from the prediction."""
    accepted, rejected = pooled(result.stats for result in results).num_predicted
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
