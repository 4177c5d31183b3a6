"""The verification stage on real C++ kernels: every candidate once, and what is verified stays
verified across snapshots."""

import itertools
import random
import shutil
import socket
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from ray.exceptions import AuthenticationError

from kernels_eval import devices
from kernels_eval.config import EvalConfig, TimingConfig
from kernels_eval.devices import Conditions
from kernels_eval.errors import ClusterError, DeviceError, EvalError, GpuLostError, UsageError
from kernels_eval.judge.messages import Finding, Prepared, verdict_of
from kernels_eval.pool.ray import start_ray
from kernels_eval.records import Candidate, Language, Verdict, candidate_id
from tasks import retry
from tasks.progress import observed_by
from tasks.sources import bundled
from tasks.sources.stage import keep
from tasks.store.lookup import known_rows
from tasks.store.snapshot import Snapshot, SnapshotRef
from tasks.synthesis.parsing import parse_response
from tasks.tables import CANDIDATES, VERDICTS
from tasks.verification import stage
from tasks.verification.config import VerificationConfig
from tasks.verification.step import _verify_a_chunk
from tests.support.pools import PoolAlone
from tests.support.samples import finished

CONFIG = VerificationConfig(
    eval=EvalConfig(timing=TimingConfig(max_s=0.3)), workers=1, builders=1, chunk_size=2
)
NAMES = ("cumulative_sum", "softmax_rows")


@pytest.fixture(scope="module")
def ray_here():
    import ray

    start_ray()
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def tasks():
    return [task for task in bundled.load("train") if task.name in NAMES]


def answer(task, number):
    """A recorded response, as synthesis would have stored it."""
    text = bundled.responses(task.name, "cpp")[number]
    parsed = parse_response(text)
    return Candidate(
        candidate_id=candidate_id(
            task, "recorded", Candidate.model_fields["sampling"].default, number, text
        ),
        task_id=task.task_id,
        language=Language.CPP,
        generator="recorded",
        sample_index=number,
        response=text,
        reasoning=parsed.reasoning,
        answer=parsed.answer,
        code=parsed.code,
        parse_reason=parsed.parse_reason,
    )


def without_code(task, number):
    base = answer(task, 0).model_dump() | {
        "candidate_id": f"cut-{number}",
        "sample_index": number,
        "code": None,
    }
    return Candidate.model_validate(base | {"parse_reason": "truncated"})


class Given:
    """A root with tasks, in which candidates are verified."""

    def __init__(self, root, tasks):
        self.root, self._numbers = str(root), itertools.count()
        self.tasks = keep(tasks, self.root, {})

    def candidates(self, asked):
        """A finished snapshot of them, another one each time."""
        rows = [c.model_dump(mode="json") | {"request_key": f"r-{c.candidate_id}"} for c in asked]
        return finished(self.root, "synthesis", rows, CANDIDATES, f"c{next(self._numbers)}")

    def work(self, asked, judge=None, config=CONFIG):
        """The stage; with a judge, without workers."""
        ref = asked if isinstance(asked, SnapshotRef) else self.candidates(asked)
        made = judged_by(judge) if judge else stage.Verification
        return made(ref, self.tasks, config, Language.CPP)

    def run(self, asked, judge):
        ref = asked if isinstance(asked, SnapshotRef) else self.candidates(asked)
        return stage.run(ref, self.tasks, CONFIG, Language.CPP, verification=judged_by(judge))

    def reported(self, candidates):
        """Run the stage with workers. Returns its snapshot and the progress it reported: one pair
        (done, total) per verdict that was newly reached."""
        seen = []
        ref = candidates if isinstance(candidates, SnapshotRef) else self.candidates(candidates)

        def observe(name, done, total, note):
            if not note.startswith(("starts", "judges", "builds")):
                seen.append((done, total))

        with observed_by(observe):
            return stage.run(ref, self.tasks, CONFIG, Language.CPP), seen


@pytest.fixture
def given(tmp_path, tasks):
    return Given(tmp_path, tasks)


