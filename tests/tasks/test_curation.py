"""Each criterion on frames small enough to decide by hand, then the invariants of the whole rule on
arbitrary ones."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from kernels_eval.errors import UsageError
from tasks.curation.config import CurationConfig
from tasks.curation.strategies import curate
from tasks.operators import operator_kind
from tests.support.samples import SINGLE, frame, sample, taken


def test_concise_and_fast_is_a_conjunction() -> None:
    agree = [sample("a", 0, 100, 2.0), sample("a", 1, 200, 1.5)]
    differ = [sample("b", 0, 100, 1.5), sample("b", 1, 200, 2.0)]
    assert taken(*agree, *differ) == [("a-0", "concise_and_fast")]


def test_only_correct_samples_compete() -> None:
    rows = [
        sample("a", 0, 10, None, status="incorrect"),
        sample("a", 1, 20, None, status="rejected"),
        sample("a", 2, 300, 1.2),
    ]
    assert taken(*rows) == [("a-2", "concise_and_fast")]


def test_a_tie_in_both_takes_the_lowest_index_and_a_tie_in_one_is_no_obstacle() -> None:
    assert taken(sample("a", 1, 100, 2.0), sample("a", 0, 100, 2.0)) == [
        ("a-0", "concise_and_fast")
    ]
    assert taken(sample("b", 0, 100, 1.0), sample("b", 1, 100, 2.0)) == [
        ("b-1", "concise_and_fast")
    ]
    assert taken(sample("c", 0, 100, 2.0), sample("c", 1, 90, 2.0)) == [("c-1", "concise_and_fast")]


def test_a_sample_without_timing_is_never_the_fastest_but_can_be_the_shortest() -> None:
    assert taken(sample("a", 0, 100, None)) == []
    assert taken(sample("a", 0, 100, None), sample("a", 1, 200, 3.0)) == []


def test_high_speedup_is_strict_and_takes_every_sample_once() -> None:
    rows = [
        sample("a", 0, 100, 9.0),
        sample("a", 1, 900, 5.0),
        sample("a", 2, 800, 5.01),
        sample("a", 3, 700, 7.0),
    ]
    assert taken(*rows) == [
        ("a-0", "concise_and_fast"),
        ("a-2", "high_speedup"),
        ("a-3", "high_speedup"),
    ]


def test_single_operators_fill_up_to_balance_in_order_of_task() -> None:
    fusions = [sample(f"f{i}", 0, 100, 1.1) for i in range(2)]
    singles = [
        row
        for name in ("s3", "s1", "s2")
        for row in (sample(name, 0, 100, 1.0, ops=SINGLE), sample(name, 1, 200, 2.0, ops=SINGLE))
    ]
    expected = [
        ("f0-0", "concise_and_fast"),
        ("f1-0", "concise_and_fast"),
        ("s1-0", "single_operator"),
        ("s2-0", "single_operator"),
    ]
    assert taken(*singles, *fusions) == expected


def test_single_operator_takes_the_shortest_not_yet_taken_one_a_task() -> None:
    fusions = [sample(f"f{i}", 0, 100, 1.1) for i in range(5)]
    rows = [
        sample("s", 0, 100, 3.0, ops=SINGLE),
        sample("s", 1, 300, 2.0, ops=SINGLE),
        sample("s", 2, 200, 1.0, ops=SINGLE),
    ]
    assert [pair for pair in taken(*fusions, *rows) if pair[0].startswith("s")] == [
        ("s-0", "concise_and_fast"),
        ("s-2", "single_operator"),
    ]


def test_quota_is_a_count_or_a_share() -> None:
    fusions = [sample(f"f{i}", 0, 100, 1.1) for i in range(6)]
    singles = [
        row
        for i in range(9)
        for row in (
            sample(f"s{i}", 0, 100, 1.0, ops=SINGLE),
            sample(f"s{i}", 1, 200, 2.0, ops=SINGLE),
        )
    ]

    def added(quota: float | int) -> int:
        return sum(
            name == "single_operator"
            for _, name in taken(*fusions, *singles, single_operator_quota=quota)
        )

    assert [added(0), added(4), added(100)] == [0, 4, 6]
    assert [added(0.25), added(0.5)] == [2, 6]


def test_no_single_operators_are_added_where_they_already_prevail() -> None:
    rows = [
        sample("s", 0, 100, 3.0, ops=SINGLE),
        sample("s", 1, 200, 2.0, ops=SINGLE),
        sample("f", 0, 100, 1.0),
    ]
    assert taken(*rows) == [("f-0", "concise_and_fast"), ("s-0", "concise_and_fast")]


def test_the_strict_bound_refuses_a_winner_without_crowning_another() -> None:
    rows = [
        sample("a", 0, 100, 2.0, lower=0.8),
        sample("a", 1, 200, 1.5, lower=1.4),
        sample("b", 0, 100, 9.0, lower=1.0),
    ]
    assert taken(*rows, require_speedup_lower_above=1.0) == []
    assert [name for name, _ in taken(*rows)] == ["a-0", "b-0"]


def test_missing_lengths_name_the_generator_and_the_fix() -> None:
    with pytest.raises(UsageError, match="1 of 2 correct samples of org/writer") as caught:
        taken(sample("a", 0, None, 2.0), sample("a", 1, 10, 2.0))
    assert "synthesis.tokenizer" in caught.value.hint
    assert taken(sample("a", 0, None, None, status="incorrect"), sample("a", 1, 10, 2.0)) == [
        ("a-1", "concise_and_fast")
    ]


def test_an_answer_without_reasoning_neither_competes_nor_is_taken() -> None:
    rows = [
        sample("a", 0, 0, 9.0),
        sample("a", 1, 100, 3.0),
        sample("a", 2, 200, 2.0),
        sample("b", 0, 0, 9.0),
    ]
    assert taken(*rows) == [("a-1", "concise_and_fast")]


def test_a_generator_that_never_reasons_is_named() -> None:
    with pytest.raises(
        UsageError, match="none of the 2 correct samples of org/writer has any reasoning"
    ):
        taken(
            sample("a", 0, 0, 2.0),
            sample("a", 1, 0, 2.0),
            sample("b", 0, 10, None, status="incorrect"),
        )


def test_rows_come_through_unchanged() -> None:
    rows = frame(sample("a", 0, 10, 2.0))
    assert curate(rows, CurationConfig()).drop("criterion").equals(rows)


@pytest.mark.parametrize(
    "bad",
    [
        {"single_operator_quota": 1.0},
        {"single_operator_quota": -1},
        {"min_speedup": -1},
        {"strategy": "best"},
    ],
)
def test_config_refuses_what_means_nothing(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CurationConfig(**bad)


def test_config_survives_json() -> None:
    for quota in (0.25, 3):
        config = CurationConfig(single_operator_quota=quota)
        assert CurationConfig.model_validate_json(config.model_dump_json()) == config
        assert type(
            CurationConfig.model_validate(config.model_dump()).single_operator_quota
        ) is type(quota)


@pytest.mark.parametrize(
    ("operators", "kind"),
    [
        (["torch.nn.functional.linear"], "single_operator"),
        (("torch.Tensor.add",), "single_operator"),
        (["torch.Tensor.add_", "torch.nn.functional.batch_norm"], "single_operator"),
        (["torch.Tensor.add_", "torch.Tensor.add_", "torch.nn.functional.batch_norm"], "fusion"),
        (["torch.Tensor.add_", "torch.nn.functional.relu"], "fusion"),
        (["torch.matmul", "torch.matmul"], "fusion"),
        (["torch.nn.functional.linear", "torch.nn.functional.gelu"], "fusion"),
        ([], "fusion"),
    ],
)
def test_operator_kind(operators: list[str], kind: str) -> None:
    assert operator_kind(operators) == kind


def test_operator_kind_on_what_verification_really_records() -> None:
    """A layer is one operator whatever torch takes it apart into, views around it do not count; a
    layer and an activation are two."""
    import torch

    from kernels_eval.checks.operators import reference_operators

    def kind(layer: torch.nn.Module, *shape: int) -> str:
        return operator_kind(
            reference_operators(lambda: layer(torch.ones(*shape).transpose(-1, -2).contiguous()))
        )

    layers = [
        (torch.nn.Linear(4, 5), (3, 4, 4)),
        (torch.nn.LayerNorm(4), (4, 4)),
        (torch.nn.GroupNorm(2, 4), (2, 4, 4)),
        (torch.nn.BatchNorm1d(4), (2, 4, 4)),
        (torch.nn.Softmax(-1), (3, 4)),
    ]
    assert [kind(layer, *shape) for layer, shape in layers] == ["single_operator"] * len(layers)
    assert kind(torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.GELU()), 4, 4) == "fusion"
    assert kind(torch.nn.Flatten(), 2, 3) == "fusion"
