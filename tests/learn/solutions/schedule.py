def program(ranks: int, microbatches: int) -> list[list[str]]:
    orders = []
    for rank in range(ranks):
        warm_up = ranks - 1 - rank
        order = [f"{rank}F{index}" for index in range(min(warm_up, microbatches))]
        weights = 0
        for index in range(microbatches):
            if index + warm_up < microbatches:
                order.append(f"{rank}F{index + warm_up}")
            order.append(f"{rank}I{index}")
            if index >= rank:
                order.append(f"{rank}W{weights}")
                weights += 1
        order += [f"{rank}W{index}" for index in range(weights, microbatches)]
        orders.append(order)
    return orders
