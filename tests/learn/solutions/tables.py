def place(tables: list[dict], ranks: int, memory: float) -> dict[str, list[int]]:
    shares = [
        (size, seconds) for size in (0.2, 0.35, 0.5, 0.7, 1.0) for seconds in (0.2, 0.35, 0.5, 0.7, 1.0)
    ]
    placements = [placed for share in shares if (placed := greedy(tables, ranks, memory, share))]
    return min(placements, key=lambda placed: busiest(tables, ranks, placed))


def busiest(tables, ranks, chosen) -> float:
    busy = [0.0] * ranks
    for table in tables:
        for rank in chosen[table["name"]]:
            busy[rank] += table["parts"][len(chosen[table["name"]])][1]
    return max(busy)


def greedy(tables, ranks, memory, share) -> dict[str, list[int]] | None:
    average = sum(table["parts"][1][1] for table in tables) / ranks
    busy, used, chosen, items = [0.0] * ranks, [0.0] * ranks, {}, []
    for table in tables:
        parts = next(
            (n for n, (b, s) in table["parts"].items() if b <= share[0] * memory and s <= share[1] * average),
            max(table["parts"]),
        )
        size, seconds = table["parts"][parts]
        items.append((seconds, size, parts, table["name"]))
    for seconds, size, parts, name in sorted(items, reverse=True):
        room = [rank for rank in range(ranks) if used[rank] + size <= memory]
        if len(room) < parts:
            return None
        chosen[name] = sorted(room, key=busy.__getitem__)[:parts]
        for rank in chosen[name]:
            busy[rank] += seconds
            used[rank] += size
    return chosen
