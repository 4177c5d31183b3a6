"""Sources of tasks and models: bundled, files, hubs, benchmarks."""
