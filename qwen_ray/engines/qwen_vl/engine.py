"""The caption engine: continuous batching over a paged cache, for Qwen2.5-VL and Qwen3-VL.

    submit()  any thread: tokens, positions, pinned pixels         Sequence: waiting
                 |
      step()     v        the engine's own thread, over and over
    +------------------+  Scheduler: a slot and pages for those that wait; a prompt step or a decode step?
    | schedule         |
    | encode   prompt: |  VisionTower: pixels -> features, all clips of the step at once     Sequence: reading
    | launch           |  LanguageModel: packed stretches of prompts, or one token of every answer -> logits -> tokens
    | collect          |  tokens of the step BEFORE come to the CPU: stop? full length?      Sequence: answering
    +------------------+
                 |
              Future[Caption]

A step is sent to the GPU before the tokens of the one before are looked at, so the GPU never waits for the CPU: a token
is chosen on the GPU, stays there as the next step's input, and its copy arrives one step later. An answer that has
ended therefore costs one token more, which is thrown away. On the CPU the same code runs step by step.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch

from qwen_ray.config import CaptionConfig
from qwen_ray.engines.batching import breaks_process
from qwen_ray.engines.cache import root as cache_root
from qwen_ray.engines.models import Model
from qwen_ray.engines.protocol import Caption, CaptionRequest
from qwen_ray.engines.qwen_vl import memory
from qwen_ray.engines.qwen_vl.cache import Pages, page_digests
from qwen_ray.engines.qwen_vl.loading import load
from qwen_ray.engines.qwen_vl.runner import Runner
from qwen_ray.engines.qwen_vl.sampling import streams
from qwen_ray.engines.qwen_vl.scheduler import Scheduler, Sequence, Stretch, Work
from qwen_ray.engines.trace import Trace
from qwen_ray.errors import EngineError, RequestError, ResourceError, RowError

log = logging.getLogger(__name__)
HEALTHY_STEPS = 64
"""Steps without trouble after which what memory had halved doubles again."""
MEMORY_FLAG = "memory_short"


@dataclass(frozen=True, slots=True)
class Statistics:
    """What the engine has done since it started.

    Attributes:
        num_prompt_tokens: of all prompts that were admitted; `num_reused_tokens` of them were in the cache.
        num_media_reused: pictures whose features were at hand.
        num_disturbed: times that a sequence gave its pages to another and was read again.
        num_shrunk: times that memory ran out and a step was made smaller.
        num_pages_held: pages of the cache that sequences hold now.
    """

    num_prompt_steps: int
    num_decode_steps: int
    num_prompt_tokens: int
    num_reused_tokens: int
    num_media_reused: int
    num_disturbed: int
    num_shrunk: int
    num_pages_held: int


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds of an engine's start: `weights` to load them; `first_step` to compile and to measure the largest step;
    `recording` of decode steps.
    """

    weights: float
    first_step: float
    recording: float


@dataclass(frozen=True, slots=True)
class _InFlight:
    """Tokens on their way: of each sequence, with the slot that it had."""

    owners: tuple[tuple[Sequence, int], ...]
    tokens: Callable[[], list[int]]


