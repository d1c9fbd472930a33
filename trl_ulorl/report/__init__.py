"""A finished or running training, explained in one HTML file that needs no network."""
