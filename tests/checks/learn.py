"""A server that learns from its requests, on a workload that its drafter is bad at.

    python -m tests.checks.learn --prompts gsm8k/train.jsonl --ask "Write SQL ...:\\n\\n{}"

It asks some prompts of the workload with `store: false`, then others that are kept, waits for the
trainings, and asks the first ones again: the answers must be the same, and tau should have risen.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx


class Asking:
    """A server of its own, with the lines that it prints."""

    def __init__(self, words: Sequence[str]) -> None:
        command = [sys.executable, "-m", "specdec", "serve", "--port", "0", *words]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.url, self.lines = "", list[str]()
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        self._ready.wait()
        assert self.url, "the server does not start"

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            self.lines.append(line)
            if found := re.search(r" at (http://[\d.:]+)/v1", line):
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def chat(self, text: str, **more: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": text}], **more}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=None)
        return dict(answer.raise_for_status().json())

    def all(self, texts: Sequence[str], at_once: int, **more: Any) -> tuple[list[str], float]:
        """Answers, and their tau pooled."""
        with ThreadPoolExecutor(at_once) as pool:
            answers = list(pool.map(lambda text: self.chat(text, **more), texts))
        steps = sum(one["meta_info"]["spec_verify_ct"] for one in answers)
        tokens = sum(one["usage"]["completion_tokens"] - 1 for one in answers)
        return [one["choices"][0]["message"]["content"] for one in answers], tokens / steps

    def rounds(self) -> int:
        """Trainings that have ended."""
        text = httpx.get(f"{self.url}/metrics", timeout=None).text
        found = re.findall(r"^specdec:learning_rounds_total\{.*\} ([\d.]+)$", text, re.MULTILINE)
        return int(sum(map(float, found)))


def main() -> int:
    """1 where an answer changed, or tau did not rise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", required=True, help="JSON lines with a question each")
    parser.add_argument("--ask", default="{}", help="what is asked of a question, at {}")
    parser.add_argument("--kept", type=int, default=128, help="requests to learn from, per round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--fresh", type=int, default=24, help="requests that are never kept")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--folder", help="of requests that are kept (default: one that goes)")
    parser.add_argument("serve", nargs="*", help="options of specdec serve, behind --")
    args = parser.parse_args()
    with open(args.prompts, encoding="utf-8") as file:
        rows = [json.loads(line)["question"] for line in file]
    texts = [args.ask.replace("\\n", "\n").replace("{}", row) for row in rows]
    fresh, texts = texts[: args.fresh], texts[args.fresh :]
    how = {"max_tokens": args.max_tokens, "temperature": 0}
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or scratch
        words = ["--learn-from-requests", folder, "--learn-device", "cpu", *args.serve]
        server = Asking(words)
        try:
            before, tau = server.all(fresh, args.at_once, store=False, **how)
            print(f"tau {tau:.3f} before", flush=True)
            for number in range(args.rounds):
                some = texts[number * args.kept :][: args.kept]
                _, tau_kept = server.all(some, args.at_once, **how)
                print(f"tau {tau_kept:.3f} on {len(some)} requests that are kept", flush=True)
                while server.rounds() <= number:
                    time.sleep(1)
            after, tau_after = server.all(fresh, args.at_once, store=False, **how)
            same = sum(one == other for one, other in zip(before, after, strict=True))
            print(f"tau {tau_after:.3f} after; {same} of {len(fresh)} answers are the same")
            text = httpx.get(f"{server.url}/metrics", timeout=None).text
            print(*re.findall(r"^specdec:(?:drafter|learning)_.*$", text, re.MULTILINE), sep="\n")
        finally:
            server.process.send_signal(signal.SIGTERM)
            server.process.wait()
    return int(same < len(fresh) or tau_after <= tau)


if __name__ == "__main__":
    sys.exit(main())
