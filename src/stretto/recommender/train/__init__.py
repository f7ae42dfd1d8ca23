"""The training job of a recommender."""
