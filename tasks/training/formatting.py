"""Curated rows as the text a reasoning model reads and emits, and which of its tokens carry loss.

Guarantees: the prompt ends exactly where generation starts and the completion is exactly what the
model would emit from there, with the whole reasoning, and the end token where it wrote one; both
are strings, because conversational rows go through the chat template again and Qwen-style templates
then strip the reasoning silently. A row that cannot be trained on is listed with its reason, never
truncated and never repaired. Does not guarantee anything of what the text says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from tasks.sources.small_model import chat_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
IGNORED = -100  # what torch's cross-entropy leaves out
Rows = Sequence[Mapping[str, Any]]
DropReason = Literal["overlong", "empty_reasoning", "empty_answer", "control_token"]


class Dropped(Record):
    """A row that is not trained on, and why. `tokens` counts prompt and completion."""

    candidate_id: str
    reason: DropReason
    tokens: int


class LabelMask(NamedTuple):
    """Token ids of a whole example, and for each whether it carries loss. Both of length prompt +
    completion."""

    input_ids: list[int]
    carries_loss: list[bool]

    @property
    def labels(self) -> list[int]:
        """The ids that carry loss, IGNORED elsewhere."""
        pairs = zip(self.input_ids, self.carries_loss, strict=True)
        return [token if carries else IGNORED for token, carries in pairs]


def tokens_of(example: Mapping[str, Any]) -> int:
    """Tokens of an example's prompt and completion."""
    return int(example["prompt_tokens"] + example["completion_tokens"])


def to_prompt_completion(rows: Rows, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """One example per row of `tasks.tables.CURATED`, in order: candidate_id, prompt, completion,
    prompt_tokens, completion_tokens, body.

    An answer that the token limit cut off (`finish_reason` "length") gets no end token: its model
    wrote none there. A row's `prompt` is the user's turn. `prompt` of the example is the chat
    rendered up to the generation prompt; `completion` the reasoning, `</think>`, the answer and the
    tokenizer's end token (`body` is the pair (reasoning, answer) that it was made of). White space
    around reasoning and answer is not kept: the newlines around `</think>` are QwQ's own. Raises
    UsageError where the tokenizer has no chat template or no end token.
    """
    if not getattr(tokenizer, "chat_template", None):
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
    examples = []
    for row in rows:
        prompt = chat_text(tokenizer, row["prompt"])
        reasoning, answer = (row["reasoning"] or "").strip(), (row["answer"] or "").strip()
        # QwQ's generation prompt opens the think block; where a template does not (Qwen3), the
        # model itself writes the tag
        opening = "" if prompt.rstrip().endswith(THINK_OPEN) else f"{THINK_OPEN}\n"
        end = "" if row.get("finish_reason") == "length" else tokenizer.eos_token
        completion = f"{opening}{reasoning}\n{THINK_CLOSE}\n\n{answer}{end}"
        examples.append(
            {
                "candidate_id": row["candidate_id"],
                "prompt": prompt,
                "completion": completion,
                "body": (reasoning, answer),
            }
        )
    for side in ("prompt", "completion") if examples else ():
        # rows above the model's window are found here and listed: the tokenizer need not warn
        texts = [example[side] for example in examples]
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        for example, ids in zip(examples, encoded, strict=True):
            example[f"{side}_tokens"] = len(ids)
    return examples


def label_mask(example: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> LabelMask:
    """Ids of prompt then completion, each tokenised alone as at inference, and the mask: the
    completion, end token included."""
    prompt = tokenizer(example["prompt"], add_special_tokens=False)["input_ids"]
    completion = tokenizer(example["completion"], add_special_tokens=False)["input_ids"]
    return LabelMask(prompt + completion, [False] * len(prompt) + [True] * len(completion))


def select_examples(
    examples: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    overlong: Literal["drop", "refuse"],
) -> tuple[list[dict[str, Any]], list[Dropped]]:
    """Examples to train on and those that cannot be, in order.

    `control_token`: the text itself holds a think tag or one of the tokenizer's special tokens,
    which would end the turn or the reasoning in the middle. With `overlong="refuse"` the first list
    is never shorter than the input: UsageError names the rows instead. Raises UsageError where
    nothing is left.
    """
    kept, dropped = [], []
    for example in examples:
        if reason := _reason_to_drop(example, tokenizer, max_length):
            name, tokens = example["candidate_id"], tokens_of(example)
            dropped.append(Dropped(candidate_id=name, reason=reason, tokens=tokens))
        else:
            kept.append(example)
    if dropped and overlong == "refuse":
        raise UsageError(
            f"{len(dropped)} of {len(examples)} rows cannot be trained on: {_listing(dropped)}",
            _way_out(dropped),
        )
    if not kept:
        raise UsageError(
            f"no row is left to train on (of {len(examples)}):"
            f" {_listing(dropped) or 'the set is empty'}",
            _way_out(dropped),
        )
    return kept, dropped


def _reason_to_drop(
    example: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> DropReason | None:
    reasoning, answer = example["body"]
    if not reasoning:
        return "empty_reasoning"
    if not answer:
        return "empty_answer"
    control = {THINK_OPEN, THINK_CLOSE, *tokenizer.all_special_tokens}
    if any(token in reasoning or token in answer for token in control):
        return "control_token"
    if tokens_of(example) > max_length:
        return "overlong"
    return None


SHOWN = 5


def _listing(dropped: Sequence[Dropped]) -> str:
    named = ", ".join(
        f"{row.candidate_id} ({row.reason}, {row.tokens} tokens)" for row in dropped[:SHOWN]
    )
    return named + (f" and {len(dropped) - SHOWN} more" if len(dropped) > SHOWN else "")


def _way_out(dropped: Sequence[Dropped]) -> str:
    longest = max((row.tokens for row in dropped if row.reason == "overlong"), default=0)
    if longest:
        return f"raise max_length to {longest}, or set overlong to drop and train on the rest"
    return (
        "curate more rows, or set overlong to drop and train on the rest"
        if dropped
        else "curate at least one row"
    )
