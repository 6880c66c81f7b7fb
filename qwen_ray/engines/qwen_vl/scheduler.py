"""Who works next: which requests hold a slot and pages, and whether prompts are read or answers go on.

A step is either a prompt step, up to `budget` tokens of prompts, or a decode step, one token for every sequence that
answers. Prompt steps are worth waiting for: read together, prompts run at the speed of matrix products, while a few
alone would hold all answers up. So a prompt step comes when there is a whole budget's worth to read, when nobody
answers, or when the last one is `PATIENCE` decode steps ago.

Pages are taken as tokens need them. When there are none left, the youngest sequence gives its own back and is read
again later, its answer so far included; the oldest is never disturbed, so all of them end.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from qwen_ray.engines.protocol import Caption, CaptionRequest, Sampling
from qwen_ray.engines.qwen_vl.cache import PAGE, Pages
from qwen_ray.engines.qwen_vl.prompter import Prompt

PATIENCE = 8


@dataclass(eq=False, slots=True)
class Sequence:
    """A request on its way through the engine.

    Attributes:
        pixels: of its media, pinned where there is a GPU.
        digests: of each full page of its prompt; empty where nothing is reused.
        media_digests: of each medium.
        output: tokens of the answer that the CPU knows.
        num_asked: tokens of the answer that the GPU has been asked for, `output` included.
        num_cached: tokens whose keys and values are in the cache, or will be when the step in flight ends.
        features: of its media, from when they are needed to when the prompt is read.
        alone: work on it without company, to see whether it is the one that fails.
    """

    request: CaptionRequest
    prompt: Prompt
    sampling: Sampling
    stops: frozenset[int]
    pixels: list[torch.Tensor]
    digests: list[bytes]
    media_digests: list[bytes]
    stream: int
    answer: Future[Caption] = field(default_factory=Future)
    output: list[int] = field(default_factory=list)
    num_asked: int = 0
    num_cached: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    features: torch.Tensor | None = None
    alone: bool = False
    flags: set[str] = field(default_factory=set)

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt.token_ids_L)

    @property
    def num_to_read(self) -> int:
        """Tokens that must be in the cache before the next one can be asked for: the prompt, and after a
        disturbance what had been answered.
        """
        return self.num_prompt + len(self.output)

    @property
    def is_asked_out(self) -> bool:
        """Whether the GPU has been asked for all tokens that the answer may have."""
        return self.num_asked >= self.sampling.max_new_tokens


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens [start, stop) of a sequence; `ends` where they are the last that must be read."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def ends(self) -> bool:
        """Whether the next token of the sequence can be asked for behind this stretch."""
        return self.stop == self.sequence.num_to_read


@dataclass(frozen=True, slots=True)
class Work:
    """A step: stretches of prompts, or else sequences that answer."""

    stretches: tuple[Stretch, ...] = ()
    answering: tuple[Sequence, ...] = ()


class Scheduler:
    """Queues, slots and pages.

    Args:
        pages: of the cache.
        num_slots: most sequences in the cache at once.
        budget: most tokens of a prompt step; may be changed between steps, as may `most_rows` of a decode step.
    """

    def __init__(self, pages: Pages, num_slots: int, budget: int) -> None:
        self.pages, self.budget, self.most_rows = pages, budget, num_slots
        self.waiting: deque[Sequence] = deque()
        self.reading: list[Sequence] = []
        self.answering: list[Sequence] = []
        self.num_reused = 0  # tokens of prompts that were in the cache
        self._slots = deque(range(num_slots))
        self._patience = PATIENCE

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.waiting or self.reading or self.answering)

    def next(self) -> Work:
        """The next step; empty where all that is left is to hear from the one in flight."""
        self._admit()
        if self._is_prompt_due():
            self._patience = PATIENCE
            return Work(stretches=tuple(self._stretches()))
        self._patience -= 1
        return Work(answering=tuple(self._rows()))

    def drop_cancelled(self) -> None:
        """Forget waiting requests that nobody wants to hear about any more, and free what others of them hold."""
        self.waiting = deque(sequence for sequence in self.waiting if not sequence.answer.cancelled())
        for sequence in [one for one in (*self.reading, *self.answering) if one.answer.cancelled()]:
            self.free(sequence)

    def advance(self, work: Work) -> None:
        """Note what a step that was sent off does."""
        for stretch in work.stretches:
            sequence = stretch.sequence
            sequence.num_cached = stretch.stop
            self._publish(sequence)
            if stretch.ends:
                sequence.num_asked += 1
                sequence.features = None
                self.reading.remove(sequence)
                self.answering.append(sequence)
        for sequence in work.answering:
            sequence.num_asked += 1
            sequence.num_cached += 1

    def free(self, sequence: Sequence) -> None:
        """Take a sequence out and give back what it holds."""
        for queue in (self.reading, self.answering):
            if sequence in queue:
                queue.remove(sequence)
        self.pages.release(sequence.pages)
        sequence.pages, sequence.features, sequence.num_cached = [], None, 0
        if sequence.slot >= 0:
            self._slots.append(sequence.slot)
            sequence.slot = -1

    def put_back(self, sequence: Sequence) -> None:
        """Have a sequence read again from its beginning, before all that wait. Its answer so far must be known."""
        self.free(sequence)
        sequence.num_asked = len(sequence.output)
        self.waiting.appendleft(sequence)

    def _admit(self) -> None:
        """Give slots and pages to waiting requests, in order, while there are some."""
        kept: deque[Sequence] = deque()
        expected = {digest for one in self.reading for digest in one.digests}
        while self.waiting and self._slots:
            sequence = self.waiting.popleft()
            if self._is_expected(sequence, expected):
                kept.append(sequence)  # another is reading the same beginning: wait for its pages
                continue
            if not self._hold(sequence):
                kept.append(sequence)
                break
            sequence.slot = self._slots.popleft()
            self.reading.append(sequence)
            expected.update(sequence.digests)
        self.waiting.extendleft(reversed(kept))

    def _is_expected(self, sequence: Sequence, expected: set[bytes]) -> bool:
        missing = sequence.digests[len(self.pages.find(sequence.digests)) :]
        return bool(missing) and missing[0] in expected

    def _hold(self, sequence: Sequence) -> bool:
        """Pages for what must be read and one token more, shared ones first; False where there are not enough, one for
        each sequence that answers left over.
        """
        reused = self.pages.find(sequence.digests)[: (sequence.num_prompt - 1) // PAGE]
        self.pages.hold(reused)
        missing = sequence.num_to_read // PAGE + 1 - len(reused)
        if missing + len(self.answering) > self.pages.num_free:
            self.pages.release(reused)
            return False
        sequence.pages = [*reused, *self.pages.take(missing)]
        sequence.num_cached = len(reused) * PAGE
        self.num_reused += sequence.num_cached
        return True

    def _is_prompt_due(self) -> bool:
        if not self.reading:
            return False
        to_read = sum(sequence.num_to_read - sequence.num_cached for sequence in self.reading)
        return to_read >= self.budget or self._patience <= 0 or all(one.is_asked_out for one in self.answering)

    def _stretches(self) -> list[Stretch]:
        """Whole prompts as far as the budget goes; only one that is larger than the budget is read in parts, and alone,
        since whatever begins within a prompt has to fetch its past from the cache.
        """
        stretches: list[Stretch] = []
        room = self.budget
        for sequence in self.reading:
            start, stop = sequence.num_cached, sequence.num_to_read
            if stretches and (sequence.alone or stop - start > room):
                break
            stretches.append(Stretch(sequence, start, min(stop, start + room)))
            room -= stop - start
            if sequence.alone:
                break
        return stretches

    def _rows(self) -> list[Sequence]:
        """Sequences that go on, the oldest first, each with room for one token more."""
        rows: list[Sequence] = []
        going = [one for one in self.answering if not one.is_asked_out][: self.most_rows]
        for sequence in next(([one] for one in going if one.alone), going):
            if len(sequence.pages) * PAGE == sequence.num_cached:
                if not self.pages.num_free:
                    break
                sequence.pages += self.pages.take(1)
            rows.append(sequence)
        return rows

    @property
    def must_make_room(self) -> bool:
        """Whether a sequence that answers has no room for its next token."""
        starved = any(len(one.pages) * PAGE == one.num_cached and not one.is_asked_out for one in self.answering)
        return starved and not self.pages.num_free

    def youngest(self) -> Sequence:
        """The one to disturb when room is needed: the last to have come, reading or answering."""
        return (self.reading or self.answering)[-1]

    def _publish(self, sequence: Sequence) -> None:
        for page, digest in zip(sequence.pages[: sequence.num_cached // PAGE], sequence.digests, strict=False):
            self.pages.publish(page, digest)
