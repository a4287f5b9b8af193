"""`specdec doctor`: what this machine is, what is installed, and which attention backend would serve a model, with reasons."""

from __future__ import annotations

import argparse
import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING

from specdec import __version__
from specdec.cli import whole_number

if TYPE_CHECKING:
    import torch

    from specdec.attention.backend import AttentionSpec

ENVIRONMENT = (
    "AITER_TRITON_ONLY",
    "AITER_REBUILD",
    "AITER_LOG_LEVEL",
    "ENABLE_CK",
    "GPU_ARCHS",
    "CU_NUM",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "FLASH_ATTENTION_TRITON_AMD_AUTOTUNE",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
)
"""Variables that change what runs. specdec itself reads the first alone; the libraries under it read the others."""

_PACKAGES = ("torch", "triton", "transformers", "amd-aiter")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `specdec doctor`."""
    parser.usage = "%(prog)s [options]"
    add = parser.add_argument_group("a model to ask the backends about").add_argument
    add("--device", default="auto", metavar="NAME", help="auto (default), cpu, cuda or cuda:N")
    add("--dtype", default="auto", metavar="NAME", help="auto (default), float32, bfloat16 or float16")
    add("--heads", type=whole_number, default=32, metavar="N", help="query heads (default %(default)s)")
    add("--kv-heads", type=whole_number, default=8, metavar="N", help="key and value heads (default %(default)s)")
    add("--head-dim", type=whole_number, default=128, metavar="N", help="size of a head (default %(default)s)")
    add("--window", type=whole_number, metavar="N", help="some layers have a sliding window of N tokens")
    add("--sinks", action="store_true", help="layers carry attention sinks")


def run(args: argparse.Namespace) -> int:
    """Runs `specdec doctor`; 0 when a backend can serve the model, 1 when none can.

    Raises:
        SpecDecError: the device or type does not exist here.
    """
    import torch

    from specdec.attention.backend import AttentionSpec
    from specdec.attention.selector import refusals
    from specdec.config import DEFAULT_BLOCK_SIZE
    from specdec.device import resolve_device, resolve_dtype

    device = resolve_device(args.device)
    spec = AttentionSpec(
        device=device,
        dtype=resolve_dtype(args.dtype, device),
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        block_size=DEFAULT_BLOCK_SIZE,
        windows=frozenset({None, args.window}),
        sinks=args.sinks,
    )
    print(f"specdec       {__version__}, Python {platform.python_version()}")
    print(f"device        {describe_device(device)}")
    for name in _PACKAGES:
        print(f"{name:<13} {_package_version(name)}")
    if torch.version.hip or torch.version.cuda:
        print(f"torch for     {f'ROCm {torch.version.hip}' if torch.version.hip else f'CUDA {torch.version.cuda}'}")
    for warning in aiter_warnings():
        print(f"warning       {warning}")
    refused = refusals(spec)
    print(f"\nattention backends, for {describe_spec(spec)}")
    print("\n".join(backend_lines(spec, refused)))
    print("\nenvironment")
    found = [f"  {name}={os.environ[name]}" for name in ENVIRONMENT if name in os.environ]
    print("\n".join(found or ["  none of the variables that change what runs is set"]))
    return int(all(refused.values()))


def describe_device(device: torch.device) -> str:
    """Kind, name and, for an AMD device, architecture."""
    import torch

    import specdec.device

    if device.type == "cpu":
        return f"cpu, {os.cpu_count()} cores, {platform.machine()}"
    architecture = specdec.device.rocm_architecture(device)
    kind = f"ROCm {architecture}" if architecture else "CUDA"
    return f"{device}, {torch.cuda.get_device_name(device)}, {kind}"


def describe_spec(spec: AttentionSpec) -> str:
    """The shape asked about, in words."""
    window = ", ".join(f"a window of {w}" for w in spec.windows if w is not None)
    parts = [
        f"{spec.num_heads} heads",
        f"{spec.num_kv_heads} key heads",
        f"head size {spec.head_dim}",
        str(spec.dtype).split(".")[-1],
    ]
    return ", ".join(parts + ([window] if window else []) + (["sinks"] if spec.sinks else []))


def backend_lines(spec: AttentionSpec, refused: dict[str, list[str]]) -> list[str]:
    """One line per backend: chosen, possible, or refused with all reasons; then what it cannot do for a block drafter."""
    from dataclasses import replace

    from specdec.attention.selector import refusals

    chosen = next((name for name, reasons in refusals(spec, auto=True).items() if not reasons), None)
    blocks = refusals(replace(spec, non_causal=True))
    width = max(map(len, refused))
    lines = []
    for name, reasons in refused.items():
        if reasons:
            lines.append(f"  {name:<{width}}  no: {'; '.join(reasons)}")
            continue
        taken = "chosen by --attention auto" if name == chosen else f"works with --attention {name}"
        lines.append(f"  {name:<{width}}  {taken}{_remark(name, spec)}")
        if blocks[name]:
            lines.append(f"  {'':<{width}}  but not for DFlash drafters: {'; '.join(blocks[name])}")
    return lines


def _remark(name: str, spec: AttentionSpec) -> str:
    from specdec.attention.rocm_aiter_fa import RocmAiterFaBackend, tier_of

    triton_only = name == RocmAiterFaBackend.name and tier_of(spec.device) == "triton"
    return ", with AITER's Triton kernels alone" if triton_only else ""


def aiter_warnings() -> list[str]:
    """What is wrong with the AITER installed here, whether or not this machine could use it."""
    from specdec.ops.aiter import unavailable_reasons, wrong_package_installed

    return unavailable_reasons() if wrong_package_installed() else []


def _package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
