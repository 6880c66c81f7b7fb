"""Any Whisper checkpoint in transformers form, batched over videos, on CPU and on every CUDA that torch runs on.

One thread owns the model and answers whatever waits in one call. The threads that ask do the rest, so the GPU does not
wait for it: the spectrogram before, times and words after. Decoding follows OpenAI's rules: transformers' own
`WhisperForConditionalGeneration.generate` gives neither the probabilities of silence nor those of the text, so its
logits processors run under the plain `generate` here.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.generation import WhisperTimeStampLogitsProcessor
from transformers.models.whisper.tokenization_whisper import LANGUAGES
from transformers.utils import logging as transformers_logging

from qwen_ray.config import SpeechConfig
from qwen_ray.engines.batching import Batcher
from qwen_ray.engines.models import Model
from qwen_ray.engines.protocol import Segment, Word
from qwen_ray.engines.speech import MAX_NO_SPEECH_PROB, MIN_AVG_LOGPROB, doubts
from qwen_ray.engines.whisper.alignment import Heads, align
from qwen_ray.engines.whisper.passages import FRAME_S, Passage, passages, token_starts_s, words
from qwen_ray.errors import ConfigError, RequestError

SAMPLE_RATE_HZ = 16_000
FRAME = round(FRAME_S * SAMPLE_RATE_HZ)
LEAST_S = 0.2
"""A shorter rest behind the last passage is what the detector leaves around speech."""
PATIENCE, LEAST_ADVANCE_S = 3, 2.0
"""Short first passages whose sequel was left unfinished are heard on from their end, however short, three times. After
that each hearing counts for two seconds: a confused model closes its first passage at once, time after time, and would
be asked about the same sound more than a thousand times.
"""
MULTILINGUAL_VOCABULARY = 51865
"""Least size of the vocabulary of a Whisper that knows more than English."""
MAX_INITIAL_TIME = 50
"""Frames within which the first passage must begin; Whisper's own value."""


@dataclass(frozen=True, slots=True)
class _Sound:
    """`language` is a code, or empty where it is to be found out."""

    features_MT: torch.Tensor
    num_samples: int
    language: str

    @property
    def duration_s(self) -> float:
        return self.num_samples / SAMPLE_RATE_HZ


@dataclass(frozen=True, slots=True)
class _Heard:
    """What the model wrote; `done_s` is how far it came. Likeness is None without `alignment_heads`."""

    passages: list[Passage]
    done_s: float
    language: str
    avg_logprob: float
    no_speech_prob: float
    likeness_LT: torch.Tensor | None = None
    probabilities: torch.Tensor | None = None


