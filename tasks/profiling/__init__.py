"""Where the references of tasks spend their time."""
