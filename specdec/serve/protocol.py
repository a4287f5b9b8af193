"""The requests: the fields of OpenAI's routes, with those that vLLM and SGLang add."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from specdec.base.chat.thinking import switch
from specdec.grammar.fields import unknown_keys
from specdec.serve.errors import RequestError
from specdec.serve.limits import MAX_CHARACTERS, MAX_ENTRIES, MAX_FIELDS

logger = logging.getLogger(__name__)

_NO_TOOLS = "completions call no tools; ask /v1/chat/completions"
_OLD_TOOLS = "give tools and tool_choice instead"
_NO_SUCH_TEXT = "this server has no such way to choose tokens; leave it out"
_OTHER_SAMPLERS = (
    "mirostat", "mirostat_mode", "dry_multiplier", "xtc_probability", "dynatemp_range",
)  # fmt: skip
_OTHER_FORMS = (
    "guided_decoding", "guided_decoding_params", "output_config", "output_format",
    "response_schema", "structured_output",
)  # fmt: skip

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), _NO_TOOLS),
    "functions": (([],), _OLD_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "function_call": (("none", "auto"), _OLD_TOOLS),
    "audio": ((), "this server answers in text alone; leave it out"),
    "modalities": ((["text"],), 'this server answers in text alone; give ["text"]'),
    "suffix": (("",), "nothing is inserted before a text that follows; leave it out"),
    "use_beam_search": ((False,), "there is no beam search; leave it out"),
    "length_penalty": ((1.0,), "there is no beam search; leave it out"),
    "bad_words": (([],), "forbid tokens with logit_bias, by their ids"),
    "allowed_token_ids": (([],), _NO_SUCH_TEXT),
    "logits_processors": (([],), _NO_SUCH_TEXT),
    "top_a": ((0.0,), _NO_SUCH_TEXT),
    "typical_p": ((1.0,), _NO_SUCH_TEXT),
    "include_stop_str_in_output": ((False,), "outputs are cut before a stop string; leave it out"),
    "spaces_between_special_tokens": (
        (True,),
        "texts are as the tokenizer decodes them; leave it out",
    ),
    **dict.fromkeys(_OTHER_SAMPLERS, ((0,), _NO_SUCH_TEXT)),
    "tfs_z": ((1.0,), _NO_SUCH_TEXT),
    "top_n_sigma": ((0.0, -1.0), _NO_SUCH_TEXT),
    "repeat_penalty": ((1.0,), "it is called repetition_penalty here"),
    "truncate_prompt_tokens": ((), "prompts are never cut; shorten it"),
    "prompt_logprobs": ((), "completions give them with echo and logprobs"),
    "structural_tag": ((), "give a schema or rules instead, as response_format or guided_grammar"),
    "guided_whitespace_pattern": (
        (),
        "white space is what docs/structured-output.md says; leave it out",
    ),
    **dict.fromkeys(_OTHER_FORMS, ((), "ask with response_format or guided_json")),
    **dict.fromkeys(("extra_body", "nvext"), (({},), "give its fields beside the others")),
    "chat_template": ((), "the template is the model's own; leave it out"),
    "documents": (([],), "give them in the messages or in chat_template_kwargs"),
    "priority": ((0,), "requests are served in the order in which they come; leave it out"),
}
"""Known fields that cannot be honored, by name: values that ask for nothing, and what to do."""

SILENT = {
    "user", "metadata", "service_tier", "safety_identifier", "return_meta_info",
    "parallel_tool_calls", "request_id",
}  # fmt: skip
"""Fields that change no answer of this server."""

_warned: set[str] = set()


class Body(BaseModel):
    """A request. Its types are those of JSON: no number is read from a string."""

    model_config = ConfigDict(extra="allow", strict=True)

    def check_others(self) -> None:
        """Looks at fields that this class does not have; each unknown one is warned of once.

        Raises:
            RequestError: one cannot be honored.
        """
        for name, value in (self.model_extra or {}).items():
            if name in REFUSED:
                harmless, way_out = REFUSED[name]
                if value not in harmless:
                    raise RequestError(f"{name} is not offered: {way_out}", name)
            elif name not in SILENT:
                warn_of(name)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Leaves out nulls, many clients' word for fields not set, once fields are counted."""
        if not isinstance(given, dict):
            return given
        if len(given) > MAX_FIELDS:
            what = f"the request has {len(given):,} fields and the limit is {MAX_FIELDS:,}"
            raise RequestError(f"{what}; give fewer")
        for name, value in given.items():
            most = (MAX_CHARACTERS if isinstance(value, str) else MAX_ENTRIES).get(name)
            if most is not None and isinstance(value, str | list | dict) and len(value) > most:
                what = "characters" if isinstance(value, str) else "entries"
                what = f"{name} has {len(value):,} {what} and the limit is {most:,}; give fewer"
                raise RequestError(what, name)
        return {name: value for name, value in given.items() if value is not None}


