"""What training shows the model is what sampling asks it and what the parser reads back, under
templates like those of QwQ and of Qwen3."""

import unicodedata
from functools import cache

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import PretrainedConfig

from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask, Language, SamplingParams
from tasks.models import load_tokenizer
from tasks.sources.small_model import SmallModelConfig, build_small_model
from tasks.synthesis.local import TransformersSampler
from tasks.synthesis.parsing import parse_response
from tasks.synthesis.sampler import Request
from tasks.training.formatting import IGNORED, examples_of, select_examples

REASONING = (
    "Rows are independent, so take four at once.\n\n```cpp\nacc += x[j];\n```\n\nThat hides the"
    " latency of the add. Wait, \u6f22 is fine."
)
CODE = "import torch.nn as nn\n\n\nclass ModelNew(nn.Module):\n    pass\n"
ANSWER = f"Four rows at a time:\n\n```python\n{CODE}```\n\nIt needs no shared memory."
PROMPT = "Write a kernel for\nclass Model(nn.Module): ...\n"
# As QwQ-32B's: the generation prompt opens the think block, and an assistant turn of the history
# loses its reasoning
QWQ = (
    "{%- for m in messages %}{%- set text = m.content %}{%- if m.role == 'assistant' and '</think>'"
    " in text %}{%- set text = text.split('</think>')[-1].lstrip('\\n') %}{%- endif %}{{-"
    " '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}{%- endfor %}{%- if"
    " add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)
# As Qwen3's: the same, but the model writes the tag itself; asked not to think it finds an empty
# block
QWEN3 = QWQ.replace(
    "assistant\\n<think>\\n' }}",
    "assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}{{-"
    " '<think>\\n\\n</think>\\n\\n' }}{%- endif %}",
)
# As gpt-oss's and Magistral's: thoughts stand between marks of their own
GPT_OSS, MAGISTRAL = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- if m.thinking %}{{- '" + mark + "' + m.thinking }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    for mark in ("<|channel|>analysis<|message|>", "[THINK]")
)
# As Qwen2.5's: no thoughts at all
PLAIN = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TEMPLATES = pytest.mark.parametrize("template", [QWQ, QWEN3], ids=["qwq", "qwen3"])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    config = SmallModelConfig(
        vocab_size=600,
        hidden_size=16,
        layers=1,
        heads=2,
        kv_heads=1,
        intermediate_size=16,
        max_positions=4096,
    )
    return build_small_model(
        tmp_path_factory.mktemp("models") / "small", [REASONING, ANSWER, PROMPT], config
    )


@cache
def tokenizer_with(base, template):
    tokenizer = load_tokenizer(base)
    tokenizer.chat_template = template
    return tokenizer


def example_of(tokenizer, reasoning=REASONING, answer=ANSWER):
    row = {"candidate_id": "c", "prompt": PROMPT, "reasoning": reasoning, "answer": answer}
    (example,) = examples_of([row], tokenizer)
    return example


def carried(example):
    """The tokens that carry loss."""
    return [label for label in example.labels if label != IGNORED]


class Parrot:
    """A model that says, after the one prompt it knows, what it was told to; any other prompt is an
    error."""

    def __init__(self, prompt, says, vocabulary):
        import torch

        self.prompt, self.says, self.vocabulary = prompt, says, vocabulary
        self.config = PretrainedConfig(max_position_embeddings=4096, num_hidden_layers=1)
        self.device = torch.device("cpu")

    def generate(self, input_ids, generation_config, **_):
        import torch

        assert input_ids[0].tolist() == self.prompt, (
            "sampling asks with other tokens than training has shown"
        )
        said = self.says[: generation_config.max_new_tokens]
        return torch.cat([input_ids, torch.tensor([said])], dim=1)


@pytest.mark.parametrize(
    "template, reasoning, answer",
    [
        *((template, REASONING, ANSWER) for template in (QWQ, QWEN3, GPT_OSS, MAGISTRAL)),
        (PLAIN, "", ANSWER.partition("\n\n")[2]),
    ],
    ids=["qwq", "qwen3", "gpt-oss", "magistral", "plain"],
)
def test_what_is_trained_on_comes_back_through_sampling_and_parsing(
    base, template, reasoning, answer
):
    tokenizer = tokenizer_with(base, template)
    example = example_of(tokenizer, reasoning, answer)
    assert select_examples([example], tokenizer, 4096)[0]
    labels = carried(example)
    prompt = list(example.input_ids[: -len(labels)])
    # beyond the end token there is something more to say: who does not stop at it says it
    parrot = Parrot(prompt, [*labels, *labels], len(tokenizer))
    sampler = TransformersSampler(base, None, "small")
    loaded = sampler.loaded
    loaded.tokenizer, loaded.model = tokenizer, parrot
    task = KernelTask(task_id="t", name="t", code="class Model: pass")
    sampling = SamplingParams(temperature=0.0, max_tokens=2 * len(labels))
    request = Request(
        request_key="r",
        task=task,
        language=Language.CPP,
        prompt=PROMPT,
        sample_index=0,
        sampling=sampling,
    )
    (response,) = sampler.sample([request])
    assert (response.finish_reason, response.completion_tokens) == ("stop", len(labels)), (
        "it ends with the end token, itself trained on"
    )
    parsed = parse_response(response.text, finish_reason=response.finish_reason)
    assert (parsed.reasoning, parsed.answer, parsed.code) == (reasoning, answer, CODE)


