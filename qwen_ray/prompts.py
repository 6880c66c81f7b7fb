"""Prompts as messages, and the hash that says which prompt made a caption."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def messages(prompt: str, system_prompt: str = "") -> list[dict[str, Any]]:
    """Chat messages for one video and one question, in the form that Qwen-VL chat templates take."""
    user = {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": prompt}]}
    return [{"role": "system", "content": system_prompt}, user] if system_prompt else [user]


def prompt_hash(prompt: str, system_prompt: str = "") -> str:
    """16 hex digits over everything the model is asked."""
    text = json.dumps(messages(prompt, system_prompt), sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
