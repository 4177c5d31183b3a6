"""Which other shapes are tried, and that both processes draw the same."""

import itertools
import math
from random import Random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels_eval.config import EDGES, FEW_TERMS_KINDS, MOVED_SHARE, TAILS, CorrectnessConfig
from kernels_eval.model.distributions import drawn_from, make_distinct
from kernels_eval.model.few_terms import with_few_terms
from kernels_eval.model.inputs import (
    constants_in,
    make_inputs,
    plan_inputs,
)
from kernels_eval.model.invariants import note_of
from kernels_eval.model.operators import reference_operators
from kernels_eval.model.redraws import SETTINGS, VARIED_EDGES, VARIED_OTHERWISE, redrawn
from kernels_eval.model.smaller_shapes import drawn_size, smaller_shapes
from kernels_eval.model.task_text import code_of, promised_by
from kernels_eval.protocol import (
    BEYOND,
    BLOCKS,
    EXTENDED,
    GENERAL,
    LASTING_INPUTS,
    MOVED,
    ORDINARY_TERMS,
    RARE,
    UNSORTED,
    UPPER_BITS,
    VARIED,
    WHOLE_RANGE,
    FewTerms,
    InputPlan,
)
from kernels_eval.reference.equal_parts import EqualParts
from kernels_eval.reference.uses import Uses, with_regular
from tests.support.kernels import AFFINE

OLD = ("uniform", "normal_x10", "sparse", "small_integers")
SHAPE = st.lists(st.integers(1, 40), min_size=1, max_size=4)


def shrunk(shapes, variant):
    made = [list(shape) if shape else shape for shape in shapes]
    for index, dim, size in variant:
        made[index][dim] = size
    return made


def test_a_batch_shrinks_alone_where_its_size_is_its_own():
    variants = smaller_shapes([[16, 128], [16, 128], None, [128]], Random(0))
    assert shrunk([[16, 128], [16, 128], None, [128]], variants["batch_1"]) == [
        [1, 128],
        [1, 128],
        None,
        [128],
    ]
    for name, tail in TAILS.items():
        (batch, last), again, nothing, row = shrunk(
            [[16, 128], [16, 128], None, [128]], variants[f"all_{name}"]
        )
        assert (again, nothing, row) == ([batch, last], None, [last])
        assert 8 <= batch < 16 and batch % 4 == 1 and 64 <= last < 128
        assert {last % block for block in (4, 8, 16, 32)} == {tail % b for b in (4, 8, 16, 32)}


def test_a_square_has_no_batch_of_one_since_it_would_broadcast():
    square = [[64, 64]]
    variants = smaller_shapes(2 * square, Random(0))
    assert "batch_1" not in variants
    one, other = shrunk(2 * square, variants["all_odd"])
    assert one == other and one[0] == one[1] and one[0] % 16 == 15
    drawn = [shrunk(square, smaller_shapes(square, Random(n))["each_2"])[0] for n in range(8)]
    assert all(rows * columns % 8 == 2 for rows, columns in drawn)
    left = {
        name: [size % 8 for size in shrunk([[64, 96]], variant)[0]]
        for name, variant in smaller_shapes([[64, 96]], Random(0)).items()
        if name.startswith("each")
    }
    assert left == {"each_1": [7, 1], "each_2": [1, 2], "each_odd": [7, 7]}
    assert "each_2" not in smaller_shapes([[8, 3, 64, 64]], Random(0))


def test_what_a_task_cuts_into_equal_parts_stays_a_multiple():
    shapes = [[64, 32], [64, 16]]
    for name, tail in TAILS.items():
        whole, part = shrunk(shapes, smaller_shapes(shapes, Random(0), {32: 2})[f"all_{name}"])
        assert whole == [part[0], 2 * part[1]] and 8 <= part[1] < 16 and part[1] % 4 == tail % 4
    assert shrunk([[64, 6]], smaller_shapes([[64, 6]], Random(0), {6: 3})["all_1"])[0][1] == 6


@pytest.mark.parametrize(
    ("cut", "found"),
    [
        (lambda x: x.chunk(2, -1), [(32, 2)]),
        (lambda x: (x[..., :16], x[..., 16:]), [(32, 2)]),
        (lambda x: (x[..., ::2], x[..., 1::2]), [(32, 2)]),
        (lambda x: x.split(6), [(24, 4)]),
        (lambda x: x.split(4), []),
        (lambda x: x.split([8, 24], -1), []),
        (lambda x: (x[:-1], x[1:]), []),
        (lambda x: x.narrow(1, 0, 16), []),
        (lambda x: x.view(24, 16, 2).unbind(-1), []),
    ],
)
def test_equal_parts_are_found(cut, found):
    with EqualParts() as parts:
        cut(torch.zeros(24, 32))
    assert parts.found == found


def test_the_four_numbers_of_a_box_stay():
    variants = smaller_shapes([[64, 4], [64]], Random(0))
    assert {variant[0][1] for variant in variants.values()} == {0}


