"""What reasoning length says about correctness and speed, and how hard tasks are: estimates,
sentences, figures, report."""
