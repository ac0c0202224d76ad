"""Tools on checkpoints of pretrained models; models never import them."""
