"""The small model is built whole, reused and stable; the in-process sampler is deterministic and
says how it ended."""

import re
from itertools import islice
from random import Random

import pytest
from pydantic import ValidationError

from flows.config import load_profile
from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask
from tasks.models import (
    chat_text,
    count_tokens,
    load_causal_model,
    load_tokenizer,
    written_text,
)
from tasks.sources.bundled import pairs
from tasks.sources.pretraining import TASK_ENDS, TASK_STARTS, PretrainingConfig, Reader
from tasks.sources.small_model import (
    SmallModelConfig,
    build_small_model,
    pretrained_texts,
    resolve_model,
)
from tasks.synthesis.local import TransformersSampler
from tasks.synthesis.prompts import render
from tasks.training.recipe import FIXED
from tests.support.requests import make_request

TEXTS = [
    "Replace the module with a fused kernel. The loop is bound by memory: 4 MB in, 4 MB out.",
    (
        "class ModelNew(nn.Module):\n    def forward(self, x: torch.Tensor) -> torch.Tensor:\n     "
        "   return ext.softmax(x)\n"
    ),
    "for (int64_t i = 0; i < rows; ++i) {\n    float best = -INFINITY;\n}\n",
]
CONFIG = SmallModelConfig(
    vocab_size=600,
    hidden_size=32,
    layers=2,
    heads=2,
    kv_heads=1,
    intermediate_size=64,
    max_positions=1024,
)
TRICKY = [
    "1234567 tokens,  two spaces\tand a tab\r\n\r\n  indented",
    "don't WE'LL i'm",
    "caf\u00e9 cafe\u0301 \u6f22\u5b57 \U0001f600 \ufb01",
    "<think>\nso\n</think>\n\nanswer<|im_end|>\n<|im_start|>user\n",
    "\n\n\n    return x\n\n\n",
    "<|endoftext|>",
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return build_small_model(tmp_path_factory.mktemp("models") / "small", TEXTS, CONFIG)


# -- the model -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TRICKY)
def test_ids_do_not_change_when_the_tokenizer_is_loaded_and_saved_again(model_dir, tmp_path, text):
    from tokenizers import Tokenizer

    written = (
        Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        .encode(text, add_special_tokens=False)
        .ids
    )
    loaded = load_tokenizer(model_dir)
    assert type(loaded).__name__ == "Qwen2Tokenizer"
    loaded.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes(
        (model_dir / "config.json").read_bytes()
    )  # its model type picks the tokenizer class
    again = load_tokenizer(tmp_path)
    assert loaded(text)["input_ids"] == written == again(text)["input_ids"]


def test_text_survives_the_tokenizer_and_think_tags_are_single_plain_tokens(model_dir):
    tokenizer = load_tokenizer(model_dir)
    text = "<think>\n\u6f22 x[1] = 2;\n</think>\n\nok"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    for tag in ("<think>", "</think>"):
        assert len(tokenizer(tag)["input_ids"]) == 1 and tag not in tokenizer.all_special_tokens
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_the_template_opens_the_think_block_and_strips_reasoning_from_the_history(model_dir):
    turns = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nsecret\n</think>\n\nfirst"},
        {"role": "user", "content": "two"},
    ]
    text = load_tokenizer(model_dir).apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>assistant\n<think>\n")
    assert "<|im_start|>assistant\nfirst<|im_end|>\n" in text and "secret" not in text


def test_every_id_the_model_can_emit_is_a_token(model_dir):
    import torch

    model = load_causal_model(model_dir, dtype=torch.float32)
    assert (
        model.config.vocab_size
        == model.lm_head.out_features
        == len(load_tokenizer(model_dir))
        <= CONFIG.vocab_size
    )


def test_the_same_seed_gives_the_same_weights_and_another_gives_others(model_dir, tmp_path):
    same = build_small_model(tmp_path / "same", TEXTS, CONFIG)
    other = build_small_model(tmp_path / "other", TEXTS, CONFIG.model_copy(update={"seed": 1}))
    weights = [(path / "model.safetensors").read_bytes() for path in (model_dir, same, other)]
    assert weights[0] == weights[1] != weights[2]
    assert (model_dir / "tokenizer.json").read_bytes() == (same / "tokenizer.json").read_bytes()


