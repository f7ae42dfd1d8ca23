"""The config of a recommender."""
