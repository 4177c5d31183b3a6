"""A registered adapter has a signature and answers under it, loaded by MLflow alone from the
registry."""

import pytest

from tasks.sources.small_model import build_small_model, load_causal_model, load_tokenizer
from tasks.tracking.adapter_model import signature
from tasks.tracking.connection import Destination
from tasks.tracking.mlflow_sink import log_run
from tasks.tracking.records import AdapterRecord, RunRecord

PROMPT = "Write a kernel that adds one to every element of a tensor.\n" + "x = x + 1\n" * 20


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return build_small_model(tmp_path_factory.mktemp("models") / "small", [PROMPT])


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(
        r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    directory = tmp_path_factory.mktemp("run") / "adapter"
    get_peft_model(load_causal_model(base, dtype=torch.float32), config).save_pretrained(directory)
    return directory


def greedy(base, adapter, tokens):
    import torch

    tokenizer, model = (
        load_tokenizer(base),
        load_causal_model(base, dtype=torch.float32, adapter=adapter),
    )
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], tokenize=False, add_generation_prompt=True
    )
    encoded = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    out = model.generate(**encoded, do_sample=False, max_new_tokens=tokens)
    return tokenizer.decode(out[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True)


def test_the_registry_gives_back_a_model_that_answers(base, adapter, tmp_path, monkeypatch):
    import mlflow
    import pandas as pd

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    before = {path.name: path.read_bytes() for path in adapter.iterdir()}
    logged = AdapterRecord(
        directory=adapter,
        base_model=str(base),
        registered_model="concur-tiny",
        lineage={"concur.curated": "c0ffee"},
    )
    record = RunRecord(run_fingerprint="f", name="tiny", adapter=logged)
    run_id = log_run(record, Destination(uri, None, "concur"))
    assert {path.name: path.read_bytes() for path in adapter.iterdir()} == before, (
        "the snapshot's own folder is not touched"
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", uri)
    info = mlflow.models.get_model_info("models:/concur-tiny/1")
    assert info.signature == signature()
    assert info.run_id == run_id
    assert info.metadata == {"concur.curated": "c0ffee"}
    assert info.flavors["concur_lora"]["base_model"] == str(base)

    loaded = mlflow.pyfunc.load_model("models:/concur-tiny/1")
    answered = loaded.predict(
        pd.DataFrame({"prompt": [PROMPT, PROMPT]}), params={"max_new_tokens": 12}
    )
    assert list(answered.columns) == ["response"]
    assert answered["response"].to_list() == [greedy(base, adapter, 12)] * 2
    assert greedy(base, adapter, 12) != greedy(base, None, 12)
    drawn = {"max_new_tokens": 12, "temperature": 1.5}
    first, again, other = (
        loaded.predict(pd.DataFrame({"prompt": [PROMPT]}), params={**drawn, "seed": seed})[
            "response"
        ][0]
        for seed in (1, 1, 2)
    )
    assert first == again != other
    with pytest.raises(mlflow.exceptions.MlflowException, match="prompt"):
        loaded.predict(pd.DataFrame({"question": [PROMPT]}))
