"""The words of a training step: labels, swapped words, and the positions of prompt and answer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jobs.assets import shapes
from jobs.assets.tiny.checkpoint import IGNORED, VOCABULARY, caption_parts


class Captions:
    """Caption tokens by lookup: ids and swap groups without a loop over scenes."""

    def __init__(self, tokenizer: Any, device: torch.device) -> None:
        first, second = (
            [tokenizer(text, add_special_tokens=False).input_ids for text in part] for part in caption_parts()
        )
        if len({len(ids) for ids in first}) != 1 or len({len(ids) for ids in second}) != 1:
            raise AssertionError("every word of a caption should be one token")
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.first = torch.tensor(first, device=device)
        self.second = torch.tensor(second, device=device)
        self.group_size, self.groups = self._swap_groups(tokenizer, device)

    def _swap_groups(self, tokenizer: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        """For each token the words of its kind: their number [V] (0: never swapped) and their ids [V, 8]."""
        directions = ["left", "right", "up", "down", "still"]
        kinds = [list(shapes.SIZES), list(shapes.COLOURS), list(shapes.SHAPES), directions, list(shapes.BACKGROUNDS)]
        size, groups = torch.zeros(VOCABULARY, dtype=torch.long), torch.zeros(VOCABULARY, 8, dtype=torch.long)
        for words in kinds:
            ids = [tokenizer(f" {word}", add_special_tokens=False).input_ids[0] for word in words]
            size[ids] = len(ids)
            groups[ids, : len(ids)] = torch.tensor(ids)
        return size.to(device), groups.to(device)

    def tokens(self, batch: shapes.SceneBatch) -> Tensor:
        """Labels [B, L]: the caption and the end of the turn, then IGNORED."""
        first_B, second_B = caption_index(batch)
        ends = torch.full((len(first_B), 1), self.end, device=self.first.device)
        rest = torch.full((len(first_B), self.second.shape[1]), IGNORED, device=self.first.device)
        one = torch.cat([self.first[first_B], ends, rest], 1)
        two = torch.cat([self.first[first_B], self.second[second_B], ends], 1)
        return torch.where((batch.count_B == 2)[:, None], two, one)

    def swap_words(self, tokens_BL: Tensor, share: float) -> Tensor:
        """The same tokens with `share` of the telling words replaced by a random word of their kind."""
        size = self.group_size[tokens_BL]
        pick = (torch.rand(tokens_BL.shape, device=tokens_BL.device) * size).long()
        other = self.groups[tokens_BL].gather(-1, pick.unsqueeze(-1)).squeeze(-1)
        swap = (torch.rand(tokens_BL.shape, device=tokens_BL.device) < share) & (size > 0)
        return torch.where(swap, other, tokens_BL)


def caption_index(batch: shapes.SceneBatch) -> tuple[Tensor, Tensor]:
    """Place of each scene's first and second sentence [B] in `caption_parts`."""
    phrase = (batch.size_BN * len(shapes.COLOURS) + batch.colour_BN) * len(shapes.SHAPES) + batch.shape_BN
    phrase = phrase * len(shapes.MOTIONS) + batch.motion_BN
    return phrase[:, 0] * len(shapes.BACKGROUNDS) + batch.background_B, phrase[:, 1]


def split_prompt(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Token ids of the chat prompt before and after its one video placeholder."""
    content = [{"type": "video"}, {"type": "text", "text": text}]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    before, after = prompt.split("<|video_pad|>")
    return tuple(tokenizer(part, add_special_tokens=False).input_ids for part in (before, after))  # type: ignore[return-value]
