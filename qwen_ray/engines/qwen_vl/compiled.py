"""Functions of a layer and its tensors through `torch.compile`, once for all layers and all sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Function = Callable[..., Any]
Compiled = Callable[[Function], Function]


def compiled(function: Function) -> Function:
    """Compiled for any number of tokens. Layers are alike, so the code of the first serves all of them."""
    made: Function = torch.compile(function, dynamic=True)
    return made


def plain(function: Function) -> Function:
    """The function itself."""
    return function
