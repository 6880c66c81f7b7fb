"""The language model over the tokens of many sequences at once, packed into one row.

The layers are transformers' modules. Attention, which alone knows sequences apart, is handed in as a step: `PromptStep`
for stretches of prompts, `DecodeStep` for one new token of each. In the last layer of a prompt only the last token is
asked about; the others' keys and values are stored and the rest of their layer is left out, a layer's worth of work.

Axes: T tokens of a step, R tokens whose next one is wanted, E width, H query heads, G key heads, D head dimension,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from qwen_ray.engines.qwen_vl.attention import Attention, Rows, Segments
from qwen_ray.engines.qwen_vl.cache import KeyValues, Where
from qwen_ray.engines.qwen_vl.compiled import Compiled, plain
from qwen_ray.engines.qwen_vl.tensor_parallel import Group


class Step(Protocol):
    """What attention must know of a step."""

    def wanted(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of something for T tokens that for the R whose next token is wanted."""

    def attend(
        self, layer: int, q: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, *, last: bool
    ) -> torch.Tensor:
        """Store keys and values, and let queries attend: of all T tokens, or in the `last` layer of the R alone."""


@dataclass(frozen=True, slots=True)
class PromptStep:
    """Stretches of prompts.

    Attributes:
        where: places of the T tokens in the cache.
        all_queries: each stretch looking at its sequence from the first token on.
        last_queries: the last token of each prompt, likewise, where all end here; none otherwise.
        context: places of all keys that are looked at; None where every prompt begins in this step.
        last_R: int64, indices of those last tokens.
    """

    cache: KeyValues
    attention: Attention
    where: Where
    all_queries: Segments
    last_queries: Segments
    context: Where | None
    last_R: torch.Tensor

    def wanted(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Step.wanted`."""
        return tokens[self.last_R]

    def attend(
        self, layer: int, q: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, *, last: bool
    ) -> torch.Tensor:
        """See `Step.attend`."""
        self.cache.write(layer, k_TGD, v_TGD, self.where)
        k, v = (k_TGD, v_TGD) if self.context is None else self.cache.read(layer, self.context)
        if not len(q):
            return q
        if not last:
            return self.attention.packed(q, k, v, self.all_queries, causal=True)
        return self.attention.packed(q, k, v, self.last_queries, causal=True)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One new token of each of B sequences."""

    cache: KeyValues
    attention: Attention
    where: Where
    rows: Rows

    def wanted(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Step.wanted`: all."""
        return tokens

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        *,
        last: bool,  # noqa: ARG002  every layer attends for all
    ) -> torch.Tensor:
        """See `Step.attend`."""
        self.cache.write(layer, k_TGD, v_TGD, self.where)
        return self.attention.paged(q, *self.cache.layer(layer), self.rows)


@dataclass(frozen=True, slots=True)
class Seen:
    """Features of pictures among the tokens of a step.

    Attributes:
        places_M: int64, which tokens they are.
        levels_LME: features; the first level replaces the tokens' embeddings, level k > 0 is added behind layer k - 1
            (Qwen3-VL's DeepStack, arXiv 2406.04334).
    """

    places_M: torch.Tensor
    levels_LME: torch.Tensor


class LanguageModel:
    """Logits of next tokens.

    Args:
        network: transformers' model for conditional generation of Qwen2.5-VL or Qwen3-VL, dense or of experts.
        compiled: whether a layer's parts around attention are compiled.
        group: the ranks that share its weights.
    """

    def __init__(self, network: Any, compiled: Compiled, group: Group) -> None:
        self._text, self._head = network.model.language_model, network.lm_head
        self.config = network.config.text_config
        self._group = group
        self._before = compiled(_before)
        # Experts are picked by what the router says, which no graph can follow. Sums over ranks are not compiled yet.
        after = plain if hasattr(self.config, "num_experts") or group.size > 1 else compiled
        self._after, self._between = after(_after), after(_between)

    def logits(self, ids_T: torch.Tensor, positions_3T: torch.Tensor, step: Step, seen: Seen | None) -> torch.Tensor:
        """logits_RV of the tokens that the step wants.

        Args:
            ids_T: int64.
            positions_3T: int64, time, height and width of each token.
            step: what attention does.
            seen: pictures among the tokens.
        """
        hidden_TE = self._text.embed_tokens(ids_T)
        levels: Sequence[torch.Tensor] = ()
        if seen is not None:
            first, *levels = seen.levels_LME.unbind(0)
            hidden_TE.index_copy_(0, seen.places_M, first)
        cos, sin = (part[0] for part in self._text.rotary_emb(hidden_TE, positions_3T[:, None]))
        layers, group = self._text.layers, self._group
        q, k, v = self._before(layers[0], hidden_TE, cos, sin)
        for number, (layer, following) in enumerate(pairwise(layers)):
            attended = step.attend(number, q, k, v, last=False)
            if number >= len(levels) or seen is None:
                hidden_TE, q, k, v = self._between(layer, following, group, hidden_TE, attended, cos, sin)
                continue
            hidden_TE = self._after(layer, group, hidden_TE, attended)
            hidden_TE.index_add_(0, seen.places_M, levels[number])
            q, k, v = self._before(following, hidden_TE, cos, sin)
        q, hidden_TE = step.wanted(q), step.wanted(hidden_TE)
        attended = step.attend(len(layers) - 1, q, k, v, last=True)
        if not len(q):
            return attended.new_empty(0, self.config.vocab_size)
        # Few tokens are left in the last layer, and their number changes: not worth compiling for.
        hidden_TE = _after(layers[-1], group, hidden_TE, attended)
        logits_RV: torch.Tensor = self._head(self._text.norm(hidden_TE))
        return logits_RV


def _before(
    layer: Any, hidden_TE: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layer up to its attention: queries, keys and values."""
    attention, x_TE = layer.self_attn, layer.input_layernorm(hidden_TE)
    q, k, v = (
        linear(x_TE).unflatten(-1, (-1, attention.head_dim))
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    return _rotated(q, cos_TD, sin_TD), _rotated(k, cos_TD, sin_TD), v


def _after(layer: Any, group: Group, hidden_TE: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """The layer from its attention on."""
    hidden_TE = hidden_TE + group.all_reduce(layer.self_attn.o_proj(attended.flatten(1)))
    return hidden_TE + group.all_reduce(layer.mlp(layer.post_attention_layernorm(hidden_TE)[None])[0])


def _between(
    layer: Any,
    following: Any,
    group: Group,
    hidden_TE: torch.Tensor,
    attended: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """From the attention of one layer to that of the next, compiled as one to pass over the hidden state less often."""
    hidden_TE = _after(layer, group, hidden_TE, attended)
    return hidden_TE, *_before(following, hidden_TE, cos_TD, sin_TD)


def _rotated(x: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Rotary positions in the model's precision, as `apply_rotary_pos_emb` of transformers has them."""
    left, right = x.chunk(2, dim=-1)
    return x * cos_TD[:, None] + torch.cat([-right, left], -1) * sin_TD[:, None]
