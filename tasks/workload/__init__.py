"""Work of a task's reference: operators, families, floating-point operations, bytes."""
