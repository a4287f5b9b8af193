"""Models of lm-eval itself, `hf` and `vllm`, that answer the same questions beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import get_model

from evals.peers.peer import weights_of
from evals.peers.vllm import MEMORY_SHARE, import_vllm
from evals.system import LocalSystem
from specdec.base.errors import InvalidInputError, one_line
from specdec.session.provenance import dtype_name

PEERS = ("hf", "vllm")


def check_peers(names: tuple[str, ...]) -> None:
    """Looks at names before anything is loaded.

    Raises:
        InvalidInputError: one is not known.
    """
    for name in names:
        if name.partition(":")[0] not in PEERS:
            raise InvalidInputError(f"peer is {name!r}; name hf or vllm, or either:FOLDER")


def harness_peer(name: str, system: LocalSystem, think_end_token: str | None = None) -> LM:
    """The model called `name`, which may carry a folder of weights behind a colon.

    Args:
        system: ours; its target's weights are taken where there is no folder, with their type, its
            device, requests at once and length; conversations are read as ours.

    Raises:
        InvalidInputError: it is not installed, or cannot load the weights.
    """
    kind, _, folder = name.partition(":")
    verifier, requests = system.decoder.verifier, system.settings["max_num_seqs"]
    weights = Path(folder) if folder else Path(*filter(None, weights_of(verifier)))
    options: dict[str, Any] = {"pretrained": str(weights), "dtype": dtype_name(verifier.dtype)}
    options["max_length"] = system.settings["max_model_len"]
    options |= {"chat_template_args": dict(system.reader.variables)}
    options |= {"think_end_token": think_end_token}
    if weights.suffix == ".gguf":
        options |= {"pretrained": str(weights.parent), "gguf_file": weights.name}
    if kind == "hf":
        options |= {"device": str(verifier.device), "batch_size": requests}
    else:
        import_vllm(name)
        options |= {"gpu_memory_utilization": MEMORY_SHARE, "max_num_seqs": requests}
        options |= {"enable_prefix_caching": False}
    try:
        peer: Any = get_model(kind)(**options)
        peer.tokenizer.chat_template = system.reader.tokenizer.chat_template
    except Exception as error:  # of two libraries, which raise what they like
        raise InvalidInputError(f"peer {name!r} cannot be loaded: {one_line(error)}") from error
    found: LM = peer
    return found
