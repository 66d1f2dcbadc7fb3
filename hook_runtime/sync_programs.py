"""The programs of HookLLM: batches in which requests read and change what they pass through."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .conductor import Conductor, Run
from .config import ProgramConfig
from .desk import DEFAULT
from .errors import ProbeError
from .exchange import per_prompt
from .hooked import Call
from .program_work import Work, as_list, chat_prompt
from .programmed import Analyzed, Performed, Programmed, reading_of
from .programs import Program
from .specs import AttentionProbe

T = TypeVar("T")


class SyncPrograms(Programmed):
    """What `HookLLM` does with programs; the engine itself is the subclass's."""

    llm: Any
    _lock: threading.RLock
    _leftover_runs: list[str]

    # ------------------------------------------------------------ the public side

    def load_program(
        self, name: str, program: Program | ProgramConfig | str | Path, *, default: bool = False
    ) -> None:
        """Have a program under a name on the running engine, in place of what had it before.

        Args:
            name: by which requests ask for it.
            program: a `Program`, a `ProgramConfig`, or the path of one.
            default: requests of ``generate``, ``chat`` and ``perform`` that name no program run
                it; those of ``probe`` and ``capture`` never run one.

        Raises:
            ConfigError: the config is wrong.
            ProbeError: the model lacks what it names.
            UnsupportedVLLMError: it needs hidden states, which this engine keeps closed.
        """
        with self._lock:
            self._check_open()
            self._perform(self._loaded(name, program, default))

    def generate(
        self,
        prompts: Any,
        sampling_params: Any = None,
        *,
        program: Any = DEFAULT,
        steer: Any = None,
        analyze: bool = False,
        use_tqdm: bool = False,
        **kwargs: Any,
    ) -> Any:
        """vLLM's ``LLM.generate``; requests with a program run it in the same pass.

        Refused on an engine with layers cut off.

        Args:
            prompts: vLLM's, one or several; one with a program must be text or token ids.
            sampling_params: vLLM's, one for all or one a prompt.
            program: a `Program`, the name of a loaded one, None for none, or a list with one a
                prompt; by default the one loaded as the default, if any. What it read is there
                for ``analyze`` and ``reading`` by ``output.request_id``.
            steer: an intervention, or a `Program`, to carry out after ``program``, or a list with
                one or None a prompt.
            analyze: return `Analyzed`, with what the programs' analyzers make of it, too.
            use_tqdm: show a progress bar.
            **kwargs: vLLM's; with a program, ``lora_request`` only.

        Returns:
            vLLM's outputs, in the order of the prompts; or `Analyzed`.

        Raises:
            ProgramError: a program was not carried out whole.
            ProbeError, UnsupportedVLLMError: as ``load_program``, and more than
                ``max_capture_bytes`` to read.
        """
        self._check_open()
        given = as_list(prompts)
        plans = self._desk.pick(program, len(given), steer)
        if all(plan.empty for plan in plans):
            if analyze and any(plan.analyzer for plan in plans):
                raise ProbeError("the program reads nothing that its analyzer could look at.")
            outputs = self._generate(prompts, sampling_params, use_tqdm=use_tqdm, **kwargs)
            return Analyzed(outputs, [None] * len(outputs)) if analyze else outputs
        done = self.perform(
            given, program, sampling_params, steer=steer, progress=use_tqdm, **kwargs
        )
        outputs = [one.output for one in done]
        if not analyze:
            return outputs
        found = [
            plan.analyzer.analyze(one.reading) if plan.analyzer else None
            for plan, one in zip(plans, done, strict=True)
        ]
        return Analyzed(outputs, found)

    def chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        *,
        program: Any = DEFAULT,
        steer: Any = None,
        analyze: bool = False,
        use_tqdm: bool = False,
        lora_request: Any = None,
        **template: Any,
    ) -> Any:
        """As ``generate``, for one conversation or a list of them.

        ``lora_request`` is one for all or one a conversation; ``template`` goes to the
        tokenizer's ``apply_chat_template``.
        """
        self._check_open()
        tokenizer = self.tokenizer
        several = bool(messages) and not isinstance(messages[0], Mapping)
        prompts = [
            chat_prompt(m, tokenizer, template) for m in (messages if several else [messages])
        ]
        return self.generate(
            prompts,
            sampling_params,
            program=program,
            steer=steer,
            analyze=analyze,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
        )

    def perform(
        self,
        prompts: Sequence[Any],
        programs: Any = DEFAULT,
        sampling_params: Any = None,
        *,
        steer: Any = None,
        probes: Sequence[AttentionProbe | None] | None = None,
        lora_request: Any = None,
        progress: bool = False,
        save_to: str | Path | None = None,
    ) -> list[Performed]:
        """Generate under programs, in one engine batch (thousands in several); outputs with what
        was read.

        Args:
            prompts: vLLM's; one with a program must be text or token ids.
            programs: as ``program`` of ``generate``.
            steer: as in ``generate``.
            sampling_params: one for all or one a prompt. On an engine with layers cut off there
                must be none: prompts are then computed and nothing is generated.
            probes: attention probes, one or None a prompt, in place of the programs' own.
            lora_request: one for all or one a prompt.
            progress: show a progress bar.
            save_to: folder for what hidden-state and head-output probes read, a safetensors file
                a prompt (``000000.safetensors``, ...). Prompts then run in as many batches as
                ``max_capture_bytes`` takes, and values are read from the files when looked at.

        Errors are those of ``generate`` and ``capture``.
        """
        self._check_open()
        count = len(prompts)
        plans = self._desk.pick(programs, count, steer)
        sampling_params = self._params_to_perform(sampling_params)
        if sampling_params is None:
            sampling_params = self.llm.get_default_sampling_params()
        params = per_prompt(sampling_params, count, "sampling parameters")
        adapters = per_prompt(lora_request, count, "LoRA requests")
        own = per_prompt(list(probes) if probes is not None else None, count, "probes")
        with self._lock:
            self._check_open()
            conductor = self._perform(self._opened())
            work = [
                Work.of(*given, self.tokenizer, conductor)
                for given in zip(prompts, plans, own, params, adapters, strict=True)
            ]
            if save_to is not None:
                return self._saved(work, conductor, Path(save_to), progress)
            sizes = [w.size for w in work]
            conductor.check_sizes(sizes)
            done: list[Performed] = []
            for part in conductor.parts(sizes):
                done.extend(self._batch(work[part.start : part.stop], conductor, progress))
            return done

    # ------------------------------------------------------------ one batch

    def _saved(
        self, work: list[Work], conductor: Conductor, folder: Path, progress: bool
    ) -> list[Performed]:
        from .state_files import save_reading

        folder.mkdir(parents=True, exist_ok=True)
        done: list[Performed] = []
        for part in conductor.parts([w.size for w in work]):
            for one in self._batch(work[part.start : part.stop], conductor, progress):
                path = folder / f"{len(done):06d}.safetensors"
                done.append(Performed(one.output, save_reading(path, one.reading)))
        return done

    def _batch(self, work: list[Work], conductor: Conductor, progress: bool) -> list[Performed]:
        programs = [w.program for w in work if w.program is not None]
        self._perform(self._sent(programs))
        runs = {
            i: conductor.begin(w.program, len(w.tokens))
            for i, w in enumerate(work)
            if w.program is not None
        }
        try:
            probed = self._probe(
                [w.prompt for w in work],
                [w.probe for w in work],
                [w.params for w in work],
                [w.adapter for w in work],
                runs,
                progress,
            )
            states = dict(zip(runs, self._states(runs, probed.outputs), strict=True))
        except BaseException:
            for run in runs.values():
                self._leftover_runs.append(run.run_id)
                conductor.leave_cache(run)
            raise
        finally:
            for run in runs.values():
                conductor.end_run(run)
        done = []
        for i, (w, output) in enumerate(zip(work, probed.outputs, strict=True)):
            reading = reading_of(
                output,
                w.tokens or output.prompt_token_ids or (),
                output.outputs[0].token_ids,
                probed.captures[i],
                w.probe,
                states.get(i, ()),
            )
            done.append(Performed(output, reading))
        self._desk.keep((d.reading, w.analyzer) for d, w in zip(done, work, strict=True))
        return done

    def _states(self, runs: Mapping[int, Run], outputs: Sequence[Any]) -> list[Any]:
        generated = [len(outputs[i].outputs[0].token_ids) for i in runs]
        unwanted = list(self._leftover_runs)
        found = self._perform(self._fetched(list(runs.values()), generated, unwanted))
        if runs:
            del self._leftover_runs[: len(unwanted)]
        return found

    # ------------------------------------------------------------ the subclass's

    @property
    @abstractmethod
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""

    @abstractmethod
    def _generate(self, prompts: Any, sampling_params: Any, **kwargs: Any) -> list[Any]: ...

    @abstractmethod
    def _probe(
        self,
        prompts: Sequence[Any],
        probes: Sequence[AttentionProbe | None],
        params: Sequence[Any],
        adapters: Sequence[Any],
        runs: Mapping[int, Run],
        progress: bool,
    ) -> Any: ...

    @abstractmethod
    def _perform(self, steps: Generator[Call, list[Any], T]) -> T: ...

    @abstractmethod
    def _check_open(self) -> None: ...
