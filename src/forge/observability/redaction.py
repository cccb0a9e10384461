"""Keeping API keys and tokens out of what a run writes down."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "<hidden>"

_SECRET_NAME = re.compile(
    r"(api_?key|access_?key|secret|passw(or)?d|passphrase|credential|private_?key|bearer|authorization)"
    # `max_tokens` and `tokenizer` are no secrets; `hf_token` and `token` are.
    r"|(^|[._-])(auth_?)?token$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"\b(hf|api_org)_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|\bsk-[A-Za-z0-9_-]{16,}"  # OpenAI, Anthropic
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\b(AKIA|ASIA)[A-Z0-9]{16}\b"  # Amazon
    r"|\bxox[abprs]-[A-Za-z0-9-]{10,}"  # Slack
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"  # JSON web tokens
)
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
_URL_SECRET = re.compile(
    r"(?<=[?&])([\w.-]*(?:token|key|secret|signature|sig|passw(?:or)?d)[\w.-]*=)[^&\s]+", re.IGNORECASE
)
_ASSIGNMENT = re.compile(r"^(?P<name>-{0,2}[\w.-]+)=(?P<value>.*)$", re.DOTALL)


def looks_secret(name: str) -> bool:
    """Whether a key, option or variable of this name holds a secret.

    >>> looks_secret("WANDB_API_KEY"), looks_secret("--hub.token"), looks_secret("max_new_tokens")
    (True, True, False)
    """
    return bool(_SECRET_NAME.search(name.replace("-", "_").strip("_")))


def redact_text(text: str) -> str:
    """`text` with whatever has the form of a known kind of key, or a password or a key in an address, hidden.

    >>> redact_text("https://me:pass@host/x")
    'https://<hidden>@host/x'
    """
    return _URL_SECRET.sub(rf"\1{HIDDEN}", _URL_PASSWORD.sub(HIDDEN, _SECRET_VALUE.sub(HIDDEN, text)))


def redact_command(argv: list[str]) -> list[str]:
    """A command line with the values of secret-looking options hidden.

    >>> redact_command(["main.py", "--hub.token", "abc", "wandb.api_key=xyz", "--training.steps", "5"])
    ['main.py', '--hub.token', '<hidden>', 'wandb.api_key=<hidden>', '--training.steps', '5']
    """
    shown: list[str] = []
    hide_next = False
    for word in argv:
        assignment = _ASSIGNMENT.match(word)
        if hide_next:
            shown.append(HIDDEN)
        elif assignment and looks_secret(assignment["name"]):
            shown.append(f"{assignment['name']}={HIDDEN}")
        else:
            shown.append(_INLINE.sub(_hide_inline, redact_text(word)))
        hide_next = not hide_next and word.startswith("--") and not assignment and looks_secret(word)
    return shown


_INLINE = re.compile(r"""(?P<name>[\w.-]+)(?P<colon>["']?\s*:\s*)(?P<value>"[^"]*"|'[^']*'|[^\s,{}\[\]]+)""")
"""A key of a mapping that is given on the command line: rewards=[{reward: my.Judge, args: {api_key: abc}}]"""


def _hide_inline(match: re.Match[str]) -> str:
    return f"{match['name']}{match['colon']}{HIDDEN}" if looks_secret(match["name"]) else match[0]


def redact(value: Any) -> Any:
    """A config or record with every secret hidden: by the name of its key, or by its own form.

    >>> redact({"hub": {"token": "abc"}, "steps": 5})
    {'hub': {'token': '<hidden>'}, 'steps': 5}
    """
    if isinstance(value, Mapping):
        return {k: HIDDEN if looks_secret(str(k)) and v not in (None, "") else redact(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact(v) for v in value]
    return redact_text(value) if isinstance(value, str) else value
