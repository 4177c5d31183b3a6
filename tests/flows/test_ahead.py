"""What a deployed run prepares ahead is ready for the stages, and fails no run."""

import threading

from flows.config import load_profile
from flows.runtime import ahead
from tasks import models


def asked_for(monkeypatch, profile, count):
    imported = []
    monkeypatch.setattr(ahead, "tokenizer_of", lambda config, root: config.tokenizer)
    monkeypatch.setattr(ahead, "count_tokens", count)
    monkeypatch.setattr(ahead, "import_module", imported.append)
    ahead.begin(profile).join()
    return imported


def test_the_tokenizer_and_the_libraries_of_later_stages_are_loaded(monkeypatch, tmp_path):
    counted = []
    config = load_profile("nightly", [f"root={tmp_path}"])
    imported = asked_for(monkeypatch, config, lambda name, texts: counted.append(name))
    assert counted == ["small"]
    assert imported == [*ahead.LIBRARIES, "mlflow.tracking"]


def test_what_a_profile_does_without_is_not_loaded_and_a_failure_stops_nothing(
    monkeypatch, tmp_path
):
    def fails(*_):
        raise OSError("no such tokenizer")

    off = ["tracking.enabled=false", f"root={tmp_path}"]
    imported = asked_for(monkeypatch, load_profile("nightly", off), fails)
    assert imported == [*ahead.LIBRARIES]


def test_a_tokenizer_that_is_loaded_ahead_is_waited_for(monkeypatch):
    begun, go, loads = threading.Event(), threading.Event(), []

    class Tokenizer:
        def __call__(self, texts, **_):
            return {"input_ids": [[1]] * len(texts)}

    def load(location):
        loads.append(location)
        begun.set()
        assert go.wait(60)
        return Tokenizer()

    monkeypatch.setattr(models, "load_tokenizer", load)
    first = threading.Thread(target=models.count_tokens, args=("ahead", ["a"]))
    first.start()
    assert begun.wait(60)
    second = threading.Thread(target=models.count_tokens, args=("ahead", ["a"]))
    second.start()
    go.set()
    for thread in (first, second):
        thread.join()
    assert loads == ["ahead"]
    models._kept_tokenizer.cache_clear()
