"""Mutants: one change each, in a kernel's own code, drawn from all rules alike."""

import pytest

from benchmarks.mutants import RULES, Mutant, changes, drawn, mutants_of, table
from tests.support.kernels import AFFINE, candidate, module

KERNEL = """
#include <torch/extension.h>
// a < b in a comment
torch::Tensor scale(torch::Tensor x) {
    TORCH_CHECK(x.dim() == 1, "one dimension");
    auto out = torch::empty_like(x);
    float* y = out.data_ptr<float>();
    double sum = 0.0;
    for (int64_t i = 0; i < x.numel(); ++i) {
        sum += std::exp(0.5f * x.data_ptr<float>()[i]);
    }
    return out;
}
"""


def test_a_mutant_differs_in_one_line_that_is_neither_a_comment_nor_a_check():
    found = list(changes(KERNEL))
    assert found
    for rule, before, after, mutated in found:
        pairs = zip(KERNEL.splitlines(), mutated.splitlines(), strict=True)
        (changed,) = ((old.strip(), new.strip()) for old, new in pairs if old != new)
        assert changed == (before, after) and rule in RULES
        assert not before.startswith(("//", "#", "TORCH_CHECK"))
    assert len({mutated for *_, mutated in found}) == len(found)


@pytest.mark.parametrize(
    "rule, after",
    [
        ("bound", "for (int64_t i = 0; i <= x.numel(); ++i) {"),
        ("start", "for (int64_t i = 1; i < x.numel(); ++i) {"),
        ("step", "for (int64_t i = 0; i < x.numel(); i += 2) {"),
        ("index", "sum += std::exp(0.5f * x.data_ptr<float>()[i + 1]);"),
        ("accumulate", "sum = std::exp(0.5f * x.data_ptr<float>()[i]);"),
        ("factor", "sum += std::exp((1.02f * 0.5f) * x.data_ptr<float>()[i]);"),
        ("function", "sum += expm1f(0.5f * x.data_ptr<float>()[i]);"),
        ("precision", "float sum = 0.0;"),
        ("omission", ""),
    ],
)
def test_rules(rule, after):
    assert after in [made for each, _, made, _ in changes(KERNEL) if each == rule]


def test_all_rules_are_drawn_alike_and_the_same_each_time():
    code = module("return ext.affine(x)")
    made = mutants_of(Mutant(AFFINE, candidate(AFFINE, code), "none", "", ""))
    assert all(each.candidate.code != code for each in made)
    chosen = drawn([made, []], 6, seed=3)
    assert chosen == drawn([made, []], 6, seed=3)
    rules = [rule for rule in RULES if rule in {each.rule for each in made}]
    assert [each.rule for each in chosen][: len(rules)] == rules[:6]


def test_the_table_counts_what_was_not_built_apart_and_names_what_lives():
    row = {"task": "t", "rule": "sign", "before": "a", "after": "-a", "reason": "r"}
    rows = [{**row, "status": each} for each in ("correct", "incorrect", "compile_error")]
    printed = table(rows)
    assert "| sign | 3 | 1 | 1 | 1 |" in printed
    assert "- t, sign: `a` to `-a`" in printed
