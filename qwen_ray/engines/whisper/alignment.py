"""Where in the sound each token is, from the cross-attention of the checkpoint's `alignment_heads`.

The finished text is given to the decoder once more, as OpenAI's Whisper does, and only the queries and keys of the few
layers that matter are kept. `generate(return_token_timestamps=True)` keeps the attention of all layers at all steps
instead, which is gigabytes for a large model, and needs the slow attention for it.

Legend: B rows of a batch, P prompt tokens, L tokens, H heads, T frames of 0.02 s, D size of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

SMOOTHED_FRAMES = 7
"""Width of the median filter over frames; Whisper's own."""
Heads = Sequence[tuple[int, int]]
"""(layer, head)."""


def align(
    model: Any,
    encoded: Any,
    prompt_ids: Sequence[Sequence[int]],
    text_ids: Sequence[Sequence[int]],
    frames: Sequence[int],
    heads: Heads,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """How alike tokens and frames are, and how probable the tokens.

    Args:
        model: A `WhisperForConditionalGeneration`.
        encoded: Its encoder's output for B sounds.
        prompt_ids: Of each sound, P tokens, ending with the one that asks for text without times.
        text_ids: Of each sound, the tokens of its text.
        frames: Of each sound, its length.
        heads: Those to look at.

    Returns:
        Of each sound, float32 on the CPU: likeness [number of text tokens + 1, frames] and probabilities
        [number of text tokens]. The additional row is the end of the text.
    """
    end_id = int(model.generation_config.eos_token_id)
    whole = [[*prompt, *text, end_id] for prompt, text in zip(prompt_ids, text_ids, strict=True)]
    longest = max(len(ids) for ids in whole)
    ids_BL = torch.tensor([ids + [end_id] * (longest - len(ids)) for ids in whole], device=model.device)
    with _watched(model, {layer for layer, _ in heads}) as seen:
        logits_BLV = model(encoder_outputs=encoded, decoder_input_ids=ids_BL, use_cache=False).logits
    found = []
    for row, (prompt, text) in enumerate(zip(prompt_ids, text_ids, strict=True)):
        first, after = len(prompt) - 1, len(prompt) + len(text)  # each position predicts the token after it
        attention_HLT = torch.stack([seen.attention(row, layer, head, after + 1, frames[row]) for layer, head in heads])
        likeness_LT = _normalised(attention_HLT).mean(0)[first:after]
        probabilities_LV = logits_BLV[row, first : after - 1, :end_id].float().softmax(-1)
        chosen = torch.tensor(text, dtype=torch.long, device=model.device)[:, None]
        found.append((likeness_LT.cpu(), probabilities_LV.gather(-1, chosen)[:, 0].cpu()))
    return found


class _Seen:
    """Queries and keys of cross-attention, by layer."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self.tensors: dict[tuple[int, str], torch.Tensor] = {}

    def attention(self, row: int, layer: int, head: int, num_tokens: int, num_frames: int) -> torch.Tensor:
        """Float32 [num_tokens, num_frames], each row's sum is 1."""
        module = self._decoder.layers[layer].encoder_attn
        size = module.head_dim
        part = slice(head * size, (head + 1) * size)
        queries_LD = self.tensors[layer, "q"][row, :num_tokens, part].float()
        keys_TD = self.tensors[layer, "k"][row, :num_frames, part].float()
        return (queries_LD @ keys_TD.T * size**-0.5).softmax(-1)


@contextmanager
def _watched(model: Any, layers: set[int]) -> Iterator[_Seen]:
    decoder = model.get_decoder()
    seen = _Seen(decoder)

    def keep(layer: int, which: str) -> Any:
        return lambda _module, _inputs, output: seen.tensors.__setitem__((layer, which), output)

    hooks = [
        getattr(decoder.layers[layer].encoder_attn, f"{which}_proj").register_forward_hook(keep(layer, which))
        for layer in layers
        for which in "qk"
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _normalised(attention_HLT: torch.Tensor) -> torch.Tensor:
    """Each frame's attention in standard deviations over the tokens, smoothed over frames."""
    std, mean = torch.std_mean(attention_HLT, dim=-2, keepdim=True, correction=0)
    scaled = (attention_HLT - mean) / std.clamp_min(1e-10)
    around = SMOOTHED_FRAMES // 2
    if scaled.shape[-1] <= around:
        return scaled
    padded = torch.nn.functional.pad(scaled, (around, around), mode="reflect")
    return padded.unfold(-1, SMOOTHED_FRAMES, 1).median(-1).values
