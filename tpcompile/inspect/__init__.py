"""What people read: the plan, explained."""
