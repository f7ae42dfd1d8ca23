"""The campaign for one GPU: `python benchmarks/gpu/campaign.py`."""
