"""The tables of the controlled proof: what is planted is what they count."""

import numpy as np
import polars as pl

from benchmarks.proof import Model, _mixed, _pairs, power, written


def test_lengths_of_written_answers_follow_the_planted_relation():
    for planted in (-0.9, 0.9):
        rows = list(written(30, planted))
        mean = {
            status: np.mean([row["reasoning_tokens"] for row in rows if row["status"] == status])
            for status in ("correct", "incorrect")
        }
        assert (mean["correct"] < mean["incorrect"]) == (planted < 0)


def test_a_planted_share_comes_from_the_base_model():
    draw = np.random.default_rng(0)
    right, wrong = np.ones(5), np.zeros(5)
    assert _mixed(right, wrong, 0.0, 100, draw) == 1.0
    assert _mixed(right, wrong, 1.0, 100, draw) == 0.0


def test_a_branch_is_compared_with_random_of_its_size_and_seed():
    names = ["base", "tuned", "concur-400-seed0", "random-400-seed0", "concur-200-seed0"]
    assert ("random-400-seed0", "concur-400-seed0") in _pairs(names)
    assert all(model != "concur-200-seed0" or of == "base" for of, model in _pairs(names))


def test_power_needs_no_more_than_verified_answers(capsys):
    def frame(share):
        right = [index < 10 * share for index in range(10)]
        return pl.DataFrame(
            [
                {"task_id": f"t{task}", "status": "correct" if one else "incorrect"}
                for task in range(30)
                for one in right
            ]
        )

    models = {"base": Model(None, frame(0.1)), "tuned": Model(None, frame(0.9))}
    power(models, repetitions=20, seed=0)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "| 20 |" in line]
    shares = [float(row[-1].rstrip(" |")) for row in rows]
    assert shares[0] < 30 and shares[-1] == 100.0
