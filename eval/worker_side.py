"""What a benchmark does inside vLLM's workers: take the hook out, measure memory, profile."""

from __future__ import annotations

import time
from typing import Any

EXTENSION = f"{__name__}.BenchWorker"
"""For ``worker_extension_cls``, of HookLLM and of an unhooked ``vllm.LLM`` alike."""
RUNTIME = "hook_runtime"
PROFILE_ROWS = 40


class BenchWorker:
    """Methods added to every vLLM worker; all names start with ``bench_``."""

    bench_aside: list[tuple[Any, str, Any]] | None = None
    bench_profiler: Any = None

    def bench_hook(self, in_place: bool) -> int:
        """Take the runtime's wrappers off their objects, or put them back; how many there are.

        A wrapper is a function of the runtime among an object's own attributes, in front of its
        class's method.
        """
        if self.bench_aside is None:
            self.bench_aside = []
        if in_place:
            for owner, name, wrapper in self.bench_aside:
                setattr(owner, name, wrapper)
            self.bench_aside = []
            return len(_wrappers(self))
        for owner, name, wrapper in _wrappers(self):
            delattr(owner, name)
            self.bench_aside.append((owner, name, wrapper))
        return len(self.bench_aside)

    def bench_memory(self, reset: bool = False) -> dict[str, int]:
        """Bytes that torch held at its peak (since the last ``reset``) on this worker's GPU."""
        import torch

        device = _device(self)
        if device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(device)
        peak = {
            "allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
            "used": total - free,
            "total": total,
        }
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return peak

    def bench_matmul(self, size: int, repeats: int) -> float:
        """Median seconds of one ``size``^3 product of matrices of the model's dtype."""
        import torch

        worker: Any = self
        device = _device(self)
        a, b = (
            torch.randn(size, size, device=device, dtype=worker.vllm_config.model_config.dtype)
            for _ in range(2)
        )
        product = torch.empty_like(a)
        seconds = []
        for _ in range(3 + repeats):
            _wait(device)
            start = time.perf_counter()
            torch.matmul(a, b, out=product)
            _wait(device)
            seconds.append(time.perf_counter() - start)
        return sorted(seconds[3:])[repeats // 2]

    def bench_profile(self, start: bool) -> str:
        """Start torch's profiler, or stop it: its table, by time on the device, as text."""
        from torch.profiler import ProfilerActivity, profile

        on_gpu = _device(self).type == "cuda"
        if start:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
            self.bench_profiler = profile(activities=activities)
            self.bench_profiler.start()
            return ""
        _wait(_device(self))
        self.bench_profiler.stop()
        averages = self.bench_profiler.key_averages()
        self.bench_profiler = None
        order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        return averages.table(sort_by=order, row_limit=PROFILE_ROWS, max_name_column_width=80)


def _device(worker: Any) -> Any:
    return worker.device


def _wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _wrappers(worker: Any) -> list[tuple[Any, str, Any]]:
    """(object, attribute, wrapper) of everything that the runtime put in front of a method."""
    runner = worker.model_runner
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    owners = [
        runner,
        getattr(runner, "cudagraph_dispatcher", None),  # of the V1 runner
        getattr(runner, "cudagraph_manager", None),  # of the V2 runner
        *(getattr(layer, "impl", None) for layer in layers),
    ]
    return [
        (owner, name, value)
        for owner in {id(owner): owner for owner in owners}.values()
        for name, value in list(getattr(owner, "__dict__", {}).items())
        if callable(value) and str(getattr(value, "__module__", "")).startswith(RUNTIME)
    ]
