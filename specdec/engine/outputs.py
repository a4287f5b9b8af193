"""Taking a step's tokens over into a request, cut exactly where plain decoding would have stopped."""

from collections.abc import Container, Sequence

from specdec.core import Request
from specdec.engine.results import StepResult


def append_tokens(request: Request, result: StepResult, eos_token_ids: Sequence[int]) -> str | None:
    """Adds what a step gave a request.

    Args:
        request: not finished.
        result: of one step.
        eos_token_ids: the model's end-of-sequence ids.

    Returns:
        Why the output ends here, or None when it goes on.
    """
    params = request.sampling
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    room = request.max_total_len - len(request.prompt_token_ids) - len(request.output_token_ids)
    tokens, reason = _cut(result.token_ids, room, stop_ids)
    keep = request.on_tokens(request, tokens) if request.on_tokens else None
    if keep is not None:
        tokens, reason = tokens[:keep], "stop"
    request.output_token_ids += tokens
    if params.logprobs:
        request.logprobs += result.logprobs[: len(tokens)]
    if result.k is not None:
        request.num_drafted.append(result.num_drafts)
        request.num_accepted.append(min(result.num_accepted, len(tokens)))
        request.num_emitted.append(len(tokens))
    return reason


def _cut(tokens: list[int], room: int, stop_ids: Container[int]) -> tuple[list[int], str | None]:
    """The tokens up to the first stop token or the token limit, and why they end there.

    >>> _cut([5, 6, 7], 2, {7})
    ([5, 6], 'length')
    >>> _cut([5, 6, 7, 8], 9, {6})
    ([5, 6], 'stop')
    """
    tokens = tokens[:room]
    for index, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: index + 1], "stop"
    return tokens, "length" if len(tokens) == room else None
