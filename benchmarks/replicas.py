"""Simulated vLLM replicas that write answers of given lengths: for `benchmarks.night`.

Guarantees: every answer is written once, and the speed at each moment is what
`benchmarks.decoding` says of the answers that are being written and of their contexts.
Where keys and values fill the memory, the answer that was taken last waits and is read again, as in
vLLM. Does not know of prefixes that answers share in memory, nor of blocks of a waiting answer that
are still there when it continues: both make real servers faster. Values are those of `night.toml`.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.decoding import Card, Decoding, decoding
from tasks.synthesis import sizing
from tasks.synthesis.server import ASK_AHEAD

UTILIZATION = 0.9
Values = dict[str, float]


class Service(NamedTuple):
    """How answers are written: on `gpus` GPUs a replica, with these arguments of vLLM."""

    name: str
    card: str
    gpu: Card
    gpus: int
    args: tuple[str, ...] = ()

    @property
    def shape(self) -> sizing.Shape:
        return sizing.QWQ_32B.served(self.args)

    @property
    def room_bytes(self) -> int:
        """For keys and values of a replica."""
        found = sizing.kv_cache_bytes(self.shape, self.gpu.memory_bytes, self.gpus, UTILIZATION)
        return max(0, found or 0)

    def decoding(self, values: Values, tokens: float, share: float | None = None) -> Decoding:
        """With `share` of the slots that fit (default: `slot_share`) full. An answer that is being
        written is longer than the mean answer, since long ones take longer: hence the spread."""
        answer = tokens * values["answer_spread"]
        of = (self.shape, self.gpu, self.gpus, UTILIZATION, values["prompt_tokens"], answer)
        share = values["slot_share"] if share is None else share
        return decoding(*of, max(1, int(decoding(*of).sequences * share)))


def answer_lengths(
    tasks: int, mean: float, seed: int, values: Values, recorded: Sequence[Sequence[float]] = ()
) -> tuple[list[int], list[float]]:
    """Tokens of the answers to so many tasks, cut at the limit, with this mean; and of each the
    mean logarithm of as many other answers to its task, which an earlier night would know. Drawn
    from a lognormal, or from `recorded` lengths (by task), scaled to the mean."""
    generator, each = random.Random(seed), int(values["answers_per_task"])
    limit, drawn, known = values["token_limit"], list[float](), list[float]()
    for _ in range(tasks):
        if recorded:
            both = generator.choices(generator.choice(recorded), k=2 * each)
        else:
            task = generator.gauss(0, values["sigma_tasks"])
            rest = (generator.gauss(0, values["sigma_answers"]) for _ in range(2 * each))
            both = [math.exp(task + one) for one in rest]
        drawn += both[:each]
        known += [statistics.fmean(map(math.log, both[each:]))] * each
    low, high = 0.0, limit / min(drawn)
    for _ in range(40):
        factor = (low + high) / 2
        below = statistics.fmean([min(limit, factor * length) for length in drawn]) < mean
        low, high = (factor, high) if below else (low, factor)
    return [max(1, round(min(limit, high * length))) for length in drawn], known


class Tail(NamedTuple):
    """A simulated stage, in seconds: when each answer was finished, in order; from when on a
    replica had a slot without an answer."""

    finished_s: list[float]
    idle_from_s: float
    preempted: int

    @property
    def wall_s(self) -> float:
        return self.finished_s[-1]

    def saved_s(self, share: float) -> float:
        """By not waiting for this share of the answers, those that end last."""
        return self.wall_s - self.finished_s[math.ceil(len(self.finished_s) * (1 - share)) - 1]


def simulate(
    lengths: Sequence[int], service: Service, values: Values, slots: int, gpus: int
) -> Tail:
    """Write answers of these lengths (tokens) in this order, at most `slots` at once a replica. As
    tasks/synthesis does, each replica has ASK_AHEAD times its slots in flight, and the next answer
    goes where one has ended."""
    replicas = [_Replica(service, slots, values) for _ in range(gpus // service.gpus)]
    left = deque(map(_Answer, lengths))
    for _ in range(int(slots * ASK_AHEAD)):
        for replica in replicas[: len(left)]:
            replica.waiting.append(left.popleft())
    events = [(0.0, number) for number, each in enumerate(replicas) if each.waiting]
    finished, idle_from_s = list[float](), math.inf
    while events:
        _, number = heapq.heappop(events)
        replica = replicas[number]
        ended = replica.advance()
        finished += [replica.now_s] * ended
        for _ in range(min(ended, len(left))):
            replica.waiting.append(left.popleft())
        if not replica.waiting and replica.count < slots:
            idle_from_s = min(idle_from_s, replica.now_s)
        if replica.count or replica.waiting:
            heapq.heappush(events, (replica.now_s, number))
    return Tail(sorted(finished), idle_from_s, sum(each.preempted for each in replicas))


class _Answer:
    def __init__(self, tokens: int) -> None:
        self.left, self.written, self.last_step, self.active = tokens, 0, 0, False


class _Replica:
    """A server with so many slots; `room` and `held` are tokens of keys and values."""

    def __init__(self, service: Service, slots: int, values: Values) -> None:
        self.service, self.slots, self.values = service, slots, values
        self.room = service.room_bytes // service.shape.token_bytes
        self.prompt = int(values["prompt_tokens"])
        self.speed = values["decoding"]
        self.waiting = deque[_Answer]()
        self.ends: list[tuple[int, int, _Answer]] = []
        self.newest: list[_Answer] = []
        self.count = self.step = self.held = self.preempted = self.taken = 0
        self.now_s = 0.0

    def advance(self) -> int:
        """Write until an answer ends or the memory is full. Returns how many ended."""
        self._admit()
        steps = min(self._next_end() - self.step, max(1, (self.room - self.held) // self.count))
        context = self.held / self.count + (steps + 1) / 2  # the mean while these steps last
        of = (self.service.shape, self.service.gpu, self.service.gpus, 1.0, context, 0, self.count)
        self.now_s += steps * self.count / (decoding(*of).tokens_per_s * self.speed)
        self.step += steps
        self.held += steps * self.count
        before = self.count
        while self.count and self._next_end() == self.step:
            self._remove(heapq.heappop(self.ends)[2])
        ended = before - self.count
        if self.count > 1 and self.held + self.count > self.room:
            self._preempt()
        return ended

    def _next_end(self) -> int:
        while not self.ends[0][2].active or self.ends[0][2].last_step != self.ends[0][0]:
            heapq.heappop(self.ends)  # of an answer that was preempted
        return self.ends[0][0]

    def _admit(self) -> None:
        while self.waiting and self.count < self.slots:
            answer = self.waiting[0]
            tokens = self.prompt + answer.written
            if self.count and self.held + tokens > 0.99 * self.room:
                return
            read = tokens if answer.written else tokens * self.values["prefill_share"]
            self.now_s += read / self.values["prefill_per_s"]
            answer.last_step, answer.active = self.step + answer.left, True
            self.taken += 1
            self.count += 1
            self.held += tokens
            heapq.heappush(self.ends, (answer.last_step, self.taken, answer))
            self.newest.append(self.waiting.popleft())

    def _remove(self, answer: _Answer) -> None:
        left = answer.last_step - self.step
        answer.written += answer.left - left
        answer.left, answer.active = left, False
        self.count -= 1
        self.held -= self.prompt + answer.written

    def _preempt(self) -> None:
        while not self.newest[-1].active:
            self.newest.pop()
        answer = self.newest.pop()
        self._remove(answer)
        self.waiting.appendleft(answer)
        self.preempted += 1
