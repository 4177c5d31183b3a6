"""A run's surroundings: workspace lock, disk room, clean end, and progress."""
