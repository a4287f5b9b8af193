"""What a client is told when its request cannot be served: OpenAI's error object and a status."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from specdec.base.errors import CapacityError, SpecDecError, shown
from specdec.sampling.params import SamplingParams

RETRY_SECONDS = 1
"""After which a client may ask a busy server again."""

_NAMES = "|".join(one.name for one in fields(SamplingParams))
_FIELD = re.compile(rf"(?:[a-z]+ ){{0,3}}({_NAMES}) (?:is|holds|has) ")
"""With which a line about a value, or a part of one, begins."""

_INSTANCE = re.compile(r"dictionary or (instance of \w+|object to extract fields from)")


class RequestError(Exception):
    """A request that cannot be served.

    Args:
        message: one line: the value, the limit, the way out.
        param: the field that it is about.
        code: a word for programs.
        close: the connection ends with the answer, since the rest of the request is not waited for.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
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
    return RequestError(message, status=503, code="server_busy", close=close)


def engine_failed(error: BaseException) -> RequestError:
    """A defect of ours or the machine's."""
    line = " ".join(str(error).split()) or type(error).__name__
    return RequestError(line, status=500, code="engine_failed")


def defect() -> RequestError:
    """A defect of the server's own, of which a client is told no more."""
    return RequestError("the server has a defect; its log has the traceback", status=500)


def refused(error: SpecDecError) -> RequestError:
    """A value out of range, or a prompt that is too long."""
    named = _FIELD.match(str(error))
    code = "context_length_exceeded" if isinstance(error, CapacityError) else None
    return RequestError(str(error), named and named[1], code=code)


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
        why = problem.get("ctx", {}).get("error", problem["msg"])
        return RequestError(f"the body is not JSON: {why}")
    if not place and problem["type"] == "string_unicode":
        what = "the name of a field is not Unicode text: it has half of a surrogate pair; remove it"
        return RequestError(what)
    if not place:
        what = "the body is no JSON object; send one, with Content-Type: application/json"
        return RequestError(what)
    name = place[0]
    if problem["type"] == "missing":  # between the ends may stand a class of ours
        where = ".".join(dict.fromkeys((name, place[-1])))
        return RequestError(f"{where} is missing; give it", name)
    of_field = [one for one in problems if one["loc"][1:2] == (name,)] or [problem]
    said = (one["msg"].lower().removeprefix("value error, ") for one in of_field)
    what = "; ".join(dict.fromkeys(_INSTANCE.sub("object", one) for one in said))
    return RequestError(f"{name} is {shown(problem['input'])}: {what}", name)


def check_outputs(count: int, most: int) -> None:
    """Raises:
    RequestError: a request asks for too many.
    """
    if count > most:
        what = f"the request asks for {count:,} outputs and the limit is {most}"
        raise RequestError(f"{what}; ask for fewer at once")


def check_model(name: str | None, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises:
    RequestError: a request names another model.

    Args:
        names: that are right.
        known: those that a client is told.
    """
    if name is not None and name not in names:
        what = f"there is no model {name[:200]!r} (known: {', '.join(known)})"
        raise RequestError(what, "model", status=404, code="model_not_found")
