"""Grammars of calls: beside xgrammar's own structural tags, with special tokens, and malformed."""

import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("xgrammar")

import xgrammar

from specdec.base.chat.tools import FORMATS, ToolFormat, format_of
from specdec.base.errors import InvalidInputError
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar
from specdec.grammar.rules import rules_of
from tests.helpers.tools import HARMONY, chat_tokenizer, tool_tokenizer
from tests.specdec.serve.test_call_reader import ARGUMENTS, IN_TEXTS, called, read

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "where": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
    "required": ["city", "days"],
}
FUNCTIONS: dict[str, Any] = {"get_weather": WEATHER, "get": {"type": "object", "properties": {}}}
BUILTIN = {
    "deepseek_v3": "deepseek_r1",
    "deepseek_v31": "deepseek_v3_1",
    "deepseek_v32": "deepseek_v3_2",
    "deepseek_v4": "deepseek_v4",
    "glm": "glm_4_7",
    "glm_4.7": "glm_4_7",
    "qwen3_coder": "qwen_3_coder",
    "hermes": "qwen_3",
    "kimi_k2": "kimi",
    "llama3": "llama",
}
"""Of the formats the name that xgrammar has for those it builds itself."""


def matches(rules: Any) -> Callable[[str], bool]:
    info = xgrammar.TokenizerInfo(
        [b"</s>", *(bytes([byte]) for byte in range(1, 128))],
        xgrammar.VocabType.RAW,
        stop_token_ids=[0],
    )
    compiled = xgrammar.GrammarCompiler(info, cache_enabled=False).compile_grammar(rules)

    def match(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return bool(matcher.accept_string(text) and matcher.accept_token(0))

    return match


@pytest.mark.parametrize("name", [form.name for form in IN_TEXTS])
def test_calls_and_texts(name: str) -> None:
    form = FORMATS[name]
    one, two = called(form, "get_weather", ARGUMENTS), called(form, "get", {})
    text = f"{form.opening}{one}{form.closing}"
    both = f"{form.opening}{one}{form.between}{two}{form.closing}"
    for required in (True, False):
        match = matches(rules_of(Grammar.calls(name, FUNCTIONS, required=required)))
        assert match(text) and match(both) == form.parallel
        assert match("Hello") == match(f"Hi {text}") == (not required)
        assert not match(f"{text}x")
        assert match(text.replace("get_weather", "get_wea")) == (not required and not form.tag)
        assert not match(text.replace("5", "true"))
    single = matches(rules_of(Grammar.calls(name, FUNCTIONS, required=True, parallel=False)))
    assert single(text) and not single(both)
    answers = Grammar.calls(name, FUNCTIONS, answer=Grammar.choice(["yes", "no"]))
    match = matches(rules_of(answers))
    assert match("yes") and match(text) and not match(f"yes{text}") and not match("Hello")
    free = matches(rules_of(Grammar.calls(name, {"get": None}, required=True)))
    assert free(f"{form.opening}{called(form, 'get', {'a': 1, 'b_c': 'x'})}{form.closing}")


@pytest.mark.parametrize("name", [form.name for form in IN_TEXTS if not form.tag])
def test_an_answer_may_be_json_that_calls_nothing(name: str) -> None:
    """Where no tag says what a call is."""
    form = FORMATS[name]
    text = f'Sure: {form.trigger}Bob", "age": 5}}, {form.trigger}, {{}}\n'
    match = matches(rules_of(Grammar.calls(name, FUNCTIONS)))
    for names in (["get"], ["get_weather"], ["get", "get"]):
        given = {"get": {}, "get_weather": ARGUMENTS}
        calls = [called(form, one, given[one]) for one in names]
        whole = form.opening + form.between.join(calls) + form.closing
        assert match(text) and match(text + whole) == (form.parallel or len(names) == 1)
        assert not match(text + whole.replace("{}", "1").replace("5", "true"))
        if match(text + whole):
            said, found = read(form, [text + whole])
            assert said == text and [one for one, _ in found] == names


@pytest.mark.parametrize("name", BUILTIN)
def test_the_library_s_own_tags_take_the_same(name: str) -> None:
    """What is written here is what models were taught, as others know it."""
    form, functions = FORMATS[name], [("get_weather", WEATHER), ("get", FUNCTIONS["get"])]
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in functions
    ]
    tag = xgrammar.get_model_structural_tag(BUILTIN[name], tools, reasoning="disabled")
    match = matches(xgrammar.Grammar.from_structural_tag(tag))
    one = called(form, "get_weather", ARGUMENTS)
    assert match(f"Hi{form.opening}{one}{form.closing}")
    if form.parallel:
        assert match(f"{form.opening}{one}{form.between}{one}{form.closing}")
    assert not match(f"Hi{form.opening}{one.replace('get_weather', 'other')}{form.closing}")


