"""What a task's reference computes and moves: operators, families, floating-point operations,
bytes."""
