"""`specdec doctor --model`: whether a target and a drafter would run here, from configs alone."""

from __future__ import annotations

import argparse
import os
import textwrap
from typing import TYPE_CHECKING, Any

from specdec.base.errors import InvalidInputError
from specdec.base.registry import PARTS, drafter_name, parts_of, resolve

if TYPE_CHECKING:
    import torch

_WIDTH = 132
_EIGHT_BITS = " in 8 bits, if no layer's keys are too large for them"  # which weights alone tell


def run_model(args: argparse.Namespace) -> int:
    """Prints what the target that the options name needs.

    Returns:
        0 when it would run, else 1.

    Raises:
        SpecDecError: a config cannot be read, or the device or type does not exist here.
    """
    import torch

    from specdec.base.config import LoadConfig
    from specdec.base.packages import require_ours
    from specdec.device.device import cache_dtype, describe_device, resolve_device, resolve_dtype

    if args.gpu_memory is not None and not 0 < args.gpu_memory < 1e6:
        what = f"--gpu-memory is {args.gpu_memory:g}"
        raise InvalidInputError(f"{what}; give the memory of one GPU in GB, such as 192")
    device = resolve_device(args.device)
    elsewhere = args.gpu_memory is not None  # a GPU that is not here
    kind = torch.device("cuda") if elsewhere else device
    dtype = None if (args.dtype, elsewhere) == ("auto", False) else resolve_dtype(args.dtype, kind)
    memory = _memory(device) if args.gpu_memory is None else int(args.gpu_memory * 1e9)
    kept = cache_dtype(LoadConfig(kv_dtype=args.kv_dtype).kv_dtype, device)
    require_ours("drafters", "verifiers")
    # quantized weights would stay packed on that GPU
    packed = True if elsewhere and device.type == "cpu" and dtype != torch.float32 else None
    options = {"cache_dtype": kept, "packed": packed, "max_gpus": _max_gpus(args, device)}
    needs = resolve(PARTS, "needs", "part")(
        args.model, device=device, dtype=dtype, gpu_bytes=memory, **options
    )
    _say("model", args.model)
    of = "" if needs.text_type in ("", needs.model_type) else f", its text part {needs.text_type}"
    _say("type", f"{needs.model_type}{of}")
    if needs.runs_on:
        _say("runs on", needs.runs_on)
        _say("device", f"{describe_device(device)}; {str(needs.dtype).removeprefix('torch.')}")
        _say("attention", needs.attention or "none")
    if needs.caches:
        _say("cache", "; ".join(needs.caches))
        _say("", _cache_sizes(needs, args.kv_dtype))
        usual, extended, most = needs.context
        size = _gigabytes(usual * needs.token_bytes + needs.request_bytes)
        longest = f"{usual:,} tokens, whose cache takes {size}"
        further = ", and no more" if most else ""
        if extended > usual:
            further = f"; its RoPE goes to {extended:,} with --max-model-len"
        _say("context", longest + further)
    place = "GPU" if args.gpu_memory is not None or device.type == "cuda" else "machine"
    if needs.weights:
        plain = " and plain here" if needs.unpacked else ""
        _say("weights", f"{_gigabytes(needs.weights)}, stored as {needs.stored}{plain}")
        several = "s" if needs.gpus > 1 else ""
        _say("memory", f"{needs.gpus} {place}{several} of {_gigabytes(memory)}")
    if needs.ranks and place == "GPU":
        _say("ranks", _ranks(needs))
    for index, note in enumerate(needs.notes):
        _say("" if index else "requests", note)
    if needs.predicts:
        _say("prediction", "layers for multi-token prediction are in the checkpoint: --drafter mtp")
    missing = list(needs.missing)
    for name in parts_of(drafter_name(args.drafter, args.model)):
        missing += _drafter(name, needs)
    for index, reason in enumerate(missing):
        _say("missing" if index == 0 else "", reason)
    _say("would run", "no" if missing else "yes")
    return int(bool(missing))


def _drafter(name: str, needs: Any) -> list[str]:
    """Says what drafts, and returns what is in its way."""
    if not needs.hidden_size:
        return []  # nothing to fit
    fit = resolve(PARTS, "fit", "part")(name, needs)
    if fit.problems:
        _say("drafter", f"{name}: {fit.algorithm}")
        return list(fit.problems)
    words = [fit.algorithm] if fit.algorithm != name else []
    words += [f"{fit.drafts} drafts"] if fit.drafts else []
    if fit.taps:
        words.append(f"taps layers {', '.join(map(str, fit.taps))} of {needs.num_layers}")
    words += [f"{fit.numbers / 1e6:,.0f} M parameters"] if fit.numbers else []
    words += ["fits"] if fit.taps else []
    _say("drafter", f"{name}: {', '.join(words)}" if words else name)
    if fit.license:
        _say("", fit.license)
    return []


def _ranks(needs: Any) -> str:
    """Among how many GPUs the target can be divided, and what each has of its weights then."""
    further = [f"{_gigabytes(size)} on {count}" for count, size in needs.ranks.items() if count > 1]
    if not further:
        ours = needs.runs_on == "our own layers"
        why = "its layers are not divided" if ours else "transformers' modules are not divided"
        return f"one GPU alone, since {why}"
    return f"weights of a GPU: {', '.join(further)} (--tensor-parallel)"


def _max_gpus(args: argparse.Namespace, device: torch.device) -> int:
    """GPUs to reckon with: those that are here, unless the memory of others is given."""
    import torch

    if args.gpu_memory is not None:
        return 8
    return torch.cuda.device_count() if device.type == "cuda" else 1


def _cache_sizes(needs: Any, kv_dtype: str) -> str:
    parts = [f"{needs.token_bytes / 1024:,.1f} KiB per token"] if needs.token_bytes else []
    parts += [f"{needs.request_bytes / 2**20:,.1f} MiB per request"] if needs.request_bytes else []
    return ", ".join(parts) + _EIGHT_BITS * (kv_dtype == "fp8")


def _memory(device: torch.device) -> int:
    """Bytes of the device's memory."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size < 1e11 else f"{size / 1e9:,.0f} GB"


def _say(name: str, text: str) -> None:
    lines = textwrap.wrap(text, _WIDTH - 14, break_long_words=False, break_on_hyphens=False) or [""]
    print(f"{name:<13} {lines[0]}")
    for line in lines[1:]:
        print(f"{'':<13} {line}")
