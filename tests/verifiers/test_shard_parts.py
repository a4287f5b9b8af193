"""Which parts of a checkpoint a rank reads, and which targets are not divided; no rank needs
another one for that.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.base.checkpoint.tensor_files import TensorFiles
from specdec.base.errors import SpecDecError
from specdec.layers.linear import DenseLinear
from specdec.layers.packed.weight import PackedWeight
from specdec.layers.sharded import SummedLinear
from specdec.parallel.group import Group
from tests.helpers.quantized import quantize_files
from tests.helpers.tiny_configs import CONFIGS, VOCAB
from tests.helpers.tiny_models import plain_model, tiny_tokenizer
from tests.verifiers.test_load_quantized import cohere, fp8_target
from tests.verifiers.test_quantized_checkpoint import CASES, PLAIN
from verifiers.config.families import describe
from verifiers.config.wrappers import read_config
from verifiers.dummy import dummy_rank
from verifiers.load import load_verifier
from verifiers.weights.checkpoint import read_weights
from verifiers.weights.shards import Shard, sharded


def shard_of(config: Any, rank: int, size: int = 2) -> Shard:
    group = Group(rank, size, None, None)
    description = describe(sharded(config, group))
    assert description is not None
    return Shard(config, description, group, name="tiny")


def read(
    folder: Path, config: Any, shard: Shard | None = None, *, as_stored: bool = False
) -> dict[str, Any]:
    return read_weights(
        folder,
        config,
        device=torch.device("cpu"),
        dtype=torch.float32,
        as_stored=as_stored,
        shard=shard,
    )


@pytest.mark.parametrize("name", ["llama_tied", "mixtral", "gpt_oss", "qwen3_next", "nemotron_h"])
def test_a_rank_reads_its_slices_and_nothing_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that leave the files are those that stay."""
    model = plain_model(name)
    model.save_pretrained(tmp_path)
    config, taken, whole = model.config, 0, read(tmp_path, model.config)
    original = TensorFiles.read

    def counting(files: TensorFiles, *args: Any) -> Tensor:
        nonlocal taken
        tensor = original(files, *args)
        taken += tensor.nbytes
        return tensor

    monkeypatch.setattr(TensorFiles, "read", counting)
    for rank in range(2):
        taken, shard = 0, shard_of(config, rank)
        parts = read(tmp_path, config, shard)
        # of an odd vocabulary; the last has a row more
        tables = [part for part in parts.values() if len(part) == -(-VOCAB // 2)]
        kept = sum(part.nbytes for part in parts.values()) - rank * sum(
            table[0].nbytes for table in tables
        )
        assert tables and kept == taken < 0.7 * sum(t.nbytes for t in whole.values())
        for key, part in parts.items():
            expected = shard.part(key, whole[key])
            assert isinstance(expected, Tensor) and torch.equal(part, expected), key
            assert tuple(part.shape) == shard.shape(key, whole[key].shape)


@pytest.mark.parametrize("case", ["int4_zeros", "channel", "awq"])
def test_packed_weights_are_divided_by_outputs_and_by_groups_of_inputs(
    case: str, tmp_path: Path
) -> None:
    """Joined again, the parts are the whole."""
    plain_model("mixtral", intermediate_size=64).save_pretrained(tmp_path / "plain")
    form, folder = CASES[case], tmp_path / "packed"
    quantize_files(
        tmp_path / "plain",
        folder,
        form.config,
        lambda name, weight: None if _is_plain(name) else form.write(weight),
    )
    config = read_config(str(folder))
    whole = read(folder, config, as_stored=True)
    ranks = [read(folder, config, shard_of(config, rank), as_stored=True) for rank in range(2)]
    packed = {name: weight for name, weight in whole.items() if isinstance(weight, PackedWeight)}
    assert {
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.mlp.experts.gate_up_proj",
    } <= packed.keys()
    for name, weight in packed.items():
        parts = [rank[name].dequantized() for rank in ranks]
        if name.endswith("gate_up_proj"):
            parts = [
                half
                for halves in zip(*(part.chunk(2, dim=1) for part in parts), strict=True)
                for half in halves
            ]
        assert all(
            rank[name].codes.untyped_storage().nbytes() < weight.codes.nbytes for rank in ranks
        ), "the rest is not kept"
        joined = torch.cat(parts, dim=-1 if re.search(r"\.(o|down)_proj", name) else -2)
        assert torch.equal(joined, weight.dequantized()), name


def _is_plain(name: str) -> bool:
    return name.endswith(".gate") or any(part in name for part in PLAIN)


def refusal(folder: Path, size: int, **options: Any) -> str:
    with pytest.raises(SpecDecError) as caught:
        load_verifier(
            folder,
            device=torch.device("cpu"),
            dtype=torch.float32,
            group=Group(0, size, None, None),
            **options,
        )
    assert "\n" not in str(caught.value)
    return str(caught.value)


REFUSED = {
    "llama": (3, "4 attention heads, which 3 ranks do not divide; start 1"),
    "laguna": (3, "which 3 ranks do not divide; start 1 or another divisor or multiple of 2"),
    "kimi_linear": (2, "3 heads of recurrent layers"),
    "bamba": (2, "1 groups of such heads that share keys"),
    "qwen2_moe": (2, r"25 numbers on axis -2 of 'model.layers.0.mlp.experts.gate_up_proj'"),
}
"""A number of ranks, and what is said."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_divide_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """Before a weight is read: there is none."""
    changes = {"bamba": {"mamba_n_groups": 1}, "qwen2_moe": {"moe_intermediate_size": 25}}
    model = plain_model(name)
    for key, value in changes.get(name, {}).items():
        setattr(model.config, key, value)
    model.config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    tiny_tokenizer().save_pretrained(tmp_path)
    size, said = REFUSED[name]
    assert said in refusal(tmp_path, size)


def test_groups_of_inputs_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    """As stored; of plain numbers a rank has its part of all."""
    folder = fp8_target(tmp_path, "llama")  # in groups of 24 of 32 inputs
    config = read_config(str(folder))
    said = "which 2 ranks do not divide; start fewer ranks, or unpack them: weights 'bfloat16'"
    with pytest.raises(SpecDecError, match=said):
        read(folder, config, shard_of(config, 0), as_stored=True)
    whole, *ranks = (
        read(folder, config, shard) for shard in (None, shard_of(config, 0), shard_of(config, 1))
    )
    name = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(torch.cat([rank[name] for rank in ranks], dim=1), whole[name])


def test_models_of_transformers_modules_are_refused(tmp_path: Path) -> None:
    """By type, and by the user's own choice."""
    cohere(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert "of type 'cohere' has to run through transformers' modules" in refusal(tmp_path, 2)
    CONFIGS["llama"]().save_pretrained(tmp_path)
    assert "was asked to run through transformers' modules" in refusal(tmp_path, 2, fuse=False)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_random_weights_are_those_of_one_process(name: str) -> None:
    """Cut, whatever the number of ranks; norms that are centered on 0 scale by 1 as well."""
    config, device = CONFIGS[name](), torch.device("cpu")
    whole, *ranks = (
        dummy_rank(config, group, device, torch.float32, name=name)._decoder.layers[1]
        for group in (None, Group(0, 2, None, None), Group(1, 2, None, None))
    )
    outputs = [layer.output for layer in (whole, *ranks)]
    first, *parts = [
        output.part if isinstance(output, SummedLinear) else output for output in outputs
    ]
    weights = [part.weight for part in parts if isinstance(part, DenseLinear)]
    assert isinstance(first, DenseLinear) and len(weights) == len(parts)
    assert torch.equal(torch.cat(weights, dim=1), first.weight) and first.weight.std() > 0.1
    assert whole.input_norm is not None and (whole.input_norm.weight == 1).all()


def test_one_process_reads_what_it_always_did() -> None:
    """A config is marked only for a group, and in a copy."""
    config = CONFIGS["llama"]()
    assert sharded(config, None) is config
    assert sharded(config, Group(0, 2, None, None)).ranks == 2 and not hasattr(config, "ranks")
