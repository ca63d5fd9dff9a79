"""Pictures: from data to a figure with its alternative text, without state."""
