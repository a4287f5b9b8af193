"""`specdec bench --dummy-weights CONFIG`: from options to a report."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specdec.base.errors import InvalidInputError
from specdec.base.writing import check_writable
from specdec.cli.fields import from_options
from specdec.cli.options import say, say_gpu
from specdec.device.device import cache_dtype, resolve_device, resolve_dtype


def measure_dummy(args: argparse.Namespace) -> int:
    """Measures and prints; see `evals.bench.dummy`. Of the ranks of `torchrun` one prints.

    Raises:
        SpecDecError: an option, the config or the device is wrong.
    """
    from drafters.dflash.dummy import dummy_config
    from evals.bench.dummy import DummyBench, DummyConfig
    from evals.bench.shapes import config_file, entries
    from evals.bench.synthetic import SyntheticBench, survival_of
    from evals.peers.vllm_steps import library_for
    from evals.report.report import write_report
    from evals.report.table import format_report
    from specdec.parallel.group import join_group, rank_device
    from specdec.session.provenance import dtype_name, origin_of_run, sha256_of
    from verifiers import dummy
    from verifiers.config.shape import expert_counts

    check_writable(args.out)
    quantize = None if args.weights in ("as-stored", "bfloat16") else args.weights
    dummy.check_way(quantize)
    config = DummyConfig(
        concurrencies=tuple(args.max_num_seqs),
        trees=tuple(nodes for nodes in args.tree_nodes if nodes),
        steps=args.max_tokens,
        peers=tuple(args.peer),
        quantize=quantize,
        **from_options(DummyConfig, args),
    )
    file = config_file(args.dummy_weights)
    shape, device = dummy.read_config(file), rank_device(resolve_device(args.device))
    if config.peers:
        library_for(device)
    say_gpu(args.device)
    group, dtype = join_group(device), resolve_dtype(args.dtype, device)
    synthetic: dict[str, Any] = {}
    if args.synthetic_acceptance:
        named = [name for name in args.drafter if name != "auto"]
        drafter = dummy_config(shape, config_file(named[0]) if named else None)
        values, spread = args.synthetic_acceptance, args.synthetic_spread
        survival_of(values, spread, drafter.max_draft_tokens)  # says what is wrong
        survival = partial(survival_of, values, spread, drafter.max_draft_tokens)
        drafts = tuple(args.num_draft_tokens)
        synthetic = {"drafter": drafter, "survival": survival, "drafts": drafts}
        synthetic["divides"] = args.divide_drafter
    choices: dict[str, Any] = {
        "name": args.dummy_weights,
        "attention": args.attention,
        "block_size": args.block_size,
        "cache_dtype": cache_dtype(args.kv_dtype, device),
    }
    met: dict[int, float | None] = {}
    routed = expert_counts(shape) is not None
    # Which experts rows meet decides how long a step takes, so a peer gets the same ones.
    weights = TemporaryDirectory(prefix="specdec-weights-") if routed and config.peers else None
    if group is None:
        model = dummy.random_model(shape, device, dtype, seed=config.seed)
        met = {rows: dummy.experts_met(model, rows) for rows in config.step_rows} if routed else {}
        if weights:
            say(f"writing the weights for the peer to {weights.name}")
            dummy.write_weights(model, Path(weights.name), wrapped="text_config" in entries(file))
        verifier = dummy.dummy_verifier(
            model, fp8_prefill=args.prefill_dtype == "auto", quantize=quantize, **choices
        )
        del model  # the verifier may have taken its weights over
    else:
        if quantize:
            raise InvalidInputError("several ranks have plain random weights; leave out --weights")
        if weights:
            what = "with several ranks a peer's rows would meet other experts than ours"
            raise InvalidInputError(f"{what}; leave out --peer")
        verifier = dummy.dummy_rank(shape, group, device, dtype, seed=config.seed, **choices)
    provenance: dict[str, Any] = origin_of_run(verifier) | {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "kv_dtype": dtype_name(verifier.attention.spec.kv_dtype),
        "target": {
            "name": args.dummy_weights,
            "revision": None,
            "sha256": {file.name: sha256_of(file)},
        },
        "drafters": {},
        "ranks": 1 if group is None else group.size,
    }
    speaks = group is None or group.rank == 0
    report: dict[str, Any] | None = None
    given = Path(weights.name) if weights else None
    options: dict[str, Any] = {"met": met, "weights": given, "progress": say if speaks else None}
    bench: DummyBench
    if synthetic:
        bench = SyntheticBench(verifier, entries(file), config, **synthetic, **options)
    else:
        bench = DummyBench(verifier, entries(file), config, **options)
    del verifier  # it goes when the bench lets it go
    try:
        for report in bench.run(provenance):
            if args.out and speaks:
                write_report(report, Path(args.out))
    finally:
        if group is not None and report is not None:
            group.leave()
        if weights:
            weights.cleanup()
        if report is not None and speaks:
            print(format_report(report))
    return 0