def verdicts_of(ref):
    rows = ref.open().read().to_dicts()
    assert len({row["candidate_id"] for row in rows}) == len(rows)
    return {row["candidate_id"]: row for row in rows}


@pytest.mark.slow
def test_verdicts_are_kept_and_only_the_new_candidate_is_verified(ray_here, given, tasks):
    first_asked = [answer(tasks[0], 0), answer(tasks[1], 0), without_code(tasks[0], 7)]
    first, seen = given.reported(first_asked)
    before = verdicts_of(first)
    assert set(before) == {c.candidate_id for c in first_asked}
    assert len(seen) == 2 and seen[-1][1] == 3  # the one without code needed no worker
    assert before["cut-7"]["status"] == "no_code" and before["cut-7"]["reason"] == "truncated"
    right, wrong = (before[candidate.candidate_id] for candidate in first_asked[:2])
    details = (right["detail"], wrong["detail"])
    assert (right["status"], wrong["status"]) == ("correct", "incorrect"), details
    assert right["timing"]["speedup"] > 0 and wrong["timing"] is None
    manifest = first.open().manifest
    counts = {"correct": 1, "incorrect": 1, "no_code": 1}
    assert (manifest["rows"], manifest["status_counts"], manifest["language"]) == (3, counts, "cpp")
    for row in before.values():  # what is stored is a legal verdict
        Verdict.model_validate({name: row[name] for name in row if name != "verdict_key"})

    # one candidate more: another snapshot, and only that one is run
    new = answer(tasks[1], 1)
    grown = given.candidates([*first_asked, new])
    second, seen = given.reported(grown)
    after = verdicts_of(second)
    assert second.fingerprint != first.fingerprint
    assert seen == [(4, 4)]
    assert {key: after[key] for key in before} == before  # the very same rows, timings included
    assert set(after) - set(before) == {new.candidate_id}
    assert verdicts_of(first) == before

    # the same again: nothing is done
    assert given.reported(grown) == (second, [])

    # machines are no part of a verdict: the same snapshot; the protocol is: other keys, so nothing
    # would be reused
    elsewhere = CONFIG.model_copy(update={"workers": 7, "chunk_size": 64})
    assert given.work(grown, config=elsewhere).snapshot.ref == second
    keyed = [candidate.model_dump() for candidate in (*first_asked, new)]
    stricter = CONFIG.model_copy(update={"eval": EvalConfig(timing=TimingConfig(max_s=0.4))})
    other = given.work(grown, config=stricter)
    assert other.snapshot.ref != second
    keys = {other.verdict_key(candidate) for candidate in keyed}
    assert (
        list(known_rows(Snapshot(given.root, "verification", ""), "verdict_key", keys, VERDICTS))
        == []
    )
    same = given.work(grown)
    expected = {same.verdict_key(candidate) for candidate in keyed}
    assert {row["verdict_key"] for row in after.values()} == expected


class Judge(PoolAlone):
    """A pool that needs no compiler: every kernel is wrong, and the machine fails each time
    `faults_after` more of them were judged."""

    def __init__(self, *faults_after):
        super().__init__()
        self.faults_after = list(faults_after)

    def verify(self, pairs):
        left = self.faults_after.pop(0) if self.faults_after else None
        for number, (task, candidate) in enumerate(pairs):
            if number == left:
                self.quarantined.append("cuda:1 failed its health check twice")
                raise GpuLostError("the device is gone")
            self.asked.append(candidate.candidate_id)
            finding = Finding(reason="wrong_output", detail="as always")
            prepared = Prepared(candidate_id=candidate.candidate_id)
            yield verdict_of(task, candidate, prepared, finding)


def judged_by(judge):
    class Judged(stage.Verification):
        def pool(self):
            return judge

    return Judged


def numbered(tasks, samples):
    """Candidates of every task, their ids in the order in which they are to be verified."""
    base = answer(tasks[0], 0)

    def one(task_id, number):
        named = {"candidate_id": f"{task_id}/{number:03d}", "task_id": task_id}
        return base.model_copy(update=named | {"sample_index": number})

    ids = sorted(task.task_id for task in tasks)
    return [one(task_id, number) for task_id in ids for number in range(samples)]


