"""Another attention in a trained model: swapped, calibrated, swept."""
