"""What a model costs: parameters and FLOPs counted exactly, and how fast devices could be at best."""
