"""What both services stand on: packs, streaming, quantized products, the model pass, KV, and serving."""
