"""Where tasks and models come from: bundled, files, hubs, benchmarks."""
