"""Two real processes that share a model say what one says, and hold half of its layers each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing
from transformers import AutoConfig, AutoModelForImageTextToText

from qwen_ray.config import CaptionConfig
from qwen_ray.engines.models import resolve
from qwen_ray.engines.qwen_vl.attention import Rows, Sdpa, segments
from qwen_ray.engines.qwen_vl.cache import PAGE, KeyValues, Where
from qwen_ray.engines.qwen_vl.compiled import plain
from qwen_ray.engines.qwen_vl.family import PAGED
from qwen_ray.engines.qwen_vl.language import DecodeStep, LanguageModel, PromptStep, Seen
from qwen_ray.engines.qwen_vl.loading import Checkpoint, load
from qwen_ray.engines.qwen_vl.runner import Runner
from qwen_ray.engines.qwen_vl.tensor_parallel import ALONE, Group
from qwen_ray.errors import ConfigError
from tests.checkpoints import write_checkpoint

LENGTH = PAGE + 6
"""Tokens of the prompt: more than one page."""


def _write(family: str, folder: Path) -> None:
    """A checkpoint with biases wherever its family can have them."""
    config = AutoConfig.from_pretrained(write_checkpoint(family, folder))
    config.text_config.attention_bias = True
    model = AutoModelForImageTextToText.from_pretrained(folder, config=config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.normal_()
    model.save_pretrained(folder)


def _load(folder: Path, group: Group) -> tuple[CaptionConfig, Checkpoint]:
    config = CaptionConfig(model=str(folder), batch_size=1)
    return config, load(config, resolve(config.model), device_map="cpu", group=group)


def _logits(checkpoint: Checkpoint) -> torch.Tensor:
    """Of the last token of a prompt that shows something, and of one token after it."""
    text, group = checkpoint.network.config.text_config, checkpoint.group
    model, attention, device = LanguageModel(checkpoint.network, plain, group), Sdpa(), torch.device("cpu")
    heads = text.num_key_value_heads // group.size
    cache = KeyValues(text.num_hidden_layers, 2, heads, text.head_dim, torch.float32, device)
    places = torch.arange(LENGTH + 1)
    pages, rows = places // PAGE, places % PAGE
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(text.vocab_size, (LENGTH + 1,), generator=draw)
    seen = Seen(places[3:9], torch.randn(3, 6, text.hidden_size, generator=draw))
    prompt = PromptStep(
        cache=cache,
        attention=attention,
        where=Where(pages[:-1], rows[:-1]),
        all_queries=segments([LENGTH], None, device),
        last_queries=segments([1], [LENGTH], device),
        context=None,
        last_R=torch.tensor([LENGTH - 1]),
    )
    first = model.logits(ids[:-1], places[:-1].expand(3, -1), prompt, seen)
    whose = Rows(torch.tensor([[0, 1]]), torch.tensor([0]), torch.tensor([LENGTH + 1]), LENGTH + 1)
    decode = DecodeStep(cache, attention, Where(pages[-1:], rows[-1:]), whose)
    return torch.cat([first, model.logits(ids[-1:], places[-1:].expand(3, -1), decode, None)])


def _measured(folder: Path, group: Group) -> tuple[torch.Tensor, int, int]:
    """Logits, weights of the layers, and bytes of a page of the cache."""
    config, checkpoint = _load(folder, group)
    layers = checkpoint.network.model.language_model.layers
    held = sum(weight.untyped_storage().nbytes() for weight in layers.parameters())
    with torch.inference_mode():
        return _logits(checkpoint), held, Runner(checkpoint, config, cuda=False).bytes_a_page


def _as_rank(rank: int, folder: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    torch.save([_measured(folder / family, Group(rank, 2)) for family in PAGED], folder / f"{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    for family in PAGED:
        _write(family, folder / family)
    return folder


def test_two_ranks_say_what_one_says_and_hold_half_each(folder):
    multiprocessing.spawn(_as_rank, (folder,), nprocs=2)
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    for family, *shared in zip(PAGED, *ranks, strict=True):
        wanted, whole, page = _measured(folder / family, ALONE)
        for logits, held, part_of_page in shared:
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4, msg=lambda text, f=family: f"{f}: {text}")
            assert 0.5 * whole < held < 0.52 * whole, family
            assert 2 * part_of_page == page


@pytest.mark.parametrize(("size", "field"), [(3, "num_attention_heads = 4"), (4, "num_key_value_heads = 2")])
def test_a_model_is_shared_evenly_or_not_at_all(folder, size, field):
    with pytest.raises(ConfigError, match=rf"{field} evenly; allowed: 1, 2 ranks"):
        _load(folder / "qwen3_vl_moe", Group(0, size))


def test_a_model_of_another_kind_is_not_shared(tmp_path):
    write_checkpoint("qwen3_5", tmp_path)
    with pytest.raises(ConfigError, match="'qwen3_5'"):
        _load(tmp_path, Group(0, 2))
