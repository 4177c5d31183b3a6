"""What keeps a flow run short, clear and resumable: guard, disk, shutdown, notices, watchdog."""
