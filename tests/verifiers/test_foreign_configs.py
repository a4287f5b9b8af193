"""Configs of strangers: whatever stands at any entry, loading and `doctor` end in a result or in
one line that names the entry.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import SpecDecoder
from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.errors import CheckpointError, SpecDecError
from tests.helpers.tiny_configs import CONFIGS, LATENT_CONFIGS
from tests.helpers.tiny_models import plain_greedy, plain_model, tiny_tokenizer
from verifiers import needs
from verifiers.load import load_verifier
from verifiers.needs import needs_of, read_needs

CPU = torch.device("cpu")
VALUES: tuple[Any, ...] = (None, 5, "x", [], 0, 1.5)
EXTRA = (
    "layer_types", "sliding_window", "quantization_config", "text_config", "per_layer_config",
    "is_causal", "auto_map",
)  # fmt: skip
"""What a config may state though its type has no such entry."""

COMPOSITE = {
    "model_type": "qwen3_5",
    "text_config": {"model_type": "qwen3_5_text", "num_hidden_layers": 4},
    "vision_config": {},
}
FAMILIES: dict[str, Any] = {
    "llama": lambda: CONFIGS["llama"]().to_dict(),
    "gemma4_shared": lambda: CONFIGS["gemma4_shared"]().to_dict(),
    "gpt_oss": lambda: CONFIGS["gpt_oss"]().to_dict(),
    "qwen3_5_moe": lambda: CONFIGS["qwen3_5_moe"]().to_dict(),
    "deepseek_v32": lambda: LATENT_CONFIGS["deepseek_v32"]().to_dict(),
    "composite": lambda: COMPOSITE,
    "gpt2": lambda: {
        "model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 97,
        "n_positions": 40,
    },
}  # fmt: skip


def entries_of(family: str) -> dict[str, Any]:
    entries: dict[str, Any] = json.loads(json.dumps(FAMILIES[family](), default=str))
    return {name: value for name, value in entries.items() if value is not None}


def changed(entries: dict[str, Any], turn: int) -> Iterator[dict[str, Any]]:
    """With half of the values at each entry, at any depth; in the next turn with the others."""
    for number, name in enumerate((*entries, *EXTRA), start=turn):
        yield from ({**entries, name: value} for value in VALUES[number % 2 :: 2])
        if isinstance(entries.get(name), dict):
            yield from ({**entries, name: inner} for inner in changed(entries[name], number))


@pytest.mark.parametrize("family", FAMILIES)
def test_any_value_at_any_entry_ends_in_one_line(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # which takes a while, and is tested below
    monkeypatch.setattr(needs, "blamed", lambda entries, judge, error: "")
    monkeypatch.setattr(needs, "divisions", lambda config, *_, **__: {1: 1})
    if family != "llama":
        monkeypatch.setattr(needs, "weight_bytes", lambda *_, **__: 1)
    said = 0
    for entries in changed(entries_of(family), [*FAMILIES].index(family)):
        try:
            needs_of(entries, name="target", device=CPU, dtype=torch.float32, gpu_bytes=10**9)
        except SpecDecError as error:
            said += 1
            assert "\n" not in str(error) and "'target'" in str(error)
    assert said > 10, "so many of these make no config"


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("num_attention_heads", 0),
        ("layer_types", 5),
        ("quantization_config", 5),
        ("quantization_config", {"quant_method": "compressed-tensors", "config_groups": 5}),
        ("quantization_config", {"quant_method": "gptq", "bits": "x"}),
        ("vocab_size", "x"),
        ("text_config", 5),
        ("to_dict", 5),
    ],
)
def test_the_entry_is_named(entry: str, value: Any, llama: Path, tmp_path: Path) -> None:
    change(tmp_path, llama, **{entry: value})
    with pytest.raises(CheckpointError, match=rf"{entry}[.\w]* is ") as doctor:
        read_needs(str(tmp_path), device=CPU, dtype=torch.float32, gpu_bytes=10**9)
    with pytest.raises(CheckpointError, match=rf"{entry}[.\w]* is ") as loading:
        load_verifier(str(tmp_path), device=CPU, dtype=torch.float32)
    assert "\n" not in str(doctor.value) + str(loading.value)


@pytest.mark.parametrize(
    ("family", "entry"),
    [
        *(("llama", f"num_{one}") for one in ("attention_heads", "key_value_heads")),
        *(("llama", one) for one in ("head_dim", "hidden_size", "intermediate_size")),
        *(("bamba", f"mamba_{one}") for one in ("d_conv", "d_head", "d_state", "n_groups")),
        *(("bamba", one) for one in ("mamba_n_heads", "num_hidden_layers")),
        *(("qwen3_moe", one) for one in ("decoder_sparse_step", "moe_intermediate_size")),
        *(("qwen3_next", f"linear_{one}") for one in ("conv_kernel_dim", "key_head_dim")),
        *(("qwen3_next", f"linear_num_{one}_heads") for one in ("key", "value")),
        *(("nemotron_h", one) for one in ("n_groups", "ssm_state_size", "mamba_head_dim")),
    ],
)
def test_a_count_of_less_than_one(family: str, entry: str) -> None:
    entries = json.loads(json.dumps(CONFIGS[family]().to_dict(), default=str))
    for value in (0, -1):
        said = rf": {entry} is {value}[,;] .*must be at least [01]"
        with pytest.raises(CheckpointError, match=said):
            needs_of(
                entries | {entry: value}, name="x", device=CPU, dtype=torch.float32, gpu_bytes=10**9
            )


def test_groups_of_quantized_weights_may_be_whole_rows() -> None:
    """Which is written as -1."""
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True}
    entries = entries_of("llama") | {"quantization_config": quantization}
    assert needs_of(entries, name="x", device=CPU, dtype=torch.float32, gpu_bytes=10**9).would_run


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"head_dim": -16}, "-16"),
        ({"index_topk": 2**31}, "index_topk is 2147483648; it must lie in"),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 1e30,
                    "original_max_position_embeddings": 32,
                }
            },
            "rope_parameters stretch positions to 32000000",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": "x"}},
            "RoPE's factor is 'x'; it must be a positive number",
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": -1}}, "RoPE's factor is -1"),
        ({"rope_parameters": {"rope_theta": True}}, "RoPE's rope_theta is True"),
        ({"rope_theta": 0}, "rope_theta is 0; it must lie in"),
        (
            {"rope_parameters": {"rope_theta": math.inf}},
            "rope_theta is inf; it must be a positive number",
        ),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan; it must lie in \\[0, 1\\]"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps is 1e\\+300; it must lie in"),
        ({"rms_norm_eps": {"__float__": "Infinity"}}, "rms_norm_eps is inf; it must lie in"),
    ],
)
def test_numbers_that_no_model_has(
    entries: dict[str, Any], reason: str, llama: Path, tmp_path: Path
) -> None:
    change(tmp_path, llama, **entries)
    for judge in (read_needs, load_verifier):
        options: dict[str, Any] = {"gpu_bytes": 10**9} if judge is read_needs else {}
        with pytest.raises(CheckpointError, match=reason):
            judge(str(tmp_path), device=CPU, dtype=torch.float32, **options)


@pytest.mark.parametrize("limits", [[0.0, math.inf], [0.0, {"__float__": "Infinity"}]])
def test_an_infinite_limit_is_read_however_it_is_written(limits: list[Any], tmp_path: Path) -> None:
    """Transformers writes that of Mamba's time steps as an object."""
    entries = CONFIGS["falcon_h1"]().to_dict() | {"time_step_limit": limits}
    (tmp_path / "config.json").write_text(json.dumps(entries, default=str))
    assert read_needs(str(tmp_path), device=CPU, dtype=torch.float32, gpu_bytes=10**9).would_run


