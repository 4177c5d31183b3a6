"""What a rule keeps of screened verdicts is confirmed, what fails is replaced, and a kill changes
nothing in the end. The whole stage but its workers."""

from contextlib import suppress
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_eval.errors import GpuLostError, UsageError
from kernels_eval.records import KernelTask, Language
from tasks.curation.config import CurationConfig
from tasks.curation.kept import kept
from tasks.curation.stage import run as curate
from tasks.curation.tables import READ
from tasks.progress import observed_by
from tasks.store.snapshot import Snapshot
from tasks.tables import TASKS, VERDICTS
from tasks.verification import confirmation, stage
from tasks.verification.config import VerificationConfig
from tasks.verification.confirmation import EVERYTHING_RIGHT, Confirmation, Rule, all_of
from tests.support.samples import finished, line_of, samples
from tests.support.searched import PlantedPool

CONFIG = VerificationConfig(workers=1, builders=1, chunk_size=2)
CPU = stage.conditions(Language.CPP).device


class Line:
    """Screened samples under a root, and the speedups that confirming finds (None: wrong)."""

    def __init__(self, root, text, confirmed):
        rows = [
            row
            | {"level": "screen", "language": "cpp", "device": "cpu", "code": row["candidate_id"]}
            for row in samples(text)
        ]
        for row in rows:
            if row["status"] == "rejected":
                row |= {"reason": "no_custom_kernel", "outputs_match": True}
        tasks = [
            KernelTask(task_id=name, name=name, code=f"class Model: n = '{name}'")
            for name in sorted({row["task_id"] for row in rows})
        ]
        programs = [task.model_dump(mode="json") for task in tasks]
        given_tasks = finished(root, "tasks", programs, TASKS, "t")
        self.samples = line_of(root, rows).model_copy(update={"tasks": given_tasks})
        self.confirmed = dict(confirmed)
        self.pool = PlantedPool(self.confirmed.get)

    def rule(self, *configs):
        configs = [CurationConfig.model_validate(each) for each in configs or ({},)]
        propose = partial(kept, self.samples, configs, None)
        return Rule([each.model_dump() for each in configs], propose, READ)

    def run(self, rule, lost_after=None):
        pool = self.pool = PlantedPool(self.confirmed.get, lost_after)

        class Confirming(Confirmation):
            def pool(self):
                return pool

        of = (self.samples.verdicts, self.samples.candidates, self.samples.tasks)
        return confirmation.run(*of, CONFIG, Language.CPP, rule, confirmation=Confirming)

    def curated(self, rule, **config):
        """(candidate, speedup) of what is taken of the confirmed verdicts, all of level confirm."""
        verdicts = self.run(rule)
        again = self.samples.model_copy(update={"verdicts": verdicts})
        made = curate(again, CurationConfig.model_validate(config), None).open()
        assert made.manifest["unconfirmed"] == 0
        rows = made.read(columns=["candidate_id", "speedup"])
        levels = levels_of(verdicts)
        assert {levels[name] for name in rows["candidate_id"]} == {"confirm"}
        return dict(rows.rows())


def levels_of(ref):
    rows = ref.open().read(columns=["candidate_id", "level"], unique="candidate_id")
    return dict(rows.rows())


FASTEST = {"strategy": "speedup", "size": 9}
SHORTEST = {"strategy": "min_length", "size": 9}
PAIR = "a-0 10 6.0; a-1 20 3.0; b-0 10 2.0"


