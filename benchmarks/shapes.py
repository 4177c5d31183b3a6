"""Shapes of models that benchmarks build with random weights. Plain data: a borrowed machine may
have few packages."""

QWQ_32B = {
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 40960,
}
"""https://huggingface.co/Qwen/QwQ-32B, config.json; its rotary base is ROPE_THETA."""
QWEN_0_5B = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}
"""https://huggingface.co/Qwen/Qwen2.5-0.5B, config.json, the same rotary base."""
ROPE_THETA = 1000000.0
