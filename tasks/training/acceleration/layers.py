"""Faster training of a LoRA model with the same result.

Guarantees: the same function and gradients up to rounding and dropout masks; PEFT's parameter names
and float32 weights. Decoder layers must be alike.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from pydantic import Field
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from tasks.training.acceleration import attention, offloading
from tasks.training.acceleration.dropout import CounterDropout, DropoutKeys
from tasks.training.acceleration.recomputation import (
    BYTES,
    LEVELS,
    LayerShape,
    RecomputationPlan,
    plan_recomputation,
)

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

log = logging.getLogger(__name__)

ATTENTION_OPERATORS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


MEMORY_SHARE = 0.92
"""Share of a device's memory that is planned for."""


class AccelerationOptions(Record):
    """What is made faster. The defaults are what measured best.

    Attributes:
        compile: compile each decoder layer; alike layers share the code
        compile_backend: of torch.compile; aot_eager generates no code (tests, debugging)
        attention: the kernel; auto times them on a GPU
        recompute: what each layer recomputes in the backward pass: auto spends the free memory, the
            others force one level
        host_memory_gb: main memory, page-locked, that a worker may fill with activations of the
            MLP instead of computing them again; null: its share of 60 % of the machine's, where
            copies are fast enough to overlap
    """

    compile: bool = True
    compile_backend: str = "inductor"
    attention: Literal["auto", "sdpa", "cudnn", "cudnn_expanded"] = "auto"
    recompute: Literal["auto", "layer", "mlp", "keep"] = "auto"
    host_memory_gb: float | None = Field(default=None, ge=0)


