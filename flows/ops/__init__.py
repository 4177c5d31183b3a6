"""The local stack (Prefect, worker, MLflow, Ray), doctor, and garbage collection of snapshots."""
