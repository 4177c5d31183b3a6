"""The service by its HTTP: what it answers, what it refuses, and who may ask. No worker: the tests
reach the verdicts."""

import asyncio
import json
import re
import sqlite3
import threading

import pytest

from kernels_eval.errors import UsageError
from kernels_eval.languages import languages_of
from kernels_eval.records import Language
from kernels_eval.service import guard
from kernels_eval.service.schema import MOST_REQUESTS, Definition, EvaluationRequest, Workload
from tests.support.cases import cases
from tests.support.kernels import AFFINE
from tests.support.services import MODULE, asking, reach, request, service

pytestmark = pytest.mark.anyio
CASES = cases("service")
JSON = {"Content-Type": "application/json"}
TOKEN = "a-token-of-the-test-0123456789"


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def made(tmp_path):
    found = service(tmp_path)
    yield found
    found.evaluations.close()


@pytest.fixture(scope="module")
def refusing(tmp_path_factory):
    """A service that nothing reaches."""
    found = service(tmp_path_factory.mktemp("refusing"))
    yield found
    assert found.evaluations.queued == 0
    found.evaluations.close()


def body(**fields):
    given = {"task_id": AFFINE.task_id, "code": MODULE.format(0)} | fields
    return json.dumps({name: value for name, value in given.items() if value is not None})


def batch(*bodies):
    return f'{{"requests": [{", ".join(bodies)}]}}'


# -- what is refused -------------------------------------------------------------------------------

REFUSED = {
    "nothing": ("", 422, "Field required"),
    "no JSON": ("{", 400, "no JSON"),
    "text": ('"x"', 422, "valid dictionary"),
    "NaN": (body()[:-1] + ', "deadline_s": NaN}', 400, "no JSON"),
    "infinity": (body()[:-1] + ', "deadline_s": 1e999}', 422, "finite"),
    "bad UTF-8": (b'{"task_id": "\xff", "code": "x"}', 400, "unicode"),
    "lone surrogate": (r'{"task_id": "\ud800", "code": "x"}', 400, "no JSON"),
    "surrogate as a key": (r'{"\udfff": 1}', 400, "no JSON"),
    "too deep": ('{"task": ' * 5000, 400, "recursion"),
    "too deep in lists": ("[" * 100_000 + "]" * 100_000, 400, "recursion"),
    "a number of 9999 digits": (body()[:-1] + f', "priority": {"9" * 9999}}}', 400, "number"),
    "too much code": (body(code="x" * 1_000_001), 422, "at most 1000000"),
    "long id": (body(id="a" * 129), 422, "id: String should match"),
    "NUL in a client's name": (body(client="\0" * 200), 422, "at most 128"),
    "empty batch": (batch(), 422, "at least 1"),
    "large batch": (batch(*[body()] * (MOST_REQUESTS + 1)), 422, f"at most {MOST_REQUESTS}"),
    "batch with one that is wrong": (batch(body(), body(reward=1)), 422, "requests.1.reward"),
    "batch with an unknown task": (batch(body(), body(task_id="x")), 422, "'x' is not one"),
    "batch and more": (batch(body())[:-1] + ', "x": 1}', 422, "x: Extra inputs"),
    "one id for two": (batch(body(id="a"), body(id="a", code="x")), 409, "another request"),
}
for name, (fields, status, text) in CASES["refused"].items():
    REFUSED[name] = body(**fields), status, text


@pytest.mark.parametrize("path", ["/v1/evaluate", "/v1/evaluate/events"])
@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_used_is_one_clear_answer_and_changes_nothing(refusing, case, path):
    content, status, text = REFUSED[case]
    async with asking(refusing) as client:
        answer = await client.post(path, content=content, headers=JSON)
    assert (answer.status_code, text in answer.json()["detail"]) == (status, True), answer.text
    assert len(answer.text) < 2000 and refusing.evaluations.queued == 0
    assert_data(answer)


async def test_json_under_another_name_is_told_its_header(refusing):
    async with asking(refusing) as client:
        answer = await client.post("/v1/evaluate", data={body(): ""})
    assert answer.status_code == 422
    assert "Content-Type: application/json" in answer.json()["detail"]


