"""Prompts by name, file and text; metadata in them; and foreign text that cannot change who is speaking."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from qwen_ray.config import preset, set_paths
from qwen_ray.engines.models import resolve
from qwen_ray.errors import ConfigError, RequestError
from qwen_ray.prompts import TEMPLATES, Prompt, fill, load, load_all, messages, neutral

TOKENIZERS = [AutoTokenizer.from_pretrained(resolve(f"builtin:{name}").location) for name in ("tiny-qwen2.5-vl",)]


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_template_loads_by_its_name(path):
    assert load(path.stem).name == path.stem
    assert load(path.stem).text.strip()


def test_a_prompt_is_named_typed_or_lies_in_a_file(tmp_path):
    (tmp_path / "actions.yaml").write_text("text: Who does what?\nsystem: Be brief.\nscript: latin\n")
    (tmp_path / "plain.txt").write_text("What is on the table?\n")
    assert load(str(tmp_path / "actions.yaml")) == Prompt(
        name="actions", text="Who does what?", system="Be brief.", script="latin"
    )
    assert load(str(tmp_path / "plain.txt")) == Prompt(name="plain", text="What is on the table?")
    assert load("What is it?") == Prompt(name="prompt", text="What is it?")
    assert [one.name for one in load_all(["What is it?", "describe", "Who is it?"])] == [
        "prompt",
        "describe",
        "prompt-2",
    ]


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ("describ", ["'describ'", "describe", "detailed"]),
        ("none.yaml", ["none.yaml", "No such file"]),
        ({"name": "x"}, ["text"]),
        ({"name": "x", "text": "What?", "temprature": "1"}, ["temprature", "script"]),
        ({"name": "a b", "text": "What?"}, ["'a b'", "letters"]),
        ({"name": "x", "text": " "}, ["'x'", "empty"]),
        ("Give {title.upper} now", ["'title.upper'", "{{"]),
        ("Give {title!r} now", ["{{"]),
        ('Answer as {"a": 1} please', ["'\"a\"'", "{{"]),
        ("Give { now", ["{{"]),
    ],
)
def test_a_wrong_prompt_is_refused_with_what_to_do(given_, words):
    with pytest.raises(ConfigError) as raised:
        load(given_)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("caption.prompts=They say {speech} here", "{speech} is reserved"),
        ("caption.prompts=Merge {captions} here", "{captions} is reserved"),
        ("caption.summary=Merge {captions} and {speech}", "{speech} is reserved"),
        ("caption.summary=Merge them all", "needs {captions}"),
        ("caption.prompts=[describe, describe]", "each name once"),
        ("caption.prompts=[]", "one or more"),
    ],
)
def test_reserved_placeholders_and_double_names_are_refused(assignment, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        set_paths(preset("tiny"), [assignment])


def test_metadata_takes_its_place_and_braces_can_be_written():
    prompt = Prompt(name="x", text="{title} by {author}: {{sic}}", system="About {title}.")
    assert fill(prompt, {"title": "Heat", "author": 7}) == ("Heat by 7: {sic}", "About Heat.")
    assert prompt.placeholders() == {"title", "author"}
    for lacking in ({"title": "Heat"}, {"title": "Heat", "author": None}):
        with pytest.raises(RequestError, match="author") as raised:
            fill(prompt, lacking)
        assert raised.value.error_type == "no_metadata"


def test_metadata_that_looks_like_a_placeholder_stays_as_it_is():
    assert fill(Prompt(name="x", text="{a} {b}"), {"a": "{b}", "b": "{a!r}"})[0] == "{b} {a!r}"


HOSTILE = st.lists(
    st.sampled_from(
        ["<|im_end|>", "<|im_start|>", "<|", "|>", "<", "im_end", "<|video_pad|>", "<|vision_start|>", "<think>",
         "</tool_call>", "\n", "assistant", " ", "<<|im_end|>", "<|<|im_end|>im_end|>", "a"]
    ),
    max_size=8,
).map("".join)  # fmt: skip


@given(HOSTILE, HOSTILE)
def test_no_metadata_makes_a_special_token(title, system):
    """However it is pieced together: the chat has exactly the marks that it has with harmless words."""
    prompt = Prompt(name="x", text="About {title}: what?", system="You know {title} and {system}.")
    for tokenizer in TOKENIZERS:
        special = set(tokenizer.get_added_vocab().values())

        def marks(values, tokenizer=tokenizer, special=special):
            chat = messages(*fill(prompt, values))
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            return [token for token in tokenizer(text)["input_ids"] if token in special]

        assert marks({"title": title, "system": system}) == marks({"title": "Heat", "system": "more"})


@pytest.mark.parametrize("mark", ["<|im_start|>", "<|vision_pad|>", "<think>", "</think>", "<tool_response>"])
def test_marks_of_the_chat_template_are_broken_and_the_rest_is_untouched(mark):
    assert mark not in neutral(f"x {mark} y")
    assert neutral("1 < 2, a <- b, 3<4") == "1 < 2, a <- b, 3<4"


def test_the_hash_follows_everything_that_is_asked():
    base = Prompt(name="x", text="What?", system="Be brief.")
    assert Prompt(name="other", text="What?", system="Be brief.").hash == base.hash
    assert len({base.hash, Prompt(name="x", text="Who?").hash, Prompt(name="x", text="What?").hash}) == 3
