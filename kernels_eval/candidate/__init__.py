"""The only code that runs beside candidates, in a disposable process."""