@given(st.integers(4, 10**9), st.sampled_from(sorted(TAILS.values())), st.randoms())
def test_a_drawn_size_leaves_its_tail_in_blocks_of_all_sizes(size, tail, random):
    drawn = drawn_size(size, tail, random)
    assert max(2, size // 2) <= drawn < size
    assert size < 16 or drawn % 4 == tail % 4
    assert size < 8192 or drawn % 1024 == tail % 1024


@given(st.lists(st.one_of(st.none(), SHAPE), min_size=1, max_size=4), st.randoms())
def test_equal_sizes_stay_equal_and_nothing_grows_or_vanishes(shapes, random):
    for name, variant in smaller_shapes(shapes, random).items():
        made = shrunk(shapes, variant)
        pairs = [
            (old, new)
            for a, b in zip(shapes, made, strict=True)
            if a
            for old, new in zip(a, b, strict=True)
        ]
        assert all(1 <= new <= old for old, new in pairs)
        assert any(new < old for old, new in pairs)
        assert all(new > 1 or old == 1 or name == "batch_1" for old, new in pairs), (
            "no dimension starts to broadcast"
        )
        assert name.startswith("each") or len(set(pairs)) == len({old for old, _ in pairs}), (
            "equal sizes shrink together"
        )


@pytest.mark.parametrize(
    "value, changed",
    [
        (torch.rand(8, 64), 1),
        (torch.tril(torch.ones(64, 64)), 64),
        (torch.ones(8, 64, dtype=torch.bool), 64),
        (torch.arange(256) % 7, 16),
    ],
)
def test_lone_inputs_differ_in_one_element_or_row(value, changed):
    note = note_of([value], {"index.self"})
    differ = (redrawn(value, note, 5, "lone") != value).flatten().nonzero()
    assert 0 < len(differ) <= changed and differ[-1] - differ[0] < changed


def test_a_tasks_inputs_are_the_same_for_the_same_seed():
    import types

    task = types.ModuleType("task")
    exec(AFFINE.code, vars(task))
    plan = plan_inputs([make_inputs(task, 1, "declared", None, "cpu")])
    for distribution in ("declared", *OLD, *CorrectnessConfig().distributions[1:]):
        for shape in ("declared", "all_odd"):
            a, b, c = (
                make_inputs(task, seed, distribution, plan, "cpu", shape)[0] for seed in (5, 5, 6)
            )
            assert torch.equal(a, b) and not torch.equal(a, c)
            assert a.shape[0] == a.shape[1]
            assert int(a.shape[0]) in ((64,) if shape == "declared" else (47, 63))


def test_what_a_distribution_changes_lies_within_a_smaller_shape():
    positive = SimpleNamespace(get_inputs=lambda: [torch.rand(48, 64)])
    plan = plan_inputs([positive.get_inputs()])
    for shape in plan.shapes:
        for seed in range(20):
            drawn = make_inputs(positive, seed, "impulse", plan, "cpu", shape)[0]
            assert int((drawn > 15).sum()) >= 1 and int((drawn < -15).sum()) >= 1


def test_a_symmetric_matrix_stays_one_where_a_smaller_shape_is_square():
    square = torch.randn(48, 48)
    task = SimpleNamespace(get_inputs=lambda: [square + square.T])
    plan = plan_inputs([task.get_inputs()])
    smaller = make_inputs(task, 3, "normal", plan, "cpu", "all_odd")[0]
    assert torch.equal(smaller, smaller.T) and smaller.shape[0] < 48
    for shape in plan.shapes:
        assert make_inputs(task, 3, "normal", plan, "cpu", shape)[0].dim() == 2


def test_equal_elements_are_moved_so_far_apart_that_a_softmax_tells_them_apart():
    x = torch.randn(64, 64)
    x[3], x[5], x[9] = 0.0, 1.5, -1.5
    before = x.clone()
    make_distinct(x)
    assert x.unique().numel() == x.numel()
    assert (x - before).abs().max() < 1e-2 and x.abs().max() == before.abs().max()
    assert all(torch.softmax(row, 0).unique().numel() == 64 for row in x[[3, 5, 9]])
    assert (x[x != 0].abs() >= torch.finfo(torch.float32).tiny).all()


@pytest.mark.parametrize(
    "x", [torch.ones(4, dtype=torch.bfloat16), torch.tensor([torch.inf, torch.inf, torch.nan])]
)
def test_what_has_no_room_for_distinct_elements_stays(x):
    before = x.clone()
    make_distinct(x)
    assert torch.equal(x.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize("kind", FEW_TERMS_KINDS)
def test_one_term_lies_in_each_part_of_a_sum(kind):
    terms, half, _, backgrounds = FEW_TERMS_KINDS[kind]
    terms = terms or half
    values = [torch.randn(3, 4096), torch.randn(3, 4096), torch.randn(7)]
    for around, size in backgrounds:
        asked = FewTerms(length=4096, terms=terms, around=around, size=size)
        whole, less = (
            with_few_terms(
                values, plan_inputs([values]).model_copy(update={"few_terms": few}), 5, kind
            )
            for fewer in (False, True)
            for few in [{kind: asked.model_copy(update={"fewer": fewer})}]
        )
        assert torch.equal(whole[2], values[2])
        for x, fewer, own in zip(whole, less, values[:2], strict=False):
            least = float(own.min()) if kind == ORDINARY_TERMS else -math.inf
            assert kind != ORDINARY_TERMS or least <= x.min() <= x.max() <= own.max()
            placed = x != (own if around is None else max(around, least))
            assert placed.view(3 * terms, 4096 // terms).sum(1).tolist() == [1] * 3 * terms
            assert torch.equal(x[placed], own[placed]) if size is None else True
            assert (x[placed].abs() >= abs(size or 0)).all()
            assert (fewer != x).sum(1).tolist() == [1, 1, 1]


def definite(x):
    return bool(torch.equal(x, x.T)) and not torch.linalg.cholesky_ex(x).info.any()


def rising(x):
    return bool((x.diff() >= 0).all())


SQUARE = torch.randn(32, 32)
SYMMETRIC = SQUARE + SQUARE.T
NOTES = {
    "normal": (SQUARE, "vary; moved"),
    "few_numbers": (torch.randint(1, 9, (256,)) / 8, "vary; moved"),
    "ordered_columns": (SQUARE.sort(0).values, "vary; shuffled timed"),
    "signs": (SQUARE.sign(), "; shuffled timed"),
    "sorted": (SQUARE[0].sort().values, "vary; shuffled timed"),
    "repeated_blocks": (SQUARE[0].repeat(16), "vary; shuffled timed"),
    "equal_images": (SQUARE[None, None].repeat(9, 3, 1, 1), "vary; shuffled timed"),
    "bounds": (SQUARE.sort().values, "vary rising; moved", "searchsorted.sorted_sequence"),
    "symmetric": (SYMMETRIC, "vary symmetric; shuffled timed"),
    "definite": (
        SQUARE @ SQUARE.T + torch.eye(32),
        "vary definite; moved",
        "linalg_cholesky_ex.self",
    ),
    "triangular": (SQUARE.tril(), "vary zeros; shuffled timed", "tril.self"),
    "banded": (SQUARE.tril(1).triu(-1), "vary zeros; shuffled timed"),
    "rank_one": (SQUARE[:, :1] * SQUARE[:1], "vary; shuffled timed"),
    "ones": (torch.ones(8, 8), "; constant timed"),
    "mask": (torch.tril(torch.ones(8, 8)), "; shuffled"),
    "probabilities": (torch.softmax(SQUARE, -1), "; probabilities"),
    "whole": (torch.arange(64.0), "; between timed"),
    "whole_bounds": (torch.arange(64.0), "rising; between", "bucketize.boundaries"),
    "labels": (torch.randint(0, 9, (64,)), "; resampled timed", "nll_loss_forward.target"),
    "ordered_labels": (torch.arange(64), "in order rising; resampled timed", "index_add.index"),
    "borders": (torch.arange(64), "rising; resampled timed", "slice.neighbours"),
    "bounds_of_integers": (torch.arange(64), "rising; resampled timed", "reads lt.other"),
    "triples": (
        torch.arange(192).view(64, 3),
        "rising; resampled timed",
        "index_select.index",
    ),
    "sets": (torch.arange(512).view(64, 8), "in order rising; resampled timed", "eq.self"),
    "full_lengths": (torch.full((64,), 9), "; one_integer", "lt.other"),
    "offsets_of_zero": (torch.zeros(64, dtype=torch.int64), "; one_integer", "add.other"),
    "one_length_for_all": (torch.full((64,), 9), "sum", "repeat_interleave.repeats"),
    "places_to_write": (torch.arange(64).roll(1), "; shuffled", "index_copy.index"),
    "sources_of_edges": (
        torch.arange(128).roll(64).view(2, 64),
        "in order rising; resampled timed",
        "index.self",
    ),
    "counts_to_be_summed": (torch.randint(0, 9, (64,)), "", "searchsorted.sorted_sequence"),
    "offsets": (torch.arange(0, 64, 4), "rising; offsets", "_embedding_bag.offsets"),
    "repeats": (torch.arange(64), "sum rising", "repeat_interleave.repeats"),
    "read_by_python": (torch.arange(64), "rising"),
}
"""Declared tensors, their note, the operator that uses them, and the task's text."""
KEPT = {"rising": rising, "definite": definite, "symmetric": lambda x: torch.equal(x, x.T)}


@pytest.mark.parametrize("name", NOTES)
def test_what_an_argument_means_is_kept_and_what_saves_work_is_not(name):
    value, wanted, *known = NOTES[name]
    note = note_of([value], set(known[:1]), "".join(known[1:]))
    order = " ".join(("in order" if note.order else "", *note.order))
    told = "vary " * note.vary + " ".join(note.keeps) + order, note.varied + " timed" * note.timed
    assert [each.strip() for each in told] == [*map(str.strip, wanted.split(";")), ""][:2]
    names = ["normal", "mixed"] * note.vary + [VARIED, VARIED_OTHERWISE] * bool(note.varied)
    for distribution, seed in itertools.product(names, range(5)):
        drawn = redrawn(value, note, seed, distribution)
        assert not torch.equal(drawn, value) or distribution == VARIED_OTHERWISE
        assert drawn.dtype == value.dtype and drawn.shape == value.shape
        if note.varied == "shuffled" and distribution in (VARIED, VARIED_OTHERWISE):
            near, at_most = MOVED_SHARE * bool((value != value.round()).any()), 1e-6
            found, declared = (x.float().flatten().sort().values for x in (drawn, value))
            assert torch.allclose(found, declared, near, at_most)
            continue
        assert all(KEPT[each](drawn) for each in (*note.keeps, *note.order) if each in KEPT)
        if note.varied == "probabilities":
            assert bool((drawn > 0).all()) and torch.allclose(drawn.sum(-1), torch.ones(32))
        elif note.varied == "one_integer":
            assert drawn.min() >= 0 and drawn.max() <= max(1, int(value.max()))
        elif not note.vary and note.varied != "constant":
            assert value.min() <= drawn.min() and drawn.max() <= value.max()
    if note.varied == "moved" and not note.keeps:
        near = redrawn(value, note, 1, MOVED)
        assert torch.allclose(near, value, MOVED_SHARE) and near.unique().numel() == value.numel()
        assert value.min() <= near.min() and near.max() <= value.max()
    elif not note.timed and not note.keeps:
        assert torch.equal(redrawn(value, note, 1, MOVED), value)
    if note.varied == "offsets":
        assert drawn[0] == value[0] and drawn[-1] == value[-1] and bool((drawn.diff() > 0).all())


@pytest.mark.parametrize("domain", ["", "_positive", "_unit", "_within"])
def test_edges_are_halves_whole_numbers_and_constants_within_the_domain(domain):
    value, generator = torch.rand(48, 64) - 0.5, torch.Generator().manual_seed(5)
    least, largest = {"_positive": (0, 99), "_unit": (-1, 1), "_within": (-0.5, 0.5)}.get(
        domain, (-99, 99)
    )
    plan = InputPlan(notes=[], shapes={}, constants=[4.0, 0.7])
    drawn = drawn_from(value, generator, f"edges{domain}", plan)
    again = drawn_from(value, generator.manual_seed(5), f"edges{domain}", plan)
    assert torch.equal(drawn, again)
    assert bool((drawn > least).all()) and bool((drawn < largest).all())
    halves = [half * scale for half in (0.5, 1.5) for scale in (1.0, 0.25, 4.0)]
    for edge in (*EDGES[1:], *halves, 0.7):
        assert bool((drawn == edge).any()) == (edge < largest), edge
    assert not any(bool((drawn == 0).all(dim).any()) for dim in (0, 1))


@pytest.mark.parametrize("domain, least", [("", -99), ("_positive", 0), ("_unit", 0)])
def test_ends_of_a_domain_and_slices_of_zeros_are_in_ends_alone(domain, least):
    value, generator = torch.rand(48, 64), torch.Generator().manual_seed(5)
    drawn = drawn_from(value, generator, f"ends{domain}")
    inner = drawn_from(value, generator, f"edges{domain}")
    assert all(bool((drawn == 0).all(dim).any()) for dim in (0, 1))
    assert bool((drawn == 1).any()) and bool((drawn >= least).all())
    assert not domain or bool((inner > 0).all())
    assert domain != "_unit" or (drawn.max() == 1 and inner.max() < 1)


@pytest.mark.parametrize(
    "call, singular",
    [
        (torch.linalg.qr, False),
        (lambda x: x[:, :48].inverse(), False),
        (lambda x: torch.linalg.vector_norm(x.abs().sqrt()), True),
        (lambda x: x * 2, True),
    ],
)
def test_no_slice_is_zero_where_matrices_are_factored(call, singular):
    value = torch.randn(48, 64)
    plan = with_regular(plan_inputs([[value]]), reference_operators(lambda: call(value)))
    drawn = redrawn(value, note_of([value]), 5, "ends", plan)
    assert bool((drawn == 0).all(0).any()) == singular


MODEL = """
import torch
class Model(torch.nn.Module):
    def forward(self, a, x):
        '''0.25. %s'''
        # a is symmetric, see torch.linalg.solve; 0.75
        assert a.dim() == 2, "a symmetric matrix: 0.125"
        symmetric = a @ x * 0.5
        return symmetric
def get_inputs():
    '''A random symmetric matrix, and a triangular one.'''
"""
PROMISES = {
    "A product with a symmetric matrix.": "symmetric",
    "Two symmetric matrices, with a and b being of one size.": "symmetric",
    "Args:\n  a (torch.Tensor): matrix, shape (N, N), symmetric.\n  x: a vector.": "symmetric",
    "a must be symmetric and positive.": "symmetric",
    "The product of a and x, also an upper triangular matrix.": "triangular",
    "a: lower-triangular": "triangular",
    "One step of a flow; symmetric and directed ones are taken.": "",
    "Causal (triangular) and full ones are taken.": "",
    "Works for symmetric matrices and others.": "",
    "A sum with triangular matrices as a special case.": "",
    "A triangular or dense matrix.": "",
    "a need not be triangular.": "",
    "An asymmetric, non-triangular matrix.": "",
    "Symmetric normalisation came before.": "",
    "A product with a symmetric matrix. Any graph is taken.": "",
    "": "",
}


@pytest.mark.parametrize("says", PROMISES)
def test_a_docstring_promises_a_structure_where_it_names_no_other(says):
    assert " ".join(sorted(promised_by(MODEL % says))) == PROMISES[says]


def test_a_code_tells_by_neither_comments_nor_strings():
    told = code_of(MODEL % "A triangular matrix.")
    assert "triangular" not in told and "linalg" not in told and constants_in(told) == [0.5, 2]


def test_constants_are_the_small_numbers_of_a_source():
    assert constants_in("x8 = y.float32()[:64].clamp(-3, 6.5) > 1e-3") == [1e-3, 3, 6.5]


OTHER_INTEGERS = {
    "counted_from_the_end": (0, {"index.indices", "reads index.indices", "mul.self"}, "", -9),
    "read_elsewhere": (0, {"index.indices", "reads index.indices", "reads add.self"}, "", None),
    "gathered": (0, {"gather.index", "reads gather.index"}, "", None),
    "lengths": (1, {"lt.other", "reads lt.other"}, "", 0),
    "places_from_one": (1, {"sub.self", "gather.index"}, "", None),
    "labels": (0, {"nll_loss_forward.target"}, "", None),
    "ignored": (0, {"nll_loss_forward.target"}, "cross_entropy(x, y, ignore_index=-1)", -1),
}
"""The least of the declared integers, their uses, the task's text, and the least that is drawn."""


@pytest.mark.parametrize("name", OTHER_INTEGERS)
def test_integers_that_the_reference_takes_are_drawn_once(name):
    first, uses, text, least = OTHER_INTEGERS[name]
    value = torch.arange(first, 9).repeat(99)
    note = note_of([value], uses, text)
    drawn = redrawn(value, note, 5, VARIED_EDGES)
    assert int(drawn.min()) == (first if least is None else least)
    assert int(redrawn(value, note, 5, VARIED).min()) == first


DIVIDED = {"remainder.self", "reads remainder.self", "sub.self", "_to_copy.self"}


@pytest.mark.parametrize(
    "uses, dtype, enlarged",
    [
        (DIVIDED, torch.int64, True),
        (DIVIDED, torch.int32, True),
        (DIVIDED, torch.int8, False),
        ({"lcm.self"}, torch.int64, True),
        ({"lcm.self"}, torch.int32, False),
        (DIVIDED | {"sum.self"}, torch.int64, False),
        (DIVIDED | {"lt.other"}, torch.int64, False),
        (DIVIDED | {"embedding.indices"}, torch.int64, False),
        (DIVIDED | {"_local_scalar_dense.self"}, torch.int64, False),
        ({"add.self", "reads add.self"}, torch.int64, False),
    ],
)
def test_only_integers_of_arithmetic_are_enlarged(uses, dtype, enlarged):
    value = torch.arange(-2, 9, dtype=dtype).repeat(999)
    drawn = redrawn(value, note_of([value], uses), 5, RARE)
    assert (int(drawn.max()) > 2**27) is (int(drawn.min()) < -(2**27)) is enlarged
    assert int(drawn.max()) <= 2**28 + 8 and torch.equal(drawn.sign(), value.sign())
    assert drawn.dtype == dtype and float((drawn != value).float().mean()) < 1 / 4


COUNTS = {"lgamma.self", "mul.self", "reads mul.self"}
RANGES = {
    "counts": (torch.randint(0, 31, (64, 64)), COUNTS, "unbounded"),
    "whole_floats": (torch.randint(0, 31, (64, 64)).float(), COUNTS, "unbounded"),
    "bytes": (torch.randint(0, 256, (64, 64)), COUNTS, ""),
    "short": (torch.randint(0, 31, (64, 64), dtype=torch.int16), COUNTS, ""),
    "letters": (torch.randint(0, 31, (64, 64)), COUNTS | {"eq.both"}, ""),
    "times": (torch.randint(0, 10**6, (64, 64)), COUNTS | {"lt.number"}, "unbounded"),
    "places": (torch.randint(0, 600, (64, 64)), COUNTS | {"lt.number"}, ""),
    "lengths": (torch.randint(0, 10**6, (64, 64)), COUNTS | {"lt.other"}, ""),
    "indices": (torch.randint(0, 31, (64, 64)), COUNTS | {"index.indices"}, ""),
    "divided": (torch.randint(0, 31, (64, 64)), COUNTS | {"reads div.self"}, "unbounded"),
    "largest": (torch.randint(0, 31, (64, 64)), COUNTS | {"amax.self"}, "positive"),
    "zeros": (torch.zeros(64, 64), COUNTS | {"index.indices"}, "zeros"),
    "mask_of_zeros": (torch.zeros(64, 64), {"eq.number"}, ""),
    "ones": (torch.ones(64, 64), {"mul.other"}, "unbounded"),
    "mask_of_ones": (torch.ones(64, 64), {"lt.number"}, ""),
    "temperature": (torch.ones(1), {"div.other"}, ""),
}
"""Whole numbers, what uses them, and the form of those that nothing bounds."""


@pytest.mark.parametrize("name", RANGES)
def test_whole_numbers_that_nothing_bounds_leave_their_range(name):
    value, uses, form = RANGES[name]
    note = note_of([value], uses, size=640)
    assert note.rare == form or (not form and note.rare not in EXTENDED)
    largest = int(value.abs().max()) or 1
    for draw, times in zip(BEYOND, (16, 16, 4), strict=True):
        drawn = redrawn(value, note, 5, draw)
        signed = form == "zeros" or (form == "unbounded" and draw == BEYOND[0])
        assert torch.equal(drawn, value) == (not form) and drawn.dtype == value.dtype
        assert not form or times / 2 * largest < float(drawn.max()) <= 16 * largest
        assert bool((drawn < 0).any()) == signed


@pytest.mark.parametrize("dtype, bits", [(torch.int32, 31), (torch.int64, 34)])
def test_integers_leave_their_range_within_their_type(dtype, bits):
    value = torch.randint(0, 2**30, (64, 64), dtype=dtype)
    drawn = redrawn(value, note_of([value], {"add.self"}), 5, BEYOND[0])
    least, most = 2 ** (bits - 1), 2**bits
    assert least < int(drawn.max()) < most and -most < int(drawn.min()) < -least


def test_some_integers_of_64_bits_differ_in_their_upper_half_alone():
    value = torch.randint(-4096, 4096, (64, 64))
    note = note_of([value], {"sub.self"})
    assert torch.equal(redrawn(value, note, 5, UPPER_BITS), value), (
        "nothing computes integers of it"
    )
    note = note.model_copy(update={"wide": True})
    drawn = redrawn(value, note, 5, UPPER_BITS)
    assert torch.equal(drawn.int(), value.int())
    assert 1 / 16 < float((drawn != value).float().mean()) < 1 / 4
    narrow = value.int()
    assert torch.equal(redrawn(narrow, note, 5, UPPER_BITS), narrow)


def _places_of(places, table):
    with Uses([places, table]) as uses:
        table[places] + table.gather(0, places[:, 0])
    return uses.found[0]


def test_places_where_an_operator_adds_may_be_equal():
    places = torch.randperm(64)
    for adds in (False, True):
        with Uses([places]) as uses:
            torch.zeros(64).index_put_((places,), torch.ones(64), accumulate=adds)
        assert (note_of([places], uses.found[0]).varied == "resampled") is adds


@pytest.mark.parametrize(
    "use, wide",
    [
        (lambda x, y: x - y, True),
        (lambda x, y: x == y, True),
        (lambda x, y: x * 2, True),
        (lambda x, y: x.float() - y.float(), False),
        (lambda x, y: x == 3, False),
        (lambda x, y: x * 0.5, False),
    ],
)
def test_upper_bits_matter_to_integers_that_are_computed_or_compared(use, wide):
    values = [torch.randint(0, 500, (8, 8)) for _ in range(2)]
    with Uses(values) as uses:
        use(*values)
    assert (0 in uses.computed) is wide


def test_places_may_be_any_of_what_they_are_places_in():
    places = torch.randint(0, 31, (64, 64))
    note = note_of([places], _places_of(places, torch.rand(640)))
    assert (note.rare, note.below) == ("places", 640)
    drawn = redrawn(places, note, 5, BEYOND[0])
    assert 320 < int(drawn.max()) < 640 and int(drawn.min()) == 0


def test_what_places_are_computed_from_stays_in_its_range():
    numbers = torch.randint(0, 31, (64, 64))
    with Uses([numbers]) as uses:
        torch.rand(640)[2 * numbers]
    assert note_of([numbers], uses.found[0]).rare == ""


@pytest.mark.parametrize("numbers, place", [(4, "lt.number"), (5, "lt.self")])
def test_comparisons_with_few_numbers_are_told_from_those_with_many(numbers, place):
    value = torch.arange(64)
    with Uses([value]) as uses:
        for number in range(numbers):
            assert (value < number).sum() == number
    assert place in uses.found[0] and ("lt.self" in uses.found[0]) == (numbers > 4)


@pytest.mark.parametrize("uses", [{"mm.self"}, {"sort.self", "reads sort.self"}])
def test_one_of_two_factors_of_32_bits_exceeds_16(uses):
    value = torch.randint(-100, 101, (64, 64), dtype=torch.int32)
    small, wide = (redrawn(value, note_of([value], uses), seed, RARE) for seed in (4, 5))
    assert torch.equal(small, value) and 2**16 < int(wide.max()) <= 2**17 + 100


def test_one_row_of_probabilities_is_certain_and_others_have_zeros():
    value = torch.softmax(torch.randn(4, 30, 16), -1)
    drawn = redrawn(value, note_of([value]), 5, RARE)
    assert torch.allclose(drawn.sum(-1), torch.ones(4, 30))
    assert int((drawn == 1).sum()) == 1 and 0.05 < float((drawn == 0).float().mean()) < 0.2
    assert int((drawn.argmax(-1) != value.argmax(-1)).sum()) <= 1


@pytest.mark.parametrize("other, most", [("pow.self", 3), ("clone.self", 19)])
def test_exponents_are_enlarged_little(other, most):
    value = torch.arange(-2, 4).repeat(999)
    note = note_of([value], {"pow.exponent", "reads pow.exponent", other})
    drawn = redrawn(value, note, 5, RARE)
    assert most - 3 <= int(drawn.max()) <= most and torch.equal(drawn.sign(), value.sign())


@pytest.mark.parametrize("shape", [(12, 16), (12, 1, 16), (3, 4, 16, 1)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
def test_one_row_of_a_mask_is_empty_and_one_full(shape, dtype):
    value = (torch.arange(16) < torch.arange(2, 14)[:, None]).to(dtype).view(shape)
    drawn = redrawn(value, note_of([value], {"mul.other"}), 5, RARE)
    counts = drawn.view(12, 16).sum(1)
    assert (int(counts.min()), int(counts.max())) == (0, 16)
    assert drawn.shape == shape and drawn.dtype == dtype and drawn.sum() == value.sum()


def test_a_mask_of_one_row_is_empty():
    value = torch.arange(16) < 9
    drawn = redrawn(value, note_of([value]), 5, RARE)
    assert drawn.shape == value.shape and drawn.dtype == torch.bool and not drawn.any()


def test_blocks_lie_within_the_declared_range():
    value = torch.randn(3, 32, 64)
    drawn = redrawn(value, note_of([value]), 5, BLOCKS)
    assert value.min() <= drawn.min() and drawn.max() <= value.max()
    alike = drawn[0] > 0
    assert torch.equal(alike, (drawn > 0)[2])
    assert sorted(alike.unique(dim=0).sum(1).tolist()) == [32, 32] and len(alike.unique(dim=0)) == 2
    assert sorted(set(alike.sum(0).tolist())) == [15, 17]
    assert bool(alike[0].diff().any()) and not torch.equal(alike[0, :32], ~alike[0, 32:])


def test_blocks_of_probabilities_are_probabilities_in_one_order():
    value = torch.softmax(torch.randn(64, 64), -1)
    drawn = redrawn(value, note_of([value]), 5, BLOCKS)
    assert torch.allclose(drawn.sum(-1), torch.ones(64)) and drawn.min() >= 0
    likely = drawn > 1 / 64
    assert likely.diagonal().float().mean() > 0.9 and 0.4 < likely.float().mean() < 0.6


def test_offsets_are_equal_once():
    value = torch.arange(0, 64, 4)
    note = note_of([value], {"_embedding_bag.offsets"})
    assert int((redrawn(value, note, 5, VARIED_EDGES).diff() == 0).sum()) == 1


@pytest.mark.parametrize(
    "value, draw, least, most",
    [
        (0.9, "varied", 0.9 / 4, 0.9 / 2),
        (0.9, "varied_edges", 0.9 * 4, 0.9 * 16),
        (-0.5, "varied_edges", -8.0, -2.0),
        (0.0, "varied_edges", 0.5, 1.0),
    ],
)
def test_pythons_floats_lie_below_theirs_or_above(value, draw, least, most):
    note = note_of([value]).model_copy(update={"reach": (value / 4, value * 16)})
    drawn = {redrawn(value, note, seed, draw) for seed in range(20)}
    assert len(drawn) == 20 and all(least <= each <= most for each in drawn)


def test_pythons_integers_that_are_equal_differ_in_one_draw():
    drawn = [[redrawn(3, note_of([3]), s, draw) for s in range(20)] for draw in SETTINGS]
    assert list(map(set, drawn)) == [{4, 5}, {4}, {5}, {2}]
    assert redrawn(True, note_of([True]), 0, "apart") is False


def test_complex_numbers_lists_and_pythons_floats_vary():
    task = SimpleNamespace(
        get_inputs=lambda: [
            [torch.randn(8, 8), 3],
            torch.randn(8, 8, dtype=torch.complex64),
            0.5,
        ]
    )
    plan = plan_inputs([task.get_inputs()])
    assert [note.vary for note in plan.notes] == [True, False, True, False]
    (own, number), z, half = make_inputs(task, 1, "normal_x1000", plan, "cpu")
    assert half == 0.5 > make_inputs(task, 1, VARIED, plan, "cpu")[2] > 0.25
    assert number == 3 and own.abs().max() > 500 and z.abs().max() > 500 and z.is_complex()


@pytest.mark.parametrize("name", ["ordered_labels", "sources_of_edges", "sets"])
def test_an_order_that_nothing_needs_is_missing_once(name):
    value, _, uses = NOTES[name]
    drawn = redrawn(value, note_of([value], {uses}), 5, UNSORTED)
    assert torch.equal(drawn.sort(-1).values, value.sort(-1).values) and not rising(drawn)


@pytest.mark.parametrize("name", ["borders", "bounds_of_integers", "offsets", "labels"])
def test_another_order_stays(name):
    value, _, uses = NOTES[name]
    assert torch.equal(redrawn(value, note_of([value], {uses}), 5, UNSORTED), value)


def test_tables_of_places_in_themselves_become_permutations():
    table = torch.randint(0, 16, (16, 4))
    table[3, 2] = 15
    with Uses([table]) as uses:
        state = torch.arange(16)
        for symbol in range(4):
            state = table[state, symbol]
    drawn = redrawn(table, note_of([table], uses.found[0]), 5, LASTING_INPUTS)
    assert torch.equal(drawn.sort(0).values, torch.arange(16)[:, None].expand(16, 4))
    assert torch.equal(redrawn(table, note_of([table], {"index.self"}), 5, LASTING_INPUTS), table)


def test_square_probabilities_come_near_the_identity():
    value = torch.softmax(torch.randn(3, 16, 16), -1)
    drawn = redrawn(value, note_of([value]), 5, LASTING_INPUTS)
    assert torch.allclose(drawn.sum(-1), torch.ones(3, 16)) and bool((drawn > 0).all())
    assert float(drawn.diagonal(dim1=-2, dim2=-1).min()) > 0.99
    normalised = note_of([value]).model_copy(update={"varied": "shuffled"})
    assert torch.equal(redrawn(value, normalised, 5, LASTING_INPUTS), drawn)
    other = torch.softmax(torch.randn(16, 8), -1)
    assert torch.equal(redrawn(other, note_of([other]), 5, LASTING_INPUTS), other)


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda ids: ids[1:] - ids[:-1], {"slice.neighbours", "sub.neighbours"}),
        (lambda ids: torch.diff(ids), {"slice.neighbours", "sub.neighbours"}),
        (lambda ids: ids - 1, set()),
        (lambda ids: ids[:9], set()),
    ],
)
def test_what_looks_at_neighbours_is_told(call, told):
    ids = torch.arange(64)
    with Uses([ids]) as uses:
        call(ids)
    assert {use for use in uses.found[0] if use.endswith(".neighbours")} == told


def test_each_input_is_followed_to_the_operators_that_use_it():
    bounds, x, order = torch.randn(8), torch.randn(4), torch.arange(4)
    with Uses([bounds, x, order]) as uses:
        torch.searchsorted(bounds.sort().values * 2, x[order])
    assert "searchsorted.sorted_sequence" in uses.found[0]
    assert "searchsorted.self" in uses.found[1] & uses.found[2]
    assert "index.indices" in uses.found[2] and "index.indices" not in uses.found[1]


def test_integers_of_few_bits_are_any_that_these_hold_but_for_codes_and_places():
    letters, bytes_ = torch.randint(44, 123, (64, 64), dtype=torch.uint8), torch.arange(256)
    note = note_of([letters], {"eq.number", "_to_copy.self", "reads _to_copy.self"})
    assert note.rare == "narrow"
    for draw, most in zip(WHOLE_RANGE, (255, 255, 255), strict=True):
        drawn = redrawn(letters, note, 5, draw)
        assert int(drawn.max()) == most and 0 < int(drawn.min()) < 34  # no 0: it may divide
    samples = torch.randint(-500, 501, (64, 64), dtype=torch.int16)
    note = note_of([samples], {"mul.self"})
    ends = [[int(x) for x in redrawn(samples, note, 5, draw).aminmax()] for draw in WHOLE_RANGE]
    assert ends == [[-32768, 32767], [-32768, 32767], [-2000, 2000]]
    assert note_of([bytes_], {"eq.number"}).rare == "bytes"
    codes = torch.randint(0, 16, (64, 64), dtype=torch.uint8)
    assert note_of([codes], {"mul.self"}).rare == ""
    with Uses([letters]) as uses:
        letters.view(torch.float8_e4m3fn).float()
    assert note_of([letters], uses.found[0]).rare == ""
    for use in ("reads index.indices", "reads __lshift__.other", "eq.other"):
        assert note_of([letters], {"mul.self", use}).rare == ""
    assert note_of([letters], {"mul.self", "index.indices", "__lshift__.self"}).rare == "narrow"


def test_two_numbers_that_are_computed_with_and_probabilities_may_be_others():
    links, likely = (torch.rand(64, 64) < 0.2).float(), torch.softmax(torch.randn(64, 16), -1)
    note = note_of([links], {"mm.self"})
    drawn = redrawn(links, note, 5, GENERAL)
    assert float(((drawn > 0) & (drawn < 1)).float().mean()) > 0.3 and float(drawn.max()) == 1
    assert not note_of([links], {"where.condition", "eq.number"}).general
    assert not note_of([links.log()], {"add.other"}).general
    sums = redrawn(likely, note_of([likely]), 5, GENERAL).sum(-1)
    assert float(sums.min()) < 0.5 and 0.3 < float((sums > 0.999).float().mean()) < 0.7
