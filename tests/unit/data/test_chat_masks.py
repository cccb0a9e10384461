"""Which tokens of a conversation are the assistant's. What is expected is written by hand: ⟦ and ⟧ enclose it.

The templates in chat_templates/ write what those models are prompted with; the tokenizers are as theirs, but small.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from forge.data.chat import ChatFormat
from forge.data.chat_masks import ChatMasks
from forge.data.conversations import Conversation, InvalidRow, Message
from forge.data.errors import DataError
from forge.testing.tiny_model import make_byte_tokenizer

TEMPLATES = Path(__file__).parent / "chat_templates"
SPECIAL = {
    "llama3": ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
    "qwen2_5": ["<|endoftext|>", "<|im_end|>", "<|im_start|>"],
    "qwen3": ["<|endoftext|>", "<|im_end|>", "<|im_start|>"],
    "smollm2": ["<|im_start|>", "<|im_end|>"],
}
WORDS = Regex(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
TEXT = ["Hello there! What is it? It is a yes.\n\nOf 12 and 30 the sum is 42.\n", "assistant user system think"] * 3


def make_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE of a few hundred tokens, put together as the family's."""
    tokenizer = Tokenizer(BPE(ignore_merges=family == "llama3"))
    if family.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=family == "smollm2")
    tokenizer.pre_tokenizer = (
        byte_level
        if family == "smollm2"
        else pre_tokenizers.Sequence([pre_tokenizers.Split(WORDS, "isolated"), byte_level])
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL[family]])
    start = SPECIAL[family][0] if family in ("llama3", "smollm2") else None
    if family == "llama3":  # which leaves spaces out of offsets, and puts the start token first unless told not to
        start_id = tokenizer.token_to_id(start)
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=True),
                processors.TemplateProcessing(single=f"{start} $A", special_tokens=[(start, start_id)]),
            ]
        )
    elif family.startswith("qwen"):
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=start,
        eos_token=SPECIAL[family][1],
        chat_template=(TEMPLATES / f"{family}.jinja").read_text(),
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {family: make_tokenizer(family) for family in SPECIAL}


def marked(tokenizer: Any, ids: list[int], turns: list[tuple[int, int]]) -> str:
    """The text of the tokens, with the turns in ⟦⟧."""
    pieces, end = [], 0
    for first, last in turns:
        pieces += [tokenizer.decode(ids[end:first]), "⟦", tokenizer.decode(ids[first:last]), "⟧"]
        end = last
    return "".join([*pieces, tokenizer.decode(ids[end:])])


def talk(*turns: str, system: str | None = None) -> Conversation:
    """A conversation in which the user begins."""
    messages: list[Message] = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(id="talk", messages=messages)


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def with_tools(*, again: bool = False) -> Conversation:
    """The assistant calls a tool, thinks about what comes back, and answers."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 30}}}
    messages: list[Message] = [
        {"role": "user", "content": "12 and 30?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "<think>\nfine\n</think>\n\n42."},
    ]
    if again:
        messages += [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    return Conversation(id="tools", messages=messages, tools=[ADD])


QWEN_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
"""

