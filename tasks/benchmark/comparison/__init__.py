"""The comparison page of an ablation."""
