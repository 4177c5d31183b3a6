"""What reasoning length says of correctness and of speedup, how hard tasks are, and what a training
set holds."""
