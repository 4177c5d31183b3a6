"""TritonBench-T's operators as tasks, and recorded answers to them under concur's verifier."""
