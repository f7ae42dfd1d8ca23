"""What a recommender's training job is; `load.load_config` reads it or a language model's."""
