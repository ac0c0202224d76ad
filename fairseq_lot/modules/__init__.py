"""The mechanisms inside fairseq's layers: fairseq's conventions for tensors, masks, caches and options."""
