"""Put another attention into a trained model: swap, calibration, sweep."""
