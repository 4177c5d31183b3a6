"""Tasks and requests for tests of synthesis, and an environment in which local servers are asked
directly."""

from kernels_eval.records import KernelTask, Language, SamplingParams
from tasks.sources.stage import keep
from tasks.synthesis.client import OpenAISampler
from tasks.synthesis.sampler import Request, Sampler

KEY = "sk-very-secret-0123456789"
MINE = KernelTask(task_id="user/mine", name="mine", code="class Model: pass")


def tasks_snapshot(root, count=1):
    """A snapshot of tasks t/0, t/1, ... whose code is a comment."""
    found = [KernelTask(task_id=f"t/{n}", name=f"t{n}", code=f"# {n}") for n in range(count)]
    return keep(found, str(root), {})


def named_sampler(name="m"):
    """A sampler that is only known by its name."""
    sampler = Sampler()
    sampler.generator = name
    return sampler


def make_request(
    index=0,
    task=MINE,
    prompt="prompt",
    key=None,
    language=Language.CPP,
    **sampling,
):
    """Sample `index` of a task; `key` is the number where None, the seed too unless it is given."""
    return Request(
        request_key=str(index) if key is None else key,
        task=task,
        language=language,
        prompt=prompt,
        sample_index=index,
        sampling=SamplingParams.model_validate({"seed": index} | sampling),
    )


def without_proxies(monkeypatch):
    """Local servers are asked directly, whatever the environment says."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def without_pauses(monkeypatch):
    """OpenAI's client tries again at once."""
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.001)


def client(url, **options):
    """A client with few retries."""
    given = {"retries": 2} | options
    return OpenAISampler(url, "org/model", **given)


def ask(server, count=1, **options):
    """The answers to requests with the prompts "prompt 0", "prompt 1", ..."""
    requests = [make_request(n, prompt=f"prompt {n}") for n in range(count)]
    return list(client(server.url, **options).sample(requests))
