"""Each criterion on frames small enough to decide by hand, then the invariants of the whole rule on
arbitrary ones."""

import pytest
from pydantic import ValidationError

from kernels_eval.errors import UsageError
from tasks.curation.config import CurationConfig
from tasks.curation.decisions import curate
from tasks.operators import operator_kind
from tests.support.cases import cases
from tests.support.samples import frame, listed, sample, samples

CASES = cases("curation")


@pytest.mark.parametrize("name", CASES["rule"])
def test_the_rule_by_hand(name):
    rows, expected = CASES["rule"][name]
    assert listed(*samples(rows)) == expected


def test_quota_is_a_count_or_a_share():
    rows = [sample(f"f{i}", 0, 100, 1.1) for i in range(6)]
    for i in range(9):
        rows += samples(f"s{i}-0 100 1.0 single; s{i}-1 200 2.0 single")
    for quota, added in {0: 0, 4: 4, 100: 6, 0.25: 2, 0.5: 6}.items():
        assert listed(*rows, single_operator_quota=quota).count("single_operator") == added


def test_the_strict_bound_refuses_a_winner_without_crowning_another():
    rows = samples("a-0 100 2.0 lower=0.8; a-1 200 1.5 lower=1.4; b-0 100 9.0 lower=1.0")
    assert listed(*rows, require_speedup_lower_above=1.0) == ""
    assert listed(*rows) == "a-0 concise_and_fast; b-0 concise_and_fast"


@pytest.mark.parametrize(
    "rows, said",
    [
        ("a-0 - 2.0; a-1 10 2.0", "1 of 2 correct samples of org/writer.*synthesis.tokenizer"),
        (
            "a-0 0 2.0; a-1 0 2.0; b-0 10 - status=incorrect",
            "none of the 2 correct samples of org/writer has any reasoning",
        ),
    ],
)
def test_missing_lengths_name_the_generator_and_the_fix(rows, said):
    with pytest.raises(UsageError, match=said):
        listed(*samples(rows))


def test_answers_without_reasoning_are_taken_where_that_is_asked_for():
    rows = samples("a-0 0 2.0; b-0 0 1.0; c-0 9 1.0; d-0 0 1.0 status=incorrect")
    assert listed(*rows, strategy="random", max_per_task=None) == "c-0 drawn"
    taken = listed(*rows, strategy="random", max_per_task=None, without_reasoning=True)
    assert sorted(taken.split("; ")) == ["a-0 drawn", "b-0 drawn", "c-0 drawn"]
    assert "without_reasoning" not in CurationConfig().model_dump()  # older sets keep their names


def test_rows_come_through_unchanged():
    rows = frame(sample("a", 0, 10, 2.0))
    assert curate(rows, CurationConfig()).drop("criterion").equals(rows)


@pytest.mark.parametrize("bad", CASES["bad_configs"])
def test_config_refuses_what_means_nothing(bad):
    with pytest.raises(ValidationError):
        CurationConfig(**bad)


def test_config_survives_json():
    for quota in (0.25, 3):
        config = CurationConfig(single_operator_quota=quota)
        assert CurationConfig.model_validate_json(config.model_dump_json()) == config
        assert type(
            CurationConfig.model_validate(config.model_dump()).single_operator_quota
        ) is type(quota)


@pytest.mark.parametrize("operators, kind", CASES["operator_kinds"])
def test_operator_kind(operators, kind):
    assert operator_kind(operators) == kind


def test_operator_kind_on_what_verification_really_records():
    """A layer is one operator whatever torch takes it apart into, views around it do not count; a
    layer and an activation are two."""
    import torch

    from kernels_eval.model.operators import reference_operators

    def kind(layer, *shape):
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