def assert_data(answer):
    """No browser takes it for a page."""
    kind = answer.headers["content-type"]
    assert kind.startswith(("application/json", "text/plain", "text/event-stream")), kind
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "no-store" in answer.headers["cache-control"]


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/v1/results/nobody", 404),
        ("DELETE", "/v1/results/nobody", 404),
        ("GET", "/v1/results/..%2f..%2fetc%2fpasswd", 404),
        ("GET", "/v1/results/%2e%2e", 422),
        ("GET", "/v1/results/a%00b", 422),
        ("GET", "/v1/results/a%0a", 422),
        ("GET", "/v1/results/" + "a" * 129, 422),
        ("GET", "/v1/results/%3Cscript%3E", 422),
        ("GET", "/v1/results/one?wait_s=nan", 422),
        ("GET", "/v1/results/one?wait_s=inf", 422),
        ("GET", "/v1/results/one?wait_s=-1", 422),
        ("GET", "/v1/results/one?wait_s=61", 422),
        ("GET", "/v1/evaluate", 405),
        ("PUT", "/v1/results/one", 405),
        ("GET", "/v1/../../etc/passwd", 404),
    ],
)
async def test_paths_and_ids_that_are_none(refusing, method, path, status):
    async with asking(refusing) as client:
        answer = await client.request(method, path)
    assert answer.status_code == status, answer.text
    assert_data(answer)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
async def test_a_form_of_another_page_is_no_request(refusing, kind):
    async with asking(refusing) as client:
        headers = {"Content-Type": kind} if kind else {}
        answer = await client.post("/v1/evaluate", content=body(), headers=headers)
    assert answer.status_code == 422 and refusing.evaluations.queued == 0


async def test_a_body_above_the_limit_is_refused_by_its_length_and_while_it_streams(refusing):
    async def stream():
        for _ in range(guard.BODY_BYTES // 1_000_000 + 2):
            sent.append(1_000_000)
            yield b" " * 1_000_000

    sent = []
    async with asking(refusing) as client:
        headers = JSON | {"Content-Length": str(guard.BODY_BYTES + 1)}
        told = await client.post("/v1/evaluate", content=b"{}", headers=headers)
        streamed = await client.post("/v1/evaluate", content=stream(), headers=JSON)
    for answer in (told, streamed):
        assert answer.status_code == 413
        assert_data(answer)
    assert len(sent) <= guard.BODY_BYTES // 1_000_000 + 1


async def test_markup_stays_data(made):
    mark = "<script>alert(1)</script>"
    async with asking(made) as client:
        refused = await client.post("/v1/evaluate", content=body(**{mark: 1}), headers=JSON)
        await client.post("/v1/evaluate", content=body(id="one", client=mark), headers=JSON)
        reach(made, status="incorrect", reason="wrong_output", detail=mark, log_tail=mark)
        found = await client.get("/v1/results/one")
        metrics = await client.get("/metrics")
    for answer in (refused, found, metrics):
        assert_data(answer)
    assert found.json()["verdict"]["detail"] == mark and mark not in metrics.text


# -- who may ask -----------------------------------------------------------------------------------

PATHS = ["/v1/results/a", "/metrics", "/docs", "/openapi.json", "/nothing"]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"Authorization": TOKEN},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer \xff".encode("latin-1")},
    ],
)
async def test_without_the_token_nothing_but_health_is_answered(refusing, given):
    async with asking(refusing, TOKEN) as client:
        for path in PATHS:
            assert (await client.get(path, headers=given)).status_code == 401, path
        for path in ("/v1/evaluate", "/v1/evaluate/events"):
            answer = await client.post(path, content=body(), headers=JSON | given)
            assert answer.status_code == 401 and TOKEN not in answer.text
            assert_data(answer)
        assert (await client.get("/health")).json()["status"] == "starting"
    assert refusing.evaluations.queued == 0


