"""Curated rows as tokens, and which of them carry loss. An unusable row is listed with its reason,
never truncated or repaired."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from tasks.models import chat_text
from tasks.thoughts import PLAIN, Form, closed_by, named_in, opened_by

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # what torch's cross-entropy leaves out
THOUGHT_FIELDS = ("reasoning_content", "thinking")
"""Fields of a message whose mention says that a template renders thoughts."""
Rows = Sequence[Mapping[str, Any]]
DropReason = Literal["overlong", "empty_reasoning", "empty_answer", "control_token"]


class Dropped(Record):
    """A row that is not trained on, and why. `tokens` counts prompt and completion."""

    candidate_id: str
    reason: DropReason
    tokens: int


class Example(NamedTuple):
    """One row as text and as token ids: prompt, then completion."""

    candidate_id: str
    reasoning: str
    answer: str
    prompt: str
    completion: str
    input_ids: Sequence[int] = ()
    prompt_tokens: int = 0

    @property
    def tokens(self) -> int:
        return len(self.input_ids)

    @property
    def completion_tokens(self) -> int:
        return self.tokens - self.prompt_tokens

    @property
    def labels(self) -> list[int]:
        return [IGNORED] * self.prompt_tokens + list(self.input_ids[self.prompt_tokens :])


def examples_of(rows: Rows, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """One example per row of `tasks.tables.CURATED` with its `prompt`, the user's turn, in order.

    The prompt is the chat up to the generation prompt; the completion the reasoning between the
    template's own marks of a thought (`<think>` where it has none, and nothing around no
    reasoning), the answer and, unless cut off (`finish_reason` "length"), the tokenizer's end
    token. Raises UsageError for a tokenizer without chat template or end token, and a template that
    keeps the model from thinking or marks thoughts in an unknown form.
    """
    form = _thoughts_of(tokenizer)
    examples = [_as_text(row, tokenizer, form) for row in rows]
    prompts = _token_ids([each.prompt for each in examples], tokenizer)
    wholes = _token_ids([each.prompt + each.completion for each in examples], tokenizer)
    made = []
    for example, prompt, whole in zip(examples, prompts, wholes, strict=True):
        if whole[: len(prompt)] != prompt:  # a token spans both: generation starts after the prompt
            whole = prompt + _token_ids([example.completion], tokenizer)[0]
        made.append(example._replace(input_ids=whole, prompt_tokens=len(prompt)))
    return made


def _thoughts_of(tokenizer: PreTrainedTokenizerBase) -> Form | None:
    """The form of the template's thoughts; None where it has none."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise UsageError(
            "the base model's tokenizer has no chat template",
            "train an instruct or reasoning model, or add chat_template.jinja",
        )
    if not tokenizer.eos_token:
        raise UsageError(
            "the base model's tokenizer has no end token: the trained model would not"
            " learn to end its answers",
            "set eos_token in its tokenizer_config.json to the token that ends a turn, or train an"
            " instruct or reasoning model",
        )
    prompt = chat_text(tokenizer, "x")
    if closed_by(prompt):
        raise UsageError(
            "the base model's chat template ends its prompt with a closed thought: it would learn"
            " to think in its answers",
            "set enable_thinking to true in its chat_template.jinja, for training and for servers"
            " alike, or train a model that thinks by default",
        )
    form = opened_by(prompt) or named_in(str(template))
    if form is None and any(name in str(template) for name in THOUGHT_FIELDS):
        raise UsageError(
            "the base model's chat template marks thoughts in a form that is not known",
            "add its marks to tasks/thoughts.toml, or train a model that writes <think>",
        )
    return form


def _as_text(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, form: Form | None
) -> Example:
    prompt = chat_text(tokenizer, row["prompt"])
    reasoning, answer = (row["reasoning"] or "").strip(), (row["answer"] or "").strip()
    # QwQ's generation prompt opens the think block; where a template does not (Qwen3), the model
    # itself writes the tag
    marks = form or PLAIN
    opening = "" if opened_by(prompt) else marks.opening
    thought = f"{opening}{reasoning}{marks.closing}" if form or reasoning else ""
    end = "" if row.get("finish_reason") == "length" else tokenizer.eos_token
    completion = f"{thought}{answer}{end}"
    return Example(row["candidate_id"], reasoning, answer, prompt, completion)


def _token_ids(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    if not texts:
        return []
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)
    found: list[list[int]] = encoded["input_ids"]
    return found


def select_examples(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[list[Example], list[Dropped]]:
    """Examples to train on and those that cannot be, in order. `control_token`: the text itself
    holds a mark of thoughts or a special token. Raises UsageError where nothing is left."""
    kept, dropped = [], []
    form = _thoughts_of(tokenizer)
    marks = [mark.strip() for each in (PLAIN, form or PLAIN) for mark in each[:2]]
    control = {*marks, *tokenizer.all_special_tokens}
    for example in examples:
        if reason := _reason_to_drop(example, control, max_length, thinks=form is not None):
            dropped.append(
                Dropped(candidate_id=example.candidate_id, reason=reason, tokens=example.tokens)
            )
        else:
            kept.append(example)
    if not kept:
        longest = max((row.tokens for row in dropped if row.reason == "overlong"), default=0)
        raise UsageError(
            f"no row is left to train on (of {len(examples)}):"
            f" {_listing(dropped) or 'the set is empty'}",
            f"raise max_length to {longest}" if longest else "curate more rows",
        )
    return kept, dropped


def _reason_to_drop(
    example: Example, control: Collection[str], max_length: int, *, thinks: bool
) -> DropReason | None:
    if thinks and not example.reasoning:
        return "empty_reasoning"
    if not example.answer:
        return "empty_answer"
    if any(token in example.reasoning or token in example.answer for token in control):
        return "control_token"
    if example.tokens > max_length:
        return "overlong"
    return None


SHOWN = 5


def _listing(dropped: Sequence[Dropped]) -> str:
    named = ", ".join(
        f"{row.candidate_id} ({row.reason}, {row.tokens} tokens)" for row in dropped[:SHOWN]
    )
    return named + (f" and {len(dropped) - SHOWN} more" if len(dropped) > SHOWN else "")
