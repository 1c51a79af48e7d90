"""Programs: their text, their check, and how they are stored."""