def test_no_adapter_makes_the_demos_model_sure_of_a_token_as_its_report_says(tmp_path):
    """The output layer and the norm before it are in no adapter, so the length of what the layer
    reads, and with it the spread of the logits, is bounded."""
    model = load_causal_model(resolve_model("small", str(tmp_path)), dtype="float32")
    head, norm = model.lm_head.weight, model.model.norm.weight
    assert not {"lm_head", "norm"} & set(FIXED.target_modules)
    length = norm.max() * head.shape[1] ** 0.5
    temperature = load_profile("cuda").benchmark.sampling.temperature
    # above its mean, which every token shares: by Jensen's inequality the others sum to their count
    highest = (head - head.mean(0)).norm(dim=1).max() * length / temperature
    assert highest.exp() / len(head) < 0.03


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained") / "model"
    tokenizer = load_tokenizer(build_small_model(folder, pretrained_texts()))
    return Reader(tokenizer, PretrainingConfig(renamed=0.5), Random(0))


def test_pretraining_reads_no_pair_that_is_held_out(reader):
    held_out = [(pair.function, f"of {pair.operator}") for pair in pairs.HELD_OUT]
    seen = set()
    for documents in (reader.prompts(), reader.excerpts()):
        for document in islice(documents, 300):
            text = reader.tokenizer.decode(document.given + document.head)
            title = re.search(r'"""Elementwise (\w+) (of \w+)\."""', text)
            assert title and title.groups() not in held_out
            seen.add(title[1])
    assert {*pairs.FUNCTIONS} < seen, "other names are read, too"


def test_a_prompt_that_is_read_is_the_one_that_is_asked(reader):
    pair = pairs.read()[0]
    task = KernelTask(task_id="bundled/t", name="t", code=pair.code, source="bundled")
    asked = chat_text(reader.tokenizer, render(task, pairs.LANGUAGE))
    given = next(doc.given for doc in reader.prompts() if doc.names == reader.names)
    text = reader.tokenizer.decode(reader.prefix + given)
    assert text.startswith(asked[: asked.index(TASK_STARTS)])
    assert text.endswith(asked[asked.index(TASK_ENDS) :])


