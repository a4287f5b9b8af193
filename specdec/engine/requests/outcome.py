"""What a finished step does to its requests: they get their tokens, and some of them end."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.engine.launch import Launch
from specdec.engine.policy.draft_acceptance import Path
from specdec.engine.requests.request import Request, Status
from specdec.sampling.logprobs import Unpacked, top_of

_RUNNING = Status.RUNNING


@dataclass(slots=True)
class Outcome:
    """What a step has done.

    Attributes:
        requests: that had not ended before and have got tokens.
        num_accepted: drafts accepted, by each of these that takes all drafts that there are, and
            was not left out.
        paths: of a tree, what was accepted by each of those that accepted any.
        ended: of these, who ends and why; not yet taken out of the schedule.
        filled: of these, whose blocks may have become full.
        starts: of each of those, L before the step.
        spoiled: whose logits were not finite; `Request.error` says why.
    """

    requests: list[Request] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    ended: list[tuple[Request, str]] = field(default_factory=list)
    filled: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    spoiled: list[Request] = field(default_factory=list)


def take_over(launch: Launch) -> Outcome:
    """Adds what a step gave to its requests. One that ended, or was sent back, while the step was
    in flight gets nothing; one for which something raises ends.
    """
    outcome, columns, shape = Outcome(), launch.columns(), launch.block
    depth = shape.depth if shape is not None else 0
    any_limited, left_out = launch.selection.plan.limited, launch.left_out
    tree_size = shape.drafts if shape is not None and shape.is_tree else 0
    token_ids, logprobs = columns.token_ids, columns.logprobs
    counts = columns.num_accepted, columns.num_drafts, columns.flags
    results = zip(launch.requests, *counts, strict=True)
    for index, (request, num_accepted, num_drafts, flags) in enumerate(results):
        if request.status is not _RUNNING:
            continue
        first = index * (depth + 1)
        tree = slice(index * depth, index * depth + num_accepted) if tree_size else None
        if request.error:  # which was raised while the step was launched
            outcome.ended.append((request, "error"))
            continue
        try:
            if flags % 2 == 0:
                _explain(request, columns.rows[tree] if tree else range(1, num_accepted + 1))
                outcome.spoiled.append(request)
                continue
            outcome.requests.append(request)
            limited = any_limited and request.plan.limited
            tells = not limited and not (left_out and request in left_out)  # of a shape
            if tells:
                outcome.num_accepted.append(num_accepted)
            tokens = token_ids[first : first + num_accepted + 1]
            known, start = len(request.output_token_ids), request.num_kv_tokens
            request.num_unread -= 1
            if shape is not None:
                request.num_kv_tokens = start + num_accepted + 1
                request.num_in_flight -= depth + 1
                if request.num_kv_tokens >= request.offers_from:
                    outcome.filled.append(request)
                    outcome.starts.append(start)
            if tree and num_accepted and tells:
                outcome.paths.append(Path(columns.rows[tree], columns.ranks[tree]))
            is_last = known + num_accepted + 1 >= request.max_output_tokens
            if not is_last and request.stop_ids.isdisjoint(tokens) and not request.on_tokens:
                request.output_token_ids += tokens  # nearly always
                reason, kept = None, num_accepted + 1
            else:
                reason = _append(request, tokens)
                kept = len(request.output_token_ids) - known
            if logprobs is not None and request.sampling.logprobs:
                _append_logprobs(request, tokens[:kept], logprobs, first)
            if shape is not None:
                size = tree_size and (columns.verified[index] if columns.verified else tree_size)
                if limited:
                    nodes = request.sampling.tree_nodes
                    size = min(size, size if nodes is None else nodes) if num_drafts else 0
                request.steps += (num_drafts, min(num_accepted, kept), kept, size, flags // 2)
                if tree:
                    request.num_by_rank.update(columns.ranks[tree][:kept])
            if request.grammar is not None and not reason and not request.grammar.advance(tokens):
                raise RuntimeError(
                    f"the grammar refuses one of the output tokens after the first {known}, which"
                    f" its mask allowed"
                )
        except Exception as error:
            request.fail(error)
            reason = "error"
        if reason:
            outcome.ended.append((request, reason))
    return outcome


def _append(request: Request, tokens: list[int]) -> str | None:
    """Adds tokens to the output, up to the first stop token or the token limit; gives why it ends
    there, None when it goes on.
    """
    room = request.max_output_tokens - len(request.output_token_ids)
    tokens, reason = tokens[:room], "length" if len(tokens) >= room else None
    for index, token in enumerate(tokens):
        if token in request.stop_ids:
            tokens, reason = tokens[: index + 1], "stop"
            break
    keep = request.on_tokens(request, tokens) if request.on_tokens else None
    if keep is not None:
        tokens, reason = tokens[:keep], "stop"
    request.output_token_ids += tokens
    return reason


def _append_logprobs(
    request: Request, tokens: Sequence[int], logprobs: Unpacked, first: int
) -> None:
    """Adds those of these tokens, the first of which is number `first` of the step's."""
    for place, token in enumerate(tokens, start=first):
        value, top_ids, top_values = logprobs[place]
        request.logprobs.append(value)
        if request.sampling.top_logprobs:
            top = top_of(token, value, top_ids, top_values, request.sampling.top_logprobs)
            request.top_logprobs.append(top)


def _explain(request: Request, rows: Sequence[int]) -> None:
    """Says why the kept logits behind the anchor or one of these rows are not finite."""
    known = len(request.output_token_ids)
    request.bad_input = request.grammar is not None and not request.grammar.dead_ends.isdisjoint(
        [0, *rows]
    )
    request.error = (
        f"the grammar allows no token of the vocabulary after {known} output tokens, or a few more;"
        " it leads where it cannot go on, so change it"
        if request.bad_input
        else f"the target's logits are NaN or infinite after {known} output tokens; use --dtype"
        f" float32 or check the checkpoint"
    )
