"""What a `config.json` may not say, and what is written of a config."""

from dataclasses import replace
from typing import Any

import pytest

from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.config.config_json import config_json
from drafters.dflash.config.layout import parse_config
from drafters.dflash.coupling import Coupling
from drafters.dflash2.selector import SelectorConfig
from drafters.dspark.markov import MarkovConfig
from specdec.base.errors import CheckpointError
from tests.drafters.dflash.config.layouts import F, S, speculators, zlab
from tests.drafters.tiny import TINY


def couple(**changes: Any) -> dict[str, Any]:
    """Weights of seven slots at two temperatures, with changes."""
    return {"temperatures": [0.5, 1.0], "a": [[1] * 7] * 2, "b": [[1] * 7] * 2} | changes


REFUSED: list[tuple[dict[str, Any], str]] = [
    (zlab(architectures=["DominoDraftModel"]), "config.json lacks emb_dim"),
    (zlab(architectures=["DominoDraftModel"], own={"emb_dim": 4, "gru_hidden_dim": 0}),
     "gru_hidden_dim is 0"),
    (zlab(architectures=["DominoDraftModel"], own={"use_hidden_proj": True}),
     "Domino with use_hidden_proj True"),
    (zlab(architectures=["DFlash2DraftModel"]), "lacks selector_rank"),
    (zlab(architectures=["DFlash2DraftModel"], own={"selector_rank": 8, "selector_top_k": 65}),
     "selector_top_k is 65"),
    (zlab(architectures=["DFlash2DraftModel"], own={"selector_rank": 8, "selector_top_k": 62}),
     "vocabulary has 61 tokens"),
    (zlab(architectures=["DSparkDraftModel"], markov_rank=8, markov_head_type="gru"),
     "markov_head_type is 'gru'; supported: va"),
    (zlab(architectures=["DSparkDraftModel"], markov_rank=-1), r"markov_rank is -1; it must lie in"
                                                               r" \[1"),
    (zlab(architectures=["DSparkDraftModel"], markov_rank=8, dspark_draft_topk=0),
     "dspark_draft_topk is 0"),
    (zlab(architectures=["DSparkDraftModel"], markov_rank=8, markov_head_type="rnn",
          sample_from_anchor=False), "'rnn' without"),
    (zlab(architectures=["DSparkDraftModel"], markov_rank=8, markov_window=3),
     "config.json says markov_window, which"),
    (zlab(sample_from_anchor=True, dspark_bonus_anchor=True), "sample_from_anchor and"
                                                              " dspark_bonus_anchor disagree"),
    (zlab(own={"query_causal": True}), r"dflash_config says query_causal, which .* not know"
                                       r" \(known: .*causal_head"),
    (zlab(own={"log_snr_conditioning": 0}), "dflash_config says log_snr_conditioning"),
    (zlab(own={"causal_head": "yes"}), "causal_head is 'yes'; it must be true or false"),
    (zlab(own={"attention_mode": "mla"}), "attention_mode 'mla'"),
    (zlab(own={"attention_sink_bias": 1}), "attention_sink_bias is 1; it must be true or false"),
    (zlab(own={"partial_rotary_factor": 0.2}), "RoPE turns 3.2 of 16 numbers of a head"),
    (zlab(architectures=["DFlashLagunaForCausalLM"], gating="per-token"), "gating is 'per-token';"
                                                                          " supported: true"),
    (zlab(architectures=["Gemma4DSparkModel"], markov_rank=0, enable_moe_block=True),
     "enable_moe_block True"),
    (zlab(own={"use_aux_hidden_state": False}), "use_aux_hidden_state False"),
    (zlab(dspark_fixup_head_type="gru"), "dspark_fixup_head_type 'gru'"),
    (zlab(remove=("architectures", "dflash_config")), "names no architecture"),
    (zlab(remove=("hidden_size",)), "lacks hidden_size"),
    (zlab(remove=("block_size",)), "lacks block_size"),
    (zlab(dflash_config={"target_layer_ids": [1]}), "lacks mask_token_id"),
    (zlab(dflash_config=[1]), r"dflash_config is \[1\]; it must be an object"),
    (zlab(hidden_size="32"), "hidden_size is '32'; it must be an integer"),
    (zlab(block_size=True), "block_size is True; it must be an integer"),
    (zlab(rms_norm_eps="x"), "rms_norm_eps is 'x'; it must be a number"),
    (zlab(is_causal="no"), "is_causal is 'no'; it must be true or false"),
    (zlab(block_size=1), "block_size is 1"),
    (zlab(layer_types=[S, F, F]), "layer 0 is sliding_attention but config.json enables no window"),
    (zlab(layer_types=[F, S, F], sliding_window=9, use_sliding_window=False),
     "layer 1 is sliding_attention"),
    (zlab(own={"use_swa": True}), "layer 0 is sliding_attention"),
    (zlab(own={"use_swa": True, "swa_window_size": 0}, sliding_window=9), "no window: it is 0"),
    (zlab(max_window_layers=-1, use_sliding_window=True, sliding_window=9),
     "max_window_layers is -1; it must be at least 0"),
    (zlab(num_target_layers=0), "num_target_layers is 0; it must be positive"),
    (zlab(draft_vocab_size=0), "draft_vocab_size is 0; it must be at least 1 and smaller"),
    (zlab(layer_types=[F, F]), "for each of 3 layers"),
    (zlab(layer_types=["chunked_attention"] * 3), "chunked_attention"),
    (zlab(own={"target_layer_ids": [-2, 2]}), "layers 0, 1, ... or -1 for the embedding output"),
    (speculators(aux_hidden_state_layer_ids=[-1, 3, 5]), "layers 0, 1, ... or -1 for the embedding"
                                                         " output"),
    (zlab(own={"target_layer_ids": "1,2"}), "must be a list of integers"),
    (zlab(own={"mask_token_id": 61}), "mask_token_id 61 lies outside 61 embeddings"),
    (zlab(remove=("rope_theta",)), "config.json lacks rope_theta"),
    (zlab(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "'dynamic' is not supported"),
    (zlab(rope_scaling={"type": "longrope"}), "'longrope' is not supported"),
    (
        zlab(rope_parameters={F: {"rope_theta": 1e4}, S: {"rope_theta": 1e4}},
             layer_types=[S, S, F], sliding_window=4),
        "one set for all layers",
    ),
    (speculators(tokens=8), "speculative_tokens is 8, but block_size 8 with sample_from_anchor"
                            " false gives 1 to 7"),
    (speculators(tokens=9, sample_from_anchor=True), "speculative_tokens is 9, but block_size 8"
                                                     " with sample_from_anchor true"),
    (speculators(tokens=0), "speculative_tokens is 0, but"),
    (speculators("dspark", tokens="7", markov_rank=4),  # type: ignore[arg-type]
     "speculative_tokens is '7'; it must be an integer"),
    (speculators(speculators_config={"proposal_methods": [7]}), r"proposal_methods is \[7\]; it"
                                                                r" must be a list of objects"),
    (zlab(rope_scaling={"rope_dim": 18}), r"rope_dim is 18; it must lie in \[1, 16\]"),
    (zlab(rope_scaling={"rope_dim": 5}), "RoPE turns 5 of 16"),
    (zlab(rope_scaling={"rope_dim": "8"}), "rope_dim is '8'; it must be an integer"),
    (zlab(draft_vocab_size=62), "draft_vocab_size is 62"),
    (zlab(own={"coupling": couple()}), "dflash_config says coupling, which this loader does not"
                                       " know"),
    (zlab(coupling=[1]), "coupling is list; it must be an object with temperatures, a and b"),
    (zlab(coupling=couple(c=[])), r"coupling is \['a', 'b', 'c', 'temperatures'\]; it must be an"
                                  r" object"),
    (zlab(coupling={"a": [[1] * 7], "b": [[1] * 7]}), r"coupling is \['a', 'b'\]; it must be an"
                                                      r" object"),
    (zlab(coupling=couple(temperatures=1.0)), "must hold a list of numbers as temperatures"),
    (zlab(coupling=couple(a=[1] * 7)), "a and b one list of numbers for each"),
    (zlab(coupling=couple(b=[[True] * 7, [1] * 7])), "a and b one list of numbers for each"),
    (zlab(coupling=couple(b=None)), "a and b one list of numbers for each"),
    (zlab(coupling=couple(temperatures=[1.0, 1.0])), r"temperatures \[1.0, 1.0\]; they must rise"),
    (zlab(coupling=couple(temperatures=[0, 1])), "they must rise from above 0"),
    (zlab(coupling=couple(temperatures=[1])), "2 rows of a for 1 temperatures"),
    (zlab(coupling=couple(a=[[1] * 7])), "1 rows of a for 2 temperatures"),
    (zlab(coupling=couple(b=[[1] * 7, [1] * 6])), r"rows of \[6, 7\] numbers; this drafter's blocks"
                                                  r" have 7 drafts"),
    (zlab(coupling=couple(a=[[1] * 7, [0] * 7])), "coupling has 0.0 in a; it must be above 0"),
    (zlab(coupling=couple(b=[[1] * 7, [-1] * 7])), "coupling has -1.0 in b; it must be at least 0"),
    (zlab(coupling=couple(b=[[1] * 7, [1e300] * 7])), "coupling must hold a list of numbers"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_refusals(raw: dict[str, Any], message: str) -> None:
    """Each says in one line what is wrong."""
    with pytest.raises(CheckpointError, match=message) as caught:
        parse_config(raw)
    assert "\n" not in str(caught.value)


ROUND_TRIPS: dict[str, DFlashConfig] = {
    "plain": TINY,
    "sliding": replace(TINY, windows=(9, 9, None), causal=(True, True, False)),
    "convolutions": replace(TINY, conv_kernel_size=2, conv_group_size=4),
    "sliding non-causal": replace(TINY, windows=(9, None, 9)),
    "raw embeddings": replace(TINY, input_embedding_scale=1.0),
    "fewer recommended": replace(TINY, sample_from_anchor=True, speculative_tokens=7),
    "selector": replace(TINY, windows=(9,) * 3, head=SelectorConfig(4, 8), conv_kernel_size=2,
                        conv_group_size=4),
    "Markov head": replace(TINY, sample_from_anchor=True,
                           head=MarkovConfig(4, "gated", has_confidence=True)),
    "Markov head on masks": replace(TINY,
                                    head=MarkovConfig(4, has_confidence=True,
                                                      confidence_sees_token=False, draft_top_k=5)),
    "everything": replace(
        TINY,
        attention_bias=True,
        sample_from_anchor=True,
        input_embedding_scale=2.0,
        output_multiplier=0.5,
        final_logit_softcapping=30.0,
        draft_vocab_size=30,
        target_hidden_size=64,
        rms_norm_eps=1e-5,
        verifier_name="some/target",
        verifier_architectures=("Qwen3ForCausalLM",),
        coupling=Coupling((0.5, 1.0), ((0.5,) * 8, (0.75,) * 8), ((0.25,) * 8, (0.0,) * 8)),
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
                         "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 128},
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_round_trip(layout: Any, name: str) -> None:
    """What is written is what is read, in either layout."""
    assert (
        parse_config(config_json(ROUND_TRIPS[name], layout, dtype="float32")) == ROUND_TRIPS[name]
    )


def test_jetspec_goes_out_as_causal() -> None:
    """JetSpec's key in, z-lab's out: both mean that rows see only rows up to themselves."""
    config = parse_config(zlab(own={"causal_head": True}))
    written = config_json(config, "z-lab", dtype="float32")
    assert written["is_causal"] is True
    assert parse_config(written) == config


@pytest.mark.parametrize(
    ("windows", "causal", "non_causal"),
    [
        ((None,) * 3, (False,) * 3, True),
        ((9, 9, None), (False,) * 3, True),
        ((9, 9, None), (True, True, False), False),
    ],
    ids=["full", "sliding non-causal", "sliding causal"],
)
def test_vllm_is_told_that_full_layers_see_the_block(
    windows: Any, causal: Any, non_causal: bool
) -> None:
    """vLLM reads the key for all layers, so one without windows says nothing is causal."""
    config = replace(TINY, windows=windows, causal=causal)
    assert (
        config_json(config, "speculators", dtype="float32")["sliding_window_non_causal"]
        is non_causal
    )


def test_causal_full_layers_only_in_zlab() -> None:
    """The speculators layout has no key for them, and says so instead of losing them."""
    config = replace(TINY, causal=(True,) * 3)
    assert parse_config(config_json(config, "z-lab", dtype="float32")) == config
    with pytest.raises(CheckpointError, match="no key in the speculators layout"):
        config_json(config, "speculators", dtype="float32")


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (replace(TINY, windows=(9, 8, None)), "z-lab", r"windows of \[8, 9\]"),
        (replace(TINY, causal=(True, False, False)), "z-lab", "no key in the z-lab layout"),
        (replace(TINY, num_target_layers=None), "z-lab", "num_target_layers is unknown"),
        (replace(TINY, target_layer_ids=(1, 5)), "speculators", "tap 5 is the target's last layer"),
    ],
)
def test_unwritable(config: DFlashConfig, layout: Any, message: str) -> None:
    """A layout refuses what it cannot say."""
    with pytest.raises(CheckpointError, match=message):
        config_json(config, layout, dtype="float32")