def test_pretraining_is_deterministic_and_changes_the_weights(tmp_path):
    short = PretrainingConfig(excerpt_steps=2, prompt_steps=2, excerpts=2, prompts=2)
    config = SmallModelConfig(hidden_size=32, intermediate_size=64, pretraining=short)
    longer = short.model_copy(update={"prompt_steps": 3})
    configs = config, config, config.model_copy(update={"pretraining": longer})
    weights = []
    for number, each in enumerate(configs):
        folder = build_small_model(tmp_path / str(number), pretrained_texts(), each)
        weights.append((folder / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_a_finished_model_is_reused_and_anything_else_in_the_way_is_refused(model_dir, tmp_path):
    before = {path.name: path.stat().st_mtime_ns for path in model_dir.iterdir()}
    assert build_small_model(model_dir, TEXTS, CONFIG) == model_dir
    assert {path.name: path.stat().st_mtime_ns for path in model_dir.iterdir()} == before
    with pytest.raises(UsageError, match="something other"):
        build_small_model(model_dir, [*TEXTS, "more"], CONFIG)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="something other"):
        build_small_model(tmp_path, TEXTS, CONFIG)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_counting_takes_any_text_and_names_a_missing_tokenizer(model_dir, tmp_path):
    assert count_tokens(model_dir, ["", "<think>", "a\ud800b"])[:2] == [0, 1]
    assert count_tokens(model_dir, []) == []
    with pytest.raises(UsageError, match="cannot load"):
        count_tokens(tmp_path, ["x"])


def test_no_texts_and_impossible_shapes_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no text"):
        build_small_model(tmp_path / "small", ["", ""], CONFIG)
    with pytest.raises(ValidationError):
        SmallModelConfig(hidden_size=130, heads=4)


# -- the sampler -----------------------------------------------------------------------------------


def requests(count, *, seed=0, max_tokens=40, temperature=1.0, top_p=1.0):
    """Two prompts of different length, alternating."""
    options = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    return [
        make_request(index // 2, prompt=TEXTS[index % 2], key=f"key-{index}", **options)
        for index in range(count)
    ]


def texts(sampler, wanted):
    responses = list(sampler.sample(wanted))
    assert len(responses) == len(wanted)
    return {response.request_key: response.text for response in responses}


def test_the_same_requests_give_the_same_text_in_any_order(model_dir, monkeypatch):
    wanted = requests(8, top_p=0.9)
    expected = texts(TransformersSampler(model_dir, None, "small"), wanted)
    assert texts(TransformersSampler(model_dir, None, "small"), wanted[::-1]) == expected
    assert len(set(expected.values())) == 8, "requests that differ only in their key draw apart"
    monkeypatch.setattr("tasks.synthesis.local.CPU_BATCH", 3)
    threes = texts(TransformersSampler(model_dir, None, "small"), wanted)
    assert threes.keys() == expected.keys()


def test_another_seed_gives_other_text_and_temperature_zero_ignores_it(model_dir):
    import torch

    sampler = TransformersSampler(model_dir, None, "small")
    before = torch.get_rng_state()
    assert texts(sampler, requests(4, seed=1)) != texts(sampler, requests(4, seed=2))
    assert torch.equal(torch.get_rng_state(), before), "the draws of others are left alone"
    greedy = texts(sampler, requests(4, seed=1, temperature=0))
    assert greedy == texts(sampler, requests(4, seed=2, temperature=0))
    nucleus = texts(sampler, requests(4, seed=3, top_p=1e-6))
    assert greedy == nucleus, "a nucleus of one token is the greedy choice"
    mixed = requests(2, temperature=0) + requests(4, seed=1)[2:]
    assert texts(sampler, mixed)["key-0"] == greedy["key-0"], "each has its own settings"


def test_responses_end_at_the_end_token_or_at_their_limit(model_dir):
    responses = list(
        TransformersSampler(model_dir, None, "small").sample(requests(16, max_tokens=300))
    )
    assert {response.finish_reason for response in responses} == {"stop", "length"}
    for response in responses:
        assert response.completion_tokens is not None and "<|im_end|>" not in response.text
        assert (response.completion_tokens == 300) or response.finish_reason == "stop"


def test_think_tags_stay_in_the_text_and_special_tokens_do_not(model_dir):
    tokenizer = load_tokenizer(model_dir)
    ids = tokenizer("so\n</think>\n\nanswer<|im_end|>")["input_ids"]
    assert written_text(tokenizer, ids) == "so\n</think>\n\nanswer"


def test_a_prompt_that_fills_the_window_is_named_and_a_limit_beyond_it_is_cut(model_dir):
    sampler = TransformersSampler(model_dir, None, "small")
    request = requests(1)[0]
    with pytest.raises(UsageError, match="user/mine has .* window is 1024"):
        list(sampler.sample([request.model_copy(update={"prompt": "x y " * 1200})]))
    (limited,) = requests(1, max_tokens=5000, temperature=0)
    limited = limited.model_copy(update={"prompt": "x y " * 312})
    tokens = len(sampler.loaded.encode(limited).prompt)
    assert tokens > 900
    (response,) = sampler.sample([limited])
    assert response.completion_tokens == 1024 - tokens or response.finish_reason == "stop"


def test_an_answer_is_as_long_as_its_own_prompt_allows(model_dir):
    """Greedy, so that a batch draws nothing: an answer is the one it is alone, also beside a prompt
    that nearly fills the window."""
    sampler = TransformersSampler(model_dir, None, "small")
    sampler.loaded.ends = {-1}  # never drawn: every answer reaches its limit
    alone, crowded = requests(2, max_tokens=90, temperature=0)
    crowded = crowded.model_copy(update={"prompt": "x y " * 312})
    room = 1024 - len(sampler.loaded.encode(crowded).prompt)
    assert 0 < room < 90
    (expected,) = sampler.sample([alone])
    found = {each.request_key: each for each in sampler.sample([alone, crowded])}
    assert found[alone.request_key] == expected
    lengths = {key: each.completion_tokens for key, each in found.items()}
    assert lengths == {alone.request_key: 90, crowded.request_key: room}


def test_a_batch_that_the_device_cannot_hold_is_halved_and_no_answer_is_lost(
    model_dir, monkeypatch
):
    import torch

    wanted = requests(7, max_tokens=8)
    sampler, tried, most = TransformersSampler(model_dir, None, "small"), [], 2
    respond = sampler.loaded.respond

    def limited(rows):
        tried.append(len(rows))
        if len(rows) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return respond(rows)

    monkeypatch.setattr(sampler.loaded, "respond", limited)
    assert len(texts(sampler, wanted)) == 7 and tried == [7, 3, 1, 1, 1, 1, 1, 1, 1]
    most = 0
    with pytest.raises(UsageError, match="out of memory while sampling one response"):
        list(sampler.sample(wanted))


def test_counts_come_from_the_generators_own_tokenizer(model_dir):
    sampler = TransformersSampler(model_dir, None, "small")
    assert sampler.count_tokens(TEXTS) == [
        len(load_tokenizer(model_dir)(text)["input_ids"]) for text in TEXTS
    ]
    assert list(sampler.sample([])) == []
    sampler.close()


def test_a_missing_model_or_adapter_is_a_usage_error(model_dir, tmp_path):
    with pytest.raises(UsageError, match="cannot load"):
        list(TransformersSampler(tmp_path, None, "small").sample(requests(1)))
    with pytest.raises(UsageError, match="adapter"):
        list(TransformersSampler(model_dir, tmp_path, "small").sample(requests(1)))
