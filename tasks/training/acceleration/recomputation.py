"""How many layers keep their activations, by the memory that a training step leaves free:
arithmetic alone."""

from __future__ import annotations

from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from kernels_eval.errors import UsageError
from kernels_eval.records import Record

LEVELS = ("layer", "mlp", "keep")
BYTES = 2  # activations and base weights are bfloat16
AHEAD = 2
"""layers whose activations move to or from main memory, beside those that keep theirs"""


class LayerShape(Record):
    """What the memory of one forward and backward pass depends on."""

    layers: PositiveInt
    hidden: PositiveInt
    intermediate: PositiveInt
    heads: PositiveInt
    key_value_heads: PositiveInt
    head_size: PositiveInt
    lora_rank: NonNegativeInt

    @classmethod
    def of(cls, config: Any, lora_rank: int) -> LayerShape:
        """The shape of a Llama-like causal model, from its transformers configuration. Raises
        UsageError where that lacks a size."""
        try:
            return cls(
                layers=config.num_hidden_layers,
                hidden=config.hidden_size,
                intermediate=config.intermediate_size,
                heads=config.num_attention_heads,
                key_value_heads=config.num_key_value_heads,
                head_size=getattr(config, "head_dim", None)
                or config.hidden_size // config.num_attention_heads,
                lora_rank=lora_rank,
            )
        except AttributeError as error:
            raise UsageError(
                f"the memory of this model cannot be planned: {error}",
                "set training.acceleration to off, and training.parallelism to ddp or fsdp2",
            ) from error

    @property
    def products(self) -> list[tuple[int, int]]:
        """Input and output width of a layer's seven projections."""
        key_value = self.key_value_heads * self.head_size
        within = [(self.hidden, self.attention), *[(self.hidden, key_value)] * 2]
        within += [(self.attention, self.hidden), *[(self.hidden, self.intermediate)] * 2]
        return [*within, (self.intermediate, self.hidden)]

    @property
    def trained(self) -> int:
        """Parameters of an adapter on all projections."""
        return self.layers * self.lora_rank * sum(wide + out for wide, out in self.products)

    @property
    def attention(self) -> int:
        """Width of the queries and of attention's output."""
        return self.heads * self.head_size

    def layer_bytes(self, level: str) -> int:
        """Bytes per token that one layer keeps at a level of `RecomputationPlan`, within 2 % of
        compiled code (a test counts the tensors)."""
        inputs, low_rank = self.hidden, 7 * self.lora_rank
        kept = BYTES * (inputs + self.attention + low_rank)
        kept += 4 * self.heads  # the logarithm of attention's normaliser (float32)
        if level != "layer":
            projected = self.attention + 2 * self.key_value_heads * self.head_size
            middle = self.hidden  # the stream between attention and MLP
            kept += BYTES * (projected + middle)
        if level == "keep":
            kept += self.wide_bytes
        return kept

    @property
    def wide_bytes(self) -> int:
        """Bytes per token of a layer's gate and up."""
        return BYTES * 2 * self.intermediate

    def workspace_bytes(self) -> int:
        """Bytes per token of one layer's backward pass beyond what layers keep: ten tensors of the
        MLP's width."""
        return BYTES * 10 * self.intermediate

    def loss_bytes(self) -> int:
        """Bytes per token at the model's end: final norm in float32 and its gradient."""
        return (4 + 4 * BYTES) * self.hidden


class RecomputationPlan(Record):
    """From the first layer to the last: `layer` layers recompute all but attention, then `mlp`
    layers their MLP, then `host` layers have gate and up in main memory meanwhile, then `keep`
    layers recompute and move nothing.

    The last layers keep: their backward passes free memory before the first recomputed layer's.

    Attributes:
        peak_bytes: estimated peak of a step: weights, adapter with optimiser, activations,
            workspace
        gathered: so many of the last layers, of a sharded model, stay gathered from their forward
            to their backward pass, and between the passes of one optimiser step
    """

    layer: NonNegativeInt
    mlp: NonNegativeInt
    keep: NonNegativeInt
    peak_bytes: int
    gathered: NonNegativeInt = 0
    host: NonNegativeInt = 0

    def levels(self) -> list[str]:
        order = ("layer", "mlp", "host", "keep")
        return [level for level in order for _ in range(getattr(self, level))]

    @property
    def moved(self) -> range:
        first = self.layer + self.mlp
        return range(first, first + self.host)

    def describe(self) -> str:
        return (
            f"{self.keep} kept, {self.mlp} without MLP, {self.layer} without all but attention"
            + (f", {self.host} in main memory" if self.host else "")
            + (f", {self.gathered} gathered" if self.gathered else "")
            + f"; peak {self.peak_bytes / 1e9:.1f} GB"
        )


def peak_bytes(
    shape: LayerShape, levels: tuple[int, int, int], *, tokens: int, weight_bytes: int, trained: int
) -> int:
    """Estimated peak bytes for (layer, mlp, keep) layers; `trained` parameters take 16 bytes each:
    float32, gradient and two Adam moments."""
    pairs = zip(levels, LEVELS, strict=True)
    kept = sum(count * shape.layer_bytes(level) for count, level in pairs)
    per_token = kept + shape.workspace_bytes() + shape.loss_bytes()
    return weight_bytes + 16 * trained + tokens * per_token


def plan_recomputation(
    shape: LayerShape,
    *,
    device_bytes: int,
    weight_bytes: int,
    trained: int,
    tokens: int,
    margin_bytes: int | None = None,
    gathered_bytes: int = 0,
    host_bytes: int = 0,
) -> RecomputationPlan:
    """The plan with the fewest recomputed FLOPs that fits `device_bytes` less `margin_bytes`
    (default 5 %), for `tokens` per micro batch.

    Kept first is attention, then MLPs, by layer. Gate and up of other MLPs go to `host_bytes` of
    main memory; remaining memory keeps layers gathered, at `gathered_bytes` each (0: not sharded).
    Raises UsageError where full recomputation does not fit.
    """
    margin = device_bytes // 20 if margin_bytes is None else margin_bytes
    allowed = device_bytes - margin

    def peak(levels: tuple[int, int, int]) -> int:
        return peak_bytes(shape, levels, tokens=tokens, weight_bytes=weight_bytes, trained=trained)

    count = shape.layers
    candidates = [(count - step, step, 0) for step in range(count + 1)] + [
        (0, count - step, step) for step in range(1, count + 1)
    ]
    fitting = [levels for levels in candidates if peak(levels) <= allowed]
    if not fitting:
        raise UsageError(
            f"{tokens} tokens at a time need {peak(candidates[0]) / 1e9:.1f} GB even when every"
            f" layer is recomputed; {allowed / 1e9:.1f} GB of {device_bytes / 1e9:.1f} GB are"
            " allowed",
            "fewer tokens per micro batch, a lower rank, or more GPUs",
        )
    layer, mlp, keep = fitting[-1]
    used = peak(fitting[-1])
    gathered = min(count, (allowed - used) // gathered_bytes) if gathered_bytes else 0
    used += gathered * gathered_bytes
    # the last that keep theirs give their place to those that come and go
    host = min(mlp + AHEAD, host_bytes // (tokens * shape.wide_bytes)) if keep >= AHEAD else 0
    if host > AHEAD and mlp:
        mlp, keep = mlp + AHEAD - host, keep - AHEAD
    else:
        host = 0
    return RecomputationPlan(
        layer=layer, mlp=mlp, keep=keep, peak_bytes=used, gathered=gathered, host=host
    )
