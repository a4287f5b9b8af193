"""The kernels of suffix decoding, compiled for machines that need not be here; see
`tests.helpers.compiled_kernels`.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from drafters.suffix import triton_choice, triton_matches
from tests.helpers.triton_interpreter import compile_for

if TYPE_CHECKING:
    from tests.helpers.compiled_kernels import Target


def match_kernels(target: "Target") -> Iterator[tuple[str, Any]]:
    """Of the default drafter, whose texts may have 32 k tokens; and with the most that there may be
    of everything.
    """
    compiled, overlap = partial(compile_for, target=target.compiler), {"OVERLAP": target.overlaps}
    texts = {"pool": "i32", "history": "i32", "slots": "i64", "seq_lens": "i64", "keys": "i32"}
    found = {"continuations": "i64", "lengths": "i64"}
    chosen = {"token_ids": "i64", "num_drafts": "i64", "scores": "fp32"}
    for title, count, compared, longest, depth, chunk in (
        ("", 16, 4, 16, 31, 1024),
        (", most", 64, 4, 64, 64, 4096),
    ):
        max_keys = count * (64 if chunk == triton_matches.CHUNK else triton_matches.MAX_CHUNKS)
        yield (
            f"matches of a chunk{title}",
            compiled(
                triton_matches._chunk_matches_kernel,
                pointers=texts,
                constants={"COUNT": count, "COMPARED": compared, "SHORTEST": 1, "CHUNK": chunk}
                | overlap,
                num_warps=triton_matches.warps_for(chunk),
            ),
        )
        sizes = {"COUNT": count, "LONGEST": longest, "DEPTH": depth} | overlap
        yield (
            f"best matches{title}",
            compiled(
                triton_matches._best_matches_kernel,
                pointers=texts | found,
                constants=sizes | {"COMPARED": compared, "KEYS": max_keys},
                num_warps=8,
            ),
        )
        yield (
            f"best continuation{title}",
            compiled(
                triton_choice._best_chain_kernel,
                pointers=found | chosen,
                constants=sizes,
                num_warps=4,
            ),
        )
        weighed = found | {"tokens": "i64", "weights": "fp32", "keep": "fp32"}
        shares = {"COUNT": count, "DEPTH": depth, "SHORTEST": -16} | overlap
        yield (
            f"weights of continuations{title}",
            compiled(
                triton_choice._weigh_kernel,
                pointers=weighed,
                floats=("log_length", "log_age"),
                constants=shares,
                num_warps=4,
            ),
        )
