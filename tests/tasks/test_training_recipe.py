"""The recipe is what PEFT and TRL really get, the paper's profile spells it out, and nothing in it
changes unseen."""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from tasks.models import load_tokenizer
from tasks.training import stage, trainer_settings
from tasks.training import trainer as training
from tasks.training.formatting import examples_of
from tasks.training.preparation import longest_allowed
from tasks.training.recipe import FIXED, TrainingRecipe
from tests.support.cases import cases
from tests.support.curated import line, sample
from tests.support.training import REASONING, row, tiny_model

CASES = cases("training")

PAPER = Path(__file__).parents[2] / "deployments" / "profiles" / "paper.yaml"


def paper():
    return TrainingRecipe.model_validate(
        yaml.safe_load(PAPER.read_text(encoding="utf-8"))["training"]
    )


def test_the_papers_profile_spells_out_every_value_and_is_the_papers():
    spelled = yaml.safe_load(PAPER.read_text(encoding="utf-8"))["training"]
    assert set(spelled) == set(TrainingRecipe.model_fields), "no default decides"
    recipe = paper()
    assert recipe.base_model == "Qwen/QwQ-32B"
    assert (recipe.lora_rank, recipe.lora_dropout) == (32, 0.05)
    assert (recipe.num_epochs, recipe.max_length, recipe.learning_rate) == (3, "data", 1e-4)
    defaults = TrainingRecipe(base_model=recipe.base_model, max_length="data")
    differing = {
        name
        for name in TrainingRecipe.model_fields
        if getattr(recipe, name) != getattr(defaults, name)
    }
    assert differing == {"workers", "row_order"}, "how it is shared out, and nothing of what it is"


def test_a_recipe_is_frozen_read_back_and_decided_by_the_device():
    recipe = TrainingRecipe()
    assert TrainingRecipe.model_validate_json(recipe.model_dump_json()) == recipe
    with pytest.raises(ValidationError):
        recipe.lora_rank = 8
    with pytest.raises(ValidationError):
        TrainingRecipe(rank=8)
    decided = [recipe.resolve(gpu=gpu).acceleration for gpu in (True, False)]
    assert decided == ["on", "off"]
    assert TrainingRecipe(acceleration="off").resolve(gpu=True).acceleration == "off"


def test_every_value_has_its_source_beside_it():
    lines = {
        line.strip().partition(":")[0]: line.partition("# ")[2]
        for line in PAPER.read_text(encoding="utf-8").splitlines()
    }
    for name in TrainingRecipe.model_fields:
        assert lines[name].startswith(("paper", "reviews", "measured", "ours: ")), name


@pytest.mark.parametrize(
    "gpu, accelerated, recomputed", [(1, "off", 1), (1, "on", 0), (0, "off", 0)]
)
def test_a_gpu_without_acceleration_recomputes(gpu, accelerated, recomputed):
    recipe = TrainingRecipe(acceleration=accelerated, workers=2, parallelism="fsdp2")
    settings = trainer_settings.sharding(recipe, gpu=bool(gpu))
    assert settings["gradient_checkpointing"] is bool(recomputed) and settings["fsdp"]
    alone = trainer_settings.sharding(recipe.model_copy(update={"workers": 1}), gpu=bool(gpu))
    assert "fsdp" not in alone, "one worker has nothing to share"


def test_what_trl_and_peft_get_is_the_recipe(base, tmp_path):
    tokenizer = load_tokenizer(base)
    recipe = paper().model_copy(update={"workers": 1}).resolve(gpu=False)
    examples = examples_of([row(0)], tokenizer)
    trainer = training.LoraTrainer(recipe, base, tmp_path, tokenizer, examples)

    (lora,) = trainer.model.peft_config.values()
    got = {
        "r": lora.r,
        "alpha": lora.lora_alpha,
        "dropout": lora.lora_dropout,
        "bias": lora.bias,
        "kind": lora.task_type,
        "target_modules": sorted(lora.target_modules),
    }
    assert got == CASES["lora"]
    assert not (lora.use_rslora or lora.use_dora or lora.modules_to_save), (
        "the adapter is scaled by alpha / r = 1, and nothing else is"
    )

    args = trainer.args
    expected = CASES["trainer_arguments"]
    assert {name: getattr(args, name) for name in expected} == expected


def test_a_share_of_warm_up_is_a_share_of_all_steps(base, tmp_path, monkeypatch):
    half = FIXED.model_copy(update={"warmup_share": 0.5})
    monkeypatch.setattr(trainer_settings, "FIXED", half)
    recipe = TrainingRecipe(gradient_accumulation=1, num_epochs=2, learning_rate=1e-3)
    result = training.train([row(index) for index in range(4)], recipe, base, tmp_path / "run")
    assert [entry["learning_rate"] for entry in result.history] == pytest.approx(
        [0.0, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 8.5355e-4, 5e-4, 1.4645e-4], abs=1e-7
    )


CHANGES = CASES["changes"]


def test_every_change_of_the_recipe_is_another_fingerprint(tmp_path):
    assert set(CHANGES) == set(TrainingRecipe.model_fields), "a new key belongs in this test"
    curated = line(tmp_path, [sample("t/1", 0, 10, 6.0)])
    recipes = [
        TrainingRecipe(),
        *(TrainingRecipe().model_copy(update={name: value}) for name, value in CHANGES.items()),
    ]
    default, *changed = (
        stage.planned(curated, recipe, {"t/1": "p"}).fingerprint for recipe in recipes
    )
    same = [name for name, found in zip(CHANGES, changed, strict=True) if found == default]
    assert same == ["checkpoint_every_steps"], "how often it is saved changes no training"
    assert len({default, *changed}) == len(CHANGES)


def test_workers_share_the_passes_of_a_step_and_change_no_step():
    one, four = TrainingRecipe(), TrainingRecipe(workers=4, parallelism="ddp")
    assert one.rows_per_step == four.rows_per_step == 8
    assert (one.passes_per_worker, four.passes_per_worker) == (8, 2)
    with pytest.raises(ValidationError, match="cannot be shared among 3 workers"):
        TrainingRecipe(workers=3, parallelism="fsdp2")


def test_the_limit_may_come_from_the_data_and_never_leaves_the_models_window(tmp_path):
    base = tiny_model(tmp_path / "small", max_positions=512)
    rows = [row(0), row(1, reasoning=REASONING * 2), row(2, reasoning=REASONING * 40)]
    examples = examples_of(rows, load_tokenizer(base))
    lengths = [example.tokens for example in examples]
    assert lengths[0] < lengths[1] < 512 < lengths[2]
    recipe = TrainingRecipe(max_length="data")
    assert longest_allowed(recipe, examples[:2], base) == lengths[1], (
        "the longest row: none is left out"
    )
    assert longest_allowed(recipe, examples, base) == 512
    assert longest_allowed(TrainingRecipe(max_length=100), examples, base) == 100
