"""What the demo's small model reads before it is tuned: programs of one family
(tasks.sources.bundled.pairs) in the pipeline's own prompt, answered by the same program in PyTorch
and, of three answers one, by a kernel. So it knows both, and writes the first: tuning turns it to
the second.

Guarantees: deterministic on one machine; no held-out pair is read.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from kernels_eval.records import Record
from tasks.models import chat_text
from tasks.sources import bundled
from tasks.sources.bundled import pairs

TASK_STARTS, TASK_ENDS = "Now the program", "\nRules:"
"""Between them prompts differ."""
WORD = re.compile(" [a-z]{2,}")
IN_PROMPTS, IN_EXCERPTS = (False, False, True), (False, True, True)
"""Which answers are kernels. In prompts few are, so that the base rarely writes one."""


class PretrainingConfig(Record):
    """All weights are trained, for about half a minute of one core: first on excerpts, then on
    whole prompts."""

    excerpt_steps: NonNegativeInt = 40
    """steps that read a task's title and `forward` among a few lines of the prompt"""
    prompt_steps: NonNegativeInt = 40
    """steps that read whole prompts; what all begin with is read once a step"""
    excerpts: PositiveInt = 12
    """rows of a step of excerpts"""
    prompts: PositiveInt = 6
    """rows of a step of prompts; one has its answer's rest, too, in which pairs do not differ"""
    filler: NonNegativeInt = 100
    """most tokens of the rules between an excerpt's task and its answer: at one distance alone,
    attention learns the distance and not the token"""
    renamed: float = Field(default=0.15, ge=0, le=1)
    """share of rows whose function is another word of the vocabulary"""
    name_weight: PositiveFloat = 5.0
    """of the tokens in which pairs differ, a function's name and an operator, in the loss of an
    answer"""
    learning_rate: PositiveFloat = 3e-3
    """peak; cosine"""
    weight_decay: NonNegativeFloat = 0.1
    initial_std: PositiveFloat = 0.08
    """of the random weights: with transformers' 0.02, which is for wide models, attention takes
    several times as many steps to find a token"""
    rope_theta: PositiveFloat = 1e6
    """Qwen2.5's"""


class Document(NamedTuple):
    """Token ids: what is given, the learned part in which pairs differ, and the learned rest;
    `names` are those of its function and operator."""

    given: list[int]
    head: list[int]
    rest: list[int]
    names: frozenset[int]


def pretrain(model: Any, tokenizer: Any, config: PretrainingConfig, seed: int) -> None:
    """Train `model` in place on every pair but those held out."""
    import torch

    draws = random.Random(seed)
    reader = Reader(tokenizer, config, draws)
    steps = config.excerpt_steps + config.prompt_steps
    optimiser = torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=config.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, config.learning_rate, total_steps=steps, pct_start=0.05, final_div_factor=100
    )
    excerpts = reader.excerpts()
    prompts = reader.prompts()
    model.train()
    for step in range(steps):
        if step < config.excerpt_steps:
            rows = with_one_rest(list(islice(excerpts, config.excerpts)))
            loss = reader.loss(model, rows, [])
        else:
            rows = with_one_rest(list(islice(prompts, config.prompts)))
            loss = reader.loss(model, rows, reader.prefix)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    model.eval()


