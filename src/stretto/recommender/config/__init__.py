"""The config of a recommender's training job; `load.load_config` reads it, or a language model's config."""