EXPECTED = {
    ("smollm2", "two turns"): """<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
What is it?<|im_end|>
<|im_start|>assistant
⟦A yes.<|im_end|>⟧
<|im_start|>user
 And 12 ?<|im_end|>
<|im_start|>assistant
⟦42

<|im_end|>⟧
""",
    ("smollm2", "system"): """<|im_start|>system
Be brief.<|im_end|>
<|im_start|>user
Hello<|im_end|>
<|im_start|>assistant
⟦It is “ö”, 你好 🙂.<|im_end|>⟧
""",
    ("qwen2_5", "two turns"): """<|im_start|>system
You are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>
<|im_start|>user
What is it?<|im_end|>
<|im_start|>assistant
⟦A yes.<|im_end|>⟧
<|im_start|>user
 And 12 ?<|im_end|>
<|im_start|>assistant
⟦42

<|im_end|>⟧
""",
    ("qwen2_5", "system"): """<|im_start|>system
Be brief.<|im_end|>
<|im_start|>user
Hello<|im_end|>
<|im_start|>assistant
⟦It is “ö”, 你好 🙂.<|im_end|>⟧
""",
    ("qwen2_5", "tools"): f"""<|im_start|>system
You are Qwen, created by Alibaba Cloud. You are a helpful assistant.

{QWEN_TOOLS}<|im_start|>user
12 and 30?<|im_end|>
<|im_start|>assistant
⟦<tool_call>
{{"name": "add", "arguments": {{"a": 12, "b": 30}}}}
</tool_call><|im_end|>⟧
<|im_start|>user
<tool_response>
42
</tool_response><|im_end|>
<|im_start|>assistant
⟦<think>
fine
</think>

42.<|im_end|>⟧
""",
    # An earlier answer loses its thinking, and the answer at the end gets an empty block of it.
    ("qwen3", "two turns"): """<|im_start|>user
What is it?<|im_end|>
<|im_start|>assistant
⟦A yes.<|im_end|>⟧
<|im_start|>user
 And 12 ?<|im_end|>
<|im_start|>assistant
⟦<think>

</think>

42

<|im_end|>⟧
""",
    ("qwen3", "thinking"): """<|im_start|>user
Hello<|im_end|>
<|im_start|>assistant
⟦There!<|im_end|>⟧
<|im_start|>user
12 and 30?<|im_end|>
<|im_start|>assistant
⟦<think>
the sum
</think>

42<|im_end|>⟧
""",
    ("qwen3", "tools"): f"""<|im_start|>system
{QWEN_TOOLS}<|im_start|>user
12 and 30?<|im_end|>
<|im_start|>assistant
⟦<tool_call>
{{"name": "add", "arguments": {{"a": 12, "b": 30}}}}
</tool_call><|im_end|>⟧
<|im_start|>user
<tool_response>
42
</tool_response><|im_end|>
<|im_start|>assistant
⟦<think>
fine
</think>

42.<|im_end|>⟧
""",
    ("qwen3", "tools, then a question"): f"""<|im_start|>system
{QWEN_TOOLS}<|im_start|>user
12 and 30?<|im_end|>
<|im_start|>assistant
⟦<tool_call>
{{"name": "add", "arguments": {{"a": 12, "b": 30}}}}
</tool_call><|im_end|>⟧
<|im_start|>user
<tool_response>
42
</tool_response><|im_end|>
<|im_start|>assistant
⟦42.<|im_end|>⟧
<|im_start|>user
Sure?<|im_end|>
<|im_start|>assistant
⟦<think>

</think>

Yes.<|im_end|>⟧
""",
    ("llama3", "two turns"): """<|begin_of_text|><|start_header_id|>system<|end_header_id|>

Cutting Knowledge Date: December 2023
Today Date: 26 Jul 2024

<|eot_id|><|start_header_id|>user<|end_header_id|>

What is it?<|eot_id|><|start_header_id|>assistant<|end_header_id|>

⟦A yes.<|eot_id|>⟧<|start_header_id|>user<|end_header_id|>

And 12 ?<|eot_id|><|start_header_id|>assistant<|end_header_id|>

⟦42<|eot_id|>⟧""",
    ("llama3", "system"): """<|begin_of_text|><|start_header_id|>system<|end_header_id|>

Cutting Knowledge Date: December 2023
Today Date: 26 Jul 2024

Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>

Hello<|eot_id|><|start_header_id|>assistant<|end_header_id|>

⟦It is “ö”, 你好 🙂.<|eot_id|>⟧""",
    ("llama3", "tools"): """<|begin_of_text|><|start_header_id|>system<|end_header_id|>

Environment: ipython
Cutting Knowledge Date: December 2023
Today Date: 26 Jul 2024

<|eot_id|><|start_header_id|>user<|end_header_id|>

Given the following functions, please respond with a JSON for a function call with its proper arguments that best \
answers the given prompt.

Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.Do not use \
variables.

{
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object"
        }
    }
}

12 and 30?<|eot_id|><|start_header_id|>assistant<|end_header_id|>

⟦{"name": "add", "parameters": {"a": 12, "b": 30}}<|eot_id|>⟧<|start_header_id|>ipython<|end_header_id|>

"42"<|eot_id|><|start_header_id|>assistant<|end_header_id|>

⟦<think>
fine
</think>

42.<|eot_id|>⟧""",
}
CONVERSATIONS = {
    "two turns": talk("What is it?", "A yes.", " And 12 ?", "42\n\n"),
    "system": talk("Hello", "It is “ö”, 你好 🙂.", system="Be brief."),
    "thinking": talk("Hello", "<think>\nhm\n</think>\n\nThere!", "12 and 30?", "<think>\nthe sum\n</think>\n\n42"),
    "tools": with_tools(),
    "tools, then a question": with_tools(again=True),
}


