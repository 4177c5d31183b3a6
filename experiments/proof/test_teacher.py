"""The scripted teacher plants what its configuration says, and nothing else."""

from collections import Counter
from functools import cache
from statistics import correlation

import pytest

from experiments.proof import generated
from experiments.proof.modules import FLAGS, TABLE, faults_of, module_of
from experiments.proof.options import TeacherOptions
from experiments.proof.program import parse
from experiments.proof.teacher import ScriptedSampler, size
from kernels_eval.config import EvalConfig, TimingConfig
from kernels_eval.errors import UsageError
from kernels_eval.evaluator import evaluate
from kernels_eval.records import Candidate, Language, Reason, SamplingParams, Status
from tasks.sources import bundled, stage
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.parsing import parse_response
from tasks.synthesis.sampler import Request
from tasks.synthesis.samplers import make_sampler
from tasks.synthesis.stage import Synthesis

TASKS = generated.load(11, 60, "all")
PROGRAMS = [parse(task.code) for task in TASKS]
ALWAYS = {"wrong": 1.0, "length_vs_correctness": 0.0}


def requests(tasks=TASKS, samples=1, language="cpp"):
    return [
        Request(
            request_key=f"{task.task_id}#{index}",
            task=task,
            language=language,
            prompt="a prompt",
            sample_index=index,
            sampling=SamplingParams(seed=index),
        )
        for task in tasks
        for index in range(samples)
    ]


def answers(samples=1, language="cpp", tasks=TASKS, **planted):
    """Parsed answers in the order of the requests."""
    sampler = ScriptedSampler(TeacherOptions(**planted))
    responses = sampler.sample(requests(tasks, samples, language))
    return [parse_response(response.text, finish_reason="stop") for response in responses]


@cache
def right(program, language):
    return {module_of(program, language, style, None).strip() for style in FLAGS}


def test_an_answer_depends_on_its_request_alone():
    sampler = ScriptedSampler(TeacherOptions())
    asked = requests(samples=3)
    texts = {response.request_key: response.text for response in sampler.sample(asked)}
    again = {response.request_key: response.text for response in sampler.sample(asked[::-1])}
    assert texts == again and len(set(texts.values())) > 0.9 * len(asked)
    other = ScriptedSampler(TeacherOptions(wrong=1))
    assert {response.request_key: response.text for response in other.sample(asked)} != texts


@pytest.mark.parametrize("language", [Language("cpp"), Language("cuda")])
def test_no_fault_is_planted_where_none_is_asked_for(language):
    tasks = generated.load(11, 60, "all", str(language))
    found = answers(4, language, tasks, wrong=0)
    programs = [parse(task.code) for task in tasks for _ in range(4)]
    for answer, program in zip(found, programs, strict=True):
        assert answer.code.strip() in right(program, language)


@pytest.mark.parametrize("wrong", [0.0, 0.3, 0.5, 1.0])
def test_the_share_of_wrong_answers_is_as_asked(wrong):
    found = answers(8, wrong=wrong)
    programs = [program for program in PROGRAMS for _ in range(8)]
    faulty = sum(
        answer.code is None or answer.code.strip() not in right(program, Language("cpp"))
        for answer, program in zip(found, programs, strict=True)
    )
    assert abs(faulty / len(found) - wrong) < 0.08  # 3.5 standard deviations of 480 draws


