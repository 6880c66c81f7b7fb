"""The model on its device: what a step of the scheduler becomes in tensors. Called in inference mode.

Tokens stay on the device from the step that chooses them to the step that reads them; only copies travel, while the
next step runs. Decode steps of a few sizes are recorded as CUDA graphs, filled up with rows that write to a scratch
page.

Axes: T tokens of a step, R tokens whose next one is wanted, B rows of a decode step, M merged cells, E width,
V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from qwen_ray.config import CaptionConfig
from qwen_ray.engines.protocol import Sampling
from qwen_ray.engines.qwen_vl.attention import Rows, best, segments
from qwen_ray.engines.qwen_vl.cache import PAGE, KeyValues, Where, bytes_a_page
from qwen_ray.engines.qwen_vl.compiled import compiled, plain
from qwen_ray.engines.qwen_vl.graphs import DecodeGraphs
from qwen_ray.engines.qwen_vl.language import DecodeStep, LanguageModel, PromptStep, Seen
from qwen_ray.engines.qwen_vl.loading import Checkpoint, pad_widths
from qwen_ray.engines.qwen_vl.memory import MemoryPlan
from qwen_ray.engines.qwen_vl.preprocess import patchify
from qwen_ray.engines.qwen_vl.sampling import choose, penalised
from qwen_ray.engines.qwen_vl.scheduler import Sequence, Stretch
from qwen_ray.engines.qwen_vl.vision import Grid, VisionTower
from qwen_ray.engines.trace import Laps

Tokens = Callable[[], list[int]]


class Runner:
    """Weights, cache and what belongs to slots.

    Attributes:
        network: transformers' model.
        patching: how pictures are cut.
        laps: how long the device works on what, where somebody wants to know.
        max_patches: most patches that are encoded at once, where a single picture has no more.
        num_media_reused: pictures whose features were at hand.
    """

    def __init__(self, checkpoint: Checkpoint, config: CaptionConfig, *, cuda: bool) -> None:
        self.network = network = checkpoint.network
        self.device, self._dtype = network.device, network.dtype
        self.patching, self._num_slots = checkpoint.patching, config.batch_size
        self._text, self._num_ranks = network.config.text_config, checkpoint.group.size
        self.context = checkpoint.context
        self._attention = best(self.device, self._dtype)
        self._compiled = compiled if cuda and config.compile else plain
        if cuda:
            pad_widths(network.model.visual)
        self._tower = VisionTower(network.model.visual, self._attention, self._compiled)
        self._language = LanguageModel(network, self._compiled, checkpoint.group)
        self._graphs: DecodeGraphs | None = None
        self._is_recorded = cuda and config.compile and not hasattr(self._text, "num_experts") and self._num_ranks == 1
        self._copies = torch.cuda.Stream(self.device) if cuda else None
        self._features: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self.laps = Laps()
        self.max_patches = self.num_media_reused = 0

    @property
    def bytes_a_page(self) -> int:
        """Memory of a page of the cache."""
        return bytes_a_page(self._text.num_hidden_layers, self._groups, self._head_dim, self._dtype)

    def start(self, plan: MemoryPlan) -> None:
        """Take the memory that was planned, and record decode steps."""
        self.max_patches, self._features_bytes = plan.max_patches, plan.features
        self._cache = self._key_values(plan.num_pages)
        width = -(-min(self.context, plan.num_tokens) // PAGE)
        self._table = torch.full((self._num_slots + 1, width), plan.num_pages, dtype=torch.int32, device=self.device)
        self._tabled = [0] * self._num_slots  # pages of each slot that the table knows
        self._tokens = torch.zeros(self._num_slots + 1, dtype=torch.int64, device=self.device)
        self._seen: torch.Tensor | None = None
        if self._is_recorded:
            scratch = (self._num_slots, 1, 0, plan.num_pages, 0)
            self._graphs = DecodeGraphs(self._decode_logits, scratch, self._num_slots, self.device)

    def stop(self) -> None:
        """Let go of everything."""
        self._graphs = None
        del self._cache, self._tower, self._language
        self._features.clear()
        self.release_memory()

    def release_memory(self) -> None:
        """Give back what is not in use."""
        self._features.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def pin(self, frames_THWC: npt.NDArray[np.uint8]) -> torch.Tensor:
        """Pixels where the GPU can fetch them by itself; on the CPU, as they are."""
        pixels = torch.from_numpy(np.ascontiguousarray(frames_THWC))
        return pixels.pin_memory() if self.device.type == "cuda" else pixels

    def patches_of(self, sequence: Sequence) -> int:
        """Patches of a sequence's largest picture."""
        return max((t * h * w for t, h, w in sequence.prompt.grids), default=0)

    def measure_step(self, num_tokens: int, num_patches: int) -> int:
        """Bytes that a prompt step of this size, or choosing a token for every slot, takes beside weights and cache.
        Compiles what is compiled.
        """
        torch.cuda.empty_cache()
        cache = self._key_values(-(-num_tokens // PAGE))
        held: int = torch.cuda.memory_allocated(self.device)
        for _ in range(2):  # the first time compiles, which takes memory of its own
            torch.cuda.reset_peak_memory_stats(self.device)
            self._largest_step(cache, num_tokens, num_patches)
        peak: int = torch.cuda.max_memory_allocated(self.device)
        del cache
        torch.cuda.empty_cache()
        return peak - held

    def _largest_step(self, cache: KeyValues, num_tokens: int, num_patches: int) -> None:
        unit, merge = self.patching, self.patching.merge
        grid = (num_patches // (16 * merge) ** 2, 16 * merge, 16 * merge)
        values = 3 * unit.temporal * unit.patch**2
        patches = torch.zeros(grid[0] * grid[1] * grid[2], values, dtype=self._dtype, device=self.device)
        levels = torch.cat(self._tower.encode(patches, [grid]), dim=1)
        del patches
        places = torch.arange(num_tokens, device=self.device)
        count = min(levels.shape[1], num_tokens)
        seen = Seen(places[:count], levels[:, :count])
        where, end = Where(places // PAGE, places % PAGE), torch.tensor([num_tokens - 1], device=self.device)
        whole = segments([num_tokens], None, self.device)
        step = PromptStep(cache, self._attention, where, whole, segments([1], [num_tokens], self.device), None, end)
        self._language.logits(places % 7, places.expand(3, -1), step, seen)
        del levels, seen
        logits = torch.zeros(self._num_slots, self._text.vocab_size, dtype=self._dtype, device=self.device)
        penalty, streams = torch.ones_like(logits[:, :1]), torch.arange(self._num_slots, device=self.device)
        choose(penalised(logits, logits > 0, penalty), streams, Sampling(1, temperature=1.0, top_p=0.9, top_k=20))

    def read(self, stretches: Many[Stretch]) -> Tokens:
        """Read stretches of prompts; the tokens that follow those that end."""
        with self.laps.lap("vision"):
            self._see(stretches)
        ids = [_token_ids(stretch)[stretch.start : stretch.stop] for stretch in stretches]
        positions = [_positions(stretch)[:, stretch.start : stretch.stop] for stretch in stretches]
        ids_T, positions_3T = self._upload(np.concatenate(ids)), self._upload(np.concatenate(positions, axis=1))
        ending = [stretch.sequence for stretch in stretches if stretch.ends]
        with self.laps.lap("prompts"):
            step, seen = self._prompt_step(stretches), self._seen_in(stretches)
            logits_RV = self._language.logits(ids_T, positions_3T, step, seen)
        for sequence in ending:
            self._tabled[sequence.slot] = 0
            self._note_seen(sequence)
        return self._choose(logits_RV, ending, self._upload(np.array([one.slot for one in ending], np.int64)))

    def decode(self, sequences: Many[Sequence]) -> Tokens:
        """The next token of each sequence."""
        self._update_table(sequences)
        rows = [
            (one.slot, one.num_cached + 1, one.prompt.next_position + one.num_asked - 1, *_place(one, one.num_cached))
            for one in sequences
        ]
        rows_5B = self._upload(np.array(rows, np.int64).T)
        longest = max(one.num_cached + 1 for one in sequences)
        with self.laps.lap("decode"):
            if self._graphs is not None:
                logits_BV = self._graphs.replay(rows_5B)
            else:
                logits_BV = self._decode_logits(rows_5B, longest)
        return self._choose(logits_BV, sequences, rows_5B[0])

    def _decode_logits(self, rows_5B: torch.Tensor, longest: int = 0) -> torch.Tensor:
        """logits_BV of rows of slot, length, position, page and place in the page."""
        slots_B, lengths_B, positions_B, pages_B, places_B = rows_5B
        rows = Rows(self._table, slots_B.int(), lengths_B.int(), longest)
        step = DecodeStep(self._cache, self._attention, Where(pages_B, places_B), rows)
        return self._language.logits(self._tokens[slots_B], positions_B.expand(3, -1), step, None)

    def _prompt_step(self, stretches: Many[Stretch]) -> PromptStep:
        places = [_places(stretch.sequence, stretch.start, stretch.stop) for stretch in stretches]
        queries, keys = [s.stop - s.start for s in stretches], [s.stop for s in stretches]
        fresh = all(stretch.start == 0 for stretch in stretches)
        context = None if fresh else self._where([_places(s.sequence, 0, s.stop) for s in stretches])
        asked = keys if all(s.ends for s in stretches) else []  # one that does not end is read alone
        return PromptStep(
            cache=self._cache,
            attention=self._attention,
            where=self._where(places),
            all_queries=segments(queries, None if fresh else keys, self.device),
            last_queries=segments([1] * len(asked), asked, self.device),
            context=context,
            last_R=self._upload(np.cumsum(queries)[: len(asked)] - 1),
        )

    def _see(self, stretches: Many[Stretch]) -> None:
        """Encode pictures of which tokens are about to be read, as many at once as there is room for."""
        batch: list[tuple[Sequence, int]] = []
        done: dict[Sequence, list[torch.Tensor | None]] = {}
        size = 0
        for stretch in stretches:
            sequence = stretch.sequence
            if sequence.features is not None or not sequence.prompt.media_L[stretch.start :].any():
                continue
            done[sequence] = [self._kept(digest) for digest in sequence.media_digests]
            for number, (grid, known) in enumerate(zip(sequence.prompt.grids, done[sequence], strict=True)):
                if known is not None:
                    continue
                patches = grid[0] * grid[1] * grid[2]
                if batch and size + patches > self.max_patches:
                    self._encode(batch, done)
                    batch, size = [], 0
                batch.append((sequence, number))
                size += patches
        if batch:
            self._encode(batch, done)
        for sequence, features in done.items():
            sequence.features = torch.cat([part for part in features if part is not None], dim=1)

    def _encode(self, batch: Many[tuple[Sequence, int]], done: dict[Sequence, list[torch.Tensor | None]]) -> None:
        grids: list[Grid] = [sequence.prompt.grids[number] for sequence, number in batch]
        patches = [self._patches(sequence.pixels[number]) for sequence, number in batch]
        for (sequence, number), levels in zip(batch, self._tower.encode(torch.cat(patches), grids), strict=True):
            done[sequence][number] = levels
            self._keep(sequence.media_digests[number], levels)

    def _patches(self, pixels: torch.Tensor) -> torch.Tensor:
        """In the model's precision, on its device; the copy runs beside what the device is doing."""
        if self._copies is None:
            return patchify(pixels, self.patching).to(self._dtype)
        with torch.cuda.stream(self._copies):
            there = pixels.to(self.device, non_blocking=True)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._copies)
        there.record_stream(current)
        return patchify(there, self.patching).to(self._dtype)

    def _kept(self, digest: bytes) -> torch.Tensor | None:
        features = self._features.get(digest) if digest else None
        if features is not None:
            self._features.move_to_end(digest)
            self.num_media_reused += 1
        return features

    def _keep(self, digest: bytes, features: torch.Tensor) -> None:
        if not digest:
            return
        self._features[digest] = features
        while sum(one.nbytes for one in self._features.values()) > self._features_bytes:
            self._features.popitem(last=False)

    def _seen_in(self, stretches: Many[Stretch]) -> Seen | None:
        """The features of what is shown in these stretches."""
        places, levels, base = [], [], 0
        for stretch in stretches:
            media_L = np.zeros(stretch.stop, np.bool_)
            known = stretch.sequence.prompt.media_L[: stretch.stop]
            media_L[: len(known)] = known
            first, last = int(media_L[: stretch.start].sum()), int(media_L.sum())
            if last > first:
                assert stretch.sequence.features is not None, "seen before it is read"
                places.append(base + np.flatnonzero(media_L[stretch.start :]))
                levels.append(stretch.sequence.features[:, first:last])
            base += stretch.stop - stretch.start
        return Seen(self._upload(np.concatenate(places)), torch.cat(levels, dim=1)) if places else None

    def _choose(self, logits_RV: torch.Tensor, sequences: Many[Sequence], slots_R: torch.Tensor) -> Tokens:
        """The next token of each sequence, kept as its next input, and its copy for the CPU."""
        if not sequences:
            return list
        with self.laps.lap("sampling"):
            return self._copied(self._chosen(logits_RV, sequences, slots_R[: len(sequences)]))

    def _chosen(self, logits_RV: torch.Tensor, sequences: Many[Sequence], slots_R: torch.Tensor) -> torch.Tensor:
        logits_RV = self._penalised(logits_RV, sequences, slots_R)
        tokens_R = logits_RV.argmax(-1)
        drawn: dict[Any, list[int]] = {}
        for k, sequence in enumerate(sequences):
            if sequence.sampling.temperature:
                how = sequence.sampling
                drawn.setdefault((how.temperature, how.top_p, how.top_k), []).append(k)
        for rows in drawn.values():
            at = self._upload(np.array(rows, np.int64))
            places = [sequences[k].stream + sequences[k].num_asked for k in rows]
            streams = self._upload(np.array([(p + 2**63) % 2**64 - 2**63 for p in places], np.int64))
            tokens_R[at] = choose(logits_RV[at], streams, sequences[rows[0]].sampling)
        self._tokens[slots_R] = tokens_R
        if self._seen is not None:
            self._seen[slots_R, tokens_R] = True
        return tokens_R

    def _penalised(self, logits_RV: torch.Tensor, sequences: Many[Sequence], slots_R: torch.Tensor) -> torch.Tensor:
        penalties = [sequence.sampling.repetition_penalty for sequence in sequences]
        if all(penalty == 1 for penalty in penalties):
            return logits_RV
        assert self._seen is not None, "noted when the prompt was read"
        penalty_R1 = self._upload(np.array(penalties, np.float32))[:, None]
        return penalised(logits_RV, self._seen[slots_R], penalty_R1)

    def _note_seen(self, sequence: Sequence) -> None:
        """Remember which tokens a sequence holds, where that makes them less likely."""
        if sequence.sampling.repetition_penalty == 1:
            return
        if self._seen is None:
            size = (self._num_slots + 1, self._text.vocab_size)
            self._seen = torch.zeros(size, dtype=torch.bool, device=self.device)
        ids = np.unique(np.concatenate([sequence.prompt.token_ids_L, np.array(sequence.output, np.int64)]))
        self._seen[sequence.slot] = False
        self._seen[sequence.slot, self._upload(ids)] = True

    def _copied(self, tokens_R: torch.Tensor) -> Tokens:
        if self.device.type == "cpu":
            return lambda: [int(token) for token in tokens_R]
        host = torch.empty(tokens_R.shape, dtype=tokens_R.dtype, pin_memory=True)
        host.copy_(tokens_R, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

        def wait() -> list[int]:
            arrived.synchronize()
            values: list[int] = host.tolist()
            return values

        return wait

    def _update_table(self, sequences: Many[Sequence]) -> None:
        """Tell the table of pages that sequences have taken since it was last told."""
        new = [
            (one.slot, k, one.pages[k])
            for one in sequences
            if len(one.pages) > self._tabled[one.slot]
            for k in range(self._tabled[one.slot], len(one.pages))
        ]
        if not new:
            return
        slots, columns, pages = self._upload(np.array(new, np.int64).T)
        self._table[slots, columns] = pages.int()
        for one in sequences:
            self._tabled[one.slot] = len(one.pages)

    def _upload(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """To the device, without waiting for it."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _where(self, places: Many[npt.NDArray[np.int64]]) -> Where:
        pages_T, rows_T = self._upload(np.concatenate(places, axis=1))
        return Where(pages_T, rows_T)

    def _key_values(self, num_pages: int) -> KeyValues:
        sizes = (self._text.num_hidden_layers, num_pages, self._groups, self._head_dim)
        return KeyValues(*sizes, self._dtype, self.device)

    @property
    def _groups(self) -> int:
        return int(self._text.num_key_value_heads) // self._num_ranks

    @property
    def _head_dim(self) -> int:
        stated = getattr(self._text, "head_dim", None)
        return int(stated or self._text.hidden_size // self._text.num_attention_heads)


def _token_ids(stretch: Stretch) -> npt.NDArray[np.int64]:
    sequence = stretch.sequence
    return np.concatenate([sequence.prompt.token_ids_L, np.array(sequence.output, np.int64)])


def _positions(stretch: Stretch) -> npt.NDArray[np.int64]:
    sequence = stretch.sequence
    after = sequence.prompt.next_position + np.arange(len(sequence.output))
    return np.concatenate([sequence.prompt.positions_3L, np.tile(after, (3, 1))], axis=1)


def _places(sequence: Sequence, start: int, stop: int) -> npt.NDArray[np.int64]:
    """Page and row of each of its tokens [start, stop)."""
    tokens = np.arange(start, stop)
    return np.stack([np.array(sequence.pages, np.int64)[tokens // PAGE], tokens % PAGE])


def _place(sequence: Sequence, token: int) -> tuple[int, int]:
    return sequence.pages[token // PAGE], token % PAGE
