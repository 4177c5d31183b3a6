"""The accelerated model learns what the plain one learns: losses, gradients, names, masks; and it
compiles once."""

import copy

import pytest
import torch

from kernels_eval.errors import UsageError
from tasks.training.acceleration import layers
from tasks.training.acceleration.layers import (
    AccelerationOptions,
    accelerate,
    decoder_layers,
    shape_of,
)
from tasks.training.acceleration.offloading import WIDE, MainMemory
from tasks.training.acceleration.recomputation import AHEAD, RecomputationPlan
from tests.support.accelerated import TOKENS, accelerated, line, model
from tests.support.cases import cases
from tests.support.training import adapted_qwen, use_plan

CASES = cases("training")

SPLIT = "aot_eager_decomp_partition"


def loss_and_gradients(adapted, line):
    adapted.zero_grad()
    labels = line["labels"]
    logits = adapted(**{name: value for name, value in line.items() if name != "labels"}).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
    loss.backward()
    return loss.detach(), {
        name: parameter.grad.clone()
        for name, parameter in adapted.named_parameters()
        if parameter.requires_grad
    }


def assert_same(ours, theirs, tolerance=1e-4):
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        scale = wanted.abs().max().clamp(min=1e-6)
        assert ((ours[name] - wanted).abs().max() / scale) < tolerance, name


@pytest.mark.parametrize("recompute", ["layer", "mlp", "keep"])
def test_losses_gradients_and_names_are_those_of_the_plain_model(recompute):
    plain = model()
    changed = copy.deepcopy(plain)
    accelerated(changed, recompute=recompute)
    assert list(changed.state_dict()) == list(plain.state_dict()), (
        "an adapter saved before loads after, and the other way round"
    )
    theirs, ours = loss_and_gradients(plain, line()), loss_and_gradients(changed, line())
    assert torch.allclose(ours[0], theirs[0], rtol=1e-5)
    assert_same(ours[1], theirs[1])


def test_masks_follow_seed_and_step_and_a_resumed_position():
    def losses(seed, start, count, recompute="keep"):
        adapted = model(dropout=0.3)
        acceleration = accelerated(adapted, seed=seed, recompute=recompute)
        acceleration.micro_step = start
        return [float(loss_and_gradients(adapted, line())[0]) for _ in range(count)]

    uninterrupted = losses(5, 0, 4)
    assert len(set(uninterrupted)) == 4, "every step draws new masks"
    assert losses(5, 2, 2) == uninterrupted[2:]
    assert losses(6, 0, 1) != uninterrupted[:1]
    assert losses(5, 0, 4, "layer") == pytest.approx(uninterrupted, rel=1e-6)


def test_recomputation_draws_the_masks_of_the_forward_pass():
    gradients = {}
    for recompute in ("keep", "layer", "mlp"):
        adapted = model(dropout=0.3)
        accelerated(adapted, seed=5, recompute=recompute)
        gradients[recompute] = loss_and_gradients(adapted, line())[1]
    assert_same(gradients["layer"], gradients["keep"])
    assert_same(gradients["mlp"], gradients["keep"])


def moving(monkeypatch, compile=False, **counts):
    """A model whose layers wait in main memory by a plan of these counts, bfloat16 as on a GPU."""
    use_plan(monkeypatch, **counts)
    adapted = adapted_qwen(
        dropout=0.3, base=(torch.bfloat16,), num_hidden_layers=6, attn_implementation="sdpa"
    )
    accelerated(adapted, seed=5, compile=compile, compile_backend=SPLIT)
    return adapted


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_activations_that_wait_in_main_memory_change_nothing(compile, monkeypatch, fresh_compiler):
    lines = [line(length) for length in (TOKENS, 17, TOKENS)]
    on_device = []
    really = MainMemory._bring_back

    def bring_back(memory, layer):
        really(memory, layer)
        on_device.append(len(memory.returned))

    monkeypatch.setattr(MainMemory, "_bring_back", bring_back)
    for counts in ({"host": 5, "keep": 1}, {"mlp": 2, "host": 3, "keep": 1}):
        kept = moving(
            monkeypatch, compile, **counts | {"host": 0, "keep": 6 - counts.get("mlp", 0)}
        )
        moved = moving(monkeypatch, compile, **counts)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for each in lines:
                theirs, ours = loss_and_gradients(kept, each), loss_and_gradients(moved, each)
                assert ours[0] == theirs[0]
                assert all(torch.equal(ours[1][name], theirs[1][name]) for name in theirs[1])
        assert len(on_device) == 3 * counts["host"] and max(on_device) <= WIDE * (1 + AHEAD)
        on_device.clear()