class Reader:
    """Documents in a tokenizer's ids, and a model's loss on them."""

    def __init__(self, tokenizer: Any, config: PretrainingConfig, draws: random.Random) -> None:
        self.tokenizer, self.config, self.draws = tokenizer, config, draws
        prompt = self.prompt(pairs.read()[0])
        self.prefix = self.ids(prompt[: prompt.index(TASK_STARTS)])
        _, rules, opening = prompt.rpartition(TASK_ENDS)
        rules, turn, opening = (rules + opening).partition("<|im_end|>")
        self.rules, self.turn = self.ids(rules), self.ids(turn + opening)
        written = [f"{mark}{name}" for mark in " ." for name in pairs.FUNCTIONS]
        self.functions = {self.ids(name)[0] for name in written}
        signs = [f" {sign}" for sign in ("+", "-", "*", "/", *pairs.OPERATORS)]
        self.operators = {self.ids(sign)[0] for sign in signs}
        self.names = frozenset(self.functions | self.operators)
        words = [each for each in range(len(tokenizer)) if each not in self.names]
        self.words = [each for each in words if WORD.fullmatch(tokenizer.decode([each]))]

    def prompts(self) -> Iterator[Document]:
        """Prompts behind `prefix`, and answers. Of those without a kernel all is head."""
        found = []
        for pair in pairs.read():
            prompt = self.prompt(pair)
            given = self.ids(prompt[prompt.index(TASK_STARTS) :])
            found += [self.answered(given, pair, kernel) for kernel in IN_PROMPTS]
        while True:
            yield from map(self.renamed, self.draws.sample(found, len(found)))

    def excerpts(self) -> Iterator[Document]:
        """Title and `forward`, filler, and the answer."""
        found = []
        for pair in pairs.read():
            lines = pair.forward.partition("\n")[2]
            given = self.ids(f'"""{pair.title}."""\n{lines}')
            found += [self.answered(given, pair, kernel) for kernel in IN_EXCERPTS]
        while True:
            for excerpt in self.draws.sample(found, len(found)):
                size = self.draws.randint(0, min(self.config.filler, len(self.rules)))
                start = self.draws.randint(0, len(self.rules) - size)
                filler = self.rules[start : start + size] + self.turn
                yield self.renamed(excerpt._replace(given=excerpt.given + filler))

    def answered(self, given: list[int], pair: pairs.Pair, kernel: bool) -> Document:
        end = [self.tokenizer.eos_token_id]
        if kernel:
            rest = self.ids(f"{pairs.KERNEL_REST}```") + end
            return Document(given, self.ids(pair.opening + pair.kernel_head), rest, self.names)
        head = self.ids(f"{pair.opening}{pair.rewrite}```") + end
        return Document(given, head, [], self.names)

    def renamed(self, document: Document) -> Document:
        """The document, or with the configured share its function under another name."""
        if self.draws.random() >= self.config.renamed:
            return document
        word = self.draws.choice(self.words)
        swap = dict.fromkeys(self.functions, word)
        given, head, rest = ([swap.get(each, each) for each in part] for part in document[:3])
        return Document(given, head, rest, frozenset({word, *self.operators}))

    def prompt(self, pair: pairs.Pair) -> str:
        return chat_text(self.tokenizer, bundled.prompt(pair.code))

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def loss(self, model: Any, rows: Sequence[Document], prefix: list[int]) -> Any:
        """Mean loss of the heads' tokens, where names weigh more, and of the rests'."""
        import torch

        longest = max(len(row.given) + len(row.head) + len(row.rest) for row in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        weights = torch.zeros(len(rows), longest)
        # padding is on the right, behind what a causal model reads
        heads, rests = (sum(map(len, part)) for part in list(zip(*rows, strict=True))[1:3])
        for number, row in enumerate(rows):
            tokens = torch.tensor(row.given + row.head + row.rest)
            start, end = len(row.given), len(row.given) + len(row.head)
            ids[number, : len(tokens)] = tokens
            named = torch.tensor([each in row.names for each in row.head])
            weights[number, start:end] = (1 + named * (self.config.name_weight - 1)) / heads
            weights[number, end : len(tokens)] = 1 / max(rests, 1)
        cache = None
        if prefix:
            cache = model.model(torch.tensor([prefix]), use_cache=True).past_key_values
            cache.batch_repeat_interleave(len(rows))
        read = model.model(ids, past_key_values=cache, use_cache=bool(prefix)).last_hidden_state
        learned = weights[:, 1:] > 0
        logits = model.lm_head(read[:, :-1][learned])
        losses = torch.nn.functional.cross_entropy(logits, ids[:, 1:][learned], reduction="none")
        return (losses * weights[:, 1:][learned]).sum()


def with_one_rest(rows: Sequence[Document]) -> list[Document]:
    """The rows, the rest but of the first that has one left out: there, pairs do not differ."""
    first = next((number for number, row in enumerate(rows) if row.rest), None)
    return [row if number == first else row._replace(rest=[]) for number, row in enumerate(rows)]
