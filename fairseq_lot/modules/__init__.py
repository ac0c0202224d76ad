"""The mechanisms inside fairseq's layers: T×B×C tensors, True = pad, incremental state, flat options."""
