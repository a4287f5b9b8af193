"""The first things that manuals of Python's clients show, in words of our own.

Answers are bounded by their schemas, so that any model will do; what is looked at is their form.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

QUESTION = "Is it warm in Paris?"
CHAT: Any = [{"role": "user", "content": QUESTION}]
KEY, TOKENS = "any", 160


class Served(NamedTuple):
    """A server: where its routes begin, such as http://127.0.0.1:8000/v1, and its model."""

    url: str
    model: str


City = Literal["Paris", "Oslo"]
"""So that an answer is short, whatever a model likes to write."""


def get_weather(city: City, celsius: bool) -> str:
    """Tells the weather of a city."""
    return f"It is warm in {city}."


get_weather.__annotations__ |= {"city": City, "celsius": bool, "return": str}  # not their names

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Oslo"]},
                "celsius": {"type": "boolean"},
            },
            "required": ["city", "celsius"],
            "additionalProperties": False,
        },
    },
}


def report() -> Any:
    """A pydantic model of an answer."""
    return importlib.import_module("pydantic").create_model(
        "Report", city=(City, ...), warm=(bool, ...)
    )


def _check_report(made: Any) -> None:
    assert made.city in get_args(City) and isinstance(made.warm, bool), made


def _check_call(name: str, arguments: Any) -> None:
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name == "get_weather" and given["city"] in ("Paris", "Oslo"), (name, arguments)


def _openai(at: Served) -> Any:
    about = {"base_url": at.url, "api_key": KEY, "max_retries": 0, "timeout": 600}
    return importlib.import_module("openai").OpenAI(**about)


def openai_chat(at: Served) -> None:
    with _openai(at) as client:
        answer = client.chat.completions.create(model=at.model, messages=CHAT, max_tokens=8)
        assert answer.choices[0].message.content and answer.usage.total_tokens
        assert at.model in [one.id for one in client.models.list()]


def openai_stream(at: Served) -> None:
    with _openai(at) as client:
        about = {"model": at.model, "messages": CHAT, "max_tokens": 8, "stream": True}
        parts = [
            part.choices[0].delta.content or "" for part in client.chat.completions.create(**about)
        ]
        assert "".join(parts)


def openai_async(at: Served) -> None:
    async def ask() -> None:
        kind = importlib.import_module("openai").AsyncOpenAI
        async with kind(base_url=at.url, api_key=KEY) as client:
            made = await client.chat.completions.create(model=at.model, messages=CHAT, max_tokens=8)
            assert made.choices[0].message.content

    asyncio.run(ask())


def openai_parse(at: Served) -> None:
    with _openai(at) as client:
        made = client.chat.completions.parse(
            model=at.model, messages=CHAT, response_format=report(), max_tokens=TOKENS
        )
        _check_report(made.choices[0].message.parsed)


def openai_tools(at: Served) -> None:
    """A forced call, its result in the history, and a choice of the model's own, as a stream."""
    with _openai(at) as client:
        about = {"model": at.model, "tools": [TOOL], "max_tokens": TOKENS}
        made = client.chat.completions.create(**about, messages=CHAT, tool_choice="required")
        message = made.choices[0].message
        call = message.tool_calls[0]
        _check_call(call.function.name, call.function.arguments)
        told = {"role": "tool", "tool_call_id": call.id, "content": "It is warm."}
        history = [*CHAT, message.model_dump(exclude_none=True), told]
        more = client.chat.completions.create(**{**about, "max_tokens": 8}, messages=history)
        assert more.choices[0].finish_reason
        parts = client.chat.completions.create(**about, messages=CHAT, stream=True)
        assert [part.choices[0] for part in parts][-1].finish_reason


def openai_responses(at: Served) -> None:
    with _openai(at) as client:
        about = {"model": at.model, "input": QUESTION, "store": False}
        assert client.responses.create(**about, max_output_tokens=8).output_text
        tool = {"type": "function", **TOOL["function"]}
        made = client.responses.create(
            **about, tools=[tool], tool_choice="required", max_output_tokens=TOKENS
        )
        _check_call(made.output[-1].name, made.output[-1].arguments)
        with client.responses.stream(**about, max_output_tokens=8) as stream:
            assert [event.type for event in stream][-1].startswith("response.")


def _litellm(at: Served, **more: Any) -> Any:
    about = {"model": f"openai/{at.model}", "api_base": at.url, "api_key": KEY, "messages": CHAT}
    return importlib.import_module("litellm").completion(**about, **more)


def litellm_chat(at: Served) -> None:
    assert _litellm(at, max_tokens=8).choices[0].message.content
    parts = _litellm(at, max_tokens=8, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts)


def litellm_tools(at: Served) -> None:
    made = _litellm(at, tools=[TOOL], tool_choice="required", max_tokens=TOKENS)
    call = made.choices[0].message.tool_calls[0]
    _check_call(call.function.name, call.function.arguments)
    assert _litellm(at, tools=[TOOL], max_tokens=8).choices


def litellm_schema(at: Served) -> None:
    made = _litellm(at, response_format=report(), max_tokens=TOKENS)
    _check_report(report().model_validate_json(made.choices[0].message.content))


def litellm_responses(at: Served) -> None:
    about = {"model": f"openai/{at.model}", "api_base": at.url, "api_key": KEY}
    made = importlib.import_module("litellm").responses(
        input=QUESTION, max_output_tokens=8, **about
    )
    assert made.output


def _langchain(at: Served, **more: Any) -> Any:
    kind = importlib.import_module("langchain_openai").ChatOpenAI
    about = {"model": at.model, "base_url": at.url, "api_key": KEY, "max_tokens": TOKENS}
    return kind(**{**about, **more})


