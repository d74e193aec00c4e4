"""Packs: models prepared for streaming, and the checkpoints they are made from."""