@pytest.mark.parametrize(("family", "name"), EXPECTED, ids=lambda value: value)
def test_the_assistants_turns_are_marked_up_to_their_end_token(family: str, name: str, tokenizers: Any) -> None:
    tokenizer, conversation = tokenizers[family], CONVERSATIONS[name]
    ids, turns = ChatMasks(tokenizer).encode(conversation)
    assert marked(tokenizer, ids, turns) == EXPECTED[family, name]
    rendered = tokenizer.apply_chat_template(conversation.messages, conversation.tools, tokenize=True)
    assert ids == rendered["input_ids"]


@pytest.mark.parametrize("family", SPECIAL)
def test_the_prompt_of_an_answer_is_what_the_generator_will_be_given(family: str, tokenizers: Any) -> None:
    tokenizer = tokenizers[family]
    ids, turns = ChatMasks(tokenizer).encode(talk("Hello there! 12?", "42", system="Be brief."))
    prompt, prompt_ids = ChatFormat(tokenizer, system_prompt="Be brief.").render("Hello there! 12?")
    assert ids[: turns[0][0]] == prompt_ids
    assert "assistant" in prompt[-40:]


def test_tokens_and_marks_of_a_short_conversation(tokenizers: Any) -> None:
    tokenizer = tokenizers["llama3"]
    ids, turns = ChatMasks(tokenizer, chat_template=SHORT).encode(talk("What is it?", "It is a yes."))
    tokens = [tokenizer.decode([token]) for token in ids]
    prompt = ["<|begin_of_text|>", "Wh", "at", " is", " it", "?", "<|eot_id|>"]
    assert tokens == [*prompt, "It", " is", " a", " yes", ".", "<|eot_id|>"]
    assert turns == [(7, 13)]


SHORT = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}"


def test_a_start_token_is_never_doubled(tokenizers: Any) -> None:
    tokenizer = tokenizers["llama3"]
    start = tokenizer.bos_token_id
    assert tokenizer("x")["input_ids"][0] == start  # this tokenizer adds one by itself, and its template writes one
    ids, turns = ChatMasks(tokenizer).encode(talk("Hello", "yes"))
    assert ids.count(start) == 1
    twice = ChatMasks(tokenizer, chat_template="{{ bos_token }}" + SHORT)
    ids, turns = twice.encode(talk("Hello", "yes"))
    assert ids.count(start) == 1
    assert marked(tokenizer, ids, turns) == "<|begin_of_text|>Hello<|eot_id|>⟦yes<|eot_id|>⟧"


def test_a_template_with_generation_marks_decides_itself(tokenizers: Any) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{{ eos_token }}{% else %}{{ m.content }}{% endif %}{{ '/' }}{% endfor %}"
    )
    tokenizer = tokenizers["smollm2"]
    ids, turns = ChatMasks(tokenizer, chat_template=template).encode(talk("Hello", "yes", "12?", "42"))
    assert marked(tokenizer, ids, turns) == "user:Hello/assistant:⟦yes⟧<|im_end|>/user:12?/assistant:⟦42⟧<|im_end|>/"


def test_a_template_without_an_end_token_trains_what_ends_a_turn(tokenizers: Any) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}" + (
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = tokenizers["qwen3"]
    ids, turns = ChatMasks(tokenizer, chat_template=template).encode(talk("Hello", "yes"))
    assert marked(tokenizer, ids, turns) == "user: Hello\n\nassistant:⟦ yes\n\n⟧"


def test_a_token_that_reaches_into_a_turn_belongs_to_it(tokenizers: Any) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + (
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = tokenizers["qwen3"]
    ids, turns = ChatMasks(tokenizer, chat_template=template).encode(talk("Hello", "yes"))
    assert " yes" in [tokenizer.decode([token]) for token in ids]  # one token, of which the prompt holds the space
    assert marked(tokenizer, ids, turns) == "user: Hello\nassistant:⟦ yes\n⟧"


def test_an_assistant_that_speaks_first_is_found(tokenizers: Any) -> None:
    tokenizer = tokenizers["smollm2"]
    conversation = Conversation(
        id="", messages=[{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Hello"}]
    )
    ids, turns = ChatMasks(tokenizer).encode(conversation)
    assert marked(tokenizer, ids, turns).endswith(
        "Face<|im_end|>\n<|im_start|>assistant\n⟦Hello<|im_end|>⟧\n<|im_start|>user\nHello<|im_end|>\n"
    )


def test_a_template_that_hides_who_speaks_is_refused_with_the_reason(tokenizers: Any) -> None:
    # Earlier turns are shown without the header that opens the last one.
    template = (
        "{% for m in messages %}{{ ('[A]' if m.role == 'assistant' else '[U]') if loop.last }}{{ m.content }}"
        "<|im_end|>{% endfor %}{{ '[A]' if add_generation_prompt }}"
    )
    masks = ChatMasks(tokenizers["smollm2"], chat_template=template)
    with pytest.raises(InvalidRow, match=r"does not show where the assistant speaks: .*assistant's 2 turns, is there"):
        masks.encode(talk("a", "b", "c", "d"))
    assert masks.encode(talk("a", "b", "c", "d"), needs_turns=False)[1] == []


def test_a_template_that_refuses_a_conversation_is_told(tokenizers: Any) -> None:
    conversation = Conversation(id="", messages=[{"role": "assistant", "content": "Hello"}], tools=[ADD])
    with pytest.raises(InvalidRow, match=r"cannot render.*tools need a first user message") as error:
        ChatMasks(tokenizers["llama3"]).encode(conversation)
    assert error.value.reason == "not_rendered"


def test_a_template_without_tools_is_refused_for_a_conversation_with_them(tokenizers: Any) -> None:
    with pytest.raises(InvalidRow, match="leaves out tools: tools has 'add', its rendering has not"):
        ChatMasks(tokenizers["smollm2"]).encode(with_tools())


def test_a_slow_tokenizer_is_refused() -> None:
    slow = SimpleNamespace(is_fast=False)
    with pytest.raises(DataError, match=r"does not tell which characters .* a model folder with a tokenizer.json"):
        ChatMasks(slow)


def test_a_base_model_gets_plain_text_that_ends_with_the_end_token() -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = None
    masks = ChatMasks(tokenizer)
    ids, turns = masks.encode(talk("1 + 1 =", "2", "2 + 2 =", "4", system="Add."))
    assert marked(tokenizer, ids, turns) == "Add.\n\n1 + 1 =\n⟦2⟧\n\n2 + 2 =\n⟦4<|im_end|>⟧"
    prompt_ids = ChatFormat(tokenizer, system_prompt="Add.", examples=[("1 + 1 =", "2")]).render("2 + 2 =")[1]
    assert ids[: turns[-1][0]] == prompt_ids


def test_plain_text_has_a_start_token_if_the_tokenizer_writes_one_and_an_end_token(tokenizers: Any) -> None:
    for text in ("It is.", "It is.<|eot_id|>"):
        ids, turns = ChatMasks(tokenizers["llama3"]).encode(Conversation(id="", messages=[], plain=text))
        assert (tokenizers["llama3"].decode(ids), turns) == ("<|begin_of_text|>It is.<|eot_id|>", [])
    ids, _ = ChatMasks(tokenizers["qwen3"]).encode(Conversation(id="", messages=[], plain="It is."))
    assert tokenizers["qwen3"].decode(ids) == "It is.<|im_end|>"
