"""The split of each operator of a user's network over ranks: traced, priced, chosen, drawn, applied."""