def test_special_tokens_stand_in_calls_alone() -> None:
    tokenizer = tool_tokenizer("")
    markers = FORMATS["mistral"].markers(tokenizer)
    assert markers == {"[TOOL_CALLS]": 3, "[ARGS]": 4}
    grammar = Grammar.calls("mistral", {"get": None}, markers=markers)
    compiled = GrammarCompiler(tokenizer, 97, [2]).compiled(grammar).result()
    letters = tokenizer.convert_tokens_to_ids

    def takes(*tokens: int) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return all(matcher.accept_token(token) for token in tokens)

    name = letters(list("get"))
    call = [3, *name, 4, *letters(list('{"a":"b"}'))]
    assert takes(*name, 2) and takes(*name, *call, 2) and takes(*call, *call, 2)
    assert not takes(*letters(list("[TOOL_CALLS]")), 3, 4) and not takes(4)
    assert not takes(3, *name, *letters(list("[ARGS]"))) and not takes(*call[:-3], 3)
    assert not takes(*call[:-3], 4) and not takes(*name, 1)


def test_a_tag_with_a_special_token_within() -> None:
    """As DeepSeek's since V3.2; without arguments, with texts and with others."""
    pieces = ["<pad>", "<s>", "</s>", "\n", *map(chr, range(32, 127))]
    tokenizer = chat_tokenizer("", pieces, ["｜DSML｜"], [])
    form, markers = FORMATS["deepseek_v32"], FORMATS["deepseek_v32"].markers(tokenizer)
    assert set(markers) == {"｜DSML｜"}
    properties = {
        "a": {"type": "string"},
        "b": {"type": ["integer", "string"]},
        "c": {"enum": ["x", 3]},
    }
    functions = {"f": {"type": "object", "properties": properties}}
    grammar = Grammar.calls(form.name, functions, markers=markers)
    compiled = GrammarCompiler(tokenizer, len(tokenizer), [2]).compiled(grammar).result()

    def takes(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return all(matcher.accept_token(one) for one in tokenizer(text)["input_ids"])

    assert takes("Hi</s>") and takes(f"Hi{form.written([('f', {}), ('f', {'b': 'y'})])}</s>")
    called = form.written([("f", {"a": "</p", "b": 5, "c": "x"})])
    assert takes(f"{called}</s>") and takes(called.replace('string="false">5', 'string="true">5'))
    for good, bad in (("5", "5.5"), ('"a" string="true"', '"a" string="false"'), (">x<", ">z<")):
        assert not takes(called.replace(good, bad)), bad
    assert not takes("｜DSML｜a") and not takes(called.replace("</p<", "<｜DSML｜x<"))


def test_channels() -> None:
    """Thinking and talk come first, a call or an answer last; what is special stands in heads."""
    tokenizer = tool_tokenizer(HARMONY)
    markers = FORMATS["harmony"].markers(tokenizer)
    assert set(markers) == {
        *("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>")
    }
    grammars = [
        Grammar.calls("harmony", {"get": None, "now": None}, required=required, markers=markers)
        for required in (False, True)
    ]
    free, forced = (GrammarCompiler(tokenizer, 97, [2]).compiled(one).result() for one in grammars)

    def takes(compiled: Any, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return all(matcher.accept_token(one) for one in tokenizer(text)["input_ids"])

    before = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.get <|constrain|>json<|message|>{}</s>"
    first = " to=functions.now<|channel|>commentary json<|message|>{}</s>"
    answer = "<|channel|>final<|message|>yes</s>"
    for text in (call, first, before + before + call, before + first, before.replace("s<", "<")):
        good = "analysi<" not in text
        assert takes(free, text) == takes(forced, text) == good, text
    assert takes(free, before + answer) and not takes(forced, before + answer)
    assert not takes(free, "<|channel|>analysis<|message|>hm</s>") and not takes(free, "yes")
    assert not takes(free, call.replace("get", "other")) and not takes(free, call[:-4] + "<|end|>")


def test_names_of_rules_stay_apart() -> None:
    """Of two schemas, one of which says in a string what is a name of the other."""
    one = {"type": "object", "properties": {"root": {"enum": ["basic_string", "root_0"]}}}
    match = matches(rules_of(Grammar.calls("hermes", {"a": one, "b": WEATHER}, required=True)))
    for value in ("basic_string", "root_0"):
        assert match(called(FORMATS["hermes"], "a", {"root": value}))
    assert not match(called(FORMATS["hermes"], "a", {"root": "a0_root_0"}))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "pattern": "^[a-z]+$"}, ["ab"], ["a1", ""]),
        ({"type": "string", "maxLength": 2}, ["", "a\n"], ["abc", "</parameter>"]),
        ({"type": "string", "format": "date"}, ["2024-02-03"], ["x"]),
        ({"enum": ["a b", 3]}, ["a b", "3"], ["4", '"a b"']),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["null", "{"], ["\n</parameter>"]),
        ({"type": "array", "items": {"type": "integer"}}, ["[1, 2]"], ["[a]", "1"]),
        ({"$ref": "#/$defs/d"}, ["true"], ["True"]),
    ],
)
def test_arguments_that_are_written_one_by_one(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    whole = {"type": "object", "properties": {"v": schema}, "$defs": {"d": {"type": "boolean"}}}
    grammar = Grammar.calls("qwen3_coder", {"f": {**whole, "required": ["v"]}}, required=True)
    match = matches(rules_of(grammar))
    for text in good + bad:
        assert match(called(FORMATS["qwen3_coder"], "f", {"v": text})) == (text in good), text


def test_what_texts_are_not_held_to_is_said() -> None:
    long = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 900}}}
    assert not Grammar.calls("hermes", {"f": long}).notes
    (note,) = Grammar.calls("glm", {"f": long}).notes
    assert note.startswith("f: maxLength of the text a is not held to")

    assert "held to no schema" in Grammar.calls("glm", {"f": {"anyOf": [long, long]}}).notes[0]


