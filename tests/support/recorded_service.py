"""The service as its clients see it, answering from recordings: what a response says it is, it is.

A response holding one of the words of `OUTCOMES` gets that verdict. Real HTTP on the loopback, so
that the real client is what a test goes through.
"""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kernels_eval.records import Reason, Verdict
from kernels_eval.service.schema import Evaluation, EvaluationRequest

OUTCOMES = {
    "fast": 2.0,
    "slow": 0.5,
    "wrong": "wrong_output",
    "cheat": "no_custom_kernel",
    "unbuilt": "build_failed",
    "broken": "reference_failed",
    "fault": None,
}
"""A speedup, a reason, or None where the machine fails."""


def verdict_of(outcome, task_id="t"):
    timed = not isinstance(outcome, str)
    reason = Reason.OK if timed else Reason(outcome)
    timing = None
    if timed:
        timing = {name: outcome for name in ("speedup", "speedup_lower", "speedup_upper")}
        timing |= {"reference_ms": 1.0, "candidate_ms": 1 / outcome, "clock_bound_ms": 1 / outcome}
        timing |= {"pairs": 1, "calls_per_sample": 1}
    return Verdict.model_validate(
        {
            **{"candidate_id": "c", "task_id": task_id, "language": "cpp"},
            **{
                "status": reason.status,
                "reason": reason,
                "timing": timing,
                "detail": "as recorded",
            },
        }
    )


class RecordedService(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests = []
        self.outcomes = []
        """words instead of the responses', in turn"""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def evaluate(self, given):
        request = EvaluationRequest.model_validate(given)
        self.requests.append(request)
        text = request.response or ""
        if self.outcomes:
            text = self.outcomes[(len(self.requests) - 1) % len(self.outcomes)]
        outcome = next((OUTCOMES[word] for word in OUTCOMES if word in text), "no_code_block")
        done = outcome is not None
        evaluation = Evaluation(
            id=request.id or "e",
            state="done" if done else "failed",
            verdict=verdict_of(outcome, request.task_id or "t") if done else None,
            error=None if done else "the GPU is lost",
            submitted_s=0.0,
        )
        return evaluation.model_dump(mode="json")


class _Handler(BaseHTTPRequestHandler):
    server: RecordedService

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer = 200, {}
        if any(each.get("task_id") == "unknown" for each in asked["requests"]):
            status, answer = 404, {"detail": "no task 'unknown'"}
        else:
            answer = {"evaluations": [self.server.evaluate(each) for each in asked["requests"]]}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def recorded_service():
    with RecordedService() as service:
        thread = threading.Thread(target=service.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield service
        finally:
            service.shutdown()
            thread.join()
