"""Clients that are programs of their own: those that measure servers, and those for Node."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.checks.clients.examples import QUESTION, TOKENS, TOOL, Served

PROGRAMS: dict[str, tuple[str, ...]] = {
    "guidellm": (
        *("-m", "guidellm", "run", "--backend", "kind=openai_http,target={root},model={model}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4"),
        *("--tokenizer", "kind=hf_auto,model={tokenizer}", "--disable-console-interactive"),
        *("--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=8"),
        *("--output", "kind=json,path={folder}/report.json"),
    ),
    "sglang": (
        *("-m", "sglang.bench_serving", "--backend", "sglang-oai-chat", "--base-url", "{root}"),
        *("--model", "{model}", "--tokenizer", "{tokenizer}", "--dataset-name", "random-ids"),
        *("--random-input-len", "24", "--random-output-len", "8", "--num-prompts", "4"),
    ),
    "vllm": (
        *("-m", "vllm.entrypoints.cli.main", "bench", "serve", "--base-url", "{root}"),
        *("--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        *("--tokenizer", "{tokenizer}", "--dataset-name", "random", "--num-prompts", "4"),
        *("--random-input-len", "24", "--random-output-len", "8"),
    ),
}
"""Programs that measure servers: their words."""

_TOOL_JS = json.dumps(TOOL)
NODE: dict[str, str] = {
    "openai (npm)": f"""
import OpenAI from "openai";
import {{ zodResponseFormat }} from "openai/helpers/zod";
import {{ z }} from "zod";
const client = new OpenAI({{ baseURL: URL_, apiKey: "any", maxRetries: 0 }});
const base = {{ model: MODEL, messages: [{{ role: "user", content: "{QUESTION}" }}] }};
const chat = client.chat.completions;
const first = await chat.create({{ ...base, max_tokens: 8 }});
check(first.choices[0].message.content, "chat");
let text = "";
for await (const part of await chat.create({{ ...base, max_tokens: 8, stream: true }}))
  text += part.choices[0]?.delta?.content ?? "";
check(text, "stream");
const shape = z.object({{ city: z.enum(["Paris", "Oslo"]), warm: z.boolean() }});
const parsed = await chat.parse({{ ...base, max_tokens: {TOKENS},
  response_format: zodResponseFormat(shape, "report") }});
check(typeof parsed.choices[0].message.parsed.warm === "boolean", "parse");
const called = await chat.create({{ ...base, max_tokens: {TOKENS}, tools: [{_TOOL_JS}],
  tool_choice: "required" }});
check(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).city, "tools");
const answer = await client.responses.create({{ model: MODEL, input: "{QUESTION}", store: false,
  max_output_tokens: 8 }});
check(answer.output_text, "responses");
""",
    "ai (npm)": f"""
import {{ generateText, generateObject, streamText, tool }} from "ai";
import {{ createOpenAICompatible }} from "@ai-sdk/openai-compatible";
import {{ createOpenAI }} from "@ai-sdk/openai";
import {{ z }} from "zod";
const served = createOpenAICompatible({{ name: "served", baseURL: URL_, apiKey: "any",
  supportsStructuredOutputs: true }});
const base = {{ model: served(MODEL), prompt: "{QUESTION}", maxRetries: 0 }};
check((await generateText({{ ...base, maxOutputTokens: 8 }})).text, "text");
let text = "";
for await (const part of streamText({{ ...base, maxOutputTokens: 8 }}).textStream) text += part;
check(text, "stream");
const shape = z.object({{ city: z.enum(["Paris", "Oslo"]), warm: z.boolean() }});
const made = await generateObject({{ ...base, schema: shape, maxOutputTokens: {TOKENS} }});
check(typeof made.object.warm === "boolean", "object");
const weather = tool({{ description: "Tells the weather.", inputSchema: shape }});
const called = await generateText({{ ...base, tools: {{ weather }}, toolChoice: "required",
  maxOutputTokens: {TOKENS} }});
check(called.toolCalls[0].input.city, "tools");
const direct = createOpenAI({{ baseURL: URL_, apiKey: "any" }});
const answer = await generateText({{ ...base, model: direct(MODEL), maxOutputTokens: 16 }});
check(answer.text, "responses");
""",
}
"""Modules for Node, which say what they have done."""


def run_program(at: Served, words: tuple[str, ...], tokenizer: str) -> str:
    """Runs it; what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        values = {"root": at.url.removesuffix("/v1"), "model": at.model, "folder": folder}
        command = [word.format(**values, tokenizer=tokenizer) for word in words]
        return _outcome(subprocess.run([sys.executable, *command], capture_output=True, text=True))


def run_node(at: Served, folder: Path, script: str) -> str:
    """Runs a module in a folder that has its packages; what came of it."""
    head = f"const URL_ = {json.dumps(at.url)}, MODEL = {json.dumps(at.model)};\n"
    head += "const check = (ok, what) => { if (!ok) throw new Error(what); console.log(what); };\n"
    imports = [line for line in script.splitlines() if line.startswith("import ")]
    rest = [line for line in script.splitlines() if not line.startswith("import ")]
    with tempfile.NamedTemporaryFile("w", suffix=".mjs", dir=folder) as file:
        file.write("\n".join([*imports, head, *rest]))
        file.flush()
        return _outcome(subprocess.run(["node", file.name], capture_output=True, text=True))


def _outcome(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode == 0:
        return "works"
    lines = [line for line in done.stderr.splitlines() if "Error" in line] or [done.stderr[-200:]]
    return f"FAILS: {lines[-1].strip()} (after: {', '.join(done.stdout.split()[-3:])})"
