from __future__ import annotations

from typing import Any

import pytest
from tokenizers import processors

from forge.data.chat import ChatFormat
from forge.data.datasets import DataError
from forge.testing.tiny_model import IM_END, IM_START, make_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_byte_tokenizer()


def test_system_prompt_examples_and_question_become_a_conversation(tokenizer: Any) -> None:
    chat = ChatFormat(
        tokenizer,
        system_prompt="Be brief.",
        examples=[("1 + 1", "2"), ("1 + 2", "3")],
        prompt_template=r"{prompt} = ? Put it in \boxed{}.",
    )
    text, ids = chat.render("2 + 2")
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n1 + 1 = ? Put it in \\boxed{}.<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\n1 + 2 = ? Put it in \\boxed{}.<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
        "<|im_start|>user\n2 + 2 = ? Put it in \\boxed{}.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (ids.count(IM_START), ids.count(IM_END)) == (7, 6)
    assert tokenizer.decode(ids) == text


def test_a_conversation_brings_its_own_turns(tokenizer: Any) -> None:
    chat = ChatFormat(tokenizer, system_prompt="Be brief.", examples=[("1", "2")], prompt_template="<{prompt}>")
    question = [
        {"role": "system", "content": "Be long."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert [message["content"] for message in chat.messages(question)] == ["Be long.", "<1>", "2", "a", "b", "<c>"]
    assert question[-1]["content"] == "c"
    assert [message["content"] for message in chat.messages(question[1:])][:3] == ["Be brief.", "<1>", "2"]


def test_the_chat_template_of_the_config_is_used_instead_of_the_tokenizers(tokenizer: Any) -> None:
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    assert ChatFormat(tokenizer, chat_template=template).render("hi") == ("[hi]>", list(b"[hi]>"))


def test_a_template_that_cannot_render_is_the_users_error(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"chat template cannot render.*no system"):
        ChatFormat(tokenizer, chat_template="{{ raise_exception('no system') }}").render("hi")


def test_a_prompt_template_without_a_place_for_the_prompt_is_refused(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"must contain \{prompt\}.*got 'Solve it.'"):
        ChatFormat(tokenizer, prompt_template="Solve it.")


def test_a_tokenizer_without_a_template_gets_plain_text() -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = None
    chat = ChatFormat(tokenizer, system_prompt="Add.", examples=[("1 + 1 =", "2")])
    text, ids = chat.render("2 + 2 =")
    assert text == "Add.\n\n1 + 1 =\n2\n\n2 + 2 =\n"
    assert ids == list(text.encode())


@pytest.mark.parametrize("has_template", [True, False])
@pytest.mark.parametrize("text_has_it", [True, False])
def test_the_start_token_is_never_doubled(has_template: bool, text_has_it: bool) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", IM_START)]
    )
    start = "<|im_start|>" if text_has_it else ""
    tokenizer.chat_template = start + "{{ messages[0]['content'] }}" if has_template else None
    _, ids = ChatFormat(tokenizer).render("hi" if has_template else start + "hi")
    expected = [IM_START] if text_has_it or not has_template else []  # a template that writes none wants none
    assert ids == [*expected, *b"hi" + (b"" if has_template else b"\n")]