def test_equal_code_is_judged_once_where_that_is_asked_for(given, tasks):
    once = CONFIG.model_copy(update={"once_per_code": True, "chunk_size": 64})
    asked = numbered(tasks, 3)
    asked[1] = asked[1].model_copy(update={"code": f"{asked[1].code}\n# another"})
    without = without_code(tasks[0], 8), without_code(tasks[0], 9)

    def run(candidates, config):
        judge = Judge()
        with given.work(candidates, judge, config) as work:
            for number in range(1, work.plan() + 1):
                work.verify_chunk(number)
            return judge, verdicts_of(work.publish())

    judge, first = run([*asked, *without], once)
    assert judge.asked == ids([asked[0], asked[1], asked[3]]), "one of each task's equal sources"
    assert set(first) == set(ids([*asked, *without]))
    keys = [first[candidate.candidate_id]["verdict_key"] for candidate in asked]
    assert keys[0] == keys[2] != keys[1] and keys[3] == keys[4] == keys[5] != keys[0]

    # another snapshot's candidates with the same code are not judged again
    later = [one.model_copy(update={"candidate_id": f"later {one.candidate_id}"}) for one in asked]
    judge, second = run(later, once)
    assert judge.asked == [] and set(second) == set(ids(later))
    judge, _ = run(later, CONFIG)
    assert len(judge.asked) == len(later), "each candidate by itself is the default"


def test_a_stream_that_broke_gives_equal_code_its_verdict_once(given, tasks):
    once = CONFIG.model_copy(update={"once_per_code": True})
    asked = numbered(tasks, 3)
    judge = Judge(1)
    with given.work(asked, judge, once) as work:
        assert (work.plan(), work.total, work.planned) == (1, 6, 2)
        with pytest.raises(GpuLostError):
            work.verify_chunk(1)
        work.verify_chunk(1)
        rows = verdicts_of(work.publish())
    assert judge.asked == ids([asked[0], asked[3]]) and set(rows) == set(ids(asked))


def ids(candidates):
    return [candidate.candidate_id for candidate in candidates]


def test_a_retried_chunk_goes_on_with_what_has_no_verdict_yet(given, tasks):
    """What Prefect's retry after a lost device relies on: verdicts before the fault are kept, none
    is asked for again, none is left out."""
    asked, judge = numbered(tasks, 4), Judge(4, 0)
    with given.work(asked, judge, CONFIG.model_copy(update={"chunk_size": 3})) as work:
        assert work.plan() == 3
        assert work.verify_chunk(1) == {"incorrect": 3}
        for _ in range(2):  # the fourth verdict is reached, then the device is gone, and gone again
            with pytest.raises(GpuLostError):
                work.verify_chunk(2)
            assert len(verdicts_of(work.snapshot.ref)) == 4
        assert work.verify_chunk(2) == {"incorrect": 2}
        assert work.verify_chunk(2) == {}, "a full chunk is full"
        assert work.verify_chunk(3) == {"incorrect": 2}
        published = work.publish()
    assert judge.asked == ids(asked)
    assert set(verdicts_of(published)) == set(judge.asked)
    manifest = published.open().manifest
    assert manifest["quarantined"] == judge.quarantined != [], "the manifest names the lost device"


