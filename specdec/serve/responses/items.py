"""The items of a response, as they come, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

_TEXTS = {"text": "output_text", "reasoning": "reasoning_text"}
_DELTAS = {**_TEXTS, "arguments": "function_call_arguments"}


class Items:
    """Puts items together.

    Attributes:
        done: those that are whole.
    """

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # what comes
        self._kind = ""
        self._said: list[str] = []  # of its text

    def add(self, kind: str, text: str, call_id: str = "") -> Iterator[dict[str, Any]]:
        """Adds to what comes: a text, a reasoning, a name that begins a call, or arguments."""
        if kind == "name":
            yield from self.close()
            about = {"call_id": call_id, "name": text, "arguments": ""}
            yield from self._begin("arguments", "fc", {"type": "function_call", **about})
            return
        if kind != self._kind:
            yield from self.close()
            shape: dict[str, Any] = {"type": "message", "role": "assistant", "content": []}
            if kind == "reasoning":
                shape = {"type": "reasoning", "summary": [], "content": []}
            yield from self._begin(kind, "rs" if kind == "reasoning" else "msg", shape)
            part = _part(kind, "")
            yield {"type": "response.content_part.added", **self._where, "part": part}
        self._said.append(text)
        more: dict[str, Any] = {"logprobs": []} if kind == "text" else {}
        where = {**self._where, "delta": text, **more}
        yield {"type": f"response.{_DELTAS[kind]}.delta", **where}

    def close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """Ends what came."""
        if self._open is None:
            return
        item, kind, text = self._open, self._kind, "".join(self._said)
        if kind == "arguments":
            item["arguments"] = text
            more = {"name": item["name"], "arguments": text}
            yield {"type": "response.function_call_arguments.done", **self._where, **more}
        else:
            part = _part(kind, text)
            more = {"text": text, **({"logprobs": []} if kind == "text" else {})}
            yield {"type": f"response.{_DELTAS[kind]}.done", **self._where, **more}
            yield {"type": "response.content_part.done", **self._where, "part": part}
            item["content"] = [part]
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.done), "item": item}
        self.done.append(item)
        self._open, self._kind, self._said = None, "", []

    def _begin(self, kind: str, prefix: str, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._open = {"id": f"{prefix}_{uuid4().hex}", **item, "status": "in_progress"}
        self._kind = kind
        place = {"output_index": len(self.done), "item": dict(self._open)}
        yield {"type": "response.output_item.added", **place}

    @property
    def _where(self) -> dict[str, Any]:
        assert self._open is not None
        where = {"item_id": self._open["id"], "output_index": len(self.done)}
        return where if self._kind == "arguments" else {**where, "content_index": 0}


def _part(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "text" else {}
    return {"type": _TEXTS[kind], "text": text, **more}