async def test_with_the_token_any_name_of_the_machine_is_answered(made):
    headers = JSON | {"Authorization": f"Bearer {TOKEN}"}
    async with asking(made, TOKEN, base_url="http://trainer.example") as client:
        assert (await client.post("/v1/evaluate", content=body(), headers=headers)).is_success


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "0.0.0.0"])
async def test_without_a_token_no_page_of_another_host_reaches_it(refusing, host):
    """A browser that was given another address for that name sends the name."""
    async with asking(refusing, base_url=f"http://{host}") as client:
        assert (await client.post("/v1/evaluate", content=body(), headers=JSON)).status_code == 400
    assert refusing.evaluations.queued == 0


@pytest.mark.parametrize(
    "host, token, refused",
    [
        ("127.0.0.1", None, False),
        ("::1", None, False),
        ("localhost", None, False),
        ("0.0.0.0", None, True),
        ("::", None, True),
        ("10.0.0.7", "", True),
        ("trainer", "short", True),
        ("0.0.0.0", TOKEN, False),
    ],
)
def test_beyond_loopback_a_token_is_required(host, token, refused):
    try:
        guard.require_token(host, token)
    except UsageError as error:
        assert refused and "CONCUR_SERVE_TOKEN" in str(error)
    else:
        assert not refused


# -- what is answered ------------------------------------------------------------------------------


async def test_a_result_is_answered_as_soon_as_it_is_there(made):
    async with asking(made) as client:
        asked = await client.post("/v1/evaluate", content=body(id="one"), headers=JSON)
        assert asked.status_code == 202 and asked.json()["evaluations"][0]["state"] == "queued"
        assert (await client.get("/v1/results/one")).json()["state"] == "queued"
        polled = asyncio.create_task(client.get("/v1/results/one?wait_s=60"))
        while not made._waiting:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(reach, made)
        found = (await polled).json()
        again = await client.post("/v1/evaluate", content=body(), headers=JSON)
    assert found["state"] == "done" and found["verdict"]["reason"] == "ok"
    assert again.json()["evaluations"][0]["cached"] is True


async def test_the_event_loop_neither_reads_nor_writes_the_journal(made):
    """While a thread writes, it would wait, and every request with it."""
    ran = []
    made.evaluations._db.set_trace_callback(lambda told: ran.append((threading.get_ident(), told)))
    expiry = asyncio.create_task(made._expire())
    async with asking(made) as client:
        for name in ("one", "two"):
            content = body(id=name, code=f"x = '{name}'")
            await client.post("/v1/evaluate", content=content, headers=JSON)
        polled = asyncio.create_task(client.get("/v1/results/one?wait_s=60"))
        late = await client.get("/v1/results/one?wait_s=0.01")
        for path in ("/health", "/metrics", "/v1/results/two"):
            await client.get(path)
        await client.delete("/v1/results/two")
        while not (made._waiting and any("deadline_s <" in told for _, told in ran)):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(reach, made)
        assert (late.json()["state"], (await polled).json()["state"]) == ("queued", "done")
    expiry.cancel()
    own = threading.get_ident()
    assert ran and not [told for thread, told in ran if thread == own]


async def test_who_waits_for_a_verdict_is_given_it_and_reads_nothing_again(made):
    async with asking(made) as client:
        await client.post("/v1/evaluate", content=body(id="one"), headers=JSON)
        polled = [asyncio.create_task(made.final("one", 60)) for _ in range(10)]
        while sum(len(each._callbacks or ()) for each in made._waiting.values()) < len(polled):
            await asyncio.sleep(0.01)
        ran = []
        made.evaluations._db.set_trace_callback(ran.append)
        await asyncio.to_thread(reach, made)
        found = await asyncio.gather(*polled)
    assert {each.state for each in found} == {"done"} and ran
    assert not [told for told in ran if told.startswith("SELECT id, state")]


async def test_events_come_one_by_one_and_the_stream_ends(made):
    async with asking(made) as client:
        content = batch(*(body(id=f"n{number}", code=f"x = {number}") for number in range(3)))
        streamed = asyncio.create_task(
            client.post("/v1/evaluate/events", content=content, headers=JSON)
        )
        while len(made._waiting) < 3:
            await asyncio.sleep(0.01)
        await client.delete("/v1/results/n1")
        await asyncio.to_thread(reach, made)
        answer = await streamed
        assert_data(answer)
        again = await client.post("/v1/evaluate/events", content=content, headers=JSON)
    for text in (answer.text, again.text):
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        states = {event["id"]: event["state"] for event in events}
        assert states == {"n0": "done", "n1": "cancelled", "n2": "done"} and len(events) == 3


