"""What a run works in: its workspace's lock, room on the disk, a clean end, and progress."""
