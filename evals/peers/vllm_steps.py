"""vLLM at a shape without weights: times of prefill and plain steps, as of our engine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from evals.peers.vllm import import_vllm
from specdec.base.errors import InvalidInputError
from specdec.base.writing import write_text
from specdec.parallel.group import WITHOUT_MULTICAST

OF_A_RANK = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""Variables that tell a process which rank of which group it is."""

HEADROOM = 2 * 2**30
"""Bytes of the accelerator that neither side plans with."""


def library_for(device: torch.device) -> Any:
    """vLLM.

    Raises:
        InvalidInputError: not installed, or the device is a CPU.
    """
    if device.type != "cuda":
        what = f"peer 'vllm' runs on a GPU and the target is on {device}"
        raise InvalidInputError(f"{what}; leave it out")
    return import_vllm("vllm")


class VllmSteps:
    """vLLM's offline engine, started when it is made.

    Args:
        spare: bytes of each accelerator to leave free beside what is taken already.
        ranks: GPUs that compute the model together, from the first.
        weights: folder with safetensors files, which gets the config; None takes dummy weights.
        speculation: vLLM's options for a drafter; None decodes plainly.

    Raises:
        InvalidInputError: see `library_for`.

    Attributes:
        tokens: that the steps of the last `decode` put out.
    """

    name = "vllm"

    def __init__(
        self,
        config: dict[str, Any],
        device: torch.device,
        dtype: torch.dtype,
        *,
        max_num_seqs: int,
        max_model_len: int,
        spare: int,
        ranks: int = 1,
        weights: Path | None = None,
        speculation: dict[str, Any] | None = None,
    ) -> None:
        if ranks > 1:
            for name in [
                name for name in os.environ if name in OF_A_RANK or name.startswith("TORCHELASTIC_")
            ]:
                # our group has met; its processes would take them for their own
                del os.environ[name]
            os.environ |= WITHOUT_MULTICAST | {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
        self._library = library_for(device)
        self.version: str = self._library.__version__
        self._folder = None if weights else TemporaryDirectory(prefix="specdec-vllm-")
        folder = Path(self._folder.name) if self._folder else weights
        assert folder is not None
        write_text(folder / "config.json", json.dumps(config))
        free, total = torch.cuda.mem_get_info(device)
        self._engine: Any = self._library.LLM(
            model=str(folder),
            load_format="auto" if weights else "dummy",
            skip_tokenizer_init=True,
            dtype=str(dtype).removeprefix("torch."),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            enable_prefix_caching=False,
            tensor_parallel_size=ranks,
            gpu_memory_utilization=(free - spare - HEADROOM) / total,
            **_options(config),
            **({"speculative_config": speculation} if speculation else {}),
        ).llm_engine
        self._request_ids = count()
        self._most, self.tokens = max_model_len, 0

    def prefill(self, prompts: Sequence[list[int]]) -> float:
        """Seconds from the first request to the last one's first token."""
        return self._times(prompts, 1)[0]

    def steps(self, prompts: Sequence[list[int]], count: int, warm: int) -> float:
        """Seconds of `count` steps of the last request, behind `warm`; others decode too."""
        ends = self._times(prompts, 1 + warm + count)
        return ends[warm + count] - ends[warm]

    def decode(self, prompts: Sequence[list[int]], count: int, warm: int) -> float:
        """Seconds of `count` steps in which all prompts decode, behind `warm` of them."""
        lengths = self._submit(prompts, self._most - len(prompts[0]))
        while not all(lengths.values()):
            self._step(lengths)
        for _ in range(warm):
            self._step(lengths)
        before, started = sum(lengths.values()), time.perf_counter()
        for _ in range(count):
            self._step(lengths)
        seconds, self.tokens = time.perf_counter() - started, sum(lengths.values()) - before
        self._engine.abort_request(list(lengths))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return seconds

    def close(self) -> None:
        """Ends the engine and its process."""
        self._engine.engine_core.shutdown()
        if self._folder:
            self._folder.cleanup()

    def _times(self, prompts: Sequence[list[int]], most: int) -> list[float]:
        """Seconds from the first request until every request has 1, 2, ... `most` tokens."""
        # The first go on until the last has its tokens, so that all steps have all rows.
        spare = 0 if most == 1 else len(prompts)
        ends: list[float] = []
        started = time.perf_counter()
        lengths = self._submit(prompts, most + spare)
        while self._engine.has_unfinished_requests():
            self._step(lengths)
            ends += [time.perf_counter() - started] * (min(lengths.values()) - len(ends))
        return ends

    def _submit(self, prompts: Sequence[list[int]], most: int) -> dict[str, int]:
        """Queues requests of up to `most` tokens; output tokens so far by their names."""
        params = self._library.SamplingParams(
            temperature=0.0,
            max_tokens=most,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._library.sampling_params.RequestOutputKind.CUMULATIVE,
        )
        lengths: dict[str, int] = {}
        for prompt in prompts:
            request_id = str(next(self._request_ids))
            self._engine.add_request(request_id, self._library.inputs.tokens_input(prompt), params)
            lengths[request_id] = 0
        return lengths

    def _step(self, lengths: dict[str, int]) -> None:
        for output in self._engine.step():
            lengths[output.request_id] = len(output.outputs[0].token_ids)


def _options(config: dict[str, Any]) -> dict[str, Any]:
    """What vLLM has to be told for such a model."""
    options: dict[str, Any] = {}
    if "text_config" in config:
        options["limit_mm_per_prompt"] = {"image": 0, "video": 0}  # text alone, without a tower
    # which it takes for Gated DeltaNet on Hopper without looking
    if find_spec("flashinfer") is None:
        options["additional_config"] = {"gdn_prefill_backend": "triton"}
    return options
