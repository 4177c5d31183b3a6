-- Prefect and MLflow each need a database of their own: both keep their schema's version in a table of the same name.
CREATE DATABASE prefect;
CREATE DATABASE mlflow;
