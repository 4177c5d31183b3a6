"""What concur makes possible from outside: extensions by entry point, each with its README."""