@pytest.mark.parametrize(
    "fault",
    [
        AuthenticationError("WrongClusterID. Ensure that the token is there"),
        ClusterError("lost the node"),
    ],
)
def test_a_chunk_whose_cluster_is_gone_goes_on_with_the_one_that_comes_back(
    given, tasks, monkeypatch, fault
):
    """A Ray head that is killed and started again is another cluster: workers of the first are
    worth nothing to the second."""

    class Gone(Judge):
        def verify(self, pairs):
            yield from islice(super().verify(pairs), 2)
            raise fault

        def __exit__(self, *_):
            raise RuntimeError("there is no worker that could be stopped")

    pools, asked = [Gone(), second := Judge()], numbered(tasks, 4)
    away = [UsageError(f"{number}") for number in range(3)]
    heads = iter([away[0], None, *away[1:], None])

    def require_cluster(address):
        assert address == "10.0.0.7:6379"
        if head := next(heads):
            raise head

    monkeypatch.setattr(stage, "require_cluster", require_cluster)
    monkeypatch.setattr(retry, "INTERVAL_S", 0.0)
    config = CONFIG.model_copy(update={"ray_address": "10.0.0.7:6379", "chunk_size": 128})
    with given.work(asked, second, config) as work:
        monkeypatch.setattr(work, "pool", lambda: pools.pop(0))
        assert work.plan() == 1
        with pytest.raises(ClusterError, match="lost") as caught:
            work.verify_chunk(1)
        assert "token" not in str(caught.value) and len(verdicts_of(work.snapshot.ref)) == 2
        assert work.verify_chunk(1) == {"incorrect": len(asked) - 2}
        assert list(heads) == [], "asked until there was one"
        work.publish()
    assert second.asked == ids(asked)[2:] and not pools