@TEMPLATES
def test_the_whole_reasoning_and_one_end_token_carry_loss_and_no_token_of_the_prompt_does(
    base, template
):
    tokenizer = tokenizer_with(base, template)
    example = example_of(tokenizer)
    end, open_tag, close_tag = tokenizer.convert_tokens_to_ids(
        ["<|im_end|>", "<think>", "</think>"]
    )
    labels = carried(example)
    assert labels[-1] == end and labels.count(end) == 1 and labels.count(close_tag) == 1
    reasoning, answer = (
        tokenizer.decode(part)
        for part in (labels[: labels.index(close_tag)], labels[labels.index(close_tag) + 1 : -1])
    )
    assert reasoning.removeprefix("<think>\n") == REASONING + "\n" and answer == "\n\n" + ANSWER
    assert labels.count(open_tag) == (1 if template == QWEN3 else 0), (
        "the model learns to open the block only where nobody opens it for it"
    )
    whole = tokenizer.decode(example.input_ids)
    assert whole.count("<think>\n") == 1 and whole.index(PROMPT) < whole.index("<think>\n"), (
        "one block, after the user's turn"
    )


@TEMPLATES
def test_a_template_that_strips_the_reasoning_of_its_history_does_not_touch_ours(base, template):
    tokenizer = tokenizer_with(base, template)
    turns = [
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": f"<think>\n{REASONING}\n</think>\n\n{ANSWER}"},
    ]
    assert REASONING not in tokenizer.apply_chat_template(turns, tokenize=False), (
        "what conversational rows would have become"
    )
    assert REASONING in example_of(tokenizer).completion


def test_a_tokenizer_without_template_or_end_token_is_refused(base):
    for attribute, said in (("chat_template", "no chat template"), ("eos_token", "no end token")):
        tokenizer = load_tokenizer(base)
        setattr(tokenizer, attribute, None)
        with pytest.raises(UsageError, match=said):
            example_of(tokenizer)


@pytest.mark.parametrize(
    "template, said, fix",
    [
        (
            QWEN3.replace("is false", "is not true").replace("is defined and", "is not defined or"),
            "closed thought",
            "enable_thinking",
        ),
        (GPT_OSS.replace("<|channel|>analysis<|message|>", "~~"), "not known", "thoughts.toml"),
    ],
    ids=["does-not-think", "unknown-marks"],
)
def test_a_template_in_which_a_model_would_think_in_its_answers_is_refused(
    base, template, said, fix
):
    with pytest.raises(UsageError, match=f"(?s){said}.*{fix}"):
        example_of(tokenizer_with(base, template))


LINE = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=40)
TEXT = st.lists(LINE, min_size=1, max_size=6).map("\n".join)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(reasoning=TEXT, remark=TEXT)
@TEMPLATES
def test_any_text_that_is_kept_decodes_to_itself_and_parses_to_its_parts(
    base, template, reasoning, remark
):
    # Qwen's tokenizers compose characters (NFC); what a model wrote is composed already
    reasoning, remark = (unicodedata.normalize("NFC", text).strip() for text in (reasoning, remark))
    tokenizer = tokenizer_with(base, template)
    example = example_of(tokenizer, reasoning, f"```python\n{CODE}```\n{remark}")
    assume(reasoning and "```" not in reasoning + remark and "~~~" not in reasoning + remark)
    assume(
        not any(
            token in reasoning + remark
            for token in ("<think>", "</think>", *tokenizer.all_special_tokens)
        )
    )
    (kept,), dropped = select_examples([example], tokenizer, 100_000)
    assert dropped == []
    labels = carried(kept)
    text = tokenizer.decode(labels, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    parsed = parse_response(text, finish_reason="stop")
    assert (parsed.reasoning, parsed.answer, parsed.code) == (reasoning, kept.answer, CODE)


@TEMPLATES
def test_an_answer_that_was_cut_off_is_trained_without_an_end_token(base, template):
    tokenizer = tokenizer_with(base, template)
    row = {"candidate_id": "a", "prompt": PROMPT, "reasoning": REASONING, "answer": ANSWER}
    whole, cut = examples_of(
        [row | {"finish_reason": "stop"}, row | {"finish_reason": "length"}], tokenizer
    )
    assert whole.completion == cut.completion + tokenizer.eos_token
    assert cut.input_ids[-1] != tokenizer.eos_token_id
