"""An ablation sweep in one page: which strategy won, by how much, and how sure that is."""