def test_a_cluster_that_does_not_come_back_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(stage, "HEAD_BACK_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    with pytest.raises(ClusterError, match=f"127.0.0.1:{port}") as caught:
        stage.wait_for_head(f"127.0.0.1:{port}")
    assert "concur status" in caught.value.hint
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    stage.wait_for_head(None)  # Ray is started here, so there is nobody to wait for


def test_one_stream_feeds_all_chunks(given, tasks):
    """The pool is asked once: between two chunks it has neither to be filled nor to be drained."""
    asked = numbered(tasks, 5)
    calls = []

    class Ahead(Judge):
        """Takes two candidates more than it has judged, as builders do."""

        def verify(self, pairs):
            calls.append(0)
            taken = []
            for pair in pairs:
                taken.append(pair)
                calls[-1] += 1
                if len(taken) > 2:
                    yield from super().verify([taken.pop(0)])
            yield from super().verify(taken)

    with given.work(asked, Ahead()) as work:
        assert work.plan() == 5
        work.verify_chunk(1)
        assert calls == [4]  # a chunk of two, and the two that are under way
        for number in range(2, 6):
            work.verify_chunk(number)
        assert len(verdicts_of(work.publish())) == len(asked) and calls == [10]


def test_a_kill_between_chunks_loses_nothing_that_was_reached(tmp_path, tasks):
    """The disk as it is while the stream is open, which is what a killed process leaves."""
    given, asked = Given(tmp_path / "alive", tasks), numbered(tasks, 3)
    candidates = given.candidates(asked)
    with given.work(candidates, Judge()) as work:
        work.plan()
        work.verify_chunk(1)
        work.verify_chunk(2)
        shutil.copytree(given.root, tmp_path / "killed")

    def moved(ref):
        return ref.model_copy(update={"root": str(tmp_path / "killed")})

    left, judge = moved(work.snapshot.ref), Judge()
    assert left.open().parts() == [], "the rows were in the journal only"
    given.tasks = moved(given.tasks)
    finished = given.run(moved(candidates), judge)
    assert judge.asked == ids(asked)[4:]
    assert finished == left and set(verdicts_of(finished)) == set(ids(asked))


def test_where_there_is_no_journal_a_chunk_is_written_when_it_is_full(tmp_path, tasks):
    with Given(f"memory://{tmp_path}", tasks).work(numbered(tasks, 3), Judge()) as work:
        for number in range(1, work.plan() + 1):
            work.verify_chunk(number)
            assert len(verdicts_of(work.snapshot.ref)) == 2 * number
        assert work.publish().open().manifest["rows"] == 6


def test_a_larger_snapshot_asks_only_for_what_is_new(given, tasks):
    old = [answer(tasks[0], 0), answer(tasks[1], 0)]
    with given.work(old, Judge()) as first:
        first.plan()
        first.verify_chunk(1)  # never published: verdicts of an unfinished snapshot count as well
    judge, new = Judge(), answer(tasks[0], 1)
    with given.work([*old, new], judge) as second:
        assert (second.plan(), second.total, second.planned) == (1, 3, 1)
        assert verdicts_of(second.snapshot.ref) == verdicts_of(first.snapshot.ref)
        second.verify_chunk(1)
    assert judge.asked == [new.candidate_id]


def test_candidates_without_code_start_no_worker(given, tasks, monkeypatch):
    def no_pool(self):
        raise AssertionError("a pool was started for nothing")

    monkeypatch.setattr(stage.Verification, "pool", no_pool)
    ref, seen = given.reported([without_code(tasks[0], number) for number in range(3)])
    assert ref.open().manifest["status_counts"] == {"no_code": 3} and seen == []
    assert ref.open().read().columns == VERDICTS.names


def test_work_goes_by_task_however_it_was_written(given, tasks):
    """A task's candidates lie together, so that its reference is loaded once; here they are spread
    over parts, in disorder."""
    asked, snapshot = numbered(tasks, 40), Snapshot(given.root, "synthesis", "scattered")
    shuffled = random.Random(0).sample(asked, len(asked))
    for start in range(0, len(shuffled), 7):
        part = shuffled[start : start + 7]
        rows = [c.model_dump(mode="json") | {"request_key": c.candidate_id} for c in part]
        snapshot.append(rows + rows[:1], CANDIDATES)  # one twice, as a second writer leaves it
    snapshot.publish(config={})
    judge = Judge()
    ref = given.run(snapshot.ref, judge)
    assert judge.asked == ids(asked)
    assert ref.open().manifest["rows"] == len(verdicts_of(ref)) == 80
    assert not [path for path in Path(ref.open().path).iterdir() if path.name.startswith(".")]


def test_the_texts_of_a_candidate_are_never_read(given, tasks):
    """They weigh ten times what verification needs: it must do with a snapshot that lacks them."""
    light = pa.schema([field for field in CANDIDATES if field.name in stage.READ])
    rows = [candidate.model_dump(mode="json") for candidate in numbered(tasks, 2)]
    rows = [{name: row[name] for name in light.names} for row in rows]
    ref = finished(given.root, "synthesis", rows, light)
    assert not {"response", "reasoning", "answer"} & set(light.names)
    assert len(verdicts_of(given.run(ref, Judge()))) == 4


def test_a_candidate_of_an_unknown_task_is_named(tmp_path, tasks):
    asked = [answer(tasks[0], 0), answer(tasks[1], 0)]
    with pytest.raises(UsageError, match=tasks[1].task_id):
        Given(tmp_path, tasks[:1]).run(asked, Judge())


def test_a_pool_that_loses_a_candidate_is_no_finished_snapshot(given, tasks):
    class Forgetful(Judge):
        def verify(self, pairs):
            yield from list(super().verify(pairs))[1:]

    candidates, judge = given.candidates(numbered(tasks, 2)), Judge()
    with pytest.raises(EvalError, match="1 of 4 candidates have no verdict"):
        given.run(candidates, Forgetful())
    assert given.run(candidates, judge).open().finished
    assert len(judge.asked) == 1


def test_a_chunk_says_of_how_many_candidates_it_is():
    work = SimpleNamespace(verb="verify", config=CONFIG, planned=2, total=40, chunks=1)
    name = "verify candidates 1 to 2 of 2 (chunk 1 of 1"
    assert _verify_a_chunk(work, 1) == f"{name}; the other 38 need no worker)"
    assert _verify_a_chunk(SimpleNamespace(**vars(work) | {"total": 2}), 1) == f"{name})"


@pytest.mark.slow
def test_a_flow_has_one_task_run_per_chunk_and_retries_it(prefect_home, given, tasks):
    from prefect import flow
    from prefect.client.orchestration import get_client

    from tasks.verification.step import verify

    asked, judge = numbered(tasks, 3), Judge(3)
    candidates = given.candidates(asked)

    @flow
    def line() -> SnapshotRef:
        return verify(candidates, given.tasks, CONFIG, Language.CPP, verification=judged_by(judge))

    assert set(verdicts_of(line())) == set(ids(asked))
    assert judge.asked == ids(asked), "each once, though the second chunk failed half way"
    with get_client(sync_client=True) as client:
        runs = {
            run.name: run.run_count
            for run in client.read_task_runs()
            # one server may serve several tests
            if run.name.startswith("verify") and " of 6 (" in run.name
        }
    spans = (
        "1 to 2 of 6 (chunk 1 of 3)",
        "3 to 4 of 6 (chunk 2 of 3)",
        "5 to 6 of 6 (chunk 3 of 3)",
    )
    assert runs == {
        f"verify candidates {span}": count for span, count in zip(spans, (1, 2, 1), strict=True)
    }


def test_a_verdict_is_reused_under_the_conditions_it_was_reached_under(given, tasks, monkeypatch):
    """Another torch, CUDA, driver, device, protocol or parse is another verdict; other code of this
    repository is not."""
    base = {"device": "H200", "torch": "2.11.0", "cuda": "13.0", "driver": "580.1"}
    candidate = answer(tasks[0], 0)

    def asked(candidate=candidate, **changed):
        """How many candidates workers are asked for."""
        measured = Conditions(**base | changed)
        monkeypatch.setattr(stage, "conditions", lambda language: measured)
        judge = Judge()
        made = given.run([candidate], judge)
        assert made.open().manifest["conditions"] == measured.model_dump()
        return len(judge.asked)

    assert asked() == 1
    assert asked() == 0
    for name in base:
        assert asked(**{name: "another"}) == 1, name
    assert asked(candidate.model_copy(update={"code": f"{candidate.code}# parsed anew"})) == 1
    assert asked() == 0
    monkeypatch.setattr(stage, "PROTOCOL_VERSION", stage.PROTOCOL_VERSION + 1)
    assert asked() == 1


def test_what_keeps_verdicts_from_serving_another_profile_is_said(given, tasks, caplog):
    asked = given.candidates([answer(tasks[0], n) for n in range(2)])

    def said(config=CONFIG):
        with given.work(asked, Judge(), config) as work:
            work.run()
        return [each.getMessage() for each in caplog.records if "anew" in each.getMessage()]

    assert said() == said() == []
    timing = CONFIG.eval.timing.model_copy(update={"max_s": 0.4})
    slower = CONFIG.eval.model_copy(update={"timing": timing})
    (text,) = said(CONFIG.model_copy(update={"eval": slower}))
    assert text.startswith("2 candidates are verified anew: verdicts of ")
    assert text.endswith(f"with protocol.timing.max_s {CONFIG.eval.timing.max_s}, here 0.4")


def test_the_conditions_of_a_gpu_name_its_driver_and_cuda(monkeypatch):
    lines = {"name,compute_cap": "NVIDIA H200, 9.0", "name,driver_version": "NVIDIA H200, 580.95"}
    monkeypatch.setattr(devices, "_query_gpus", lambda fields: [lines[fields]])
    monkeypatch.setattr(devices, "torch_versions", lambda: ("2.11.0+cu130", "13.0"))
    found = devices.conditions(Language.TRITON)
    expected = Conditions(device="NVIDIA H200", torch="2.11.0+cu130", cuda="13.0", driver="580.95")
    assert found == expected
    on_cpu = devices.conditions(Language.CPP)
    assert (on_cpu.cuda, on_cpu.driver, on_cpu.torch) == ("", "", "2.11.0+cu130")
    assert on_cpu.device


def test_a_language_without_its_device_is_refused_before_anything_is_written(
    given, tasks, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    candidates = given.candidates([answer(tasks[0], 0)])
    with pytest.raises(DeviceError, match="need an NVIDIA GPU"):
        stage.run(candidates, given.tasks, CONFIG, Language.CUDA)
    assert not (Path(given.root) / "verification").exists()