def test_a_backward_pass_after_another_forward_pass_is_refused(monkeypatch):
    adapted = moving(monkeypatch, host=5, keep=1)
    ids = torch.ones(1, 9, dtype=torch.long)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = adapted(ids).logits.sum()
        adapted(ids)
    with pytest.raises(RuntimeError, match="overwritten by those of a later one"):
        first.backward()


def test_memory_that_cannot_be_locked_lets_layers_be_computed_again(monkeypatch, caplog):
    def refused(*_):
        raise RuntimeError("CUDA error: out of memory")

    moved = RecomputationPlan(layer=0, mlp=0, host=5, keep=1, peak_bytes=0)
    again = RecomputationPlan(layer=0, mlp=6, keep=0, peak_bytes=0)

    asked = []

    def plan(options, *_):
        asked.append(options.host_memory_gb)
        return again if options.host_memory_gb == 0 else moved

    monkeypatch.setattr(MainMemory, "__init__", refused)
    monkeypatch.setattr(layers, "_plan", plan)
    accelerated(model(layers=6))
    assert asked == [None, 0] and "computed again" in caplog.text
    with pytest.raises(RuntimeError, match="out of memory"):
        accelerated(model(layers=6), host_memory_gb=4)


@pytest.fixture
def alone(tmp_path):
    """A group of one process, over which FSDP2 shards."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def sharded(adapted, mesh):
    for layer in (*decoder_layers(adapted.get_base_model()), adapted):
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
    return adapted


def gathered_layers(adapted):
    """Layers that hold whole weights now."""
    return [
        index
        for index, layer in enumerate(decoder_layers(adapted.get_base_model()))
        if not isinstance(layer.mlp.up_proj.base_layer.weight, torch.distributed.tensor.DTensor)
    ]


@pytest.mark.parametrize("gathered", [0, 2])
@pytest.mark.parametrize("recompute", ["layer", "mlp", "keep"])
def test_a_sharded_model_learns_what_the_whole_one_learns(recompute, gathered, alone, monkeypatch):
    whole = model(dropout=0.3)
    parted = sharded(copy.deepcopy(whole), alone)
    accelerated(whole, seed=5, recompute=recompute)
    real = layers._plan
    monkeypatch.setattr(
        layers, "_plan", lambda *a: real(*a).model_copy(update={"gathered": gathered})
    )
    found = accelerated(parted, seed=5, recompute=recompute)
    assert len(found.gathered) == gathered
    held = []
    forward = parted.get_base_model().model.register_forward_hook(
        lambda *_: held.append(gathered_layers(parted))
    )
    for _ in range(2):
        theirs, ours = loss_and_gradients(whole, line()), loss_and_gradients(parted, line())
        assert torch.allclose(ours[0], theirs[0], rtol=1e-5)
        assert_same({name: each.full_tensor() for name, each in ours[1].items()}, theirs[1])
    forward.remove()
    assert held == [[1, 2]] * 2 if gathered else [[]] * 2, "after the forward pass"
    assert not gathered_layers(parted), "after the backward pass"


def test_evaluation_draws_nothing_and_moves_no_position():
    adapted = model(dropout=0.3)
    acceleration = accelerated(adapted, seed=5)
    ids = line()["input_ids"]
    adapted.eval()
    with torch.no_grad():
        assert torch.equal(adapted(ids).logits, adapted(ids).logits)
    assert acceleration.micro_step == 0


def test_a_model_without_decoder_layers_is_refused():
    with pytest.raises(UsageError, match="no decoder layers"):
        decoder_layers(torch.nn.Linear(2, 2))


def test_the_shape_is_read_off_the_model():
    shape = shape_of(model())
    assert (shape.layers, shape.hidden, shape.intermediate, shape.lora_rank, shape.head_size) == (
        3,
        32,
        80,
        4,
        8,
    )


def compiled_codes():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"recompute": "layer", "compile_backend": SPLIT},
        {"recompute": "mlp", "compile_backend": SPLIT},
        {"recompute": "keep", "compile_backend": SPLIT},
        {},  # code that inductor generates
    ],
)
def test_layers_share_one_compiled_code_that_computes_the_same(options, fresh_compiler):
    eager, compiled = model(dropout=0.3), model(dropout=0.3)
    accelerated(eager, seed=5, recompute=options.get("recompute", "auto"))
    accelerated(compiled, seed=5, compile=True, **options)
    for _ in range(3):
        theirs, ours = loss_and_gradients(eager, line()), loss_and_gradients(compiled, line())
        assert torch.allclose(ours[0], theirs[0], rtol=1e-5)
        assert_same(ours[1], theirs[1], tolerance=1e-3)
    assert compiled_codes() == 1


@pytest.mark.slow
def test_evaluation_compiles_nothing(fresh_compiler):
    compiled = model(dropout=0.3, layers=2)
    accelerated(compiled, seed=5, compile=True, compile_backend="aot_eager")
    before = loss_and_gradients(compiled, line())
    for length in (3, 9, 14):
        with torch.no_grad():
            compiled.eval()(torch.ones(1, length, dtype=torch.long))
    assert compiled_codes() == 1
    assert loss_and_gradients(compiled.train(), line())[0] != before[0], (
        "the next step, with other masks"
    )
    assert compiled_codes() == 1


@pytest.mark.slow
def test_rows_of_any_length_share_compiled_code(fresh_compiler):
    eager, compiled = model(dropout=0.3, layers=2), model(dropout=0.3, layers=2)
    accelerated(eager, seed=5)
    accelerated(compiled, seed=5, compile=True, compile_backend="aot_eager")
    for length in CASES["row_lengths"]:
        row = line(length)
        theirs, ours = loss_and_gradients(eager, row), loss_and_gradients(compiled, row)
        assert torch.allclose(ours[0], theirs[0], rtol=1e-4)
        assert_same(ours[1], theirs[1], tolerance=1e-3)
    assert compiled_codes() == 2, "for one length, and for all others"


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["layer", "mlp", "keep"])
def test_a_layer_saves_what_the_plan_counts(recompute, fresh_compiler):
    """bfloat16 as on a GPU. This backend keeps attention's output in two layouts where generated
    code keeps one: that much is allowed."""
    adapted = adapted_qwen(
        dropout=0.05,
        rank=16,
        base=(torch.bfloat16,),
        hidden_size=320,
        intermediate_size=1728,
        num_hidden_layers=1,
        num_attention_heads=5,
        num_key_value_heads=1,
        vocab_size=64,
    )
    options = AccelerationOptions(recompute=recompute, compile_backend=SPLIT)
    accelerate(adapted, tokens=256, seed=0, options=options)
    inner = adapted.get_base_model().model
    hidden = inner.embed_tokens(torch.ones(1, 256, dtype=torch.long)).requires_grad_()
    angles = inner.rotary_emb(hidden, torch.arange(256)[None])
    shared = {tensor.data_ptr() for tensor in (*adapted.parameters(), *angles)}
    saved = {}

    def keep(tensor):
        if tensor.data_ptr() not in shared:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        inner.layers[0](hidden, attention_mask=None, position_embeddings=angles, use_cache=False)
    per_token = sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) / 256
    counted = shape_of(adapted).layer_bytes(recompute)
    assert 0.98 * counted <= per_token <= 1.02 * counted + 2 * 320
    assert not any(tensor.dtype == torch.bool for tensor in saved.values()), "no mask is kept"
