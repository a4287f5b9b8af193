"""The target as training sees it: features of whole sequences."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.dflash.dummy import dummy_config
from drafters.training.config import TrainConfig
from drafters.training.loss.packing import Packing, out_of_rows
from drafters.training.shape import new_config
from drafters.training.stages import load_target
from drafters.training.target import Target
from specdec.base.errors import InvalidInputError
from tests.drafters.tiny import VOCAB, tiny_target
from tests.drafters.training.small import TinyVerifier, sequences
from tests.helpers.bounds import assert_as_exact, in_float64
from tests.helpers.gguf_files import write_gguf
from tests.helpers.tiny_configs import CONFIGS, LATENT_CONFIGS
from tests.helpers.tiny_models import (
    paged_verifier,
    piece_tokenizer,
    plain_model,
    random_prompts,
)
from verifiers.config.shape import peculiarity


def outputs(model: Any, tokens: Tensor) -> tuple[Any, Any]:
    """What `model` says, with all hidden states, and what it says in float64."""
    with torch.no_grad():
        plain = model(tokens, output_hidden_states=True)
    return plain, in_float64(model, tokens, output_hidden_states=True)


def taps(output: Any, layers: tuple[int, ...]) -> Tensor:
    """Outputs of `layers`, 0-based, side by side."""
    return torch.cat([output.hidden_states[layer + 1] for layer in layers], dim=-1)


def test_target_features_are_raw_layer_outputs_whatever_the_padding() -> None:
    """Catches taps off by one, and padding that reaches the tokens before it."""
    tokens = torch.randint(VOCAB - 1, (2, 12), generator=torch.Generator().manual_seed(0))
    plain, exact = outputs(tiny_target(), tokens)
    runs = [taps(output, (1, 2, 4)) for output in (plain, exact)]
    target = Target(TinyVerifier(), (1, 2, 4))
    features, _ = target.features(sequences(tokens))
    assert_as_exact(features, *runs)
    padded, _ = target.features(sequences(F.pad(tokens, (0, 5), value=7), lengths=[12, 12]))
    assert_as_exact(padded[:, :12], *runs)
    full = Target(TinyVerifier(), (1, 2, 4), distribution=True)
    assert_as_exact(full.head(full.features(sequences(tokens))[1]), plain.logits, exact.logits)
    with pytest.raises(InvalidInputError, match=r"taps \[1, 6\] .* choose from 0 to 5"):
        Target(TinyVerifier(), (1, 6))


@pytest.mark.parametrize("name", [*CONFIGS, *LATENT_CONFIGS])
def test_new_drafters_have_the_heads_of_the_first_layer(name: str) -> None:
    """In training and with random weights; layers of Gemma 4 differ in theirs."""
    verifier: Any = paged_verifier(plain_model(name))
    target = verifier.config
    made = new_config(TrainConfig(layers=1, head_dim=16), verifier, piece_tokenizer(["<pad>"]))
    first = target.per_layer_config[0] if getattr(target, "per_layer_config", None) else target
    for config in (made, dummy_config(target)):
        heads = config.num_attention_heads, config.num_key_value_heads
        assert heads == (first.num_attention_heads, first.num_key_value_heads)
        assert config.intermediate_size == (getattr(first, "intermediate_size", None) or 96)


@pytest.mark.parametrize("name", CONFIGS)
def test_target_features_are_those_of_transformers(name: str) -> None:
    """Catches windows, scales, softcaps and sinks that are lost when the target runs on training's
    own attention, or not at all; and sequences that see each other in rows that they share.
    """
    plain = plain_model(name)
    verifier = (
        paged_verifier(plain) if peculiarity(plain.config) else TinyVerifier(plain_model(name))
    )
    tokens = torch.tensor(random_prompts(1, longest=40)[0] * 30)[:24].repeat(2, 1)
    features, _ = Target(verifier, (0, 2)).features(sequences(tokens))
    runs = [taps(output, (0, 2)) for output in outputs(plain, tokens)]
    assert_as_exact(features, *runs)
    lengths = [17, 24, 11]
    batch = sequences(torch.cat([tokens, tokens[:1]]), lengths=lengths)
    batch.packing = Packing.of([lengths], 40, tokens.device)[0]
    packed, _ = Target(verifier, (0, 2)).features(batch)
    assert packed.shape[:2] == (2, 40)
    own = torch.arange(24) < torch.tensor(lengths)[:, None]
    shared = out_of_rows(packed.flatten(0, 1), batch.packing.index(batch.lengths, 24))[own]
    assert_as_exact(shared, *(torch.cat([run, run[:1]])[own] for run in runs))


@pytest.mark.parametrize("distribution", [False, True])
@pytest.mark.parametrize("name", LATENT_CONFIGS)
def test_latent_attention_gives_the_features_of_transformers_whatever_the_padding(
    name: str, distribution: bool
) -> None:
    """Catches rows at wrong places, shared caches, and states of other layers."""
    plain = plain_model(name)
    lengths = [19, 1, 24, 8]  # with blocks of 4 tokens: some end in the middle of one
    tokens = torch.randint(
        3, plain.config.vocab_size, (4, 24), generator=torch.Generator().manual_seed(0)
    )
    target = Target(paged_verifier(plain), (0, 2), distribution=distribution)
    features, final = target.features(sequences(tokens, lengths=lengths))
    padded, _ = target.features(sequences(F.pad(tokens, (0, 7), value=5), lengths=lengths))
    runs = list(
        zip(
            *(outputs(plain, tokens[i : i + 1, :length]) for i, length in enumerate(lengths)),
            strict=True,
        )
    )
    own = torch.arange(24) < torch.tensor(lengths)[:, None]
    for found in (features, padded[:, :24]):
        assert_as_exact(
            found[own], *(torch.cat([taps(output, (0, 2))[0] for output in side]) for side in runs)
        )
    if distribution:
        assert_as_exact(
            target.head(final[own]),
            *(torch.cat([output.logits[0] for output in side]) for side in runs),
        )
    assert not features.is_inference(), "autograd cannot keep it for the drafter's gradients"
    assert len(target.verifier._decoder.layers) == (4 if distribution else 3), (
        "layers above the taps cost time"
    )


def test_a_head_without_gradients_is_refused(tmp_path: Path) -> None:
    """In GGUF's blocks; catches a TypeError in the first step."""
    model = plain_model("llama", hidden_size=64)
    write_gguf(tmp_path / "model.gguf", model, "llama", kinds={"output.weight": "Q8_0"})
    path = str(tmp_path / "model.gguf")
    config = TrainConfig(out="unused", model=path, dtype="bfloat16", init="mtp")
    with pytest.raises(InvalidInputError, match=r"head of .* is stored in fewer bits"):
        load_target(config, torch.device("cpu"))
