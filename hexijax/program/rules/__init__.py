"""What must hold of every Program: one file a rule."""
