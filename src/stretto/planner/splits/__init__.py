"""How each operator of a network is best split over the ranks."""