def langchain_chat(at: Served) -> None:
    chat = _langchain(at, max_tokens=8)
    assert chat.invoke([("system", "Be brief."), ("human", QUESTION)]).content
    assert "".join(part.content for part in chat.stream(QUESTION))
    assert len(chat.batch([QUESTION, "Hello"])) == 2


def langchain_schema(at: Served) -> None:
    for method in ("json_schema", "function_calling"):
        _check_report(
            _langchain(at).with_structured_output(report(), method=method).invoke(QUESTION)
        )


def langchain_tools(at: Served) -> None:
    made = _langchain(at).bind_tools([TOOL], tool_choice="any").invoke(QUESTION)
    _check_call(made.tool_calls[0]["name"], made.tool_calls[0]["args"])
    assert _langchain(at, max_tokens=8).bind_tools([get_weather]).invoke(QUESTION)


def langchain_responses(at: Served) -> None:
    assert _langchain(at, max_tokens=16, use_responses_api=True).invoke(QUESTION).content


def _llama_index(at: Served, **more: Any) -> Any:
    kind = importlib.import_module("llama_index.llms.openai_like").OpenAILike
    about = {"model": at.model, "api_base": at.url, "api_key": KEY, "max_tokens": TOKENS}
    about |= {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048}
    return kind(**{**about, **more})


def llama_index_chat(at: Served) -> None:
    llms = importlib.import_module("llama_index.core.llms")
    llm = _llama_index(at, max_tokens=8)
    assert llm.complete(QUESTION).text
    asked = [llms.ChatMessage(role="user", content=QUESTION)]
    assert llm.chat(asked).message.content
    assert [part.delta for part in llm.stream_chat(asked)]


def llama_index_schema(at: Served) -> None:
    prompt = importlib.import_module("llama_index.core.prompts").PromptTemplate(QUESTION)
    _check_report(_llama_index(at).structured_predict(report(), prompt))


def llama_index_tools(at: Served) -> None:
    tool = importlib.import_module("llama_index.core.tools").FunctionTool.from_defaults(get_weather)
    llm = _llama_index(at)
    made = llm.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    call = llm.get_tool_calls_from_response(made)[0]
    _check_call(call.tool_name, call.tool_kwargs)


def instructor_modes(at: Served) -> None:
    instructor = importlib.import_module("instructor")
    for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
        with _openai(at) as inner:
            client = instructor.from_openai(inner, mode=getattr(instructor.Mode, mode))
            about = {"model": at.model, "messages": CHAT, "max_tokens": TOKENS}
            made = client.chat.completions.create(**about, response_model=report(), max_retries=0)
            _check_report(made)


def instructor_streams(at: Served) -> None:
    instructor = importlib.import_module("instructor")
    with _openai(at) as inner:
        client = instructor.from_openai(inner)
        about = {"model": at.model, "messages": CHAT, "max_tokens": TOKENS}
        parts = list(client.chat.completions.create_partial(**about, response_model=report()))
        _check_report(parts[-1])


def _agent(at: Served, **more: Any) -> Any:
    models = importlib.import_module("pydantic_ai.models.openai")
    provider = importlib.import_module("pydantic_ai.providers.openai").OpenAIProvider
    model = models.OpenAIChatModel(at.model, provider=provider(base_url=at.url, api_key=KEY))
    settings = {"max_tokens": more.pop("max_tokens", TOKENS)}
    return importlib.import_module("pydantic_ai").Agent(model, model_settings=settings, **more)


def pydantic_ai_text(at: Served) -> None:
    assert _agent(at, max_tokens=8, instructions="Be brief.").run_sync(QUESTION).output


def pydantic_ai_output(at: Served) -> None:
    _check_report(_agent(at, output_type=report()).run_sync(QUESTION).output)
    native = importlib.import_module("pydantic_ai").NativeOutput
    _check_report(_agent(at, output_type=native(report())).run_sync(QUESTION).output)


def pydantic_ai_tools(at: Served) -> None:
    """The model may call, or answer by itself."""
    assert _agent(at, max_tokens=48, tools=[get_weather]).run_sync(QUESTION).output is not None


def _llm(at: Served) -> Any:
    kind = importlib.import_module("llm.default_plugins.openai_models").Chat
    about = {"model_name": at.model, "api_base": at.url, "supports_tools": True}
    made = kind("served", **about, supports_schema=True)
    made.key = KEY
    return made


def llm_chat(at: Served) -> None:
    assert _llm(at).prompt(QUESTION, max_tokens=8, stream=False).text()
    assert "".join(_llm(at).prompt(QUESTION, max_tokens=8, seed=-1))


def llm_schema(at: Served) -> None:
    made = _llm(at).prompt(QUESTION, schema=report(), max_tokens=TOKENS, stream=False)
    _check_report(report().model_validate_json(made.text()))


def llm_tools(at: Served) -> None:
    made = _llm(at).prompt(QUESTION, tools=[get_weather], max_tokens=48, stream=False)
    assert made.text() or made.tool_calls() is not None


Example = Callable[[Served], None]

PACKAGES: dict[str, tuple[Example, ...]] = {
    "openai": (
        openai_chat, openai_stream, openai_async, openai_parse, openai_tools, openai_responses,
    ),
    "litellm": (litellm_chat, litellm_tools, litellm_schema, litellm_responses),
    "langchain-openai": (langchain_chat, langchain_schema, langchain_tools, langchain_responses),
    "llama-index-llms-openai-like": (llama_index_chat, llama_index_schema, llama_index_tools),
    "instructor": (instructor_modes, instructor_streams),
    "pydantic-ai-slim": (pydantic_ai_text, pydantic_ai_output, pydantic_ai_tools),
    "llm": (llm_chat, llm_schema, llm_tools),
}  # fmt: skip
"""By the name of its distribution, what is tried with a client in this process."""
