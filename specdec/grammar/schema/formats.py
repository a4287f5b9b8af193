"""Formats of strings as patterns, narrowed where a pattern cannot say all that a format asks."""

from __future__ import annotations

_LEAP = (
    r"(?:(?:[1-9]\d|\d[1-9])(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
)
_DATE = (
    r"(?:(?:[1-9]\d|\d[1-9])\d\d-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    rf"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))|{_LEAP}-02-29)"
)
_ZONE = r"(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_TIME = rf"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?{_ZONE}"
_CLOCK = r"T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
_DAYS = r"(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)"
_HEX = "[0-9A-Fa-f]"
_LABEL = r"[A-Za-z0-9]+(?:-+[A-Za-z0-9]+)*"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_H = "[0-9A-Fa-f]{1,4}"
_CHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_HOST = r"(?:[A-Za-z0-9_~!$&'()*+,;=%-]+@)?(?:[A-Za-z0-9][A-Za-z0-9._~-]*)(?::\d{1,4})?"
_AFTER = rf"(?:\?(?:{_CHAR}|[/?])*)?(?:#(?:{_CHAR}|[/?])*)?"
_PATH = rf"(?:/{_CHAR}*)*"
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"
_NAME = r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*(?::[1-9]\d{0,3}|\*)?"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": rf"P(?:\d+W|{_DAYS}(?:{_CLOCK})?|{_CLOCK})",
    "email": rf"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@(?:{_LABEL}\.)+[A-Za-z]{{2,}}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "ipv6": "|".join(
        [rf"(?:{_H}:){{7}}{_H}", rf"(?:{_H}:){{1,7}}:", rf":(?::{_H}){{1,7}}", "::"]
        + [rf"(?:{_H}:){{1,{7 - right}}}(?::{_H}){{1,{right}}}" for right in range(1, 7)]
    ),
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d*)(?:#|{_POINTER})",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_HOST}{_PATH}|/?{_CHAR}+{_PATH}){_AFTER}",
    "uri-reference": (
        rf"(?:[A-Za-z][A-Za-z0-9+.-]*:)?(?://{_HOST}{_PATH}|/?[A-Za-z0-9._~]+{_PATH}|/)?{_AFTER}"
    ),
    "uri-template": rf"(?:[A-Za-z0-9._~!$&()*+,;=:@/?#-]|\{{[+#./;?&]?{_NAME}(?:,{_NAME})*\}})*",
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
}

FORMATS |= {
    "idn-email": FORMATS["email"],
    "idn-hostname": FORMATS["hostname"],
    "iri": FORMATS["uri"],
    "iri-reference": FORMATS["uri-reference"],
    "base64": (
        r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?"
    ),
    "ipv4network": rf"{_OCTET}(?:\.{_OCTET}){{3}}/32",
    **{
        f"uuid{number}": (
            rf"{_HEX}{{8}}-{_HEX}{{4}}-{number}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"
        )
        for number in range(1, 9)
    },
}

FORMATS = {name: f"^(?:{pattern})$" for name, pattern in FORMATS.items()}

LONGEST = {"date": 10, "ipv4": 15, "ipv6": 39, "uuid": 36}
"""Characters, of those that have a bound."""
