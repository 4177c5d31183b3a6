"""Publishing: a finished curated set as a folder that `datasets.load_dataset` loads, and what
changed between two refreshes."""