async def test_above_the_limit_it_says_when_to_come_again(tmp_path):
    made = service(tmp_path, limit=4)
    async with asking(made) as client:
        full = batch(*(body(code=f"x = {number}", client="a") for number in range(3)))
        refused = await client.post("/v1/evaluate", content=full, headers=JSON)
        assert (await client.post("/v1/evaluate", content=body(), headers=JSON)).is_success
    assert refused.status_code == 429 and int(refused.headers["Retry-After"]) > 0
    made.evaluations.close()


async def test_at_its_end_nobody_waits_and_nothing_more_is_taken(made):
    async with asking(made) as client:
        await client.post("/v1/evaluate", content=body(id="one"), headers=JSON)
        polled = asyncio.create_task(client.get("/v1/results/one?wait_s=60"))
        while not made._waiting:
            await asyncio.sleep(0.01)
        made.stop()
        assert (await polled).json()["state"] == "queued"
        refused = await client.post("/v1/evaluate", content=body(code="x"), headers=JSON)
        health = await client.get("/health")
    assert refused.status_code == 503 and "Retry-After" in refused.headers
    assert health.status_code == 503 and health.json()["status"] == "stopping"


async def test_a_full_disk_is_a_fault_of_the_machine(made, monkeypatch):
    def full(*_):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(made.evaluations, "submit", full)
    async with asking(made) as client:
        answer = await client.post("/v1/evaluate", content=body(), headers=JSON)
    assert answer.status_code == 503 and "disk is full" in answer.json()["detail"]
    assert "Retry-After" in answer.headers


async def test_of_requests_that_arrive_together_each_has_its_own_answer(made):
    asked = [body(code=MODULE.format(n), id=f"n{n}") for n in range(20)]
    asked += [body(code="x = 1", id="n0"), body(task_id="x"), body(code=None, response="none")]
    async with asking(made) as client:
        posts = [client.post("/v1/evaluate", content=each, headers=JSON) for each in asked]
        answers = await asyncio.gather(*posts)
    assert [answer.status_code for answer in answers] == [202] * 20 + [409, 422, 202]
    assert answers[-1].json()["evaluations"][0]["state"] == "done"


async def test_metrics_count_what_ended_and_what_waits(made):
    async with asking(made) as client:
        content = batch(body(), body(code="x = 1"), body(code=None, response="no code"))
        await client.post("/v1/evaluate", content=content, headers=JSON)
        before = (await client.get("/metrics")).text
        reach(made)
        after = (await client.get("/metrics")).text
    assert "concur_queued 2.0" in before and "concur_queued 0.0" in after
    assert 'concur_evaluations_total{state="done",status="no_code"} 1.0' in before
    assert 'concur_evaluations_total{state="done",status="correct"} 2.0' in after
    assert "concur_evaluation_seconds_count 3.0" in after


async def test_the_page_of_the_api_names_every_endpoint(refusing):
    async with asking(refusing) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        home = await client.get("/", follow_redirects=True)
    named = {"/v1/evaluate", "/v1/evaluate/events", "/v1/results/{identity}", "/health"}
    assert named <= set(paths)
    assert "schemas/Asked" in json.dumps(paths["/v1/evaluate"])
    assert home.status_code == 200 and home.url.path == "/docs"
    assert all(f"{path}</h3>" in home.text for path in paths)
    assert "starts the workers" in home.text and '<h3 id="Verdict">' in home.text
    assert not re.search(r"<script|//(?!127)|@import", home.text), "it loads nothing"


async def test_before_there_are_workers_what_is_queued_says_why(made):
    async with asking(made) as client:
        posted = await client.post("/v1/evaluate", content=body(id="one"), headers=JSON)
        assert posted.json()["evaluations"][0]["note"] == "starts the workers"
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "starting")
        assert "Retry-After" in health.headers
        made.engine.workers, made.engine.waits_for = 2, ""
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/results/one")).json()["note"] == ""