def test_longer_programs_are_wrong_more_often_where_that_is_asked_for():
    found = answers(10, wrong=0.5, wrong_per_operator=0.25)
    by_level = Counter[int]()
    for index, answer in enumerate(found):
        program = PROGRAMS[index // 10]
        wrong = answer.code is None or answer.code.strip() not in right(program, Language("cpp"))
        by_level[len(program.steps)] += wrong
    counts = Counter(len(program.steps) for program in PROGRAMS)
    assert by_level[1] == 0 and by_level[5] == 10 * counts[5] > by_level[3] > 0


@pytest.mark.parametrize("language", [Language("cpp"), Language("cuda")])
@pytest.mark.parametrize("fault", TeacherOptions().faults)
def test_every_fault_changes_the_module_where_it_has_a_place(fault, language):
    places = [program for program in PROGRAMS if fault in faults_of(program)]
    assert places
    for program in places:
        for style in FLAGS:
            assert module_of(program, language, style, fault).strip() not in right(
                program, language
            )
    for program in PROGRAMS:
        if fault not in faults_of(program):
            found = answers(
                1, language, [TASKS[PROGRAMS.index(program)]], faults={fault: 1}, **ALWAYS
            )
            assert found[0].code.strip() in right(program, language)


def test_an_answer_without_code_is_parsed_as_one():
    found = answers(3, faults={"no_code": 1}, **ALWAYS)
    reasons = {answer.parse_reason for answer in found}
    assert {answer.code for answer in found} == {None}
    assert reasons == {Reason.NO_CODE_BLOCK, Reason.MISSING_MODEL_NEW}


@pytest.mark.parametrize("planted, low, high", [(-0.9, -1, -0.5), (0, -0.15, 0.15), (0.9, 0.5, 1)])
def test_length_goes_with_correctness_as_planted(planted, low, high):
    found = answers(10, length_vs_correctness=planted, faults={"compile": 1})
    wrong = ["colums = " in answer.code for answer in found]
    lengths = [size(answer.reasoning) for answer in found]
    assert low < correlation(lengths, [1 - each for each in wrong]) < high
    assert 0.4 < sum(wrong) / len(wrong) < 0.6


@pytest.mark.parametrize("planted, sign", [(-0.9, -1), (0.9, 1)])
def test_length_goes_with_the_speed_of_the_style_as_planted(planted, sign):
    found = answers(10, length_vs_speed=planted, length_vs_correctness=0, wrong=0)
    fast = ["-ffast-math" in answer.code for answer in found]
    assert sign * correlation([size(answer.reasoning) for answer in found], fast) > 0.4


def test_length_and_repetition_are_as_asked():
    short, long = answers(5, reasoning_tokens=60), answers(5, reasoning_tokens=400, repetition=0.9)
    medians = [sorted(size(each.reasoning) for each in found)[150] for found in (short, long)]
    assert 45 < medians[0] < 90 and 330 < medians[1] < 420

    def repeated(found):
        passages = [each.reasoning.split("\n") for each in found]
        return sum(map(len, passages)) - sum(len(set(lines)) for lines in passages)

    assert repeated(long) > 1.5 * repeated(answers(5, reasoning_tokens=400, repetition=0))


class WordCounter(ScriptedSampler):
    """The teacher with words and signs for tokens."""

    def count_tokens(self, texts):
        return [size(text) for text in texts]


def test_an_answer_is_cut_at_max_tokens():
    sampler, asked = WordCounter(TeacherOptions()), requests(TASKS[:4])
    whole = list(sampler.sample(asked))
    assert {response.finish_reason for response in whole} == {"stop"}
    assert [size(response.text) for response in whole] == [
        response.completion_tokens for response in whole
    ]
    cut = [
        request.model_copy(
            update={"sampling": request.sampling.model_copy(update={"max_tokens": 90})}
        )
        for request in asked
    ]
    for short, long in zip(sampler.sample(cut), whole, strict=True):
        assert short.finish_reason == "length" and 60 < short.completion_tokens <= 90
        assert long.text.startswith(short.text)
    uncounted = next(iter(ScriptedSampler(TeacherOptions()).sample(asked)))
    assert uncounted.completion_tokens is None and uncounted.text == whole[0].text


def test_other_tasks_and_languages_are_refused():
    sampler, task = ScriptedSampler(TeacherOptions()), bundled.load()[0]
    for asked, named in (
        (requests([task]), task.task_id),
        (requests(language=Language("triton")), "triton"),
    ):
        with pytest.raises(UsageError, match=named):
            list(sampler.sample(asked))


def test_every_operator_has_a_kernel_and_a_sentence():
    assert set(TABLE) == set(generated.OPERATORS)
    assert all("say" in how for how in TABLE.values())


def test_what_is_planted_is_part_of_what_was_asked(tmp_path):
    plain = SynthesisConfig(sampler="scripted")
    other = SynthesisConfig(sampler="scripted", options={"wrong": 0.1})
    assert ScriptedSampler.data_version(plain) != ScriptedSampler.data_version(other)
    assert isinstance(make_sampler(other, str(tmp_path)), ScriptedSampler)
    with pytest.raises(UsageError, match="scripted responses hold no answer to a follow-up"):
        tasks = stage.keep(TASKS[:1], str(tmp_path), {})
        done = {"candidates": tasks, "verdicts": tasks, "turn": 2}
        Synthesis(tasks, plain, Language("cpp"), **done)


@pytest.mark.parametrize(
    "options",
    [
        {"length_vs_correctness": 0.8, "length_vs_speed": -0.8},
        {"styles": {"naive": 0}},
        {"faults": {}},
        {"wronng": 0.1},
    ],
)
def test_what_cannot_be_planted_is_refused(options):
    with pytest.raises(UsageError, match=r"synthesis\.options"):
        ScriptedSampler.from_config(SynthesisConfig(sampler="scripted", options=options), "")


@pytest.mark.slow
@pytest.mark.parametrize("style", FLAGS)
def test_the_verifier_tells_right_kernels_from_planted_faults(style):
    names = ("add_bias", "softmax", "scale", "max_pool")
    task = generated.task_of(names, "cpp", 0)
    said = {}
    for fault in (None, *faults_of(parse(task.code))):
        code = module_of(parse(task.code), Language("cpp"), style, fault)
        candidate = Candidate(
            candidate_id=f"{style}-{fault}",
            task_id=task.task_id,
            language=Language("cpp"),
            generator="scripted",
            response=code,
            code=code,
        )
        said[fault] = evaluate(task, candidate, EvalConfig(timing=TimingConfig(max_s=0.2))).status
    assert said.pop(None) is Status.CORRECT
    assert said.pop("compile") is Status.COMPILE_ERROR
    assert said.keys() == {"tail", "axis", "epilogue", "constant", "maximum", "shape", "no_code"}
    assert Status.CORRECT not in said.values()