class QwenVLEngine:
    """A `CaptionEngine` over one model in this process.

    Args:
        config: which model, and how it answers where a request does not say.
        model: on this node's disk.
        cuda: whether it runs on this process's GPU.
        plan: what memory is for; None settles it by what there is.

    Attributes:
        on_step: told the clip ids that the step about to be sent off works on.
        plan: what memory is for.
        start_s: what the start took.
        runner: the model on its device.
    """

    def __init__(
        self, config: CaptionConfig, model: Model, *, cuda: bool, plan: memory.MemoryPlan | None = None
    ) -> None:
        # Compiled code is kept where models are: the next engine on a node starts in 15 s instead of 36 (H200, 7B).
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_root(model.weights) / "compiled"))
        began = time.monotonic()
        self._checkpoint = load(config, model, device_map="cuda:0" if cuda else "cpu")
        loaded = time.monotonic()
        self.runner = Runner(self._checkpoint, config, cuda=cuda)
        with torch.inference_mode():
            self.plan = plan or memory.plan(self.runner, config)
            planned = time.monotonic()
            self.runner.start(self.plan)
        self.start_s = Start(loaded - began, planned - loaded, time.monotonic() - planned)
        log.info("started: %s, %s", self.start_s, self.plan)
        self._scheduler = Scheduler(Pages(self.plan.num_pages), config.batch_size, self.plan.budget)
        self.precision = self._checkpoint.precision
        self.on_step: Callable[[Many[str]], None] | None = None
        self._reuse, self._most_rows = config.reuse, config.batch_size
        self._in_flight: _InFlight | None = None
        self._num_prompt_steps = self._num_decode_steps = self._num_prompt_tokens = 0
        self._num_disturbed = self._num_shrunk = self._healthy = 0
        self._trace = Trace("qwen-vl")
        self._inbox: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()
        self._closing = False
        self._broken: EngineError | None = None
        self._thread = threading.Thread(target=self._serve, name="qwen-vl", daemon=True)
        self._thread.start()

    def submit(self, request: CaptionRequest) -> Future[Caption]:
        """See `CaptionEngine.submit`. Cancelling the future frees what the request holds."""
        try:
            sequence = self._sequence(request)
        except RowError as error:
            refused: Future[Caption] = Future()
            refused.set_exception(error)
            return refused
        self._inbox.put(sequence)
        return sequence.answer

    def close(self) -> None:
        """See `CaptionEngine.close`."""
        self._inbox.put(None)
        self._thread.join()
        self.runner.stop()
        log.info("%s", self.statistics())

    def statistics(self) -> Statistics:
        """What has been done so far."""
        return Statistics(
            num_prompt_steps=self._num_prompt_steps,
            num_decode_steps=self._num_decode_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_reused_tokens=self._scheduler.num_reused,
            num_media_reused=self.runner.num_media_reused,
            num_disturbed=self._num_disturbed,
            num_shrunk=self._num_shrunk,
            num_pages_held=self.plan.num_pages - self._scheduler.pages.num_free,
        )

    def _sequence(self, request: CaptionRequest) -> Sequence:
        checkpoint = self._checkpoint
        prompt = checkpoint.prompter.read(request)
        sampling = request.sampling or checkpoint.sampling
        checkpoint.check_length(len(prompt.token_ids_L), sampling.max_new_tokens, self.plan.num_tokens)
        names, digests = [b""] * len(prompt.grids), list[bytes]()
        if self._reuse:
            frames = [np.ascontiguousarray(medium.frames_THWC) for medium in request.media]
            names = [blake2b(str(one.shape).encode() + one.data, digest_size=16).digest() for one in frames]
            counts = [t * h * w // checkpoint.patching.merge**2 for t, h, w in prompt.grids]
            media = list(zip(counts, names, strict=True))
            digests = page_digests(prompt.token_ids_L, prompt.positions_3L, prompt.media_L, media)
        pixels = [self.runner.pin(medium.frames_THWC) for medium in request.media]
        stream = int(streams(sampling.seed, [request.clip_id])[0])
        return Sequence(request, prompt, sampling, checkpoint.stops(sampling), pixels, digests, names, stream)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _serve(self) -> None:
        while self._listen():
            try:
                self.step()
            except Exception as error:  # noqa: BLE001  the thread must answer everything, whatever happens
                self._break(EngineError(f"the caption engine failed: {type(error).__name__}: {error}"))

    def _listen(self) -> bool:
        """Take what has come in, waiting where there is nothing else to do; False at the end."""
        while True:
            idle = self._scheduler.is_idle and self._in_flight is None
            if self._closing and idle:
                return False
            try:
                sequence = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if sequence is None:
                self._closing = True
            elif self._broken is not None:
                _fail(sequence, self._broken)
            else:
                self._num_prompt_tokens += sequence.num_prompt
                self._scheduler.waiting.append(sequence)

    def step(self) -> None:
        """One turn of the machine."""
        began = time.time()
        self._scheduler.drop_cancelled()
        self._make_room()
        work = self._scheduler.next()
        launched = self._launch(work)
        answered = self._collect()
        self._in_flight = launched
        kind = "prompt" if work.stretches else "decode"
        self._trace.work(kind, began, len(work.stretches or work.answering), answered)

    def _make_room(self) -> None:
        """Where answers cannot go on for want of pages, have the youngest sequences start again later."""
        while self._scheduler.must_make_room:
            if self._in_flight is not None:
                self._collect()
                continue
            self._scheduler.put_back(self._scheduler.youngest())
            self._num_disturbed += 1

    def _launch(self, work: Work) -> _InFlight | None:
        """Send a step off; where it fails, see to it that what failed is found and the rest goes on."""
        sequences = [*(stretch.sequence for stretch in work.stretches), *work.answering]
        if not sequences:
            return None
        if self.on_step is not None:
            self.on_step([sequence.request.clip_id for sequence in sequences])
        try:
            tokens = self.runner.read(work.stretches) if work.stretches else self.runner.decode(work.answering)
        except Exception as error:  # noqa: BLE001  whatever one request causes must not fail its neighbours
            error.__context__ = error.__cause__ = None
            self._recover(work, error.with_traceback(None))
            return None
        self._scheduler.advance(work)
        self._num_prompt_steps += bool(work.stretches)
        self._num_decode_steps += bool(work.answering)
        self._grow_back()
        owners = [stretch.sequence for stretch in work.stretches if stretch.ends] + list(work.answering)
        return _InFlight(tuple((one, one.slot) for one in owners), tokens)

    def _recover(self, work: Work, error: Exception) -> None:
        """After a step that failed: smaller steps where memory ran out, and else each sequence on its own."""
        if breaks_process(error):
            raise error
        sequences = [*(stretch.sequence for stretch in work.stretches), *work.answering]
        short = isinstance(error, torch.OutOfMemoryError)
        if short:
            self.runner.release_memory()
        if short and self._shrink(work):
            for sequence in sequences:
                sequence.flags.add(MEMORY_FLAG)
            return
        log.warning("a step of %d requests failed (%s: %s)", len(sequences), type(error).__name__, error)
        if len(sequences) > 1:
            self._collect()
            for sequence in reversed(sequences):
                sequence.alone = True
                if sequence.slot >= 0:
                    self._scheduler.put_back(sequence)
            return
        (sequence,) = sequences
        self._scheduler.free(sequence)
        _fail(sequence, self._as_row_error(error, sequence))

    def _shrink(self, work: Work) -> bool:
        """Halve what such a step may take; False where it is as small as it gets."""
        self._healthy = 0
        if len(work.answering) == 1 or self._is_least(work.stretches):
            return False
        self._num_shrunk += 1
        if work.answering:
            self._scheduler.most_rows = len(work.answering) // 2
            log.warning("out of memory: %d answers now go on at a time", self._scheduler.most_rows)
            return True
        budget = self._scheduler.budget
        self._scheduler.budget = max(min(memory.LEAST_BUDGET, budget), budget // 2)
        self.runner.max_patches = max(1, self.runner.max_patches // 2)
        log.warning("out of memory: prompts are now read %d tokens at a time", self._scheduler.budget)
        return True

    def _is_least(self, stretches: Many[Stretch]) -> bool:
        """Whether a prompt step cannot be made smaller: one stretch of the least budget, its pictures one by one."""
        if len(stretches) != 1 or self._scheduler.budget > memory.LEAST_BUDGET:
            return False
        return self.runner.max_patches <= max(1, self.runner.patches_of(stretches[0].sequence))

    def _grow_back(self) -> None:
        """After enough steps without trouble, allow twice as much again, up to the plan."""
        scheduler, runner = self._scheduler, self.runner
        if scheduler.budget >= self.plan.budget and scheduler.most_rows >= self._most_rows:
            return
        self._healthy += 1
        if self._healthy >= HEALTHY_STEPS:
            self._healthy = 0
            scheduler.budget = min(self.plan.budget, 2 * scheduler.budget)
            scheduler.most_rows = min(self._most_rows, 2 * scheduler.most_rows)
            runner.max_patches = min(self.plan.max_patches, 2 * runner.max_patches)

    def _collect(self) -> int:
        """Hear what the step in flight gave, and answer those whose answers are whole; how many."""
        arrived, self._in_flight = self._in_flight, None
        if arrived is None:
            return 0
        answered = 0
        for (sequence, slot), token in zip(arrived.owners, arrived.tokens(), strict=True):
            if sequence.slot != slot:
                continue  # answered or cancelled before
            sequence.output.append(token)
            stopped = token in sequence.stops
            if stopped or len(sequence.output) == sequence.sampling.max_new_tokens:
                self._scheduler.free(sequence)
                flags = tuple(sorted(sequence.flags))
                caption = self._checkpoint.caption(sequence.output, sequence.num_prompt, stopped=stopped, flags=flags)
                answered += 1
                if sequence.answer.set_running_or_notify_cancel():
                    sequence.answer.set_result(caption)
        return answered

    def _as_row_error(self, error: Exception, sequence: Sequence) -> RowError:
        what = sequence.prompt.describe(sequence.request)
        if isinstance(error, torch.OutOfMemoryError):
            return ResourceError("out_of_memory", f"{what} does not fit into GPU memory even alone")
        return RequestError("engine_crashed", f"the model failed on {what}: {type(error).__name__}: {error}")

    def _break(self, error: EngineError) -> None:
        """Answer everything, now and from now on, with the error that broke the process."""
        self._broken, self._in_flight = error, None
        scheduler = self._scheduler
        for sequence in [*scheduler.waiting, *scheduler.reading, *scheduler.answering]:
            _fail(sequence, error)
        scheduler.waiting.clear()
        scheduler.reading.clear()
        scheduler.answering.clear()


def _fail(sequence: Sequence, error: Exception) -> None:
    if sequence.answer.set_running_or_notify_cancel():
        sequence.answer.set_exception(error)
