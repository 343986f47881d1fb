"""Regular expressions of the string formats of JSON schema, which must match as a whole."""

from __future__ import annotations

from collections.abc import Mapping

_HOUR = "([01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOUR}:[0-5][0-9])"
_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = "(0[1-9]|1[0-9]|2[0-8])"
_DATE = rf"({_YEAR}-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)|{_LEAP_YEAR}-02-29)"
_CLOCK = "([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DAYS = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_LABEL = "[A-Za-z0-9](-?[A-Za-z0-9]){0,14}"
"""Without two hyphens in a row, which mark encoded labels; at most 29 characters."""
_HOSTNAME = rf"{_LABEL}(\.{_LABEL}){{0,7}}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(\.{_BYTE}){{3}}"
_H16 = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [
        f"({_H16}:){{7}}{_H16}",
        *(f"({_H16}:){{1,{8 - after}}}(:{_H16}){{1,{after - 1}}}" for after in range(2, 8)),
        f"({_H16}:){{1,7}}:",
        f":((:{_H16}){{1,7}}|:)",
    ]
)
_WORD = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_ENCODED = "%[0-9A-Fa-f]{2}"
_NAME = f"([A-Za-z0-9._~!$&'()*+,;=-]|{_ENCODED})"
_PCHAR = f"([A-Za-z0-9._~!$&'()*+,;=:@-]|{_ENCODED})"
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P([0-9]+W|{_DAYS}(T{_CLOCK})?|T{_CLOCK})",
    "email": rf"{_WORD}(\.{_WORD})*@{_LABEL}(\.{_LABEL}){{0,3}}",
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": (
        rf"[A-Za-z][A-Za-z0-9+.-]*:(//{_NAME}*(:[0-9]{{0,5}})?(/{_PCHAR}*)*|/?({_PCHAR}+(/{_PCHAR}*)*)?)"
        rf"(\?({_PCHAR}|[/?])*)?(#({_PCHAR}|[/?])*)?"
    ),
}
"""Regular expressions of formats, which must match as a whole (RFC 3339, 3986, 4122, 5321)."""
EXACT = {name: FORMATS[name] for name in ("date", "date-time", "time", "hostname")}
"""Formats of which llguidance's own expressions match other texts too, such as 29 February of any year."""