class WhisperEngine:
    """A `SpeechEngine` over one model in this process."""

    def __init__(self, config: SpeechConfig, model: Model, *, cuda: bool) -> None:
        dtype = torch.float16 if cuda else torch.float32
        self.precision = str(dtype).removeprefix("torch.")
        if not cuda:
            torch.set_num_threads(max(1, round(config.num_cpus)))
        transformers_logging.disable_progress_bar()
        self._extract: Any = WhisperFeatureExtractor.from_pretrained(model.location)
        self._vocabulary = _Vocabulary(AutoTokenizer.from_pretrained(model.location))
        network = WhisperForConditionalGeneration.from_pretrained(
            model.location, dtype=dtype, attn_implementation="sdpa"
        )
        self._model: Any = network.eval().to("cuda" if cuda else "cpu")
        self._language = self._spoken(config.language)
        stated = self._model.generation_config
        self._heads: Heads = [(layer, head) for layer, head in getattr(stated, "alignment_heads", None) or ()]
        # ours alone: defaults of the checkpoint must not seep in
        self._model.generation_config = self._generation = _generation(config, stated, self._vocabulary, self._room)
        self._batches = Batcher(self._hear, _describe, batch_size=config.batch_size, name="whisper")

    def transcribe(self, pcm: npt.NDArray[np.int16]) -> list[Segment]:
        """See `SpeechEngine.transcribe`. Passages that the model leaves unfinished are heard again from their start."""
        if pcm.ndim != 1:
            raise RequestError("engine_crashed", f"a chunk with {pcm.ndim} axes: samples of one channel have one")
        if len(pcm) > self._extract.n_samples:
            what = f"a chunk of {len(pcm) / SAMPLE_RATE_HZ:.1f} s"
            raise RequestError("engine_crashed", f"{what}: Whisper hears at most {self._extract.chunk_length} s")
        found: list[Segment] = []
        start, language, patience = 0, self._language, PATIENCE
        while len(pcm) - start >= LEAST_S * SAMPLE_RATE_HZ:
            heard = self._batches.submit(self._sound(pcm[start:], language)).result()
            found += [_later(segment, start / SAMPLE_RATE_HZ) for segment in self._segments(heard)]
            language = heard.language
            patience -= heard.done_s < LEAST_ADVANCE_S
            advance_s = heard.done_s if patience >= 0 else max(LEAST_ADVANCE_S, heard.done_s)
            start += max(FRAME, round(advance_s * SAMPLE_RATE_HZ))
        return found

    def close(self) -> None:
        """See `SpeechEngine.close`."""
        self._batches.close()
        del self._model

    @property
    def _is_multilingual(self) -> bool:
        return int(self._model.config.vocab_size) >= MULTILINGUAL_VOCABULARY

    @property
    def _room(self) -> int:
        """Tokens that fit behind the longest prompt."""
        return int(self._model.config.max_target_positions) - len(self._prompt("en"))

    def _spoken(self, language: str) -> str:
        """The language that every chunk is in; empty where it is to be found out."""
        known = sorted(self._vocabulary.languages) if self._is_multilingual else ["en"]
        if language and language not in known:
            raise ConfigError(f"speech.language = {language!r}: this Whisper knows {', '.join(known)}")
        return language or ("" if self._is_multilingual else "en")

    def _prompt(self, language: str) -> list[int]:
        vocabulary = self._vocabulary
        if not self._is_multilingual:
            return [vocabulary.start]
        return [vocabulary.start, vocabulary.languages[language], vocabulary.transcribe]

    def _sound(self, pcm: npt.NDArray[np.int16], language: str) -> _Sound:
        samples = pcm.astype(np.float32) / 32768.0
        features = self._extract(samples, sampling_rate=SAMPLE_RATE_HZ, return_tensors="pt")["input_features"]
        return _Sound(features[0], len(pcm), language)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _hear(self, sounds: list[_Sound]) -> list[_Heard]:
        features_BMT = torch.stack([sound.features_MT for sound in sounds])
        encoded = self._model.get_encoder()(features_BMT.to(self._model.device, self._model.dtype))
        languages, no_speech_probs = self._listen(encoded, sounds)
        tokens, avg_logprobs = self._write(encoded, languages)
        heard = []
        for k, sound in enumerate(sounds):
            found, done_s = passages(tokens[k], self._vocabulary.first_time, sound.duration_s)
            heard.append(_Heard(found, done_s, languages[k], avg_logprobs[k], no_speech_probs[k]))
        return self._aligned(encoded, sounds, heard) if self._heads else heard

    def _listen(self, encoded: Any, sounds: list[_Sound]) -> tuple[list[str], list[float]]:
        """Language and probability of silence, both from the first token's logits."""
        first_B1 = torch.full((len(sounds), 1), self._vocabulary.start, device=self._model.device)
        logits_B1V = self._model(encoder_outputs=encoded, decoder_input_ids=first_B1, use_cache=False).logits
        logits_BV = logits_B1V[:, 0].float()
        codes, ids = zip(*self._vocabulary.languages.items(), strict=True)
        likeliest = logits_BV[:, list(ids)].argmax(-1).tolist() if self._is_multilingual else [0] * len(sounds)
        languages = [sound.language or codes[k] for sound, k in zip(sounds, likeliest, strict=True)]
        return languages, logits_BV.softmax(-1)[:, self._vocabulary.no_speech].tolist()

    def _write(self, encoded: Any, languages: list[str]) -> tuple[list[list[int]], list[float]]:
        """Tokens without prompt and end, and their mean log probability, the end's included."""
        prompt_BP = torch.tensor([self._prompt(language) for language in languages], device=self._model.device)
        num_prompt = prompt_BP.shape[1]
        confidence = _Confidence()
        rules = LogitsProcessorList([WhisperTimeStampLogitsProcessor(self._generation, num_prompt), confidence])
        written = GenerationMixin.generate(
            self._model,
            encoder_outputs=encoded,
            decoder_input_ids=prompt_BP,
            generation_config=self._generation,
            logits_processor=rules,
        )
        new_BL, end = written.sequences[:, num_prompt:].tolist(), self._vocabulary.end
        tokens = [list(takewhile(lambda token: token != end, ids)) for ids in new_BL]
        if self._generation.num_beams > 1:
            return tokens, written.sequences_scores.tolist()
        return tokens, [confidence.mean(row, len(ids) + 1) for row, ids in enumerate(tokens)]

    def _aligned(self, encoded: Any, sounds: list[_Sound], heard: list[_Heard]) -> list[_Heard]:
        prompts = [[*self._prompt(one.language), self._vocabulary.no_times] for one in heard]
        texts = [[token for passage in one.passages for token in passage.token_ids] for one in heard]
        frames = [max(1, sound.num_samples // FRAME) for sound in sounds]
        found = align(self._model, encoded, prompts, texts, frames, self._heads)
        return [
            replace(one, likeness_LT=likeness_LT, probabilities=probabilities)
            for one, (likeness_LT, probabilities) in zip(heard, found, strict=True)
        ]

    def _segments(self, heard: _Heard) -> list[Segment]:
        texts = [self._vocabulary.text(passage.token_ids) for passage in heard.passages]
        if heard.no_speech_prob > MAX_NO_SPEECH_PROB and heard.avg_logprob < MIN_AVG_LOGPROB:
            return []
        flags = doubts(_compression_ratio("".join(texts)), heard.avg_logprob, heard.no_speech_prob)
        starts_s = token_starts_s(heard.likeness_LT.numpy()) if heard.likeness_LT is not None else None
        found, at = [], 0
        for passage, text in zip(heard.passages, texts, strict=True):
            until = at + len(passage.token_ids)
            said: tuple[Word, ...] = ()
            if starts_s is not None and heard.probabilities is not None:
                probabilities = heard.probabilities[at:until].numpy()
                said = words(passage, self._vocabulary.text, starts_s[at : until + 1], probabilities, heard.language)
            if text.strip():
                found.append(_segment(passage, text, said, heard, flags))
            at = until
        return found


class _Vocabulary:
    """Whisper's special tokens, whose numbers differ from one generation to the next."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

        def number(name: str) -> int:
            return int(tokenizer.convert_tokens_to_ids(f"<|{name}|>"))

        self.end, self.start, self.transcribe = number("endoftext"), number("startoftranscript"), number("transcribe")
        self.no_times = number("notimestamps")
        self.no_speech, self.first_time = self.no_times - 1, self.no_times + 1
        self.languages = {code: number(code) for code in LANGUAGES if number(code) > self.start}

    def text(self, token_ids: Any) -> str:
        """The text of some tokens, spaces kept."""
        return str(self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))


class _Confidence(LogitsProcessor):  # type: ignore[misc]
    """Changes nothing; keeps how probable the likeliest token is at each step, which greedy decoding then takes.

    `generate(output_scores=True)` would keep the scores of the whole vocabulary instead, a gigabyte for 8 long chunks.
    """

    def __init__(self) -> None:
        self._steps: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        scores_BV = scores.float()
        self._steps.append(scores_BV.amax(-1) - scores_BV.logsumexp(-1))
        return scores

    def mean(self, row: int, num_tokens: int) -> float:
        """Mean log probability of the first tokens of a row."""
        return float(torch.stack([step[row] for step in self._steps[:num_tokens]]).mean())


def _generation(config: SpeechConfig, stated: Any, vocabulary: _Vocabulary, room: int) -> GenerationConfig:
    """Our settings with the checkpoint's lists of tokens that are never text."""
    return GenerationConfig(
        max_new_tokens=min(config.max_new_tokens or room, room),
        do_sample=False,
        num_beams=config.beam_size,
        early_stopping=config.beam_size > 1,
        return_dict_in_generate=True,
        output_scores=config.beam_size > 1,  # or the scores of whole beams are left out too
        suppress_tokens=stated.suppress_tokens,
        begin_suppress_tokens=stated.begin_suppress_tokens,
        no_timestamps_token_id=vocabulary.no_times,
        max_initial_timestamp_index=MAX_INITIAL_TIME,
        eos_token_id=vocabulary.end,
        pad_token_id=vocabulary.end,
        decoder_start_token_id=vocabulary.start,
    )


def _segment(passage: Passage, text: str, said: tuple[Word, ...], heard: _Heard, flags: tuple[str, ...]) -> Segment:
    has_times = bool(said) and said[0].start_s < said[-1].end_s
    return Segment(
        text=text.strip(),
        start_s=said[0].start_s if has_times else passage.start_s,
        end_s=said[-1].end_s if has_times else passage.end_s,
        language=heard.language,
        avg_logprob=heard.avg_logprob,
        no_speech_prob=heard.no_speech_prob,
        words=said,
        flags=flags,
    )


def _later(segment: Segment, by_s: float) -> Segment:
    moved = tuple(replace(word, start_s=word.start_s + by_s, end_s=word.end_s + by_s) for word in segment.words)
    return replace(segment, start_s=segment.start_s + by_s, end_s=segment.end_s + by_s, words=moved)


def _compression_ratio(text: str) -> float:
    raw = text.encode()
    return len(raw) / len(zlib.compress(raw))


def _describe(sound: _Sound) -> str:
    return f"a chunk of {sound.duration_s:.1f} s"
