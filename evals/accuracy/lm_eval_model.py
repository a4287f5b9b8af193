"""The model `specdec` of lm-eval (EleutherAI's harness, 0.4.13).

Importing this module registers the model:

    import evals.accuracy.lm_eval_model
    lm_eval.simple_evaluate(model="specdec", model_args="pretrained=embedded", tasks=["gsm8k"],
    limit=40)

and `python -m evals.accuracy.lm_eval_model run --model specdec ...` is lm-eval's command with it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from evals.accuracy.lm_eval_arguments import (
    batch_size_of,
    check_model_arguments,
    device_of,
    sampling_of,
    think_end,
)
from evals.accuracy.lm_eval_sample import Sample, key_of, note, record_of, sample_of
from evals.accuracy.scoring import Scored, score
from evals.system import LocalSystem, System
from specdec.base.chat.messages import template_variables
from specdec.base.checkpoint.hub import pinned
from specdec.base.config import EngineConfig, GenerationSource
from specdec.base.errors import InvalidInputError, SpecDecError
from specdec.base.journal import Journal
from specdec.cli.progress import ProgressBar
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from specdec.session.text import text_of


@register_model("specdec")
class SpecdecLM(TemplateLM):
    """lm-eval's view of a `SpecDecoder`; generation goes through the engine, scoring the target.

    Args:
        pretrained: "embedded", a folder, or a hub name.
        revision: branch, tag or commit of that on the hub, as in owner/name@revision.
        drafter: "auto", "smollm2-dflash", "ngram", a checkpoint, or "none"; see
            `SpecDecoder.from_pretrained`.
        num_draft_tokens: k, or "auto"; see `EngineConfig`.
        dtype, device, attention, generation_config: see `SpecDecoder.from_pretrained`.
        batch_size: requests decoded at once; "auto" takes the engine's default.
        max_batch_size: ignored, for the engine needs no search for a size.
        max_length: most tokens of prompt and output together; None takes the model's limit.
        max_gen_toks: most new tokens where a task does not say.
        seed: request `i` of a call samples with `seed + i`, unless the task's arguments hold one.
        enable_thinking: variable of the chat template that turns thinking on or off.
        chat_template_args: other variables of the chat template.
        think_end_token: text or id of the token that ends the thinking; answers begin behind the
            last one, and stop strings end them only there.
        others: those of other models of lm-eval; what asks for nothing is let be.
        decoder: an existing one instead of all of the above but max_gen_toks, seed and
            think_end_token.
        system: what generates in its place, see `evals.system`; then given texts cannot be scored.
        journal: where finished samples are looked up and stored.
        title: in front of the progress bar.
        warms_up: answers some prompts briefly first, see `System.warm_up`.

    Attributes:
        samples: everything generated or found in the journal so far, in the order of the requests.
    """

    def __init__(
        self,
        pretrained: str = "embedded",
        drafter: str = "auto",
        num_draft_tokens: int | Literal["auto"] | None = "auto",
        dtype: str = "auto",
        device: str | None = None,
        attention: str = "auto",
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        seed: int = 0,
        generation_config: GenerationSource = "model",
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | str | None = None,
        think_end_token: str | int | None = None,
        *,
        decoder: SpecDecoder | None = None,
        system: System | None = None,
        revision: str | None = None,
        journal: Journal | None = None,
        title: str = "specdec",
        warms_up: bool = False,
        **others: Any,
    ) -> None:
        super().__init__()
        check_model_arguments(others, SpecdecLM)
        variables = template_variables(chat_template_args)
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        if system is None and decoder is None:
            rows = batch_size_of(batch_size)
            engine = EngineConfig(rows, max_length, num_draft_tokens=num_draft_tokens)
            decoder = SpecDecoder.from_pretrained(
                pinned(pretrained, revision),
                drafter=drafter,
                device=device_of(device),
                dtype=dtype,
                attention=attention,
                generation_config=generation_config,
                chat_template_kwargs=variables,
                engine=engine,
            )
        self.decoder, self._warms_up = decoder, warms_up
        self._system: System = LocalSystem(decoder) if decoder is not None else cast(System, system)
        self.tokenizer = self._system.reader.tokenizer
        self._think_end = think_end(think_end_token, self.tokenizer)
        self.max_gen_toks = max_gen_toks
        self.samples: list[Sample] = []
        self._seed, self._title = seed, title
        self._journal = Journal(None, {}) if journal is None else journal
        self._device = torch.device("cpu") if decoder is None else decoder.verifier.device

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and output together."""
        return int(self._system.settings["max_model_len"])

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end-of-sequence id."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: the beginning's id, else the end's."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """Part of the key of lm-eval's request cache."""
        return self._system.name.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids; unless told, with special tokens where the text begins with none."""
        if add_special_tokens is None:
            prefix = self.tokenizer.decode([self.prefix_token_id])
            add_special_tokens = not string.startswith(prefix)
        try:
            string.encode()
        except UnicodeEncodeError as error:
            what = f"character {error.start + 1} is half of a surrogate pair; remove it"
            raise InvalidInputError(f"a text is not Unicode: {what}") from error
        ids: list[int] = self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A chat as one text; without `add_generation_prompt` its last message goes on."""
        options = {"add_generation_prompt": add_generation_prompt}
        options["continue_final_message"] = not add_generation_prompt
        return self._system.reader.chat_text(chat_history, options)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Log-probability and greediness of each continuation; long contexts are cut."""
        if self.decoder is None:
            what = "given texts are scored by one engine, not by a cluster"
            raise InvalidInputError(f"{what}; leave out --ray")
        sequences = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise InvalidInputError(
                    f"a continuation has {len(continuation)} tokens and the limit is"
                    f" {self.max_length}; shorten it or raise max_length"
                )
            if continuation:  # an empty one is certain
                tokens = (context + continuation)[-(self.max_length + 1) :]
                sequences.append((tokens, len(continuation)))
        results: list[tuple[float, bool]] = []
        values = score(self.decoder, sequences)
        for key, _, continuation in requests:
            scored = next(values) if continuation else Scored(0.0, True)
            results.append((scored.log_probability, scored.is_greedy))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, results[-1])
        return results

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of whole texts, in windows of `max_length` that score apart."""
        results = []
        for (text,) in [request.args for request in requests]:
            limits = {"max_seq_len": self.max_length, "context_len": 1}
            tokens = self.tok_encode(text)
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, **limits)
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            scored = self._loglikelihood_tokens(parts)
            results.append(sum(log_probability for log_probability, _ in scored))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), results[-1])
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers up to a stop string; all requests are queued at once and batched continuously."""
        numbered = enumerate(requests, start=self._seed)
        samplings = [self._sampling(request.args[1], seed) for seed, request in numbered]
        keys = [key_of(*pair) for pair in zip(requests, samplings, strict=True)]
        done: dict[int, Sample] = {}
        for index, key in enumerate(keys):
            found = self._journal.read(key, partial(sample_of, requests[index], samplings[index]))
            if found is not None:
                done[index] = found
        missing = [index for index in range(len(requests)) if index not in done]
        bar = ProgressBar(self._title, len(requests))
        prompts = [self._prompt(requests[index].args[0], samplings[index]) for index in missing]
        wrong: list[str] = []
        wanted = [samplings[index] for index in missing]
        if self._warms_up and prompts:
            self._system.warm_up(prompts, wanted)
            self._warms_up = False
        for answer in self._system.answers(prompts, wanted):
            index, result = missing[answer.number], answer.result
            if result.error is not None:
                sample = f"{requests[index].task_name}, sample {requests[index].doc_id}"
                wrong.append(f"{sample}: {result.error}")
                continue
            record = record_of(answer)
            self._journal.add(keys[index], record)
            done[index] = sample_of(requests[index], samplings[index], record)
            if bar.due:
                bar.show(len(done), note(done.values()))
        if wrong:  # after all others, which the journal now has
            raise SpecDecError(wrong[0] + (f" (and {len(wrong) - 1} more)" if wrong[1:] else ""))
        if not disable_tqdm:
            bar.finish(len(done), note(done.values()))
        samples = [done[index] for index in range(len(requests))]
        self.samples += samples
        asked = zip(requests, samples, strict=True)
        texts = [self._answer(request.args[1], sample) for request, sample in asked]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _answer(self, arguments: Mapping[str, Any], sample: Sample) -> str:
        """What a sample says behind its thinking, up to a stop string; all without thinking."""
        if self._think_end is None:
            return sample.text
        text, tokens = sample.text, sample.token_ids
        if isinstance(self._think_end, int):
            if self._think_end in tokens:
                behind = len(tokens) - tokens[::-1].index(self._think_end)
                skip = self._sampling(arguments, 0).skip_special_tokens
                text = text_of(self.tokenizer, tokens[behind:], skip_special_tokens=skip).lstrip()
        else:
            text = text.split(self._think_end)[-1].lstrip()
        stops = handle_stop_sequences(arguments.get("until"), eos=None)
        return min((text.partition(stop)[0] for stop in stops if stop), key=len, default=text)

    def _prompt(self, context: str, sampling: SamplingParams) -> list[int]:
        """Token ids of a prompt, cut from the left to leave room, as lm-eval's own models do."""
        room = self.max_length - sampling.max_tokens
        if room < 1:
            raise InvalidInputError(
                f"max_gen_toks is {sampling.max_tokens} and the model holds {self.max_length}"
                f" tokens; lower max_gen_toks"
            )
        return self.tok_encode(context)[-room:]

    def _sampling(self, arguments: Mapping[str, Any], seed: int) -> SamplingParams:
        """Generation arguments of a task as the engine takes them.

        Raises:
            InvalidInputError: an argument that the engine does not know, or a value out of range.
        """
        given: dict[str, Any] = dict(normalize_gen_kwargs(dict(arguments), self.max_gen_toks))
        stops = handle_stop_sequences(given.pop("until", None), eos=None)
        given.pop("do_sample")
        max_tokens, seed = given.pop("max_gen_toks"), given.pop("seed", seed)
        values = sampling_of(given)
        ends = values.pop("stop_token_ids", ())
        # these never show in the text
        special = [stop for stop in stops if stop in self.tokenizer.all_special_tokens]
        ends = (self.eot_token_id, *self.tokenizer.convert_tokens_to_ids(special), *ends)
        texts = tuple(one for one in stops if one and one not in special)
        if self._think_end is not None:
            texts = ()  # those of a task stand in thinking as well, and end the answer: `_answer`
        return SamplingParams(max_tokens, seed=seed, stop=texts, stop_token_ids=ends, **values)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except SpecDecError as error:
        sys.exit(f"specdec: error: {error}")
