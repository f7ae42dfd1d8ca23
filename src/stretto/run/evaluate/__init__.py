"""Trained models on text or samples that they were not trained on."""