@pytest.mark.parametrize(
    "text", ["[]", "{}", "x", '{"form": "hermes"}', json.dumps({"form": "hermes", "functions": 3})]
)
def test_no_grammar_of_calls(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"make it with Grammar\.calls"):
        Grammar("calls", text)


def test_names_and_formats_are_checked() -> None:
    for name in ("", "a b", 'a"', "a" * 65, "a<"):
        with pytest.raises(InvalidInputError, match="1 to 64 letters"):
            Grammar.calls("hermes", {name: None})
    with pytest.raises(InvalidInputError, match="choose one of harmony"):
        Grammar.calls("other", {"a": None})
    with pytest.raises(InvalidInputError, match="no function"):
        Grammar.calls("hermes", {})


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("hermes", '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args>}'),
        ("qwen3_coder", "<tool_call>\n<function=example>\n<parameter=one>\n"),
        ("llama3", "<|start_header_id|>'{\"name\": \"' + name + '\", ' + '\"parameters\": '"),
        ("mistral", '"[TOOL_CALLS]" + name + "[ARGS]"'),
        ("mistral_v3", '"[TOOL_CALLS] ["'),
        ("mistral_v7", '"[TOOL_CALLS]["'),
        ("mistral_v11", '"[TOOL_CALLS]" + name + "[CALL_ID]" + id + "[ARGS]"'),
        ("kimi_k2", "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>"),
        ("seed_oss", "<seed:tool_call>\n<function=example>\n<parameter=one>"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">'),
        ("nemotron", '<TOOLCALL>[{"name": "f"}]</TOOLCALL>'),
        ("granite", "<|start_of_role|>answer with <|tool_call|> and a list"),
        ("glm", "<tool_call>{name}\\n<arg_key>{key}</arg_key>\\n<arg_value>"),
        ("glm_4.7", "<tool_call>{name}<arg_key>{key}</arg_key><arg_value>"),
        ("deepseek_v3", "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + '\\n```json'"),
        ("deepseek_v31", "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name"),
        ("deepseek_v32", "{% set dsml = '｜DSML｜' %}{{ '<' + dsml + 'function_calls>' }}"),
        ("deepseek_v4", "{% set dsml = '｜DSML｜' %}{{ '<' + dsml + 'tool_calls>' }}"),
        ("command_r", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f"}]'),
        ("harmony", "'<|start|>assistant to=functions.' + name + '<|channel|>commentary'"),
        (None, "{{ messages }}"),
    ],
)
def test_formats_are_told_by_templates(name: str | None, template: str) -> None:
    found = format_of(tool_tokenizer(template))
    assert (found and found.name) == name


def template_of_calls(form: ToolFormat) -> str:
    """One that shows earlier calls in a format, and has the signs of all others beside it."""
    signs = " ".join(sign for one in IN_TEXTS for sign in one.signs if one.trigger[0] in "<[")
    begin = form.opening + form.begin.replace("{name}", "{{ c.function.name }}")
    begin = begin.replace("{id}", "{{ c.id.split(':')[-1] }}")
    arguments = "{{ c.function.arguments | tojson }}"
    if form.argument:
        first, last = form.argument
        each = first.replace("{key}", "{{ k }}").replace("{text}", "{{ v is string | tojson }}")
        each += "{{ v }}" + last
        arguments = "{% for k, v in c.function.arguments | items %}" + each + "{% endfor %}"
    call = begin + arguments + form.end + form.closing
    calls = "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}"
    return "{# " + signs + " #}{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}"


@pytest.mark.parametrize("form", [one for one in IN_TEXTS if one.signs], ids=lambda form: form.name)
def test_an_earlier_call_shows_the_format(form: ToolFormat) -> None:
    """Whatever signs of others a template has; with other tags it is none of them."""
    template = template_of_calls(form)
    if form.name == "llama3":
        template += "{# header_ #}"
    found = format_of(tool_tokenizer(template))
    assert found is not None and found.name == form.name
    if form.trigger[0] in "<[":
        other = template.replace(form.trigger, form.trigger.replace(form.trigger[1], "other:", 1))
        assert format_of(tool_tokenizer(other)) is None
