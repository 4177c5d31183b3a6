"""The local stack of `concur up`: Prefect, a worker, MLflow and Ray under one supervisord."""
