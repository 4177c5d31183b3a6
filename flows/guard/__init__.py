"""What keeps a night that goes wrong short, clear and resumable: stopping, disk, what a run that ends early tells, notices."""
