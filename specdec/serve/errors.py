"""What a client is told when its request cannot be served: OpenAI's error object and a status."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from specdec.base.errors import CapacityError, SpecDecError, shown
from specdec.sampling.params import SamplingParams

RETRY_SECONDS = 1
"""After which a client may ask a busy server again."""

_FIELD = re.compile(rf"({'|'.join(one.name for one in fields(SamplingParams))}) is ")
"""With which a line about a value begins."""

_INSTANCE = re.compile(r"dictionary or (instance of \w+|object to extract fields from)")


class RequestError(Exception):
    """A request that cannot be served.

    Args:
        status: of HTTP.
        message: one line: the value, the limit, the way out.
        param: the field that it is about.
        code: a word for programs.
        close: the connection ends with the answer, since the rest of the request is not waited for.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code, self.close = code, close

    @property
    def body(self) -> dict[str, Any]:
        """What the answer holds."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": told}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        more = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": str(RETRY_SECONDS)}}.get(
            self.status, {}
        )
        return more | {"Connection": "close"} if self.close else more


def busy(message: str, *, close: bool = False) -> RequestError:
    """The server takes nothing now and may later."""
    return RequestError(503, message, code="server_busy", close=close)


def engine_failed(error: BaseException) -> RequestError:
    """A defect of ours or the machine's."""
    line = " ".join(str(error).split()) or type(error).__name__
    return RequestError(500, line, code="engine_failed")


def defect() -> RequestError:
    """A defect of the server's own, of which a client is told no more."""
    return RequestError(500, "the server has a defect; its log has the traceback")


def refused(error: SpecDecError) -> RequestError:
    """A value out of range, or a prompt that is too long."""
    named = _FIELD.match(str(error))
    return RequestError(
        400,
        str(error),
        param=named[1] if named else None,
        code="context_length_exceeded" if isinstance(error, CapacityError) else None,
    )


def told(error: BaseException) -> RequestError:
    """An error that the engine's process told of."""
    if isinstance(error, CapacityError):
        return busy(str(error))
    return refused(error) if isinstance(error, SpecDecError) else engine_failed(error)


def malformed(problems: Sequence[Any]) -> RequestError:
    """A body that is not of the form; pydantic's problems, of which the first is told."""
    problem = problems[0]
    place = [str(part) for part in problem["loc"] if part != "body"]
    if problem["type"] == "json_invalid":
        return RequestError(
            400, f"the body is not JSON: {problem.get('ctx', {}).get('error', problem['msg'])}"
        )
    if not place and problem["type"] == "string_unicode":
        what = "the name of a field is not Unicode text: it has half of a surrogate pair; remove it"
        return RequestError(400, what)
    if not place:
        return RequestError(
            400, "the body is no JSON object; send one, with Content-Type: application/json"
        )
    name = place[0]
    if problem["type"] == "missing":  # between the ends may stand a class of ours
        where = ".".join(dict.fromkeys((name, place[-1])))
        return RequestError(400, f"{where} is missing; give it", param=name)
    what = "; ".join(
        dict.fromkeys(
            _INSTANCE.sub("object", one["msg"].lower().removeprefix("value error, "))
            for one in problems
            if one["loc"][1:2] == (name,)
        )
    )
    what = f"{name} is {shown(problem['input'])}: {what or problem['msg'].lower()}"
    return RequestError(400, what, param=name)
