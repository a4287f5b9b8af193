"""`specdec doctor`: what this machine is, what is installed, which attention backend serves.

With `--model` it says instead whether that one would run here (`specdec.cli.doctor.model`).
"""

from __future__ import annotations

import argparse
import os
import platform
from contextlib import suppress
from fnmatch import fnmatchcase
from importlib import metadata
from typing import TYPE_CHECKING

from specdec.base.errors import InvalidInputError
from specdec.base.packages import foreign_packages, overwritten_packages
from specdec.base.version import __version__
from specdec.cli.fields import adding
from specdec.cli.options import revision_option

if TYPE_CHECKING:
    from specdec.attention.backend import AttentionSpec
    from specdec.attention.mla import MlaSpec

ENVIRONMENT = (
    # AITER: what it loads, compiles and tunes, with which compiler and for which architecture.
    "AITER_*", "*HIP_CLANG_PATH", "CK_DIR", "CU_NUM", "ENABLE_CK", "FLASH_ATTENTION_*", "FLYDSL_*",
    "GPU_ARCHS", "HIP_KITTENS_DIR", "MAX_JOBS", "PREBUILD_*", "ROCM_HOME", "ROCM_PATH", "TRITON_*",
    # Torch: its allocator, its choice of products, what it is built for.
    "PYTORCH_*", "TORCH_BLAS_*",
    # AMD's runtime: queues, copies, scratch memory, page faults, profilers, several GPUs.
    "GPU_MAX_HW_QUEUES", "HIP_*", "HSA_*", "HIPBLASLT_*", "NCCL_*", "RCCL_*", "ROCPROFILER_*",
    # Which GPUs there are.
    "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    # The rest.
    "HF_HOME", "HF_HUB_OFFLINE", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "OMP_WAIT_POLICY",
    "SPECDEC_*",
)  # fmt: skip
"""Variables that change what runs, of specdec and the libraries under it; * is anything."""

_PACKAGES = ("torch", "triton", "transformers", "amd-aiter")
_TRITON = ("triton", "pytorch-triton-rocm", "triton-rocm")
"""Distributions that bring the package `triton`."""


_ORDINARY = {"heads": 32, "kv_heads": 8, "head_dim": 128}
_LATENT = {
    "heads": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}  # fmt: skip
