"""Lets vLLM's V2 model runner, made for GPUs, run in a CPU process through Triton's interpreter.

On PYTHONPATH of one test's subprocess only. Triton lists no driver on a machine without a GPU, and
its interpreter has no nan-aware argmax: both are filled in here.
"""

import importlib.util
import os

import numpy as np

os.environ["TRITON_INTERPRET"] = "1"


def _pretend_driver() -> None:
    import triton.backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    backend = type(next(iter(triton.backends.backends.values())))
    triton.backends.backends["cpu"] = backend(compiler=None, driver=Driver)


def _nan_aware(name: str, plain):
    original = getattr(np, name)

    def find(values, *args, **kwargs):
        try:
            return original(values, *args, **kwargs)
        except ValueError:
            return plain(values, *args, **kwargs)

    setattr(np, name, find)


if importlib.util.find_spec("triton") is not None:
    _pretend_driver()
    _nan_aware("nanargmax", np.argmax)
    _nan_aware("nanargmin", np.argmin)
