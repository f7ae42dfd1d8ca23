"""Probabilities of a trained recommender for new clicks."""
