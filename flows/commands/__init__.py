"""Commands of `concur` that have a module of their own."""
