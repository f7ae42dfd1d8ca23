from functools import cache


def cut(layers: list[dict], ranks: int, microbatches: int, memory: float) -> list[int]:
    def stage(rank: int, start: int, end: int) -> float:
        part = layers[start:end]
        in_flight = min(microbatches, ranks - rank)
        needed = sum(layer["weights"] + in_flight * layer["activations"] for layer in part)
        seconds = sum(layer["forward"] + layer["backward"] for layer in part)
        return seconds if needed <= memory else float("inf")

    @cache
    def best(rank: int, end: int) -> tuple[float, tuple[int, ...]]:
        if rank == 0:
            return stage(0, 0, end), (end,)
        choices = []
        for start in range(rank, end):
            slowest, sizes = best(rank - 1, start)
            choices.append((max(slowest, stage(rank, start, end)), (*sizes, end - start)))
        return min(choices)

    return list(best(ranks - 1, len(layers))[1])
