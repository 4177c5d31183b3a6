"""From verdicts to a training set, by named strategies."""
