"""Keys and values of all tokens that may still be looked at, in pages, and who holds which page.

A page is a run of `PAGE` tokens of one sequence. Pages of whole prompts stay after their sequence has ended, under a
digest of everything up to them, until their room is needed: a prompt that begins alike then starts where they end.
Contiguous slots were the alternative; they cost the longest possible answer for every caption, and share nothing.

Axes: G key heads, D head dimension, T tokens of a step.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

PAGE = 64
"""Tokens of a page. 16 KB of keys a head in bfloat16: long enough reads for full memory speed on a GPU."""


@dataclass(frozen=True, slots=True)
class Where:
    """Places in the cache of T tokens, int64 each: the page and the row in it."""

    pages_T: torch.Tensor
    rows_T: torch.Tensor


class KeyValues:
    """The tensors: for each layer keys and values [pages, G, PAGE, D]. The last page is scratch, for filling rows."""

    def __init__(
        self, num_layers: int, num_pages: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_layers, 2, num_pages + 1, heads, PAGE, head_dim)
        # Zeros, since what a masked row holds is multiplied by 0 and must be finite.
        self._tensor = _zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        self.num_pages = num_pages

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each [pages, G, PAGE, D]."""
        keys, values = self._tensor[number]
        return keys, values

    def write(self, number: int, keys_TGD: torch.Tensor, values_TGD: torch.Tensor, where: Where) -> None:
        """Store one layer's keys and values of T tokens."""
        keys, values = self.layer(number)
        if keys.is_cuda:
            from qwen_ray.engines.qwen_vl.kernels import store_pages  # Triton comes with CUDA builds of torch alone

            store_pages(keys_TGD, values_TGD, keys, values, where.pages_T, where.rows_T)
            return
        keys[where.pages_T, :, where.rows_T] = keys_TGD
        values[where.pages_T, :, where.rows_T] = values_TGD

    def read(self, number: int, where: Where) -> tuple[torch.Tensor, torch.Tensor]:
        """keys_TGD and values_TGD of one layer."""
        keys, values = self.layer(number)
        return keys[where.pages_T, :, where.rows_T], values[where.pages_T, :, where.rows_T]


def bytes_a_page(num_layers: int, heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Memory of one page over all layers."""
    value_bytes: int = dtype.itemsize
    return num_layers * 2 * heads * PAGE * head_dim * value_bytes


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """On the CPU, where NumPy takes memory only as it is written to."""
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).reshape(shape)


def page_digests(
    token_ids_L: npt.NDArray[np.int64],
    positions_3L: npt.NDArray[np.int64],
    media_L: npt.NDArray[np.bool_],
    media: Sequence[tuple[int, bytes]],
) -> list[bytes]:
    """Of each full page of a prompt a digest of all that its keys and values follow from, up to its end.

    Args:
        token_ids_L, positions_3L, media_L: of the prompt.
        media: of each medium its number of tokens and the digest of its pixels.
    """
    digests: list[bytes] = []
    names = [name for count, name in media for _ in range(count)]
    pad = 0
    for start in range(0, len(token_ids_L) - PAGE + 1, PAGE):
        page = slice(start, start + PAGE)
        count = int(media_L[page].sum())
        shown = b"".join(dict.fromkeys(names[pad : pad + count]))
        pad += count
        text = token_ids_L[page].tobytes() + positions_3L[:, page].tobytes()
        digests.append(blake2b(b"".join([*digests[-1:], text, shown]), digest_size=16).digest())
    return digests


class Pages:
    """Who holds which page. A digest names all tokens of a prompt up to the end of a page."""

    def __init__(self, num_pages: int) -> None:
        self._free = deque(range(num_pages))
        self._holders = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # kept for their digest alone, the longest idle first
        self.num_pages = num_pages

    @property
    def num_free(self) -> int:
        """Pages that `take` can still give."""
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int]:
        """Hold `count` pages, at most `num_free`."""
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            page = self._free.popleft()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._digest_of.pop(page)]
        self._holders[page] = 1
        return page

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Pages of the longest beginning that is there; nobody holds them by it."""
        found: list[int] = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def hold(self, pages: Sequence[int]) -> None:
        """Hold pages that `find` gave."""
        for page in pages:
            self._idle.pop(page, None)
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Let go of pages; those with a digest stay until their room is needed."""
        for page in reversed(pages):  # the end of a prompt is the first to go
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._digest_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def publish(self, page: int, digest: bytes) -> None:
        """Say what a full page holds, so that `find` finds it; the first of two equal ones counts."""
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest
