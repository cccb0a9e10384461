from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge.config import SFTDatasetConfig, SFTEvalConfig
from forge.data.documents import Document, build_documents
from forge.testing.tiny_model import make_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_byte_tokenizer()


@pytest.fixture
def build(tokenizer: Any) -> Any:
    def build(*, samples: int = 0, seq_len: int = 200, seed: int = 1, **config: Any) -> Any:
        evaluation = SFTEvalConfig(
            samples=samples, split=config.pop("eval_split", None), dataset=config.pop("eval", None)
        )
        dataset = SFTDatasetConfig(**config)
        return build_documents(dataset, eval=evaluation, tokenizer=tokenizer, seq_len=seq_len, seed=seed)

    return build


def marked(tokenizer: Any, document: Document) -> str:
    """The text, with what is trained in ⟦⟧."""
    parts, inside = [], False
    for token, trained in zip(document.token_ids, document.trained, strict=True):
        if trained != inside:
            parts.append("⟦" if trained else "⟧")
            inside = trained
        parts.append(tokenizer.decode([token]))
    return "".join(parts) + "⟧" * inside


def chat(*turns: str) -> dict[str, Any]:
    """A conversation, the user first."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def write(file: Path, rows: list[Any]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_a_generated_sum_is_worked_out_in_tags(build: Any, tokenizer: Any) -> None:
    documents, held_out = build(
        path="reasoning_gym", name="chain_sum", samples=2, seq_len=400, system_prompt="Be brief."
    )
    document = next(documents)
    assert document.id.startswith("chain_sum/")
    assert [other.id for other in held_out] == ["chain_sum/held-out/0", "chain_sum/held-out/1"]
    text = marked(tokenizer, document)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nState the final answer")
    assert "<|im_start|>assistant\n⟦<think>" in text
    assert text.endswith("</answer><|im_end|>⟧\n")