@pytest.mark.parametrize(
    "text, confirmed, config, expected, asked",
    [
        # what holds stays, with the confirmed time
        (PAIR, {"a-0": 5.5, "b-0": 2.1}, {}, {"a-0": 5.5, "b-0": 2.1}, "a-0 b-0"),
        # what fails is replaced by what the same rule then takes
        (PAIR, {"a-1": 3.1, "b-0": 2.0}, FASTEST, {"a-1": 3.1, "b-0": 2.0}, "a-0 a-1 b-0"),
        (PAIR, {"a-1": 3.1, "b-0": 2.0}, SHORTEST, {"a-1": 3.1, "b-0": 2.0}, "a-0 a-1 b-0"),
        (PAIR, {"b-0": 2.0}, SHORTEST, {"b-0": 2.0}, "a-0 a-1 b-0"),
        # a screened time that was luck loses its place
        (
            PAIR,
            {"a-0": 2.0, "a-1": 3.1, "b-0": 2.0},
            FASTEST,
            {"a-1": 3.1, "b-0": 2.0},
            "a-0 a-1 b-0",
        ),
        # (b) asks for more than 5
        (
            "a-0 9 9.0; a-1 10 6.0; b-0 9 1",
            {"a-0": 9, "a-1": 4.0, "b-0": 1},
            {},
            {"a-0": 9, "b-0": 1},
            "a-0 a-1 b-0",
        ),
        # a confirmed sample does not lose to a screened time that does not hold
        ("a-0 10 2.0; a-1 20 1.99", {"a-0": 1.9, "a-1": 1.8}, {}, {"a-0": 1.9}, "a-0 a-1"),
    ],
)
def test_what_is_taken_is_confirmed(tmp_path, text, confirmed, config, expected, asked):
    line = Line(tmp_path, text, confirmed)
    assert line.curated(line.rule(config), **config) == expected
    assert sorted(line.pool.asked) == asked.split(), "nothing else, and nothing twice"


def test_the_snapshot_has_every_row_and_says_what_confirming_came_to(tmp_path, monkeypatch):
    line = Line(tmp_path, f"{PAIR}; c-0 10 - status=incorrect", {"a-1": 1.5, "b-0": 2.2})
    seen, expected = [], []
    monkeypatch.setattr(
        confirmation, "expect", lambda _, ahead: expected.append((ahead.words, ahead.units))
    )
    with observed_by(lambda name, done, total, note: seen.append((name, done, total))):
        made = line.run(line.rule(FASTEST)).open()
    rows = made.read(unique="candidate_id")
    assert len(made.read()) == 4 and made.schema().names == VERDICTS.names
    found = dict(zip(rows["candidate_id"], rows.select("status", "level").rows(), strict=True))
    assert found == {
        "a-0": ("incorrect", "confirm"),
        "a-1": ("correct", "confirm"),
        "b-0": ("correct", "confirm"),
        "c-0": ("incorrect", "screen"),
    }
    manifest = made.manifest
    assert manifest["rows"] == 4 and manifest["status_counts"] == {"correct": 2, "incorrect": 2}
    assert made.above("tasks") and made.above("verification").ref == line.samples.verdicts
    told = manifest["confirmation"]
    assert (told["rounds"], told["proposed"], told["confirmed"]) == (2, 3, 2)
    assert told["failed"] == {"wrong_output": 1} and told["speedup_ratio"]["0.5"] == 0.8
    assert [each for each in seen if each[1] in (0, each[2])] == [
        ("confirmation", 0, 2),
        ("confirmation", 2, 2),
        ("confirmation, round 2", 0, 1),
        ("confirmation, round 2", 1, 1),
    ], "a total that was reached does not grow"
    assert {("then about 1 in place of worse ones", 1)} == {*expected[:-3]}
    assert expected[-1] == ("", 0), "nobody is left for another round"


def test_the_first_round_expects_one_more_where_several_could_follow(tmp_path, monkeypatch):
    speeds = {"a-0": 2.0, "a-1": 3.0, "a-2": 2.5}
    line = Line(tmp_path, "a-0 10 2.0; a-1 20 3.0; a-2 30 2.5", speeds)
    words = []
    monkeypatch.setattr(confirmation, "expect", lambda _, ahead: words.append(ahead.words))
    line.run(line.rule(FASTEST))
    assert words[0] == "then about 1 in place of worse ones"


def test_several_sets_share_one_confirmation(tmp_path):
    text = "a-0 10 2.0; a-1 20 3.0; a-2 30 2.5; b-0 10 2.0"
    speeds = {"a-0": 2.0, "a-1": 3.0, "a-2": 2.5, "b-0": 2.0}
    line = Line(tmp_path, text, speeds)
    line.run(line.rule(SHORTEST, FASTEST))
    assert sorted(line.pool.asked) == ["a-0", "a-1", "b-0"], "the union of what they take"
    # another union asks for nothing that is known
    line.run(line.rule(SHORTEST, FASTEST, {"strategy": "max_length", "size": 9}))
    assert line.pool.asked == ["a-2"]


