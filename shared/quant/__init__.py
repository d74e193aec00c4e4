"""How weights are stored, and how they are multiplied."""
