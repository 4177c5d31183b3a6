"""What a candidate's text says and asks for, read without running it."""
