"""Values of the wrong type are refused by name; those of numpy and torch become Python's own."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from specdec import EngineConfig, SamplingParams
from specdec.base.config import CacheConfig, LoadConfig
from specdec.base.errors import InvalidInputError


@pytest.mark.parametrize(
    ("config", "values", "said"),
    [
        (SamplingParams, {"max_tokens": "5"}, "max_tokens is '5'; it must be an integer"),
        (SamplingParams, {"max_tokens": 2.5}, "max_tokens is 2.5; it must be an integer"),
        (SamplingParams, {"max_tokens": True}, "max_tokens is True; it must be an integer"),
        (SamplingParams, {"top_k": 1.5}, "top_k is 1.5; it must be an integer"),
        (SamplingParams, {"seed": 1.5}, "seed is 1.5; it must be an integer"),
        (SamplingParams, {"temperature": None}, "temperature is None; it must be a number"),
        (SamplingParams, {"temperature": 10**400}, "temperature is inf; it must be 0"),
        (SamplingParams, {"top_p": "0.5"}, "top_p is '0.5'; it must be a number"),
        (SamplingParams, {"min_p": True}, "min_p is True; it must be a number"),
        (LoadConfig, {"weights": "fp8"}, "weights is 'fp8'; choose 'as-stored' or 'bfloat16'"),
        (LoadConfig, {"weights": None}, "weights is None; choose 'as-stored' or 'bfloat16'"),
        (
            LoadConfig,
            {"weights": "bfloat16", "dtype": "float16"},
            "weights are asked for in bfloat16 and dtype is 'float16'",
        ),
        (EngineConfig, {"max_model_len": 10**20}, "it must be at most 268,435,456"),
        (EngineConfig, {"max_prefill_tokens": 2**40}, "it must be at most 268,435,456"),
        (LoadConfig, {"tensor_parallel": 65}, "tensor_parallel is 65; it must be at least 1 and"),
        (LoadConfig, {"block_size": 2**20}, "block_size is 1048576; it must be at least 1 token"),
        (SamplingParams, {"stop": 5}, "stop is 5; it must be a list of strings"),
        (SamplingParams, {"stop": torch.tensor(1)}, "stop is tensor(1); it must be a list of"),
        (SamplingParams, {"prediction": np.array(3)}, "prediction is array(3); it must be a list"),
        (SamplingParams, {"logit_bias": torch.tensor(1)}, "logit_bias is tensor(1); it must map"),
        (SamplingParams, {"logit_bias": np.array([1.0])}, "logit_bias holds np.float64(1.0); it"),
        (SamplingParams, {"stop": b"x"}, "stop is b'x'; it must be a list of strings"),
        (SamplingParams, {"stop": ["x", None]}, "stop holds None; it must be a list of strings"),
        (
            SamplingParams,
            {"stop": ["x"] * 65},
            "stop has 65 strings of 65 characters together; the most are 64 of 2,048",
        ),
        (
            SamplingParams,
            {"stop": "x" * 2049},
            "stop has 1 strings of 2,049 characters together; the most are 64 of 2,048",
        ),
        (
            SamplingParams,
            {"stop_token_ids": range(1025)},
            "stop_token_ids has 1,025 entries and the limit is 1024",
        ),
        (SamplingParams, {"logit_bias": {"9" * 5000: 1}}, "it must be an integer"),
        (SamplingParams, {"logit_bias": {5: 10**400}}, "it must be a number in [-1e6, 1e6]"),
        (
            SamplingParams,
            {"max_tokens": 10**5000},
            "max_tokens has 16,610 bits; it must be an integer of 256 bits at most",
        ),
        (
            SamplingParams,
            {"stop_token_ids": 3},
            "stop_token_ids is 3; it must be a list of token ids",
        ),
        (
            SamplingParams,
            {"stop_token_ids": "34"},
            "stop_token_ids is '34'; it must be a list of token ids",
        ),
        (
            SamplingParams,
            {"stop_token_ids": [1.5]},
            "one of stop_token_ids is 1.5; it must be an integer",
        ),
        (SamplingParams, {"ignore_eos": "no"}, "ignore_eos is 'no'; it must be True or False"),
        (SamplingParams, {"logprobs": 5}, "logprobs is 5; it must be True or False"),
        (SamplingParams, {"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        (SamplingParams, {"top_logprobs": 65}, "top_logprobs is 65; it must lie in [0, 64]"),
        (SamplingParams, {"prompt_logprobs": -1}, "prompt_logprobs is -1; it must lie in [0, 64]"),
        (
            SamplingParams,
            {"min_tokens": 9, "max_tokens": 8},
            "min_tokens is 9; it must lie in [0, 8]",
        ),
        (SamplingParams, {"presence_penalty": float("nan")}, "presence_penalty is nan"),
        (SamplingParams, {"logit_bias": 5}, "logit_bias is 5; it must map token ids to numbers"),
        (SamplingParams, {"logit_bias": "ab"}, "logit_bias is 'ab'; it must map"),
        (SamplingParams, {"logit_bias": [(1, 2, 3)]}, "logit_bias holds (1, 2, 3)"),
        (
            SamplingParams,
            {"logit_bias": {"x": 1}},
            "a token of logit_bias is 'x'; it must be an integer",
        ),
        (SamplingParams, {"logit_bias": {1: float("inf")}}, "logit_bias of token 1 is inf"),
        (SamplingParams, {"logit_bias": [(1, 2), (1, 3)]}, "logit_bias names token 1 twice"),
        (
            SamplingParams,
            {"logit_bias": dict.fromkeys(range(1025), 1)},
            "logit_bias names more than 1024 tokens, which is the limit",
        ),
        (
            EngineConfig,
            {"num_draft_tokens": True},
            "num_draft_tokens is True; it must be an integer",
        ),
        (EngineConfig, {"num_draft_tokens": "4"}, "num_draft_tokens is '4'; it must be 'auto'"),
        (EngineConfig, {"max_num_seqs": "4"}, "max_num_seqs is '4'; it must be an integer"),
        (
            EngineConfig,
            {"max_num_seqs": 10**9},
            "max_num_seqs is 1000000000; it must be at least 1 and at most 65,536",
        ),
        (EngineConfig, {"max_model_len": 64.5}, "max_model_len is 64.5; it must be an integer"),
        (EngineConfig, {"graphs": "no"}, "graphs is 'no'; it must be True or False"),
        (EngineConfig, {"seed": "x"}, "seed is 'x'; it must be an integer"),
        (EngineConfig, {"cache": {"memory_bytes": 5}}, "cache is a dict; it must be a CacheConfig"),
        (CacheConfig, {"memory_bytes": "4G"}, "memory_bytes is '4G'; it must be an integer"),
        (CacheConfig, {"prefix_caching": None}, "prefix_caching is None; it must be True or False"),
        (LoadConfig, {"block_size": 16.0}, "block_size is 16.0; it must be an integer"),
        (LoadConfig, {"device": None}, "device is None; it must be a string"),
        (LoadConfig, {"dtype": 32}, "dtype is 32; it must be a string"),
    ],
)
def test_a_wrong_type_is_named(config: Any, values: dict[str, Any], said: str) -> None:
    """Before any work begins, instead of a TypeError, or of a float that counts tokens, deep
    inside.
    """
    with pytest.raises(InvalidInputError) as caught:
        config(**values)
    assert said in str(caught.value)


HUGE: tuple[Any, ...] = (10**5000, [10**5000], {10**5000: 1}, {1: 10**5000}, (1, [[10**5000]]))
"""Of more digits than Python writes."""


@pytest.mark.parametrize("config", [SamplingParams, EngineConfig, CacheConfig, LoadConfig])
def test_integers_that_python_does_not_write(config: Any) -> None:
    """Alone and within others, at every field; of an object as a list its keys count."""
    for name in config.__dataclass_fields__:
        for value in HUGE:
            try:
                config(**{name: value})
            except InvalidInputError as error:
                assert len(str(error)) < 300
            else:
                assert value == HUGE[3] and name in ("stop_token_ids", "prediction")


def test_values_of_other_libraries() -> None:
    """What numpy and torch compute is taken, and stored as Python's own; None is an empty list."""
    values: dict[str, Any] = {
        "max_tokens": np.int64(5),
        "temperature": np.float32(0.5),
        "seed": torch.tensor(3),
        "stop": None,
        "stop_token_ids": np.array([3, 4]),
    }
    sampling = SamplingParams(**values)
    assert sampling == SamplingParams(5, 0.5, seed=3, stop_token_ids=(3, 4))
    assert [
        type(value) for value in (sampling.max_tokens, sampling.temperature, sampling.seed)
    ] == [int, float, int]
    text, count = {"stop": "x"}, {"num_draft_tokens": np.int64(2)}
    assert SamplingParams(**text).stop == ("x",)  # type: ignore[arg-type]
    assert EngineConfig(**count) == EngineConfig(num_draft_tokens=2)  # type: ignore[arg-type]
    load = LoadConfig(device=torch.device("cuda:1"), dtype=torch.float32)  # type: ignore[arg-type]
    assert load == LoadConfig(device="cuda:1", dtype="float32")


@pytest.mark.parametrize(
    "config", [SamplingParams(stop=("x",)), EngineConfig(), CacheConfig(5), LoadConfig()]
)
def test_configs_are_values(config: Any) -> None:
    """Copies are equal and hash alike, so they can be keys and travel to other processes."""
    for other in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other == config and hash(other) == hash(config)
