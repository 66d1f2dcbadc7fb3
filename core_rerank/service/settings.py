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
        max_running: requests in the engine at a time; None chooses by the backend.
        max_waiting: requests that wait for those; more are refused with 429.
        timeout_s: longest time a request may take, its waiting included.
        drain_s: time that requests get to end when the service is stopped, before they are
            answered 503; what runs in a thread is waited for.
    """

    served_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_documents: int = 1000
    max_body_bytes: int = 16 << 20
    max_running: int | None = None
    max_waiting: int = 256
    timeout_s: float = 60.0
    drain_s: float = 30.0

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

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "api_keys"
        )
        return f"ServiceSettings({shown}, api_keys=<{len(self.api_keys)} keys>)"


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
