"""Searching and choosing on our kernels where they run, and in plain torch (`matches`, `choice`)
elsewhere, with equal results.

On a GPU plain torch takes dozens of small kernels for it, and their launches longest.
"""

import torch
from torch import Tensor

from drafters.suffix import choice, matches
from drafters.suffix.choice import BY_AGE, BY_LENGTH, SHORTEST, Chain, Weighed
from drafters.suffix.matches import NOTHING, Found, Limits, Texts
from specdec.device.deviation import Deviation, deviation, mismatches, worst
from specdec.kernels.kernel import Kernel


def search(texts: Texts, limits: Limits) -> Found:
    """See `drafters.suffix.matches.search`."""
    if _fits(texts.history.device, limits.occurrences, limits.depth):
        from drafters.suffix import triton_matches  # it imports Triton

        return Found(*triton_matches.search(*texts, *limits), texts.slots)
    return matches.search(texts, limits)


def best_chain(continuations: Tensor, lengths: Tensor, longest: int) -> Chain:
    """See `drafters.suffix.choice.best_chain`."""
    if _fits(lengths.device, *continuations.shape[1:]):
        from drafters.suffix import triton_choice  # it imports Triton

        return Chain(*triton_choice.best_chain(continuations, lengths, longest))
    return choice.best_chain(continuations, lengths, longest)


def weigh(continuations: Tensor, lengths: Tensor) -> Weighed:
    """See `drafters.suffix.choice.weigh`."""
    fits = _fits(lengths.device, *continuations.shape[1:])
    return (_weigh_on_triton if fits else choice.weigh)(continuations, lengths)


def _weigh_on_triton(continuations: Tensor, lengths: Tensor) -> Weighed:
    from drafters.suffix import triton_choice  # it imports Triton

    return Weighed(
        *triton_choice.weigh(
            continuations, lengths, by_length=BY_LENGTH, by_age=BY_AGE, shortest=SHORTEST
        )
    )


def _fits(device: torch.device, count: int, depth: int) -> bool:
    """Whether our kernels keep so many continuations of such a depth."""
    if not KERNEL.runs_on(device):
        return False
    from drafters.suffix.triton_matches import MAX_MATCHES, MAX_TOKENS  # it imports Triton

    return count <= MAX_MATCHES and depth <= MAX_TOKENS


def check_matches(device: torch.device) -> Deviation:
    """Texts of few different tokens, of several chunks and of one token, with a pool or none."""
    from drafters.suffix import triton_choice, triton_matches

    generator = torch.Generator().manual_seed(0)
    history = torch.randint(3, (4, 1500), dtype=torch.int32, generator=generator)
    pool = torch.where(torch.rand(1100, generator=generator) < 0.02, NOTHING, history[1, :1100])
    pool[-1] = NOTHING
    slots, seq_lens = torch.tensor([2, 0, 3]), torch.tensor([1400, 0, 9])
    moved = history.to(device), slots.to(device), seq_lens.to(device), 1401
    found = []
    for past, limits in (
        (pool, Limits(16, 16, 4, 1, 31)),
        (None, Limits(12, 7, 4, 1, 5)),
        (None, Limits(1, 4, 4, 1, 8)),
    ):
        plain = matches.search(Texts(past, history, slots, seq_lens, 1401), limits)
        ours = triton_matches.search(None if past is None else past.to(device), *moved, *limits)
        expected = plain.continuations
        found += [mismatches(ours[0], expected), mismatches(ours[1], plain.lengths)]
        raw = expected.to(device)
        chosen = triton_choice.best_chain(raw, plain.lengths.to(device), limits.longest)
        chains = choice.best_chain(expected, plain.lengths, limits.longest)
        found += [mismatches(one, other) for one, other in zip(chosen, chains, strict=True)]
        tokens, *weights = _weigh_on_triton(expected.to(device), plain.lengths.to(device))
        plainly = choice.weigh(expected, plain.lengths)
        sides = (plainly, choice.weigh(expected, plain.lengths.double()))
        found.append(mismatches(tokens, sides[0].tokens))
        found += [
            deviation(*three) for three in zip(weights, sides[0][1:], sides[1][1:], strict=True)
        ]
    return worst(found)


KERNEL = Kernel("matches", check_matches)