@dataclass(eq=False)
class Acceleration:
    """What `accelerate` did to a model. The trainer needs `callback()`, so that a resumed run
    continues the sequence of masks."""

    plan: RecomputationPlan
    attention_name: str
    attention_ms: dict[str, float]
    keys: DropoutKeys
    gathered: tuple[FSDPModule, ...] = ()
    """layers that stay gathered between passes of an optimiser step"""
    micro_step: int = 0

    def before_forward(self, module: nn.Module, *_: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self.keys.set(self.micro_step)
            self.micro_step += 1
        else:
            # evaluation and generation meet any length and are short: not worth minutes of
            # compiling
            torch.compiler.set_stance("force_eager")

    def after_forward(self, *_: Any) -> None:
        torch.compiler.set_stance("default")

    def callback(self) -> TrainerCallback:
        from transformers import TrainerCallback

        acceleration = self

        class Position(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                # at every step, not only the first: an epoch's last step may be short, and a
                # resumed run could not tell
                acceleration.micro_step = state.global_step * args.gradient_accumulation_steps

        return Position()


def accelerate(
    model: nn.Module,
    *,
    tokens: int,
    seed: int,
    rank: int = 0,
    options: AccelerationOptions | None = None,
) -> Acceleration:
    """Change a PEFT-wrapped causal model in place; a micro batch holds at most `tokens` (rows x
    padded length).

    Call it after attaching the adapter and moving the model, before the first step, with the
    trainer's gradient checkpointing off; for FSDP2 after sharding by layer.
    Each process gives its `rank`, for its own masks. Evaluation and generation run uncompiled.
    Raises UsageError for a model without decoder layers, with attention that is not causal over the
    whole row, or too large even with full recomputation."""
    options = options or AccelerationOptions()
    base = _base_of(model)
    layers = decoder_layers(base)
    device = next(base.parameters()).device
    shape = shape_of(model)
    require_causal(base)

    dropouts = _replace_dropout(model, device)
    _compute_in_input_type(model)
    attention_name, times = _choose_attention(options.attention, shape, tokens, device)
    attention.register()
    base.config._attn_implementation = attention_name
    # the first layer's input must want a gradient like those of the others, or it is compiled for
    # itself
    base.enable_input_require_grads()
    base.config.use_cache = (
        False  # a recomputed layer would write its keys and values into a cache twice
    )
    plan = _plan(options, shape, tokens, model, device)
    try:
        memory = offloading.MainMemory(plan, shape, tokens, device) if plan.host else None
    except RuntimeError as error:  # what page-locks memory refused
        if options.host_memory_gb is not None:
            raise
        log.warning("layers are computed again instead of waiting in main memory: %s", error)
        options = options.model_copy(update={"host_memory_gb": 0})
        plan, memory = _plan(options, shape, tokens, model, device), None
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what was allocated for timing
    for layer, level in zip(layers, plan.levels(), strict=True):
        _checkpoint(layer, level, shape.lora_rank)
    gathered = cast("list[FSDPModule]", layers[len(layers) - plan.gathered :])
    for sharded in gathered:
        sharded.set_reshard_after_forward(False, recurse=False)
    if options.compile:
        # kept, without MLP, recomputed, each with and without gradients: more than dynamo's default
        # of 8 codes would be silently eager
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        # DDP reduces between layers by itself; cut at its buckets, a layer's code would keep what
        # lies at every cut
        torch._dynamo.config.optimize_ddp = False
        _recompute_all_but_products_and_attention()
        for layer in layers:
            # not the call with its hooks: FSDP gathers weights in them
            layer.forward = torch.compile(
                layer.forward,
                fullgraph=True,
                backend=options.compile_backend,
            )
    if memory:
        for number, layer in enumerate(layers):
            layer.forward = memory.around(layer, number, layer.forward)
    keys = DropoutKeys(dropouts, seed, rank)
    acceleration = Acceleration(plan, attention_name, times, keys, tuple(gathered))
    # on the backbone: PEFT and TRL call the causal model's forward past its hooks
    base.model.register_forward_pre_hook(acceleration.before_forward)
    base.model.register_forward_hook(acceleration.after_forward, always_call=True)
    return acceleration


def accelerate_trainer(
    trainer: Trainer,
    *,
    tokens: int,
    seed: int,
    sharded: bool,
    options: AccelerationOptions | None = None,
    made: Callable[[Acceleration], object] = lambda _: None,
) -> None:
    """`accelerate` a trainer's model now, or once FSDP2 has sharded it (`sharded`); then call
    `made`."""
    from transformers import TrainerCallback

    def act() -> None:
        rank = trainer.args.process_index
        model = cast(nn.Module, trainer.model)
        found = accelerate(model, tokens=tokens, seed=seed, rank=rank, options=options)

        def before_forward(*_: Any) -> None:
            # the frozen weights never change, the adapter's do, after a step's last pass
            for layer in found.gathered:
                last = trainer.accelerator.sync_gradients
                layer.set_reshard_after_backward(last, recurse=False)

        model.register_forward_pre_hook(before_forward)
        trainer.add_callback(found.callback())
        made(found)

    class OnceSharded(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            act()

    if not sharded:
        act()
        return
    exchange_in_float32(trainer)
    trainer.add_callback(OnceSharded())


def exchange_in_float32(trainer: Trainer) -> None:
    """Let FSDP2 sum gradients in float32 and keep the loss unrounded; accelerate's default is
    bfloat16. Call it before training begins."""
    from transformers import TrainerCallback

    plugin = trainer.accelerator.state.fsdp_plugin
    if policy := plugin.mixed_precision_policy:
        changed = replace(policy, reduce_dtype=torch.float32, output_dtype=None)
        plugin.mixed_precision_policy = changed

    class HeadOnce(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            # TRL's loss calls the head past FSDP2's hooks, and torch expects of each module, before
            # it sums gradients of several passes in another type, that it was gathered once
            head = cast("CausalModel", trainer.model).get_output_embeddings()
            if isinstance(head, FSDPModule):
                head.unshard()
                head.reshard()

    trainer.add_callback(HeadOnce())


class CausalModel(Protocol):
    """The parts of a transformers causal model that are used here."""

    config: Any
    model: nn.Module

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def enable_input_require_grads(self) -> object: ...

    def get_output_embeddings(self) -> nn.Module | None: ...


def _base_of(model: nn.Module) -> CausalModel:
    unwrap = getattr(model, "get_base_model", None)
    return cast(CausalModel, unwrap() if unwrap else model)


def decoder_layers(base: object) -> nn.ModuleList:
    """Decoder layers of a Llama-like causal model. Raises UsageError where there are none."""
    layers = getattr(getattr(base, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not all(
        hasattr(layer, "mlp") and hasattr(layer, "self_attn") for layer in layers
    ):
        raise UsageError(
            f"{type(base).__name__} has no decoder layers with self_attn and mlp",
            "set training.acceleration to off",
        )
    return layers


def require_causal(base: CausalModel) -> None:
    """Raise UsageError for a model with other than plain causal attention."""
    if asked := attention.beyond_causal(base.config):
        raise UsageError(
            f"the attention of {type(base).__name__} asks for {asked}: accelerated attention is"
            " causal over the whole row and would train on other logits",
            "set training.acceleration to off",
        )


def shape_of(model: nn.Module) -> LayerShape:
    config = _base_of(model).config
    ranks: set[int] = set()
    for module in model.modules():
        if hasattr(module, "lora_A") and isinstance(by_adapter := module.r, dict):
            ranks |= set(by_adapter.values())
    return LayerShape.of(config, max(ranks, default=0))


def _replace_dropout(model: nn.Module, device: torch.device) -> list[CounterDropout]:
    replaced = []
    for module in model.modules():
        dropouts = getattr(module, "lora_dropout", {})
        for name, dropout in dropouts.items():
            if isinstance(dropout, nn.Dropout) and dropout.p > 0:
                ours = CounterDropout(dropout.p, device).train(dropout.training)
                dropouts[name] = ours
                replaced.append(ours)
    return replaced


def _compute_in_input_type(model: nn.Module) -> None:
    """Remove PEFT's cast to float32 before dropout, which autocast reverts at twice the bytes."""
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "cast_input_dtype_enabled"):
            layer.cast_input_dtype_enabled = False


def _choose_attention(
    asked: str, shape: LayerShape, tokens: int, device: torch.device
) -> tuple[str, dict[str, float]]:
    if asked != "auto":
        return f"concur_{asked}", {}
    if device.type != "cuda":
        return attention.SDPA, {}
    times = attention.fastest_attention(
        shape.heads, shape.key_value_heads, shape.head_size, tokens, device
    )
    return next(iter(times), attention.SDPA), times


def _plan(
    options: AccelerationOptions,
    shape: LayerShape,
    tokens: int,
    model: nn.Module,
    device: torch.device,
) -> RecomputationPlan:
    if options.recompute != "auto" or device.type != "cuda":
        level = "keep" if options.recompute == "auto" else options.recompute
        counts = dict.fromkeys(LEVELS, 0) | {level: shape.layers}
        return RecomputationPlan(**counts, peak_bytes=0)
    total = torch.cuda.mem_get_info(device)[1]
    trained = [_held(each) for each in model.parameters() if each.requires_grad]
    frozen_bytes = sum(_held(each).nbytes for each in model.parameters() if not each.requires_grad)
    sharded = isinstance(model, FSDPModule)
    planned = functools.partial(
        plan_recomputation,
        shape,
        device_bytes=total,
        weight_bytes=frozen_bytes + _exchanged_bytes(model),
        trained=sum(each.numel() for each in trained),
        tokens=tokens,
        margin_bytes=int(total * (1 - MEMORY_SHARE)),
        gathered_bytes=_whole_bytes(decoder_layers(_base_of(model))[0]) if sharded else 0,
    )
    if not options.compile:
        return planned()
    if options.host_memory_gb is not None:
        return planned(host_bytes=int(options.host_memory_gb * 1e9))
    plan = planned(host_bytes=offloading.free_bytes())
    if plan.host and not offloading.worth_moving(shape, tokens, device):
        return planned()
    return plan


def _held(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _whole_bytes(module: nn.Module) -> int:
    return BYTES * sum(parameter.numel() for parameter in module.parameters())


def _exchanged_bytes(model: nn.Module) -> int:
    if isinstance(model, FSDPModule):
        return 2 * _whole_bytes(decoder_layers(_base_of(model))[0])
    if not torch.distributed.is_initialized():
        return 0
    return sum(each.nbytes for each in model.parameters() if each.requires_grad)


def _recompute_all_but_products_and_attention() -> None:
    """Let compiled code keep no masks or dropped inputs: half of a layer's bytes. Process-wide."""
    from torch._functorch import config, partitioners

    config.aggressive_recomputation = True
    listed = partitioners.get_default_op_list
    if not (isinstance(listed, functools.partial) and listed.func is _with_attention):
        partitioners.get_default_op_list = functools.partial(_with_attention, listed)


def _with_attention(listed: Callable[[], Any]) -> Any:
    operators = listed()
    operators.compute_intensive_ops.update(
        getattr(torch.ops.aten, name) for name in ATTENTION_OPERATORS
    )
    return operators


def _checkpoint(layer: Any, level: str, rank: int) -> None:
    module = {"layer": layer, "mlp": layer.mlp}.get(level)
    if module is None:
        return
    contexts = functools.partial(
        create_selective_checkpoint_contexts, functools.partial(_policy, rank=rank)
    )
    original = module.forward

    def forward(*inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*inputs, **options)
        return checkpoint(original, *inputs, use_reentrant=False, context_fn=contexts, **options)

    module.forward = forward


def _policy(
    context: Any, operator: Any, *inputs: Any, rank: int, **options: Any
) -> CheckpointPolicy:
    name = operator.overloadpacket.__name__ if hasattr(operator, "overloadpacket") else ""
    if name in ATTENTION_OPERATORS:
        return CheckpointPolicy.MUST_SAVE
    # the narrow products of the adapter's first half: a few bytes per token that spare reading the
    # whole input again
    if name == "mm" and inputs[1].shape[-1] == rank:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
