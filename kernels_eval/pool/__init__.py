"""Many candidates over Ray: the pool, its workers, its telemetry."""
