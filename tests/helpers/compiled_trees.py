"""The kernels of draft trees and of masks, compiled for machines that need not be here; see
`tests.helpers.compiled_kernels`.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from drafters.composed import triton_forecasts
from drafters.dflash import triton_edges
from specdec.engine import triton_acceptance
from specdec.kernels.triton_argmax import SLICE
from specdec.layers.rotary import triton_angles
from specdec.model import triton_block_rows, triton_cache_rows
from specdec.sampling import triton_masks
from specdec.sampling.trees import triton_candidates, triton_trees, triton_tries
from tests.helpers.triton_interpreter import compile_for

if TYPE_CHECKING:
    from tests.helpers.compiled_kernels import Target


def tree_kernels(target: "Target") -> Iterator[tuple[str, Any]]:
    """Candidates of a vocabulary of 152 k, trees of 64 of them, and the rows of their paths."""
    compiled, overlap = partial(compile_for, target=target.compiler), {"OVERLAP": target.overlaps}
    numbers = {
        "logits": "bf16", "floats": "fp32", "ints": "i64", "positions": "i64", "least": "fp32",
        "weights": "fp32",
    }  # fmt: skip
    parts = {"maxima": "i64", "parts": "fp32"}
    sizes = {
        "SAMPLED": True,
        "FILTERED": True,
        "SLICE": SLICE,
        "GROUP": triton_candidates.GROUP,
        "target_ids": None,
    } | overlap
    yield (
        "candidates of a slice",
        compiled(triton_candidates._group_maxima_kernel, pointers=numbers | parts, constants=sizes),
    )
    yield (
        "candidates of a row",
        compiled(
            triton_candidates._row_candidates_kernel,
            pointers=numbers | parts | {"token_ids": "i64", "scores": "fp32"},
            constants=sizes | {"COUNT": 16, "SLICES": 38},
        ),
    )
    fields = dict.fromkeys(
        (
            "parents", "depths", "ancestors", "ranks", "places", "token_ids", "target_ids",
            "num_drafts",
        ),
        "i64",
    )  # fmt: skip
    paths = {"edges": "fp32", "totals": "fp32", "path": "i64", "num_accepted": "i64"}
    shape = {"NODES": 64, "DEPTH": 15} | overlap
    yield (
        "best paths",
        compiled(
            triton_trees._best_first_kernel,
            pointers=fields | paths,
            constants=shape | {"COUNT": 16},
            num_warps=1,
        ),
    )
    yield (
        "best chain",
        compiled(
            triton_trees._best_chain_kernel,
            pointers={"edges": "fp32", "ranks": "i64"},
            constants={"DEPTH": 15, "COUNT": 16} | overlap,
            num_warps=1,
        ),
    )
    yield (
        "walk",
        compiled(triton_trees._walk_kernel, pointers=fields | paths, constants=shape, num_warps=1),
    )
    outcome = {"found": "i64", "scores": "fp32", "num_drafts": "i64"}
    yield (
        "trie",
        compiled(
            triton_tries._trie_kernel,
            pointers={"continuations": "i64", "lengths": "i64", "weights": "fp32", "keeps": "fp32"}
            | outcome,
            constants={"COUNT": 8, "DEPTH": 31, "NODES": 63} | overlap,
            num_warps=triton_tries.WARPS,
        ),
    )
    tree = {
        "tokens": "i64", "parents": "i64", "depths": "i64", "logs": "fp32", "counts": "i64",
        "shifts": "fp32",
    }  # fmt: skip
    yield (
        "union of trees",
        compiled(
            triton_tries._union_kernel,
            pointers=tree | {f"other_{name}": kind for name, kind in tree.items()} | outcome,
            constants={"FIRST": 63, "SECOND": 63, "DEPTH": 15, "NODES": 63} | overlap,
            num_warps=triton_tries.WARPS,
        ),
    )
    agreed = dict.fromkeys(
        ("token_ids", "num_drafts", "output_ids", "num_accepted", "agreed", "depths", "ancestors"),
        "i64",
    )
    for title, absent in ((" of trees", {}), (" of chains", {"depths": None, "ancestors": None})):
        sizes = {"DRAFTS": 63, "OUTPUT": 16, **absent} | overlap
        yield (
            f"agreement{title}",
            compiled(triton_forecasts._agree_kernel, pointers=agreed, constants=sizes, num_warps=1),
        )
    forecasts = dict.fromkeys(("forecasts", "sums", "corrected", "shifts", "counts"), "fp32")
    buckets = {"COUNT": 19, "PER_DOUBLING": 3, "BLOCK": 64} | overlap
    yield (
        "forecasts put right",
        compiled(
            triton_forecasts._correct_kernel,
            pointers=forecasts,
            floats=("prior", "least"),
            constants=buckets,
            num_warps=1,
        ),
    )
    outcome = forecasts | {"agreed": "i64", "num_accepted": "i64", "best": "i64"}
    yield (
        "forecasts and what came",
        compiled(
            triton_forecasts._observe_kernel,
            pointers=outcome,
            floats=("log_keep",),
            constants=buckets | {"PARTS": 2},
        ),
    )
    rows = {
        "seq_lens": "i64", "block_table": "i32", "positions": "i64", "slots": "i64",
        "lengths": "i32", "starts": "i32",
    }  # fmt: skip
    of_blocks = {"WIDTH": 16, "BLOCK_SIZE": 16, **overlap}
    yield (
        "rows of blocks",
        compiled(
            triton_block_rows._block_rows_kernel, pointers=rows, constants=of_blocks, num_warps=1
        ),
    )
    places = dict.fromkeys(("seq_lens", "depths", "ancestors", "places"), "i64")
    yield (
        "rows of trees",
        compiled(
            triton_block_rows._tree_places_kernel,
            pointers=places,
            constants={"NODES": 63, **overlap},
            num_warps=1,
        ),
    )
    ends = dict.fromkeys(
        ("target_ids", "tokens", "num_drafts", "path", "num_accepted", "chosen", "next_anchors"),
        "i64",
    )
    ends |= {"finite": "i1", "whole": "i1"}
    for title, rows_of_it in (
        ("chains", {"path": None, "chosen": None}),
        ("paths", {"tokens": None, "num_drafts": None}),
    ):
        of_them = {"ROWS": 64, "WIDTH": 64 if title == "chains" else 16, **overlap, **rows_of_it}
        yield (
            f"outcome of {title}",
            compiled(
                triton_acceptance._outcome_kernel, pointers=ends, constants=of_them, num_warps=1
            ),
        )
    follows = {
        "path": "i64", "token_ids": "i64", "features": "bf16", "kept_ids": "i64", "kept": "bf16",
    }  # fmt: skip
    of_rows = {"ROWS": 64, "WIDTH": 16, "FEATURES": 2880, "BLOCK": 1024, **overlap}
    yield (
        "features of a path",
        compiled(triton_acceptance._follow_kernel, pointers=follows, constants=of_rows),
    )
    turned = {"position_ids": "i64", "frequencies": "fp32", "cos": "bf16", "sin": "bf16"}
    of_heads = {"HALF": 64, "ROWS": 16, **overlap}
    yield (
        "angles",
        compiled(
            triton_angles._angles_kernel, pointers=turned, floats=("amplitude",), constants=of_heads
        ),
    )
    tables = {
        "left": "bf16", "columns": "i64", "right": "bf16", "scores": "fp32", "scale": "fp32",
        "edges": "fp32",
    }  # fmt: skip
    of_head = {
        "RANK": 128,
        "COUNT": 16,
        "DEPTH": 15,
        "FIRST": 1,
        "LOGS": True,
        "SIDE": 16,
        "STEP": 64,
        **overlap,
    }
    yield (
        "tables of a head",
        compiled(triton_edges._edges_kernel, pointers=tables, constants=of_head, num_warps=1),
    )
    yield (
        "rows of a path",
        compiled(
            triton_cache_rows._move_rows_kernel,
            pointers=dict.fromkeys(("entries", "slots", "path"), "i64"),
            constants={"WORD": 8, "ALIGNED": True, "BLOCK": triton_cache_rows.PIECE // 8} | overlap,
        ),
    )
    yield (
        "masks of grammars",
        compiled(
            triton_masks._mask_logits_kernel,
            pointers={"logits": "bf16", "words": "i32", "places": "i64"},
            constants={"WORDS": triton_masks.WORDS} | overlap,
        ),
    )
