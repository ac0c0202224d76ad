"""What each head of a trained model does: numbers, maps, the page of the report."""