@pytest.mark.parametrize(
    "entry",
    ["num_hidden_layers", "num_nextn_predict_layers", "num_experts", "n_layer", "num_labels"],
)
def test_counts_are_refused_before_memory_is_taken(entry: str, tmp_path: Path) -> None:
    """At any depth; a list of a billion layers would not fit."""
    forms: tuple[dict[str, Any], ...] = ({entry: 10**9}, {"text_config": {entry: 10**9}})
    for number, entries in enumerate(forms):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | entries))
        with pytest.raises(CheckpointError, match=f"{entry} is 1000000000; it must lie in"):
            read_needs(str(folder), device=CPU, dtype=torch.float32, gpu_bytes=10**9)
        with pytest.raises(CheckpointError, match=f"{entry} is 1000000000; it must lie in"):
            load_verifier(str(folder), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    "junk",
    [
        [1],
        5,
        "x",
        None,
        {"metadata": [1], "weight_map": 5},
        {"metadata": {"total_size": float("nan")}},
    ],
)
def test_a_junk_index(junk: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]().to_dict(), default=str))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(junk))
    try:
        assert (
            read_needs(str(tmp_path), device=CPU, dtype=torch.float32, gpu_bytes=10**9).weights > 0
        )
    except CheckpointError as error:
        assert "holds no JSON object" in str(error)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    plain_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def change(folder: Path, source: Path, **entries: Any) -> None:
    """Makes `folder` the checkpoint in `source` with these entries."""
    for file in source.iterdir():
        (folder / file.name).unlink(missing_ok=True)
        (folder / file.name).symlink_to(file)
    stated = json.loads((source / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(stated | entries))


def decoder(folder: Path, source: Path, **entries: Any) -> SpecDecoder:
    change(folder, source, **entries)
    engine = EngineConfig(max_num_seqs=1, cache=CacheConfig(memory_bytes=2**19))
    return SpecDecoder.from_pretrained(
        str(folder), drafter="none", device="cpu", dtype="float32", engine=engine
    )


@pytest.mark.parametrize(
    ("entry", "values"),
    [
        ("sliding_window", (0, 4, "x")),
        ("attn_logit_softcapping", (0, 4, "x")),
        ("num_kv_shared_layers", (2, "x")),
        ("num_attention_heads_per_layer", (4, "x")),
        ("partial_rotary_factor", (0.5,)),
        ("no_rope_layers", ([0, 0, 1, 1],)),
        ("hidden_activation", ("relu", 5)),
    ],
)
def test_entries_of_other_types_change_nothing(
    llama: Path, tmp_path: Path, entry: str, values: tuple[Any, ...]
) -> None:
    """A Llama has no windows in Transformers, whatever its file says."""
    expected = plain_greedy(plain_model("llama"), list(range(3, 23)), 12)
    for value in values:
        own = decoder(tmp_path, llama, **{entry: value})
        assert (
            own.generate(list(range(3, 23)), max_tokens=12, ignore_eos=True).token_ids == expected
        )


@pytest.mark.parametrize(
    "entries",
    [
        {"attn_implementation": "flash_attention_2"},
        {
            "_attn_implementation": "owner/kernels",
            "_attn_implementation_internal": "flash_attention_3",
        },
        {
            "attn_implementation": {"": "flash_attention_2", "text_config": "sdpa"},
            "experts_implementation": "owner/kernels",
        },
        {"output_attentions": True, "output_hidden_states": True, "return_dict": False},
    ],
)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_how_to_run_a_model_is_not_for_its_file_to_say(
    name: str, entries: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    source, folder = llama, tmp_path / "changed"
    folder.mkdir()
    if name == "gpt2":
        torch.manual_seed(0)
        model: Any = GPT2LMHeadModel(
            GPT2Config(vocab_size=97, n_positions=40, n_embd=32, n_layer=2, n_head=2)
        ).eval()
        source = tmp_path / "gpt2"
        model.save_pretrained(source)
        tiny_tokenizer().save_pretrained(source)
    else:
        model = plain_model("llama")
    expected = plain_greedy(model, list(range(3, 23)), 4)
    own = decoder(folder, source, **entries)
    assert own.generate(list(range(3, 23)), max_tokens=4, ignore_eos=True).token_ids == expected


@pytest.mark.parametrize(
    ("name", "entry", "value"),
    [
        ("gemma3", "query_pre_attn_scalar", -1),
        ("falcon_h1", "embedding_multiplier", None),
        ("falcon_h1", "lm_head_multiplier", None),
        ("granite", "attention_multiplier", float("inf")),
        ("granite", "residual_multiplier", 10**30),
        ("deepseek_v32", "index_topk", -1),
    ],
)
def test_numbers_that_layers_would_stumble_over(name: str, entry: str, value: Any) -> None:
    """What no config class sees to, and a first step would: a root of a negative number, nothing as
    a factor.
    """
    entries = json.loads(json.dumps((CONFIGS | LATENT_CONFIGS)[name]().to_dict(), default=str)) | {
        entry: value
    }
    with pytest.raises(CheckpointError, match=f"{entry} is "):
        needs_of(entries, name="target", device=CPU, dtype=torch.float32, gpu_bytes=10**9)


@pytest.mark.parametrize(
    ("name", "entry", "tensor"),
    [
        ("gemma2", "intermediate_size", "mlp.gate_proj"),
        ("deepseek_v3", "q_lora_rank", "self_attn.q_a_proj"),
        ("lfm2", "conv_L_cache", "conv.conv"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_size_of_0_leaves_no_tensor(name: str, entry: str, tensor: str) -> None:
    """It is seen before weights are fetched, in one line, whatever the entry is called."""
    entries = json.loads(json.dumps((CONFIGS | LATENT_CONFIGS)[name]().to_dict(), default=str))
    with pytest.raises(CheckpointError, match=rf"layers\.0\.{tensor}.* of the sizes \[.*0"):
        needs_of(entries | {entry: 0}, name="target", device=CPU, dtype=torch.float32, gpu_bytes=1)


@pytest.mark.parametrize("width", [0, 5, True])
def test_recurrent_heads_fit_their_tensors(width: Any, tmp_path: Path) -> None:
    source, folder = tmp_path / "zamba2", tmp_path / "changed"
    folder.mkdir()
    plain_model("zamba2").save_pretrained(source)
    tiny_tokenizer().save_pretrained(source)
    change(folder, source, mamba_headdim=width)
    with pytest.raises(CheckpointError, match="recurrent layers have "):
        load_verifier(folder, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("window", [0, -4, True, "x", 1.5, [4], 2**31, 10**30])
def test_a_window_counts_tokens(window: Any) -> None:
    entries = json.loads(json.dumps(CONFIGS["mistral"]().to_dict())) | {"sliding_window": window}
    with pytest.raises(CheckpointError, match="sliding_window"):
        needs_of(entries, name="target", device=CPU, dtype=torch.float32, gpu_bytes=10**9)
