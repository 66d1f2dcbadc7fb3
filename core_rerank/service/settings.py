"""What the service is told when it starts: limits, keys, names; checked once."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, fields

DEFAULT_PORT = 8765


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Limits of one service; the defaults suit one engine.

    Attributes:
        served_names: names that a request's ``model`` may have beside the model's own.
        api_keys: any one of them is asked for; none means that everybody may call.
        max_documents: documents of one request.
        max_body_bytes: size of a request's body.
        max_running: requests in the engine at a time; None chooses by the backend. A quarter of
            them, one at least where there are several, is kept for ranking.
        max_waiting: requests that wait for those; more are refused with 429.
        timeout_s: longest time a request may take, its waiting included.
        drain_s: time that requests get to end when the service is stopped, before they are
            answered 503; what runs in a thread is waited for.
        openai: answer ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models`` too.
        admin_tokens: any one of them lets programs be loaded (``/v1/programs``); none means that
            there are no such routes. Needs ``openai``.
    """

    served_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_documents: int = 1000
    max_body_bytes: int = 16 << 20
    max_running: int | None = None
    max_waiting: int = 256
    timeout_s: float = 60.0
    drain_s: float = 30.0
    openai: bool = False
    admin_tokens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_documents", "max_body_bytes", "max_running", "max_waiting"):
            value = getattr(self, name)
            least = 0 if name == "max_waiting" else 1
            if value is None and name == "max_running":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number from {least}, not {value!r}.")
        for name in ("timeout_s", "drain_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name} must be a number of seconds above 0, not {value!r}.")
        if any(not key.strip() or not key.isascii() for key in self.api_keys):
            raise ValueError("an API key is blank or not ASCII: headers cannot hold it.")
        if any(len(token) < 16 or not token.isascii() for token in self.admin_tokens):
            raise ValueError("an admin token must have at least 16 characters, all of them ASCII.")
        if self.admin_tokens and not self.openai:
            raise ValueError("programs change what is generated: admin tokens need openai=True.")

    def __repr__(self) -> str:
        secret = ("api_keys", "admin_tokens")
        shown = ", ".join(
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name not in secret
        )
        hidden = ", ".join(f"{name}=<{len(getattr(self, name))} keys>" for name in secret)
        return f"ServiceSettings({shown}, {hidden})"


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine alone: localhost or a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_binding(host: str, settings: ServiceSettings, allow_unauthenticated: bool) -> None:
    """ValueError where other machines could call without a key, unless that is allowed."""
    if settings.api_keys or allow_unauthenticated or is_loopback(host):
        return
    raise ValueError(
        f"binding {host} without an API key lets everybody on the network use the model: give "
        "--api-key-file, bind 127.0.0.1, or say --allow-unauthenticated."
    )