_INDEXER = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
"""What is asked about when nothing is said, by option; latent attention as in DeepSeek-V3.2."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]"
    what = "run every kind of kernel once at tiny size; print its error and time"
    parser.add_argument("--run", action="store_true", help=what)
    group = parser.add_argument_group(
        "would a checkpoint run, and how much memory does it take? Reads its config files only"
    )
    add = group.add_argument
    what = "the target: embedded, a folder, a GGUF file, or a hub name"
    add("--model", metavar="NAME", help=what)
    revision_option(group)
    what = "its drafter: auto (default), none, ngram, a folder, or a hub name"
    add("--drafter", default="auto", metavar="NAME", help=what)
    what = "memory of one GPU (default: what this device has)"
    add("--gpu-memory", type=float, metavar="GB", help=what)
    group = parser.add_argument_group("which attention backends would serve a model of this shape")
    add, number, switch = adding(group)
    for option, other in (
        ("--device", "cpu, cuda or cuda:N"),
        ("--dtype", "float32, bfloat16 or float16"),
        ("--kv-dtype", "or fp8 for an 8-bit cache"),
        ("--prefill-dtype", "or model for prompts and queries in the model's own type"),
    ):
        add(option, default="auto", metavar="NAME", help=f"auto (default), {other}")
    for option, what in (
        ("--heads", "query heads (default 32, with --mla 128)"),
        ("--kv-heads", "key and value heads (default 8)"),
        ("--head-dim", "size of a head (default 128)"),
        ("--window", "some layers have a sliding window of N tokens"),
    ):
        number(option, help=what)
    switch("--sinks", default=None, help="layers carry attention sinks")
    about = "the same for latent attention; any of these options asks about that"
    _, number, switch = adding(parser.add_argument_group(about))
    switch("--mla", help="latent attention (DeepSeek, GLM)")
    for name, default in list(_LATENT.items())[1:]:  # the heads are everybody's
        number(_option(name), help=f"size in the model's config.json (default {default})")
    what = "an indexer selects what a row attends to (DeepSeek-V3.2, GLM-MoE-DSA)"
    switch("--indexer", help=what)
    for name, default in _INDEXER.items():
        what = f"the indexer's, as in the model's config.json (default {default})"
        number(_option(name), help=what)


def run(args: argparse.Namespace) -> int:
    """Runs `specdec doctor`; 0 when a backend can serve the model, 1 when none can.

    Raises:
        SpecDecError: no such device or type here, or the options make no model.
    """
    from specdec.attention.selector import refusals
    from specdec.device.device import describe_device, torch_build, unseen_gpu

    if args.model is not None:
        from specdec.cli.doctor.model import run_model

        _refuse_beside_a_model(args)
        return run_model(args)
    if args.drafter != "auto" or args.gpu_memory is not None:
        what = f"{'--gpu-memory' if args.drafter == 'auto' else '--drafter'} goes with --model"
        raise InvalidInputError(f"{what}; name the target")
    spec = spec_of(args)
    device = spec.device
    environment = environment_lines()  # before AITER is imported, which sets some itself
    print(f"specdec       {__version__}, Python {platform.python_version()}")
    print(f"device        {describe_device(device)}")
    if args.device == "auto" and (reason := unseen_gpu()):
        print(f"no GPU        {reason}")
    for name in _PACKAGES:
        print(f"{name:<13} {_package_version(name)}")
    print(f"torch for     {torch_build()}")
    for warning in [*foreign_packages(), *overwritten_packages(), *aiter_warnings()]:
        print(f"warning       {warning}")
    refused = refusals(spec)
    print(f"\nattention backends, for {describe_spec(spec)}")
    print("\n".join(backend_lines(spec, refused)))
    print("\nenvironment")
    print("\n".join(environment or ["  none of the variables that change what runs is set"]))
    status = int(all(refused.values()))
    if args.run:
        from specdec.cli.doctor.run import run_checks

        status |= run_checks(device, spec.dtype, spec.cache_dtype)
    return status


def _refuse_beside_a_model(args: argparse.Namespace) -> None:
    """Options that describe a model say nothing beside one that has a config."""
    alone = ("run", "mla", "indexer", "kv_heads", "head_dim", "window", "sinks")
    described = (*alone, *_LATENT, *_INDEXER)
    given = [name for name in described if getattr(args, name) not in (None, False)]
    if given:
        what = f"{_option(given[0])} does not go with --model, whose config says what it is"
        raise InvalidInputError(f"{what}; leave one of them out")


def spec_of(args: argparse.Namespace) -> AttentionSpec | MlaSpec:
    """What the options ask of a backend.

    Raises:
        InvalidInputError: a number below 1, or options of both kinds of attention.
        SpecDecError: the device or type does not exist here.
    """
    from specdec.attention.backend import AttentionSpec
    from specdec.attention.mla import IndexerSpec, MlaSpec
    from specdec.base.config import DEFAULT_BLOCK_SIZE, LoadConfig
    from specdec.device.device import cache_dtype, resolve_device, resolve_dtype

    options = vars(args).items()
    given = {name: one for name, one in options if one is not None and one is not False}
    for name, value in given.items():
        if isinstance(value, int) and value < 1:
            raise InvalidInputError(f"{_option(name)} is {value}; it must be at least 1")
    indexed = bool(given.keys() & {"indexer", *_INDEXER})
    latent = indexed or bool(given.keys() & ({"mla", *_LATENT} - {"heads"}))
    if latent and (alien := sorted(given.keys() & {"kv_heads", "head_dim", "window", "sinks"})):
        what = f"{_option(alien[0])} is not of latent attention"
        way_out = "leave it out, or leave out --mla, --indexer and their sizes"
        raise InvalidInputError(f"{what}; {way_out}")
    size = {**_ORDINARY, **(_LATENT if latent else {}), **_INDEXER, **given}
    device = resolve_device(args.device)
    load = LoadConfig(kv_dtype=args.kv_dtype, prefill_dtype=args.prefill_dtype)
    common = {
        "device": device,
        "dtype": resolve_dtype(args.dtype, device),
        "num_heads": size["heads"],
        "block_size": DEFAULT_BLOCK_SIZE,
        "cache_dtype": cache_dtype(load.kv_dtype, device),
    }
    if not latent:
        common |= {"num_kv_heads": size["kv_heads"], "head_dim": size["head_dim"]}
        windows = frozenset({None, args.window})
        return AttentionSpec(**common, windows=windows, sinks=bool(args.sinks))
    sizes_of = (size["index_n_heads"], size["index_head_dim"], size["index_topk"])
    indexer = IndexerSpec(*sizes_of) if indexed else None
    sizes = {name: size[name] for name in _LATENT if name != "heads"}
    return MlaSpec(**common, **sizes, indexer=indexer, fp8_prefill=load.prefill_dtype == "auto")


def describe_spec(spec: AttentionSpec | MlaSpec) -> str:
    """The shape asked about, in words."""
    from specdec.attention.mla import MlaSpec

    parts = [f"{spec.num_heads} heads", str(spec.dtype).split(".")[-1]]
    if spec.cache_dtype is not None:
        parts.append(f"cache in {str(spec.cache_dtype).split('.')[-1]}")
    if isinstance(spec, MlaSpec):
        parts[1:1] = [
            f"latents of {spec.kv_lora_rank} + {spec.qk_rope_head_dim}",
            f"keys of {spec.qk_nope_head_dim} + {spec.qk_rope_head_dim} and values of"
            f" {spec.v_head_dim}",
        ]
        if spec.indexer is not None:
            heads = f"{spec.indexer.num_heads} heads of {spec.indexer.head_dim}"
            parts.append(f"an indexer of {heads} that selects {spec.indexer.topk}")
        return ", ".join(parts)
    parts[1:1] = [f"{spec.num_kv_heads} key heads", f"head size {spec.head_dim}"]
    parts += [f"a window of {w}" for w in spec.windows if w is not None]
    parts += [] if spec.chunk is None else [f"chunks of {spec.chunk}"]
    return ", ".join(parts + (["sinks"] if spec.sinks else []))


def backend_lines(spec: AttentionSpec | MlaSpec, refused: dict[str, list[str]]) -> list[str]:
    """One line per backend: chosen, possible, or refused with all reasons; then what it says of
    itself, and what it cannot do for a block drafter.

    Beside latent attention drafters have a backend for ordinary heads: none is told of.
    """
    from dataclasses import replace

    from specdec.attention.backend import AttentionSpec
    from specdec.attention.selector import describe, refusals

    passed_over = refusals(spec, auto=True)
    chosen = next((name for name, reasons in passed_over.items() if not reasons), None)
    blocks = refusals(replace(spec, non_causal=True)) if isinstance(spec, AttentionSpec) else {}
    width = max(map(len, refused))
    lines = []
    for name, reasons in refused.items():
        if reasons:
            lines.append(f"  {name:<{width}}  no: {'; '.join(reasons)}")
            continue
        taken = "chosen by --attention auto" if name == chosen else f"works with --attention {name}"
        lines.append(f"  {name:<{width}}  {taken}")
        passed = passed_over.get(name, [])
        lines += [f"  {'':<{width}}  auto passes over it: {reason}" for reason in passed]
        lines += [f"  {'':<{width}}  {remark}" for remark in describe(name, spec)]
        if against := blocks.get(name):
            lines.append(f"  {'':<{width}}  but not for DFlash drafters: {'; '.join(against)}")
    return lines


def aiter_warnings() -> list[str]:
    """What is wrong or unusual with the AITER installed here, of use to this machine or not."""
    from specdec.kernels.aiter import (
        newer_than_checked,
        unavailable_reasons,
        wrong_package_installed,
    )

    if wrong_package_installed():
        return unavailable_reasons()
    newer = newer_than_checked()
    return [newer] if newer else []


def environment_lines() -> list[str]:
    """Variables of `ENVIRONMENT` that are set, with their values."""
    order = [name for sign in ENVIRONMENT for name in sorted(os.environ) if fnmatchcase(name, sign)]
    return [f"  {name}={os.environ[name]}" for name in dict.fromkeys(order)]


def _package_version(name: str) -> str:
    """Version of a distribution; of Triton also under its names in ROCm builds of torch."""
    for distribution in _TRITON if name == "triton" else (name,):
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(distribution)
            return version if distribution == name else f"{version} ({distribution})"
    return "not installed"


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
