"""What it takes from an empty machine to the first step."""
