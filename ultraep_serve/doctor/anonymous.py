"""Text of a report without hosts, users, home directories, addresses and secrets."""

import contextlib
import getpass
import ipaddress
import json
import os
import pwd
import re
import socket
from collections.abc import Iterable
from pathlib import Path

from ultraep_serve.system.environment import values_of_variables

__all__ = ["Anonymiser"]

_SHORTEST = 3  # characters of a name that is looked for
_SECRET_VARIABLES = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
_NAME_VARIABLES = ("HOSTNAME", "USER", "LOGNAME")
_NAMES_NOBODY = ("localhost", "root")
_HOMES = re.compile(r"/(?:home|Users|root)(?:/[^/\s\"':,]+)?(?=[/\s\"':,]|$)")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_LOGIN = re.compile(r"(?<=://)[^/\s\"'@]+@")
_SECRET = re.compile(
    r"(?i)\b(bearer\s+|[\w-]*(?:token|api[_-]?key|secret|password|passwd)\\?[\"']?\s*[=:]\s*\\?[\"']?)"
    r"[^\s\"',\\}]{6,}"
)
_KNOWN_SECRETS = re.compile(r"\b(?:hf_|sk-|gh[pousr]_|AKIA|xox[abpr]-)[A-Za-z0-9_-]{8,}")
_IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\d)")
_IPV6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f:]*:[0-9A-Fa-f:]*:[0-9A-Fa-f.]*(?![\w:])")


class Anonymiser:
    """Puts general words in place of names of this machine and its user, and of addresses."""

    def __init__(self, hosts: Iterable[str] = (), secrets: Iterable[str] = ()) -> None:
        """Also ``hosts`` and ``secrets`` that only the caller knows."""
        variables = values_of_variables(_SECRET_VARIABLES)
        found = {secret for secret in (*secrets, *variables) if len(secret) >= 6}
        escaped = {json.dumps(secret)[1:-1] for secret in found}
        self._replacements = [
            (_any_of(found | escaped, whole=False), "SECRET"),
            (_any_of(_homes(), whole=False), "HOME"),
            (_any_of({*_host_names(), *_with_short(hosts)}, whole=True), "HOST"),
            (_any_of(_user_names(), whole=True), "USER"),
        ]

    def __call__(self, text: str) -> str:
        """``text`` without them."""
        for pattern, word in self._replacements:
            text = pattern.sub(word, text)
        text = _LOGIN.sub("SECRET@", text)
        text = _SECRET.sub(r"\1SECRET", _KNOWN_SECRETS.sub("SECRET", text))
        text = _EMAIL.sub("EMAIL", _HOMES.sub("HOME", text))
        return _IPV6.sub(_address, _IPV4.sub(_address, text))


def _any_of(words: Iterable[str], *, whole: bool) -> re.Pattern[str]:
    """Any of ``words``, longest first; ``whole`` ones only, in any case."""
    wanted = sorted({word for word in words if len(word) >= _SHORTEST}, key=len, reverse=True)
    joined = "|".join(map(re.escape, wanted))
    if not wanted:
        return re.compile(r"(?!)")
    return re.compile(rf"(?i)(?<![A-Za-z0-9])(?:{joined})(?![A-Za-z0-9])" if whole else joined)


def _host_names() -> set[str]:
    names = {socket.gethostname(), os.uname().nodename, *values_of_variables(_NAME_VARIABLES[:1])}
    with contextlib.suppress(OSError):
        names.add(socket.getfqdn())
    return _with_short(names)


def _with_short(names: Iterable[str]) -> set[str]:
    """``names`` of hosts, also without their domains."""
    both = {part for name in names for part in (name, name.partition(".")[0])}
    return both - {*_NAMES_NOBODY, ""}


def _user_names() -> set[str]:
    names = set(values_of_variables(_NAME_VARIABLES[1:]))
    with contextlib.suppress(OSError, KeyError):
        names |= {getpass.getuser(), pwd.getpwuid(os.getuid()).pw_name}
    return names - {*_NAMES_NOBODY, ""}


def _homes() -> set[str]:
    homes = {os.path.expanduser("~")}
    with contextlib.suppress(KeyError):
        homes.add(pwd.getpwuid(os.getuid()).pw_dir)
    return {home.rstrip("/") for home in homes if len(Path(home).parts) > 2}


def _address(found: re.Match[str]) -> str:
    """``IP`` for an address of a machine; what is none, or is every machine's, stays."""
    try:
        address = ipaddress.ip_address(found[0])
    except ValueError:
        return found[0]
    return found[0] if address.is_loopback or address.is_unspecified else "IP"
