"""How often a task applies one operator to what that operator gave."""

import pytest
import torch

from kernels_eval.reference.depth import Depth

X = torch.randn(8, 8)


def chain(step, count):
    x = X
    for _ in range(count):
        x = step(x)
    return x


@pytest.mark.parametrize(
    "run, most",
    [
        (lambda: chain(lambda x: torch.softmax(x @ X, -1) + X, 6), 6),
        (lambda: [X @ X for _ in range(6)], 1),  # of one another none
        (lambda: chain(lambda x: x.exp().t().contiguous() * X, 6), 0),  # elementwise
        (lambda: chain(lambda x: torch.logsumexp(x[:, None] + X, -1), 5), 5),
        (lambda: chain(lambda x: (x @ X).sum(-1, keepdim=True).expand(8, 8), 4), 4),
        (lambda: torch.arange(8), 0),
    ],
    ids=["products", "beside", "elementwise", "hops", "two", "none"],
)
def test_the_longest_path_counts(run, most):
    with torch.no_grad(), Depth() as depth:
        run()
    assert depth.most == most