# -- which candidate a request means ---------------------------------------------------------------


def test_code_and_a_response_that_holds_it_are_one_candidate(refusing):
    read = refusing.intake.read
    told = request(7)
    answer = request(code=None, response=f"<think>hm</think>\n```python\n{told.code}```")
    assert read(told).candidate == read(answer).candidate
    assert read(request(8)).candidate != read(told).candidate
    source = {"code": AFFINE.code, "name": "affine"}
    assert read(request(7, task_id=None, task=source)).task.code == AFFINE.code


@pytest.mark.parametrize("finish_reason, reason", [("stop", None), ("length", "truncated")])
def test_how_a_response_ended_says_whether_its_thoughts_hold_a_draft(
    refusing, finish_reason, reason
):
    thought = f"hm\n```python\n{request(7).code}```\n</think>"
    found = refusing.intake.read(request(code=None, response=thought, finish_reason=finish_reason))
    assert (found.candidate.code is None, found.candidate.parse_reason) == (
        reason is not None,
        reason,
    )


@pytest.mark.parametrize("response", ["", "no code", "<think>endless", "```python\nclass Model:"])
def test_a_response_without_code_is_a_verdict_and_needs_no_worker(refusing, response):
    found = refusing.intake.read(request(code=None, response=response))
    assert (
        found.settled.status == "no_code" and found.settled.reason == found.candidate.parse_reason
    )


@pytest.mark.parametrize(
    "code, asked, judged",
    [
        ("x = 1", None, "cpp"),
        (
            "from torch.utils.cpp_extension import load_inline\nload_inline(cpp_sources='')",
            None,
            "cpp",
        ),
        ("import triton\n", "cpp", "cpp"),
        ("import triton\n", None, None),
        ("x = '__global__'", None, None),
    ],
)
def test_the_language_is_the_one_that_is_given_else_the_source_s(refusing, code, asked, judged):
    asking_for = request(code=code, language=asked)
    if judged:
        assert refusing.intake.read(asking_for).candidate.language == Language(judged)
    else:
        with pytest.raises(UsageError, match="not judged here, only cpp"):
            refusing.intake.read(asking_for)


@pytest.mark.parametrize(
    "code",
    [
        "/*" * 400_000,
        "/" * 800_000,
        f"cuda_source={' ' * 800_000}]",
        f"cuda_source=[{' ' * 800_000}x",
    ],
    ids=["open comments", "slashes", "spaces", "list"],
)
def test_no_source_holds_the_service_up(refusing, code):
    """Each of these took hours: the time of a search grew with the square of the text's length."""
    refusing.intake.read(request(task_id=AFFINE.task_id, code=code, language="cpp"))
    languages_of(code)


def test_a_definition_is_a_task_of_its_sizes():
    fields = CASES["definition"]
    definition = Definition.model_validate(fields)
    scalar = {"scale": {"type": "scalar", "value": 0.5}}
    task = definition.task(Workload(axes={"M": 3}, inputs=scalar))
    assert "return [torch.randn((3, 4), dtype=torch.float32), 0.5]" in task.code
    assert definition.task(Workload(axes={"M": 5}, inputs=scalar)).task_id != task.task_id
    with pytest.raises(ValueError, match="scalar input 'scale' has no value"):
        definition.task(Workload(axes={"M": 3}))
    indices = {**fields, "inputs": {"x": {"shape": ["M"], "dtype": "int32"}}}
    with pytest.raises(ValueError, match="'int32'.*give the task by its source"):
        Definition.model_validate(indices).task(Workload(axes={"M": 3}))


def test_requests_survive_their_own_json():
    """Clients leave out what was not set: nothing that was set is lost with it."""
    spec = {"x": {"shape": None, "dtype": "float32"}}
    made = EvaluationRequest(
        definition={
            "name": "d",
            "op_type": "o",
            "axes": {},
            "inputs": spec,
            "outputs": spec,
            "reference": "def run(x): return x",
        },
        workload={"inputs": {"x": {"type": "scalar", "value": 1.5}}},
        response="",
        priority=0,
    )
    sent = made.model_dump_json(exclude_unset=True)
    assert EvaluationRequest.model_validate_json(sent) == made
