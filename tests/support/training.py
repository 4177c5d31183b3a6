"""A tiny base model and a few rows for tests of training, and a process that is killed in the
middle of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tasks.models import load_causal_model, load_tokenizer
from tasks.sources.small_model import SmallModelConfig, build_small_model
from tasks.training.recipe import PROJECTIONS

REASONING = (
    "The rows are independent, so walk over four at once.\n\n```cpp\nacc += x[j];\n```\n\nThat"
    " hides the latency of the add."
)
ANSWER = "Four rows at a time:\n\n```python\nclass ModelNew(nn.Module):\n    pass\n```"
EXHAUSTED = "exhausted_rank"
SHAPE = SmallModelConfig(
    vocab_size=700, hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=64
)

# Trains like any caller, and kills its own process after so many passes or checkpoints. Forks for
# each case: the imports take longest.
KILLED = """
import json, os, signal, sys
from trl import SFTTrainer
from tasks.training.recipe import TrainingRecipe
from tasks.training.trainer import train

def die(): os.kill(os.getpid(), signal.SIGKILL)

def killed_after(name, calls):
    seen, real = 0, getattr(SFTTrainer, name)
    def call(self, *args, **kwargs):
        nonlocal seen
        seen += 1
        result = None if name == "_save_rng_state" and seen == calls else real(self, *args, \
**kwargs)
        if seen == calls: die()
        return result
    setattr(SFTTrainer, name, call)

job = json.load(sys.stdin)
for name, calls, out in job["deaths"]:
    child = os.fork()
    if not child:
        try:
            killed_after(name, calls)
            train(job["rows"], TrainingRecipe.model_validate(job["recipe"]), job["base"], out)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status): sys.exit(f"{name} {calls}: was not killed")
"""


def row(index, **changes):
    """A row of the curated schema with its prompt, as far as training reads it."""
    return {
        "candidate_id": f"c{index}",
        "task_id": f"t{index}",
        "prompt": f"Write a kernel for\nclass Model{index}(nn.Module): ...\n",
        "reasoning": REASONING.replace("four", f"{index + 2}"),
        "answer": ANSWER,
        **changes,
    }


def tiny_model(directory, **shape):
    texts = [REASONING, ANSWER, row(0)["prompt"]]
    return build_small_model(directory, texts, SHAPE.model_copy(update=shape))


def exhaust_memory():
    """For Ray's workers, as they start: the one whose rank the first row names (under EXHAUSTED)
    gets no memory for its first pass."""
    from tasks.training import launch

    real = launch.Job.train

    def train(job, on_log):
        if job.rows[0].get(EXHAUSTED) == os.environ.get("RANK", ""):
            import torch
            from trl import SFTTrainer

            def no_memory(*args, **kwargs):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

            SFTTrainer.training_step = no_memory
        return real(job, on_log)

    launch.Job.train = train


def die_while_training(
    rows,
    recipe,
    base,
    deaths,
):
    """Start training once for each of `deaths` (a method of SFTTrainer, after how many calls of it,
    the directory trained in) and have that process killed by SIGKILL there. `training_step` is one
    forward and backward pass; `_save_rng_state` is in the middle of writing a checkpoint."""
    job = {
        "rows": list(rows),
        "recipe": recipe.model_dump(mode="json"),
        "base": str(base),
        "deaths": [(name, calls, str(out)) for name, calls, out in deaths],
    }
    done = subprocess.run(
        [sys.executable, "-c", KILLED],
        input=json.dumps(job),
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def adapter_changes_output(base_model_dir, adapter_dir, prompt):
    """Largest absolute difference between the logits of the base model and of the same with the
    adapter, over all positions of `prompt`.

    Both are loaded from disk, in float32. 0 means that the adapter does nothing. Raises UsageError
    where either cannot be loaded.
    """
    import torch

    encoded = load_tokenizer(base_model_dir)(prompt, return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        logits = []
        for adapter in (None, adapter_dir):
            model = load_causal_model(base_model_dir, dtype=torch.float32, adapter=adapter)
            logits.append(model(**encoded).logits)
    return float((logits[0] - logits[1]).abs().max())


def use_plan(monkeypatch, **counts):
    """Have `accelerate` use a plan of so many layers a level, whatever the device has."""
    from tasks.training.acceleration import layers
    from tasks.training.acceleration.recomputation import RecomputationPlan

    plan = RecomputationPlan(**{"layer": 0, "mlp": 0, "keep": 0, "peak_bytes": 0} | counts)
    monkeypatch.setattr(layers, "_plan", lambda *_: plan)


def adapted_qwen(*, kind="Qwen2", dropout=0.0, rank=4, spread=0.05, base=None, **shape):
    """A small Qwen2, or another `kind` that transformers has, with an adapter on all projections,
    ready to train. `base` is where the model goes (arguments of `Module.to`) before it is
    adapted."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    plain = {
        "hidden_size": 32,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "tie_word_embeddings": False,
    }
    causal = getattr(transformers, f"{kind}ForCausalLM")
    model = causal(causal.config_class(**plain | shape))
    lora = {"r": rank, "lora_alpha": rank, "lora_dropout": dropout}
    adapted = get_peft_model(
        model.to(*base) if base else model, LoraConfig(**lora, target_modules=list(PROJECTIONS))
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # PEFT starts it at zero, where half of the gradients are
            torch.nn.init.normal_(parameter, std=spread)
    return adapted.train()


def adapter_bytes(result):
    """The files of an adapter by name, without its card."""
    return {
        path.name: path.read_bytes()
        for path in result.adapter_dir.iterdir()
        if path.suffix in (".json", ".safetensors")
    }
