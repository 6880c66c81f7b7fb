"""Flags of captions: what a reader would find suspicious, and nothing that is fine."""

import pytest

from qwen_ray.guards import caption_flags

ASKED = "Describe what happens in this video."

FINE = [
    "A man in a red coat walks along a beach while two dogs run ahead of him.",
    "No, no, no, no, says the child, and runs away.",
    'A shop sign reads "東京ラーメン" above the door; people queue outside in the rain.',
    "Ein Mann öffnet die Tür. Draußen schneit es.",
    "I saw a cat.",
    "The speaker says: I'm sorry, but I can't help you, and the crowd laughs.",
    "1945",
    "A dog barks. A dog barks. A man shouts.",
    "The ball goes left, then right, then left, then right, and into the net.",
    "Text on screen: 10 20 30 40 50 60 70 80 90",
]


@pytest.mark.parametrize("caption", FINE)
def test_a_caption_that_is_fine_has_no_flag(caption):
    assert caption_flags(caption, ASKED) == []


@pytest.mark.parametrize(
    ("caption", "flags"),
    [
        ("", ["empty"]),
        (" \n", ["empty"]),
        ("...", ["empty"]),
        ("<|im_end|>".replace("im_end", ""), ["empty"]),
        ("I'm sorry, but I can't help with that.", ["refusal"]),
        ("I’m unable to view videos directly.", ["refusal"]),
        ("I cannot see the video.", ["refusal"]),
        ("As an AI language model, I do not watch videos.", ["refusal"]),
        ("Unfortunately, I cannot describe people.", ["refusal"]),
        ("Sorry, I can't assist with that request.", ["refusal"]),
        ("Please provide the video so that I can describe it.", ["refusal"]),
        ("The man walks " + "and walks " * 5, ["repetition"]),
        ("the the the the the the the the", ["repetition"]),
        ("Finally, a person opens the door and looks out of the window. " * 4, ["repetition"]),
        ("A cat sits there. " + "The cat looks at the dog, and the dog looks at the cat. " * 6, ["repetition"]),
        ("一个男人在海滩上行走。", ["wrong_script"]),
        ("Мужчина идёт по пляжу.", ["wrong_script"]),
        ("A man walks 一个男人在海滩上行走，两只狗在前面跑", ["wrong_script"]),
        ("很抱歉，我无法观看视频。", ["refusal", "wrong_script"]),
        ("他走他走他走他走他走", ["repetition", "wrong_script"]),
    ],
)
def test_a_suspicious_caption_is_flagged(caption, flags):
    assert caption_flags(caption, ASKED) == flags


def test_the_script_is_that_of_the_question_unless_it_is_given():
    chinese = "一个男人在海滩上行走。"
    assert caption_flags(chinese, "描述视频中发生的事情。") == []
    assert caption_flags(chinese, "Describe the video in Chinese.", "cjk") == []
    assert caption_flags(chinese, ASKED, "any") == []
    assert caption_flags("A man walks.", "描述视频中发生的事情。") == ["wrong_script"]
    assert caption_flags("男の人がビーチを歩いている。", "ビデオを説明してください。") == []