def test_everything_right_and_named_candidates(tmp_path):
    others = "c-0 10 - status=incorrect; c-1 10 - status=rejected"
    line = Line(tmp_path, f"{PAIR}; {others}", {"a-0": 1.0, "b-0": 1.0})
    named = line.run(all_of(["b-0", "c-0"]))
    assert line.pool.asked == ["b-0"], "a wrong one stays wrong"
    everything = line.run(EVERYTHING_RIGHT)
    asked = ["a-0", "a-1", "c-1"]
    assert sorted(line.pool.asked) == asked, "what torch computed counts on one track, too"
    assert levels_of(everything) == levels_of(named) | dict.fromkeys(asked, "confirm")
    # where nothing is screened, nothing is made: every candidate had the whole protocol
    line.samples = line.samples.model_copy(update={"verdicts": everything})
    assert line.run(EVERYTHING_RIGHT) == everything
    assert line.run(line.rule()) == everything and line.pool.asked == []


@settings(max_examples=8, deadline=None)
@given(
    lost=st.lists(st.integers(0, 3), max_size=4),
    luck=st.lists(st.floats(0.3, 1.2), min_size=12, max_size=12),
)
def test_a_kill_at_any_time_ends_in_the_same_set(tmp_path_factory, lost, luck):
    text = "; ".join(
        f"{task}-{n} {10 + n} {2 + n + k}" for k, task in enumerate("abcd") for n in range(3)
    )
    names = [row["candidate_id"] for row in samples(text)]
    screened = {row["candidate_id"]: row["timing"]["speedup"] for row in samples(text)}
    speeds = {
        name: screened[name] * share if share > 0.4 else None
        for name, share in zip(names, luck, strict=True)
    }
    whole, killed = (Line(tmp_path_factory.mktemp("line"), text, speeds) for _ in range(2))
    expected = whole.run(whole.rule(FASTEST))
    asked = []
    for number in lost:
        with suppress(GpuLostError):
            killed.run(killed.rule(FASTEST), lost_after=number)
        asked += killed.pool.asked
    made = killed.run(killed.rule(FASTEST))
    asked += killed.pool.asked
    assert sorted(asked) == sorted(whole.pool.asked), "each once"
    assert made.fingerprint == expected.fingerprint and levels_of(made) == levels_of(expected)
    told = [ref.open().manifest["confirmation"] for ref in (made, expected)]
    assert told[0] == told[1]


def test_a_kill_while_the_screened_rows_are_added(tmp_path, monkeypatch):
    line = Line(tmp_path, PAIR, {"a-0": 6.0, "b-0": 2.0})

    def killed(self, *_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Snapshot, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            line.run(line.rule(FASTEST))
    made = line.run(line.rule(FASTEST))
    assert line.pool.asked == [] and made.open().manifest["confirmation"]["confirmed"] == 2
    assert levels_of(made) == {"a-0": "confirm", "a-1": "screen", "b-0": "confirm"}


def test_verdicts_of_another_device_are_refused(tmp_path):
    line = Line(tmp_path, PAIR, {})
    verdicts = line.samples.verdicts.open()
    rows, device = verdicts.read().to_dicts(), f"not {CPU}"
    made = finished(verdicts.root, "verification", rows, VERDICTS, "elsewhere", device=device)
    line.samples = line.samples.model_copy(update={"verdicts": made})
    with pytest.raises(UsageError, match="two devices"):
        line.run(EVERYTHING_RIGHT)
    assert line.pool.asked == []


def test_screening_has_a_protocol_and_verdicts_of_its_own(tmp_path):
    line = Line(tmp_path, PAIR, {})
    of = (line.samples.candidates, line.samples.tasks)
    off = CONFIG.model_copy(update={"screen": False})
    screened, whole = (stage.Verification(*of, config, Language.CPP) for config in (CONFIG, off))
    assert (CONFIG.protocol.level, off.protocol.level) == ("screen", "confirm")
    assert screened.snapshot != whole.snapshot
    row = {"candidate_id": "a-0", "task_id": "a", "code": "x", "parse_reason": None}
    assert screened.verdict_key(row) != whole.verdict_key(row)
    # what was confirmed counts where nothing is screened
    confirming = Confirmation(line.samples.verdicts, *of, CONFIG, Language.CPP, EVERYTHING_RIGHT)
    assert confirming.verdict_key(row) == whole.verdict_key(row)
