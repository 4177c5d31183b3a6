"""What each column of the snapshots means: the words behind docs/reference/tables.md.

Guarantees: one sentence for every column of every table that a stage writes, and for every field of
its structs (a test compares them).
Units: `_ms` milliseconds, `_s` seconds, `_tokens` tokens under the generator's own tokenizer,
`_share` a share of 1; others are said here.
"""

from __future__ import annotations

from collections.abc import Mapping

_TASK = "the task, unique in its source"
_CANDIDATE = (
    "hash of task code, generator, sampling, sample index, response, and of a later turn also turn"
    " and parent; the key of a candidate everywhere"
)
_LANGUAGE = "language of the kernel, such as `cuda`, `triton` or `cpp`"

TASKS: Mapping[str, str] = {
    "task_id": _TASK,
    "name": "the task's name in its source",
    "code": (
        "the program, Python source: `Model` (or the class of `entry_point`), `get_inputs()`,"
        " `get_init_inputs()`"
    ),
    "entry_point": "class of the reference program in `code`",
    "init_form": (
        "what `get_init_inputs()` returns: `args` (a list) or `args_kwargs` (`[args, kwargs]`)"
    ),
    "source": (
        "origin: `bundled`, `kernelbook`, `kernelbench`, `user`, the name of an extension, or the"
        " value of the table"
    ),
    "level": "KernelBench level, or number of operators of a generated task; null elsewhere",
    "family": "family of a generated task's operators, such as `softmax`; null elsewhere",
}
WORKLOADS: Mapping[str, str] = {
    "workload_key": (
        "hash of program, entry point, init form and limits; tasks with the same program share"
        " a row"
    ),
    "task_id": _TASK,
    "operators": "the outermost torch calls in order, the first 256",
    "operator_kind": "`single_operator` or `fusion`",
    "families": "families of the operators, such as `matmul` or `reduction`",
    "flops": (
        "floating-point operations of the products, convolutions and attention of one forward"
        " call; a multiply-add counts 2"
    ),
    "bytes_min": "bytes of what is read, written or changed in place, each once",
    "executed": "`meta` (without storage) or `declared inputs` (real values, on the CPU)",
    "graph": "digests of the ATen graph that the reference runs; null where it was not traced",
    "graph.normalised": "of operators, shapes and numbers",
    "graph.shapes": "the same without sizes",
    "graph.structure": "of the operators that reach an output, in order",
    "graph.operators": "names of these operators, in order",
    "problem": "why the reference could not be run; the numbers are then null",
}

