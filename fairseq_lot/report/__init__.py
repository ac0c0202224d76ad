"""Results, curves and maps as one page."""
