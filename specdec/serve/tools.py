"""The tools of a request: what is told of them to the model, and what may be called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specdec.base.chat.messages import knows_tools
from specdec.base.chat.tools import FORMATS, ToolFormat
from specdec.base.errors import InvalidInputError, shown
from specdec.grammar.calls import NAME
from specdec.grammar.fields import GRAMMAR_FIELDS, grammar_of
from specdec.grammar.grammar import Grammar
from specdec.grammar.schema.refs import Root
from specdec.grammar.schema.schema import misformed
from specdec.serve.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specdec.sampling.params import SamplingParams
    from specdec.serve.protocol import ChatRequest


@dataclass(frozen=True, slots=True)
class Tools:
    """What a request may call.

    Attributes:
        form: how the model writes calls.
        given: all tools, as the template reads them.
        functions: by name the schemas of the arguments of those that may be called, None of any.
        required: an answer is calls alone.
        parallel: several may come.
        notes: what calls are not held to.
    """

    form: ToolFormat
    given: list[dict[str, Any]]
    functions: dict[str, Any]
    required: bool
    parallel: bool
    notes: list[str] = field(default_factory=list)

    def sampling(
        self, tokenizer: PreTrainedTokenizerBase, sampling: SamplingParams
    ) -> SamplingParams:
        """The same with the grammar of what may be called."""
        grammar = self.grammar(tokenizer, sampling.grammar)
        behind = False if self.form.channels else None
        return replace(sampling, grammar=grammar, grammar_after_thinking=behind)

    def grammar(self, tokenizer: PreTrainedTokenizerBase, answer: Grammar | None) -> Grammar:
        """The grammar of answers; `answer` is that of those that call nothing, if there are any."""
        asked = {"required": self.required, "parallel": self.parallel}
        answer, markers = None if self.required else answer, self.form.markers(tokenizer)
        return Grammar.calls(
            self.form.name, self.functions, **asked, markers=markers, answer=answer
        )


@dataclass(frozen=True, slots=True)
class _Function:
    given: dict[str, Any]
    name: str
    schema: Any
    notes: list[str]


def tool_definitions(tools: Any) -> list[dict[str, Any]]:
    """Tools as the template reads them.

    Raises:
        RequestError: one is not of its form.
    """
    return [_function(f"tools[{place}]", one).given for place, one in enumerate(tools or ())]


def tools_of(
    asked: ChatRequest, tokenizer: PreTrainedTokenizerBase, form: ToolFormat | None
) -> Tools | None:
    """The tools of a chat; None where nothing is to be called.

    Args:
        form: how the model writes calls, where that is known.

    Raises:
        RequestError: one is not of its form, or cannot be called.
    """
    known = [_function(f"tools[{place}]", given) for place, given in enumerate(asked.tools or ())]
    names = [one.name for one in known]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"two functions are called {twice!r}; give each another name", "tools")
    allowed, required, single = _choice(asked.tool_choice, names)
    if not allowed:
        return None
    if required and (of_all := _grammar_field(asked)) is not None:
        what = f"{of_all} says what the whole answer is, and tool_choice asks for calls alone"
        raise RequestError(f"{what}; leave one of them out", of_all)
    if not knows_tools(tokenizer):
        what = "the chat template tells the model of no tools"
        way_out = "leave them out, or start the server with another template"
        raise RequestError(f"{what}; {way_out}", "tools")
    if form is None and not required:
        what = "the chat template says in no known way how calls are written"
        way_out = "ask with tool_choice required, or start the server with --tool-format"
        raise RequestError(f"{what}; {way_out}", "tools")
    return Tools(
        FORMATS["json"] if form is None else form,
        [one.given for one in known],
        {one.name: one.schema for one in known if one.name in allowed},
        required,
        asked.parallel_tool_calls is not False and not single,
        [note for one in known if one.name in allowed for note in one.notes],
    )


def _function(place: str, given: Any) -> _Function:
    if not isinstance(given, Mapping) or given.get("type", "function") != "function":
        kind = given.get("type") if isinstance(given, Mapping) else given
        raise RequestError(f"{place} is {shown(kind)}; give a function", place)
    function = given.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{place} has no function; give an object with its name", place)
    name, strict = function.get("name"), function.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        what = f"{place} is called {shown(name)}"
        raise RequestError(f"{what}; give 1 to 64 letters, digits, _ . or -", place)
    if not isinstance(function.get("description", ""), str | None):
        raise RequestError(f"the description of {name} is no text; give one", place)
    if not isinstance(strict, bool | None):
        raise RequestError(f"strict of {name} is {shown(strict)}; give true or false", place)
    schema = _schema(name, function.get("parameters"), place)
    told = {key: value for key, value in function.items() if key != "strict"}
    told["parameters"] = schema
    notes = []
    try:
        Grammar.json_schema(schema)
    except InvalidInputError as error:
        if strict:
            raise RequestError(f"{name}, which is strict: {error}", place) from error
        notes.append(f"{name}: its arguments are any object, since {error}")
    return _Function({"type": "function", "function": told}, name, None if notes else schema, notes)


def _schema(name: str, given: Any, place: str) -> dict[str, Any]:
    """The schema of a function's arguments; none at all unless they are described."""
    schema = {"type": "object", "properties": {}} if given is None else given
    if not isinstance(schema, Mapping):
        what = f"the parameters of {name} are {shown(given)}"
        raise RequestError(f"{what}; give a JSON schema of an object", place)
    if schema.keys().isdisjoint(("type", "$ref", "anyOf", "oneOf", "allOf")):
        schema = {"type": "object", **schema}
    if wrong := misformed(schema):
        raise RequestError(f"the parameters of {name}: {wrong[0]}", place)
    if Root(schema).kinds(schema) != {"object"}:
        what = f"the parameters of {name} describe no object"
        raise RequestError(f"{what}; give a schema of type object", place)
    return dict(schema)


def _choice(given: Any, names: list[str]) -> tuple[list[str], bool, bool]:
    """The functions that may be called, whether one has to be, and whether one alone."""
    if given in (None, "auto", "none"):
        return ([] if given == "none" else names), False, False
    if not names:
        what = f"tool_choice is {shown(given)} and there are no tools"
        raise RequestError(f"{what}; give some", "tool_choice")
    if given == "required":
        return names, True, False
    kind = given.get("type") if isinstance(given, Mapping) else None
    if isinstance(given, Mapping) and kind == "function":
        return [_named(given, names)], True, True
    allowed = given.get("allowed_tools") if isinstance(given, Mapping) else None
    if kind == "allowed_tools" and isinstance(allowed, Mapping):
        mode, some = allowed.get("mode", "auto"), allowed.get("tools")
        if mode in ("auto", "required") and isinstance(some, list) and some:
            return [_named(one, names) for one in some], mode == "required", False
    way_out = "choose none, auto, required, or a function"
    way_out += ': {"type": "function", "function": {"name": ...}}'
    raise RequestError(f"tool_choice is {shown(given)}; {way_out}", "tool_choice")


def _grammar_field(asked: ChatRequest) -> str | None:
    """A field that asks for a grammar, but for `response_format`: OpenAI's clients say that of all
    the answers of a conversation, and mean those without calls.
    """
    names = (name for name in GRAMMAR_FIELDS if name != "response_format")
    return next((name for name in names if grammar_of({name: getattr(asked, name)})), None)


def _named(given: Any, names: list[str]) -> str:
    function = given.get("function") if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in names:
        what = f"tool_choice names {shown(name)}"
        way_out = "add it, or name another"
        raise RequestError(f"{what}, which is none of the tools; {way_out}", "tool_choice")
    return str(name)
