"""Prompts: named templates, placeholders for a video's own metadata, and the hash that says which one made a caption.

A prompt ships with the package (`assets/prompts/`), lies in a file, or is typed in place; either way its text ends up
in the resolved configuration, so that a caption can still be explained when the file has changed. Metadata is foreign
text: it is put in so that it can never be read as one of the chat template's own marks.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwen_ray.errors import ConfigError, RequestError

TEMPLATES = Path(__file__).parent / "assets" / "prompts"
RESERVED = {"speech": "transcripts in prompts are not supported yet", "captions": "only a summary prompt has captions"}
"""Placeholders that are not metadata, and why they are refused."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MARK = re.compile(r"<(?=[|/A-Za-z])")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One question to the model about each clip."""

    name: str
    """Under which its answers are recorded."""
    text: str
    """The question. `{title}` stands for the manifest column `title`; `{{` and `}}` are braces."""
    system: str = ""
    """System message, with the same placeholders; empty leaves the checkpoint's own."""
    script: str = ""
    """Writing system that an answer should be in, such as `latin`, `cyrillic` or `cjk`; empty: the prompt's own;
    `any`: not looked at.
    """

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name.replace("-", "_")):
            raise ConfigError(f"prompt name {self.name!r}: allowed are letters, digits, - and _")
        if not self.text.strip():
            raise ConfigError(f"prompt {self.name!r}: its text is empty")
        self.placeholders()

    @property
    def hash(self) -> str:
        """16 hex digits over everything the model is asked."""
        text = json.dumps(messages(self.text, self.system), sort_keys=True, ensure_ascii=False)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def placeholders(self) -> set[str]:
        """Names in braces. Raises ConfigError for one that is not a plain name."""
        return _names(self.name, self.text) | _names(self.name, self.system)


def load(given: str | Mapping[str, Any] | Prompt) -> Prompt:
    """A prompt from how a user names it.

    Args:
        given: a template's name (`detailed`), a `.yaml` file with `text` and perhaps `name`, `system`, `script`, a
            `.txt` or `.md` file that is the text, the text itself (anything with a space in it), or a mapping of the
            fields.

    Raises:
        ConfigError: nothing of that name, an unreadable file, or wrong fields.
    """
    if isinstance(given, Prompt):
        return given
    if isinstance(given, Mapping):
        return _from_fields(given, "prompt", str(given.get("name", "prompt")))
    path = Path(given)
    if path.suffix in (".yaml", ".yml", ".txt", ".md") and not any(space in given.strip() for space in "\n\t"):
        return _from_file(path)
    if (TEMPLATES / f"{given}.yaml").is_file() and _NAME.fullmatch(given.replace("-", "_")):
        return _from_file(TEMPLATES / f"{given}.yaml")
    if " " in given.strip():
        return Prompt(name="prompt", text=given)
    known = ", ".join(sorted(path.stem for path in TEMPLATES.glob("*.yaml")))
    raise ConfigError(f"prompt {given!r}: no template of that name (there are {known}), no file, and no sentence")


def load_all(given: Iterable[str | Mapping[str, Any] | Prompt]) -> tuple[Prompt, ...]:
    """Prompts as `load` reads them; texts that were typed in place are `prompt`, `prompt-2` and so on."""
    loaded: list[Prompt] = []
    for one in given:
        prompt = load(one)
        typed = isinstance(one, str) and prompt.text == one
        nth = 1 + sum(other.name.startswith("prompt") for other in loaded)
        loaded.append(replace(prompt, name=f"prompt-{nth}") if typed and nth > 1 else prompt)
    return tuple(loaded)


def messages(text: str, system: str = "", media: Sequence[str] = ("video",)) -> list[dict[str, Any]]:
    """Chat messages for one question, in the form that Qwen-VL chat templates take.

    Args:
        text: the question.
        system: system message; empty for none.
        media: what is shown before it, in order: `video` or `image` each.
    """
    content = [*({"type": kind} for kind in media), {"type": "text", "text": text}]
    user = {"role": "user", "content": content}
    return [{"role": "system", "content": system}, user] if system else [user]


def check_placeholders(prompts: Iterable[Prompt], summary: Prompt | None) -> None:
    """Raise ConfigError for placeholders that are reserved, and for a summary prompt without `{captions}`."""
    for prompt in prompts:
        _refuse_reserved(prompt, {"captions", "speech"})
    if summary is not None:
        _refuse_reserved(summary, {"speech"})
        if "captions" not in summary.placeholders():
            raise ConfigError(f"prompt {summary.name!r}: a summary prompt needs {{captions}}, where the captions go")


def _refuse_reserved(prompt: Prompt, names: set[str]) -> None:
    for name in sorted(prompt.placeholders() & names):
        raise ConfigError(f"prompt {prompt.name!r}: {{{name}}} is reserved: {RESERVED[name]}")


def fill(prompt: Prompt, values: Mapping[str, Any]) -> tuple[str, str]:
    """(text, system) with placeholders replaced by `values`, neutralised.

    Raises:
        RequestError: a value is missing or null.
    """
    missing = sorted(name for name in prompt.placeholders() if values.get(name) is None)
    if missing:
        raise RequestError("no_metadata", f"prompt {prompt.name!r}: this video's metadata has no {', '.join(missing)}")
    plain = {name: neutral(str(values[name])) for name in prompt.placeholders()}
    return prompt.text.format_map(plain), prompt.system.format_map(plain)


def neutral(text: str) -> str:
    """Foreign text that cannot be read as a mark of the chat template.

    Every special and added token of Qwen's vocabularies begins with `<` and then `|`, `/` or a letter (`<|im_end|>`,
    `<think>`, `</tool_call>`); a space between the two leaves the text readable and the mark broken.
    """
    return _MARK.sub("< ", text)


def _names(prompt: str, text: str) -> set[str]:
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(text) if field is not None]
        whole = all(not spec and not how for _, _, spec, how in string.Formatter().parse(text))
    except ValueError as error:
        raise ConfigError(f"prompt {prompt!r}: {error}; write {{{{ and }}}} for braces that are text") from None
    wrong = [field for field in fields if not _NAME.fullmatch(field)]
    if wrong or not whole:
        found = wrong[0] if wrong else "a format after : or !"
        raise ConfigError(
            f"prompt {prompt!r}: {found!r} in braces is no name of a manifest column; "
            "write {{ and }} for braces that are text"
        )
    return set(fields)


def _from_file(path: Path) -> Prompt:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        fields = {"text": text.strip()} if path.suffix in (".txt", ".md") else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"prompt {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompt {path}: not readable as YAML: {' '.join(str(error).split())}") from None
    return _from_fields(fields, f"prompt {path}", path.stem)


def _from_fields(fields: Any, where: str, name: str) -> Prompt:
    known = set(Prompt.__dataclass_fields__)
    if not isinstance(fields, Mapping) or not isinstance(fields.get("text"), str):
        raise ConfigError(f"{where}: expected a mapping with `text`, and perhaps name, system and script")
    wrong = [key for key, value in fields.items() if key not in known or not isinstance(value, str)]
    if wrong:
        raise ConfigError(f"{where}: {wrong[0]!r} is not one of {', '.join(sorted(known))}, or not text")
    return Prompt(**{"name": name, **fields})
