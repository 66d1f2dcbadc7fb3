"""Errors of the runtime: each says what was given, what was expected and how to fix it.

HookRuntimeError
├── UnsupportedModelError     refused at start-up: a capture could not be exact
├── UnsupportedVLLMError      a vLLM symbol the runtime needs is gone, or a setting rules it out
├── ProbeError (ValueError)   a malformed probe or one that does not fit its prompt or model
├── IncompleteCaptureError    rows were missing even after the request was computed again
├── ConfigError (ProbeError)  a config file is wrong: names the file, the key and what is allowed
├── ProgramError              a program was not carried out whole: its request's output is void
├── ShadowMemoryError         the heads asked for do not fit the memory that is left
├── EngineDeadError           vLLM's engine process is gone
└── ClosedError               used after close()
"""

from __future__ import annotations


class HookRuntimeError(Exception):
    """Base of every error raised by ``hook_runtime``."""


class UnsupportedModelError(HookRuntimeError):
    """The model (or an engine option) cannot be captured exactly; raised before any request."""


class UnsupportedVLLMError(HookRuntimeError):
    """The installed vLLM lacks something the runtime needs; names the symbol."""


class ProbeError(HookRuntimeError, ValueError):
    """A probe is malformed, or does not fit its prompt or its model."""


class ConfigError(ProbeError):
    """A config file is wrong: the message names the file, the key and what is allowed there."""


class IncompleteCaptureError(HookRuntimeError):
    """A capture missed rows even after it was computed again from scratch."""


class ProgramError(HookRuntimeError):
    """A program was not carried out whole, so that its request's output is not what was asked."""


class ShadowMemoryError(HookRuntimeError):
    """The heads asked for do not fit the memory that is left; what was held stays held."""


class EngineDeadError(HookRuntimeError):
    """vLLM's engine process is gone: every request in it is lost, and no more will be taken."""


class ClosedError(HookRuntimeError):
    """The engine was used after ``close()``."""
