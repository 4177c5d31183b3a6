"""The metrics that ncu is asked for: name, unit and meaning.

The first 24 are those of CudaForge's judge (https://arxiv.org/abs/2511.01884, run_ncu.py), whose
authors found a judge with all metrics worse than with these. The others say how near each unit is
to its peak ("speed of light") and name the planted causes of `kernels_eval.profiling.bottleneck`.
One that a chip does not have (the stall for memory dependencies is one of before Volta) is left
out.
"""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    name: str
    unit: str
    meaning: str


ACTIVE, ELAPSED = ".avg.pct_of_peak_sustained_active", ".avg.pct_of_peak_sustained_elapsed"
STALLED = "smsp__warp_issue_stalled_"
GLOBAL = "smsp__sass_average_data_bytes_per_sector_mem_global_op_"
SHARED, CONFLICTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared", "l1tex__data_bank_conflicts_pipe"

METRICS = (
    Metric("sm__cycles_active.avg", "cycles", "with work on a multiprocessor"),
    Metric(f"sm__warps_active{ACTIVE}", "%", "achieved occupancy"),
    Metric("launch__occupancy_limit_blocks", "blocks", "a multiprocessor, by its block slots"),
    Metric("launch__occupancy_limit_registers", "blocks", "a multiprocessor, by registers"),
    Metric("launch__occupancy_limit_shared_mem", "blocks", "a multiprocessor, by shared memory"),
    Metric("launch__registers_per_thread", "registers", "a thread"),
    Metric("sm__inst_executed.sum", "instructions", "of warps"),
    Metric(f"sm__inst_executed_pipe_fp32{ACTIVE}", "%", "the fp32 pipe's rate"),
    Metric(f"sm__inst_executed_pipe_tensor{ACTIVE}", "%", "the tensor pipe's rate"),
    Metric("dram__bytes_read.sum", "bytes", "read from device memory"),
    Metric("dram__bytes_write.sum", "bytes", "written to device memory"),
    Metric(f"dram__throughput{ELAPSED}", "%", "device memory's bandwidth"),
    Metric("dram__bytes.sum.per_second", "bytes/s", "of device memory"),
    Metric(f"gpu__dram_throughput{ELAPSED}", "%", "device memory's rate, all of its parts"),
    Metric("l1tex__t_sector_hit_rate.pct", "%", "hits in L1"),
    Metric(f"l1tex__throughput{ACTIVE}", "%", "L1's rate"),
    Metric("lts__t_sector_hit_rate.pct", "%", "hits in L2"),
    Metric(f"lts__throughput{ACTIVE}", "%", "L2's rate"),
    Metric(f"{STALLED}memory_dependency_per_warp_active.pct", "%", "warps that wait for memory"),
    Metric(f"{STALLED}short_scoreboard_per_warp_active.pct", "%", "for shared memory"),
    Metric(f"{STALLED}long_scoreboard_per_warp_active.pct", "%", "for L1 and what lies behind"),
    Metric(f"{STALLED}barrier_per_warp_active.pct", "%", "at a barrier"),
    Metric(f"{STALLED}branch_resolving_per_warp_active.pct", "%", "for a branch"),
    Metric("smsp__sass_average_branch_targets_threads_uniform.pct", "%", "uniform branches"),
    Metric("gpu__time_duration.sum", "ns", "of the launch"),
    Metric(f"sm__throughput{ELAPSED}", "%", "the multiprocessors' speed of light"),
    Metric(f"gpu__compute_memory_throughput{ELAPSED}", "%", "the memory system's speed of light"),
    Metric("launch__waves_per_multiprocessor", "waves", "of blocks"),
    Metric("smsp__thread_inst_executed_per_inst_executed.ratio", "threads", "active in a warp"),
    Metric("smsp__inst_executed.sum", "instructions", "of warps, by the schedulers"),
    Metric("smsp__inst_executed_op_local_ld.sum", "instructions", "loads from local memory"),
    Metric("smsp__inst_executed_op_local_st.sum", "instructions", "stores to local memory"),
    Metric(f"{GLOBAL}ld.pct", "%", "used of each sector that is loaded"),
    Metric(f"{GLOBAL}st.pct", "%", "used of each sector that is stored"),
    Metric(f"{SHARED}.sum", "wavefronts", "of shared memory"),
    Metric(f"{SHARED}{ELAPSED}", "%", "shared memory's rate"),
    Metric(f"{CONFLICTS}_lsu_mem_shared.sum", "wavefronts", "added by bank conflicts"),
)
CUDAFORGE = METRICS[:24]
