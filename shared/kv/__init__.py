"""Keys and values as tensors: paged storage, and the handoff between the stages."""
