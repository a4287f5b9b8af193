"""An engine of a cluster: one decoder in one process, which Ray Data calls many times at once."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from specdec.base.errors import SpecDecError
from specdec.base.packages import require_ours
from specdec.cluster.config import EngineSpec
from specdec.cluster.ledger import Verdict
from specdec.cluster.origin import origin
from specdec.cluster.rows import Answer, Row, refusal_to_json
from specdec.engine.capture.warmup import warm_up_shapes
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from specdec.session.outputs import GenerationResult

WARMUP_TOKENS = 8
"""Decoded before the first row, outside every clock."""

_DIED_TWICE = (
    "its engine died while it decoded this prompt among others, and again while it"
    " decoded it alone; see Ray's logs"
)


class Engine:
    """What a row becomes: a callable class for `Dataset.map_batches`, one instance per actor."""

    def __init__(self, spec: EngineSpec, ledger: Any) -> None:
        self._refused: SpecDecError | None = None
        try:
            self._decoder, self._ledger = load(spec), ledger
        except SpecDecError as error:  # Ray would bury it under its own, and try again
            self._refused = error
            return
        if spec.warm_up is not None and self._decoder.verifier.device.type != "cpu":
            for shape in warm_up_shapes(self._decoder.engine, spec.warm_up):
                shape.run()
        end = self._decoder.tokenizer.eos_token_id or 0
        self._decoder.generate([end], SamplingParams(max_tokens=WARMUP_TOKENS, ignore_eos=True))
        self._decoder.engine.reset()  # no drafter may copy from that
        self._origin, self._node = origin(self._decoder), _address()
        self._gate, self._quiet, self._running = asyncio.Lock(), asyncio.Event(), 0
        self._quiet.set()
        self._last = 0.0  # when the last answer was done, or the first of a busy time began
        self._broken = False
        self._calls = set[asyncio.Task[Any] | None]()

    async def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Answers of a batch, in its order; other batches run meanwhile."""
        if self._refused is not None:
            return {"answer": [refusal_to_json(self._refused) for _ in batch["row"]]}
        call = asyncio.current_task()
        # Neither Ray nor the loop holds a task that waits; it alone holds what it waits for.
        self._calls.add(call)
        try:
            rows = [Row.from_json(str(text)) for text in batch["row"]]
            answers = await asyncio.gather(*(self._answer(row) for row in rows))
            return {"answer": [answer.to_json() for answer in answers]}
        finally:
            self._calls.discard(call)

    async def _answer(self, row: Row) -> Answer:
        verdict = await self._ledger.verdict.remote(row.key)
        if verdict is Verdict.NEVER:
            return Answer(
                row.key,
                [GenerationResult.refused(SpecDecError(_DIED_TWICE))],
                0.0,
                self._origin,
                self._node,
            )
        alone = verdict is Verdict.ALONE
        async with self._place(alone=alone):
            if self._broken:
                # before this row has begun, so that the next engine takes it among others
                os._exit(1)
            await self._ledger.begin.remote(row.key, alone=alone)
            try:
                results = await self._converse(row)
            except (
                RuntimeError
            ) as error:  # the engine failed, and no request may trust the device any more
                print(f"specdec: {error}", file=sys.stderr, flush=True)
                if not alone:
                    os._exit(1)
                self._broken, results = True, [GenerationResult.refused(error)]
            now = time.perf_counter()
            seconds, self._last = now - self._last, now
        await self._ledger.end.remote(row.key)
        return Answer(row.key, results, seconds, self._origin, self._node)

    @asynccontextmanager
    async def _place(self, *, alone: bool) -> AsyncIterator[None]:
        """A place among the rows that run, or the whole engine."""
        async with self._gate:
            if alone:
                await self._quiet.wait()
            if not self._running:
                self._quiet.clear()
                self._last = time.perf_counter()
            self._running += 1
            if alone:
                try:
                    yield
                finally:
                    self._leave()
                return
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._running -= 1
        if not self._running:
            self._quiet.set()

    async def _converse(self, row: Row) -> list[GenerationResult]:
        """Results of all turns; what cannot be served ends the conversation as a result with an
        error.
        """
        decoder, results = self._decoder, list[GenerationResult]()
        prompt: Any = row.prompt
        chat = isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)
        most = decoder.engine.admission.max_total_tokens
        sampling = row.completed(decoder.verifier.defaults, most)
        sampling = sampling.for_chat() if chat else sampling
        for follow_up in (*row.follow_ups, None):
            try:
                tokens = decoder.tokenize(prompt)
                handle = decoder.session.submit(tokens, sampling, incremental=False)
            except SpecDecError as error:
                return [*results, GenerationResult.refused(error)]
            results.append(await handle)
            if follow_up is None or results[-1].error is not None:
                break
            text = decoder.tokenizer.decode(results[-1].token_ids, skip_special_tokens=True)
            answer = {"role": "assistant", "content": text}
            prompt = [*prompt, answer, {"role": "user", "content": follow_up}]
        return results


def load(spec: EngineSpec) -> SpecDecoder:
    """The decoder of a spec."""
    require_ours("drafters", "verifiers")
    return SpecDecoder.from_pretrained(
        spec.model, drafter=spec.drafter, **asdict(spec.load), engine=spec.engine
    )


def _address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())
