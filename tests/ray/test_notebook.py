"""The notebook runs from top to bottom in an empty folder, and shows the renderer's captions and the script's words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import qwen_ray

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "explore.ipynb"
TRUTH = json.loads((qwen_ray.SAMPLES / "truth.json").read_text())


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> nbformat.NotebookNode:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = tmp_path_factory.mktemp("notebook")
    return NotebookClient(notebook, timeout=250, resources={"metadata": {"path": str(folder)}}).execute()


def _tables(notebook: nbformat.NotebookNode) -> str:
    """The HTML of all outputs."""
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", []))
    return "\n".join(output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {}))


def _num_pictures(notebook: nbformat.NotebookNode) -> int:
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", []))
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_the_tables_show_every_true_caption_and_word(executed):
    shown = _tables(executed)
    words = re.findall(r"[a-z']+", shown.lower())
    for truth in TRUTH.values():
        assert all(f"<td>{clip['caption']}</td>" in shown for clip in truth["clips"])
        assert set(re.findall(r"[a-z']+", truth["script"].lower())) <= set(words)


def test_it_draws_its_pictures_and_finds_the_tables_in_order(executed):
    printed = [output["text"] for cell in executed.cells for output in cell.get("outputs", []) if "text" in output]
    assert _num_pictures(executed) == 3
    assert any("broken promises: []" in text for text in printed)


def test_the_committed_outputs_are_small_and_those_of_this_code(executed):
    committed = nbformat.read(NOTEBOOK, as_version=4)
    assert NOTEBOOK.stat().st_size < 300_000
    assert (_num_pictures(committed), _tables(committed).count("<td>")) == (3, _tables(executed).count("<td>"))
