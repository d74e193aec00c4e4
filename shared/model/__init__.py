"""The decoder: specification, layers, attention, the pass."""
