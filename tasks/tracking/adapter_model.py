"""A LoRA adapter as a model of MLflow's registry: the MLmodel file that gives a plain PEFT folder
its signature, and what loads it.

Guarantees: the folder stays what PEFT and vLLM load, with one file more; prompts in, responses out,
under the base model's own chat template, greedily unless asked otherwise; the base model is loaded
by the name that the file has, or by the one that `mlflow.pyfunc.load_model(...,
model_config={"base_model": ...})` gives. Loading needs concur, torch and PEFT, and memory for the
base model. Not meant for serving many requests: that is vLLM's, by the adapter's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels_eval.records import Row
from tasks.sources.small_model import chat_text, load_causal_model, load_tokenizer

if TYPE_CHECKING:
    import pandas as pd
    from mlflow.models import ModelSignature

MLMODEL = "MLmodel"
FLAVOR = "concur_lora"
MAX_NEW_TOKENS = 1024


def signature() -> ModelSignature:
    """A column of prompts (the user's turn) in, a column of responses out; how much and how freely
    is told by parameters."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema

    return ModelSignature(
        inputs=Schema([ColSpec(DataType.string, "prompt")]),
        outputs=Schema([ColSpec(DataType.string, "response")]),
        params=ParamSchema(
            [
                ParamSpec("max_new_tokens", DataType.long, MAX_NEW_TOKENS),
                ParamSpec("temperature", DataType.double, 0.0),
                ParamSpec("seed", DataType.long, 0),
            ]
        ),
    )


def write_mlmodel(directory: Path, base_model: str, run_id: str, facts: Mapping[str, str]) -> Path:
    """Write MLmodel into `directory`: the base model's name, the signature, and `facts` (lineage)
    as its metadata. Returns its path."""
    from mlflow import pyfunc
    from mlflow.models import Model

    model = Model(run_id=run_id, signature=signature(), metadata=dict(facts))
    pyfunc.add_to_model(model, loader_module=__name__, model_config={"base_model": base_model})
    model.add_flavor(FLAVOR, base_model=base_model, adapter=".")
    path = directory / MLMODEL
    model.save(str(path))
    return path


def _load_pyfunc(path: str, model_config: Row | None = None) -> AdapterModel:
    """What MLflow calls. Raises UsageError where base model or adapter cannot be loaded."""
    import torch

    base_model = (model_config or {})["base_model"]
    gpu = torch.cuda.is_available()
    model: Any = load_causal_model(
        base_model, dtype=torch.bfloat16 if gpu else torch.float32, adapter=Path(path)
    )
    return AdapterModel(model.to("cuda" if gpu else "cpu"), load_tokenizer(base_model))


class AdapterModel:
    """What `mlflow.pyfunc.load_model` gives: `predict` answers prompts one by one."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    def predict(self, model_input: pd.DataFrame, params: Row | None = None) -> pd.DataFrame:
        """A frame with the column `prompt` in, one with the column `response` out. Parameters are
        those of `signature`."""
        import pandas as pd
        import torch

        params = dict(params or {})
        temperature = float(params.get("temperature", 0.0))
        drawn = (
            {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        )
        pad = self.tokenizer.pad_token_id
        responses = []
        for prompt in model_input["prompt"]:
            text = chat_text(self.tokenizer, prompt)
            encoded = self.tokenizer(text, return_tensors="pt", add_special_tokens=False).to(
                self.model.device
            )
            with torch.inference_mode(), torch.random.fork_rng():
                torch.manual_seed(int(params.get("seed", 0)))
                out = self.model.generate(
                    **encoded,
                    **drawn,
                    max_new_tokens=int(params.get("max_new_tokens", MAX_NEW_TOKENS)),
                    pad_token_id=self.tokenizer.eos_token_id if pad is None else pad,
                )
            responses.append(
                self.tokenizer.decode(
                    out[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True
                )
            )
        return pd.DataFrame({"response": responses})
