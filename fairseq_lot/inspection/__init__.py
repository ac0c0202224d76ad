"""What each head of a trained model does, measured."""
