"""What a recommender's training job is; `load.load_any` reads it or a language model's."""