def warn_of(name: str) -> None:
    """Says in the log, once, that a field does nothing."""
    if name not in _warned and len(_warned) < 100:
        _warned.add(name)
        text = "a request has the field %r, which is not known and is left alone"
        logger.warning(text, name[:80])


def _token_ids(given: Any) -> list[int]:
    """Token ids; one word for all that are none, since a list may be long."""
    if not _are(int, given):
        raise ValueError("input should be a list of integers")
    return given


def _texts(given: Any) -> list[str]:
    if not _are(str, given):
        raise ValueError("input should be a list of texts")
    return given


def _prompts(given: Any) -> list[str] | list[list[int]]:
    """The prompts of a completion one by one."""
    if isinstance(given, str):
        return [given]
    if _are(int, given):
        return [given]
    if _are(str, given) or (_are(list, given) and all(_are(int, one) for one in given)):
        return given
    raise ValueError(
        "input should be a text, a list of texts, a list of token ids, or a list of such lists"
    )


def _are(kind: type, given: Any) -> bool:
    return isinstance(given, list) and set(map(type, given)) <= {kind}


Prompts = Annotated[Any, AfterValidator(_prompts)]


class StreamOptions(Body):
    """Attributes as OpenAI has them, and vLLM."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Prediction(Body):
    """What an output will be like, as OpenAI has it."""

    type: Literal["content"] = "content"
    content: str | list[dict[str, Any]]

    @property
    def text(self) -> str:
        """The message's text.

        Raises:
            RequestError: a part is no text.
        """
        if isinstance(self.content, str):
            return self.content
        wrong = [one for one in self.content if not isinstance(one.get("text"), str)]
        if wrong or any(one.get("type") != "text" for one in self.content):
            message = 'prediction has a part that is no text; give {"type": "text", "text": ...}'
            raise RequestError(message, "prediction")
        return "".join(one["text"] for one in self.content)


class Generation(Body):
    """What completions and chats share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, lt=2**31)
    best_of: int | None = Field(None, ge=-(2**31), lt=2**31)
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    cache_salt: str | None = None
    skip_special_tokens: bool | None = None
    thinking_token_budget: int | None = None
    prediction: Prediction | str | None = None
    num_draft_tokens: int | None = None
    tree_nodes: int | None = None
    store: bool | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[Any, AfterValidator(_texts)] = None
    guided_grammar: str | None = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None
    format: Any = None

    def check_others(self) -> None:
        """Looks within `stream_options` and `response_format`, too."""
        super().check_others()
        for name in self.stream_options.model_extra or () if self.stream_options else ():
            warn_of(f"stream_options.{name}")
        for name in unknown_keys({"response_format": self.response_format}):
            warn_of(name)


class CompletionRequest(Generation):
    """`POST /v1/completions`."""

    prompt: Prompts
    echo: bool = False
    logprobs: int | None = Field(None, ge=0)
    add_special_tokens: bool = True


class Templated(Body):
    """How a template makes a prompt of messages."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to think; None where nothing is said."""
        return self.enable_thinking

    @property
    def switched(self) -> bool | None:
        """The same, where an effort of "none" turns it off as well."""
        return False if self.thinks is None and self.reasoning_effort == "none" else self.thinks

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the template. The switch has the names that templates give it."""
        effort = (
            {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        )
        said = {} if self.switched is None else switch(on=self.switched)
        return effort | said | (self.chat_template_kwargs or {})


class Chat(Templated):
    """Messages, and how a template makes a prompt of them."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    add_special_tokens: bool = False


class Thinking(Body):
    """Whether a model thinks, as DeepSeek, GLM and Kimi are asked."""

    type: Literal["enabled", "disabled"]


class ChatRequest(Chat, Generation):
    """`POST /v1/chat/completions`."""

    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool = True
    include_reasoning: bool = True
    thinking: Thinking | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to think, in either way to say it.

        Raises:
            RequestError: they disagree.
        """
        said = self.thinking.type == "enabled" if self.thinking else self.enable_thinking
        if self.enable_thinking not in (None, said):
            message = "thinking and enable_thinking disagree; give one of them"
            raise RequestError(message, "thinking")
        return said

    def check_others(self) -> None:
        """Looks within `thinking`, too."""
        super().check_others()
        for name in self.thinking.model_extra or () if self.thinking else ():
            warn_of(f"thinking.{name}")

    @property
    def max_output(self) -> int | None:
        """The limit that the request names, if it does."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(Templated):
    """`POST /tokenize`: a text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DrafterRequest(Body):
    """`POST /update_drafter`: the name of a checkpoint."""

    drafter: str


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[Any, AfterValidator(_token_ids)]
