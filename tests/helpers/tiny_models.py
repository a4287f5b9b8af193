"""Tiny random models of every supported kind, and engines around them."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.drafter import DFlashDrafter
from drafters.dflash.model import DFlashModel
from drafters.head import HeadConfig
from drafters.lilicorr.lattice import LatticeConfig
from drafters.xpress.refiner import XPressConfig
from specdec.attention.selector import select_backend
from specdec.model.core import Verifier
from tests.helpers.tiny_configs import CONFIGS, LATENT_CONFIGS, VOCAB, WINDOW
from verifiers.config.families import family_of
from verifiers.config.shape import backend_spec
from verifiers.config.wrappers import text_class
from verifiers.hf import verifier_for
from verifiers.hf_attention import ATTENTION_NAME


def plain_model(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The model as transformers alone runs it, eager attention, float32; `changes` are made to its
    config.
    """
    torch.manual_seed(seed)
    config = (CONFIGS | LATENT_CONFIGS)[name]()
    config.tie_word_embeddings = config.tie_word_embeddings and not name.startswith("gemma")
    for attribute, value in changes.items():
        setattr(config, attribute, value)
    model = _from_config(config, "eager").eval()
    family = family_of(config)
    hybrid = family.recurrent and not family.latent
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks") or "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            if parameter_name.endswith(
                ("router.scale", "per_expert_scale", "e_score_correction_bias")
            ):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            # by default a state forgets all within a token or two
            if parameter_name.endswith("A_log"):
                parameter.uniform_(-2, 0)
            if parameter_name.endswith(("dt_bias", ".D")):
                parameter.normal_()
            if hybrid and parameter_name.endswith(".bias"):
                parameter.normal_(std=0.1)
        for buffer_name, buffer in model.named_buffers():
            biased = family.recurrent or name == "hy_v3"
            if biased and buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(std=0.2)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        if name in LATENT_CONFIGS:
            # transformers makes the padding token's row zero, for which all positions score the
            # same in the first indexer.
            model.get_input_embeddings().weight[config.pad_token_id].normal_(
                std=config.initializer_range
            )
    return model


def _from_config(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """A causal language model."""
    model: PreTrainedModel = text_class(config)._from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    return model


def paged_verifier(
    model: PreTrainedModel,
    block_size: int = 4,
    *,
    fuse: bool = True,
    backend: Callable[[Any], Any] | None = None,
    device: str = "cpu",
) -> Verifier:
    """A second model with the same weights behind our paged attention, torch_ref's unless `backend`
    makes another of the spec.
    """
    config = copy.deepcopy(model.config)
    paged = _from_config(config, ATTENTION_NAME)
    paged.load_state_dict(model.state_dict())
    paged.generation_config.eos_token_id = model.generation_config.eos_token_id
    spec = backend_spec(
        config, device=torch.device(device), dtype=torch.float32, block_size=block_size
    )
    attention = backend(spec) if backend is not None else select_backend("torch_ref", spec)
    return verifier_for(paged.to(device), name=config.model_type, backend=attention, fuse=fuse)


@torch.inference_mode()
def plain_greedy(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """New tokens of `generate`, greedy, end-of-sequence included."""
    ids = torch.tensor([list(prompt)])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, the same size as the tiny models' vocabulary."""
    return piece_tokenizer(["<pad>", "<s>", "</s>", *map(chr, range(32, 32 + VOCAB - 3))])


def piece_tokenizer(pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    """A token per piece."""
    vocab = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def random_dflash(
    verifier: Verifier,
    *,
    block_size: int = 5,
    causal: tuple[bool, bool, bool] = (False, True, False),
    head_dim: int = 8,
    seed: int = 0,
    taps: tuple[int, ...] = (0, 2, 3),
    head: HeadConfig | None = None,
    divides: bool | None = None,
) -> DFlashDrafter:
    """A DFlash drafter with random weights, one full layer and two sliding ones; with a head, the
    anchor's row predicts, but for a lattice and a refiner.
    """
    torch.manual_seed(seed)
    config = DFlashConfig(
        block_size=block_size,
        mask_token_id=0,
        target_layer_ids=taps,
        windows=(None, WINDOW, WINDOW),
        causal=causal,
        hidden_size=verifier.hidden_size,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        vocab_size=verifier.vocab_size,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=512,
        num_target_layers=verifier.num_layers,
        sample_from_anchor=not isinstance(head, LatticeConfig | XPressConfig | None),
        head=head,
    )
    return DFlashDrafter(DFlashModel(config), verifier, divides=divides)


def random_prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens, special tokens left out."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