KERNEL_PROFILES: Mapping[str, str] = {
    "profile_key": "hash of verdict, candidate, settings and version; a refresh reuses the row",
    "verdict_key": "the verdict that it is a profile of",
    "candidate_id": _CANDIDATE,
    "task_id": _TASK,
    "device": "name of the GPU or processor",
    "limit": (
        "`memory`, `compute`, `latency`, `launch_overhead` or `elsewhere`; null without a profile"
    ),
    "cause": (
        "`at_roofline`, `uncoalesced`, `bank_conflicts`, `spills`, `divergence`, `too_few_blocks`,"
        " `low_occupancy`, or null"
    ),
    "where": "the kernel, or the operator where the limit is `elsewhere`",
    "numbers": "what says so: shares, and blocks for each multiprocessor",
    "suggestion": "one sentence",
    "rewrote_bottleneck": "whether the reference's slowest operator is called no more",
    "sol_score": "1 / (1 + (T_k - T_SOL) / (T_b - T_SOL)); 0.5 is the reference's speed",
    "speed_of_light": "`least_ms / candidate_ms`",
    "kernel_share": "share of the candidate's time that its own kernels take",
    "reference_ms": "of the verdict",
    "candidate_ms": "of the verdict",
    "least_ms": "the larger of `memory_ms` and `compute_ms`",
    "memory_ms": "time that the task's bytes need at least",
    "compute_ms": "time that the task's operations need at least",
    "flops": "of the task's workload",
    "bytes_min": "of the task's workload",
    "peak_flops": "operations per second of the device: its data sheet's, measured on a CPU",
    "peak_bytes_per_s": "bytes per second of the device: its data sheet's, measured on a CPU",
    "total_us": "microseconds of operators and kernels together",
    "clock": "`device` (kernels were timed) or `cpu`",
    "operators": "calls of PyTorch (`name`, `us`, `calls`) of a forward call, the slowest first",
    "kernels": (
        "the candidate's own kernels, the slowest first: the same; blocks (`grid`) and threads of a"
        " block (`block`) of the longest launch; `registers` and `stack_bytes` of a thread,"
        " `shared_bytes` of a block; `blocks_per_sm`; `occupancy` and `local_share`, shares;"
        " ncu's `metrics`"
    ),
    "reference_operators": "the same of the reference's operators",
    "counters": "why there are no metrics; empty where there are",
    "problem": "why there is no profile",
}
CANDIDATES: Mapping[str, str] = {
    "candidate_id": _CANDIDATE,
    "task_id": "the task it answers",
    "language": _LANGUAGE,
    "generator": "the model that wrote it; with an adapter, `MODEL+NAME`",
    "sampling": "sampling parameters of the response",
    "sampling.temperature": "0 is greedy",
    "sampling.top_p": "share of the probability that tokens are drawn from",
    "sampling.max_tokens": "most tokens of a response",
    "sampling.seed": "seed of sample 0; sample i has this plus i",
    "sampling.top_k": "number of likeliest tokens to draw from; null: the server decided",
    "sampling.min_p": (
        "least probability as a share of the likeliest token's; null: the server decided"
    ),
    "sampling.repetition_penalty": (
        "above 1 makes tokens that occurred already less likely; null: the server decided"
    ),
    "sample_index": "which of the task's samples this is, from 0",
    "prompt_hash": "hash of the prompt",
    "response": "the complete response of the model",
    "reasoning": "the text before `</think>`",
    "answer": "the text after it",
    "code": "the module with `ModelNew`, parsed from the answer; null if there is none",
    "parse_reason": "why there is no code: a reason of the status `no_code`; null if there is code",
    "reasoning_tokens": "tokens of the reasoning; null if its tokenizer is not available",
    "completion_tokens": "tokens of the response as the server counted them; null where it did not",
    "finish_reason": "`stop`, or `length` where `max_tokens` cut it off",
    "finish_guessed": (
        "true if it was not recorded why the answer ended: `finish_reason` is then `length` if a"
        " think block or code fence is open at the end, or the prose after the code ends in"
        " mid-sentence"
    ),
    "turn": "1 answers the task; a later one answers the feedback on `parent`",
    "parent": "candidate_id of the attempt that was followed up; null at turn 1",
    "separated_reasoning": (
        "reasoning as the server separated it from `response`; null where it did not"
    ),
    "request_key": "hash of the complete request: a refresh reuses the answer by it",
}
VERDICTS: Mapping[str, str] = {
    "schema_version": "version of the record, now 2",
    "candidate_id": _CANDIDATE,
    "task_id": "the task it answers",
    "language": _LANGUAGE,
    "level": "`screen`, or `confirm` after the whole protocol",
    "status": (
        "`correct`, `incorrect`, `compile_error`, `runtime_error`, `timeout`, `no_code`, `rejected`"
        " or `task_error`"
    ),
    "reason": "one of the reasons of its status",
    "detail": "one line for a person, at most 500 characters, control characters replaced",
    "timing": "null unless `correct`, and where `time_correct` is off",
    "timing.reference_ms": "median of a forward call of the reference",
    "timing.candidate_ms": "median of a forward call of the candidate",
    "timing.speedup": "`reference_ms / candidate_ms` of the same paired run",
    "timing.speedup_lower": "lower end of its 95 % interval",
    "timing.speedup_upper": "upper end of its 95 % interval",
    "timing.pairs": "samples on each side",
    "timing.calls_per_sample": "forward calls batched into a sample, the same on both sides",
    "timing.clock_bound_ms": "the candidate's latency on unseen inputs by the parent's own clock",
    "timing.drift": (
        "relative change of the reference's median from the first third of the window to the last"
    ),
    "timing.compiled": (
        "against the reference under torch.compile: torch.compile's `mode`; `speedup`, the one over"
        " eager divided by the compiled reference's, with its interval; `reference_ms`, that times"
        " `candidate_ms`; `graphs`, with more than one of which Python runs between them;"
        " `compile_s`, about 0 where an earlier candidate of the task caused it; or"
        " `unavailable_reason`. Null where that was not asked for"
    ),
    "timing.throttled": (
        "whether the GPU reported lowered clocks (power, temperature) at the start or the end; null"
        " if it cannot"
    ),
    "correctness": (
        "null where no output was compared; errors are relative and the worst over all trials"
    ),
    "correctness.trials": "comparisons made; the one after timing is not counted",
    "correctness.rms_error": "largest RMS(error) / RMS(oracle)",
    "correctness.reference_rms_error": "the same for the reference itself",
    "correctness.max_error": "largest |error| / (|oracle| + RMS(oracle)) over all elements",
    "correctness.kernelbench_1e4": (
        "allclose against the reference with atol and rtol of 1e-4 on the task's own inputs"
        " (KernelBench v0.1); recorded for comparison"
    ),
    "correctness.kernelbench_1e2": "the same with 1e-2 (KernelBench v0)",
    "correctness.oracle": "`float64`, or `float32` where at least one trial had no other",
    "outputs_match": (
        "null: nothing was compared; false: an output differed; true: every compared output matched"
    ),
    "custom_kernels": (
        "kernels that CUDA extensions launched, functions of C++ extensions that were called, or"
        " Triton kernels, at most 32"
    ),
    "custom_kernel_time_share": (
        "share of a forward call's time spent in them by the child's own clock: the smaller of the"
        " medians of five calls before and after timing"
    ),
    "library_calls": (
        "dispatcher operators of a forward call, and library functions that the built libraries"
        " link; `Tensor.numpy` for tensors that are given to NumPy; sorted, at most 64"
    ),
    "reference_operators": (
        "outermost torch calls of the reference in order, views and copies left out, at most 256"
    ),
    "precision_class": (
        "`fp32`, `fp16`, `bf16`, `e4m3` or `e5m2`: the gate of the task; null until outputs match"
    ),
    "flags": "findings that do not reject the candidate",
    "build_tier": (
        "`lite`: built with concur's small headers; `full`: a build needed torch's own; null:"
        " nothing to build"
    ),
    "build_cached": "every extension that was built before the run came from the cache",
    "isolation": (
        "isolation layers that were active while the candidate ran; empty where it never did"
    ),
    "device": "the GPU's name, or `cpu`; empty where the reference was never loaded",
    "build_s": "screening, reading build requests and building",
    "run_s": (
        "on the worker that owns the device; for a task's first candidate with loading the"
        " reference and its expected values"
    ),
    "phases": "the parts of `run_s`",
    "phases.reference_s": "loading the task, expected values",
    "phases.load_s": "import and constructor of the candidate",
    "phases.correctness_s": "calls whose outputs were compared",
    "phases.attribution_s": "which kernel did the work, what is still running or was changed",
    "phases.timing_s": "the paired measurement",
    "log_tail": "end of the compiler's or the child's output, at most 8,192 characters",
    "verdict_key": (
        "hash of candidate, parsed code, protocol, PROTOCOL_VERSION, device, driver, CUDA and"
        " torch: by it a refresh reuses the verdict"
    ),
}
TRACE_FLAGS: Mapping[str, str] = {
    "flag_key": (
        "hash of candidate, thresholds and TRACE_FLAG_VERSION: by it a refresh reuses the row"
    ),
    "candidate_id": _CANDIDATE,
    "trace_flags": (
        "those raised: `repetitive`, `ends_in_loop`, `self_doubting`, `mixed_language`,"
        " `truncated`, `too_short`"
    ),
    "characters": "of the reasoning",
    "words": "of its prose; code fences are left out",
    "repeated_share": "share of 10-grams of words that occurred before",
    "loop_words": "words of a repeated period at the end",
    "loop_share": "the same, of all words",
    "doubt_markers": "phrases such as 'wait' or 'let me double-check'",
    "doubt_per_1000_words": "the same, per 1,000 words",
    "foreign_letters": "letters outside of the text's main script",
    "foreign_share": "the same, of all letters",
    "unclosed_fence": "a code fence is open at the end",
    "unclosed_thought": "the think block is not closed",
    "ends_mid_sentence": "the last sentence is incomplete",
}
CURATED: Mapping[str, str] = {
    "candidate_id": _CANDIDATE,
    "task_id": _TASK,
    "task_name": "the task's name in its source",
    "task_code": "the reference program",
    "entry_point": "class of the reference program in `task_code`",
    "language": _LANGUAGE,
    "generator": "the model that wrote it",
    "reasoning": "what the model wrote before its answer",
    "answer": "the answer as the model wrote it",
    "code": "the module with `ModelNew`",
    "reasoning_tokens": "tokens of the reasoning",
    "speedup": "median reference time / median candidate time; null where not timed",
    "speedup_lower": "lower end of its 95 % interval",
    "custom_kernel_time_share": "of its verdict",
    "operator_kind": "`single_operator` or `fusion`",
    "criterion": "the rule that selected it",
    "finish_reason": (
        "why its answer ended; an answer with `length` is trained without an end token"
    ),
    "reasoning_from": (
        "candidate_id that `reasoning` was moved from; null where it is the sample's own"
    ),
    "bottleneck": "what limits its kernel, as a profile found; null where it was not profiled",
    "sol_score": "SOL-ExecBench's score: 0.5 is the reference's speed, 1 the speed of light",
}
NUMBERS: Mapping[str, str] = {
    "name": "what the number is",
    "value": "null if the data do not support a value",
    "lower": "lower end of its 95 % interval",
    "upper": "upper end of its 95 % interval",
    "samples": "samples it rests on",
    "tasks": "tasks it rests on",
    "method": "how it was computed",
    "why_not": "why there is no value; null where there is one",
}
HISTORY: Mapping[str, str] = {
    "step": "optimiser step; 0 holds the held-out loss before the first",
    "epoch": "epochs done, with fractions",
    "loss": "nats per completion token",
    "learning_rate": "of the step",
    "grad_norm": "before clipping",
    "num_tokens": "tokens seen so far",
    "held_out_loss": (
        "nats per completion token on held-out tasks; null at steps without a measurement"
    ),
    "tokens_per_s": "tokens per second, evaluation and checkpoints left out",
    "mfu": "model FLOPs utilisation, a share; null where the device's peak is not known",
    "memory_gb": "peak memory of the device, GB; null without a GPU",
}
SCORES: Mapping[str, str] = {
    "model": "`recorded`, `base` or `tuned`",
    "baseline": "what speedups are against: `eager` PyTorch, or `compile`",
    "track": "`custom_kernel`: a custom kernel did the work; `any`: whoever computed the answer",
    "metric": "`exec`, `fast_P` (correct and speedup above P) or `geometric_mean_speedup`",
    "k": "of pass@k; null for the geometric mean",
    "value": "a share of 1, or a ratio; null where the samples do not support it",
    "lower": "lower end of its 95 % interval",
    "upper": "upper end of its 95 % interval",
    "tasks": "tasks it rests on",
    "samples": "samples it rests on",
    "why_not": "why there is no value",
    "missing": "number of tasks that other models answered and this one did not",
}
