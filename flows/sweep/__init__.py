"""What `flows.ablations` is made of: the plan of a sweep, its branches, what they cost, and what is told of them."""
