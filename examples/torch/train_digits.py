"""A small CNN on scikit-learn's handwritten digits, data-parallel, with gradgate in front of the gradients.

    torchrun --standalone --nproc-per-node 2 examples/torch/train_digits.py --gate auto

Without --gate it is the plain trainer; the difference is the two lines under `if arguments.gate`.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradgate.torch


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 16, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--gate", choices=["auto", "on", "off", "observe"], help="default: no gradgate at all")
    parser.add_argument("--codecs", default="bf16,int8")
    parser.add_argument("--decisions", help="decision log (JSON lines), for `gradgate report`")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels))
    test, train = order[:297], order[297:][rank::size]

    ddp = DistributedDataParallel(network())
    if arguments.gate:
        state = gradgate.torch.GateState(
            ddp, codecs=arguments.codecs.split(","), mode=arguments.gate, log=arguments.decisions
        )
        ddp.register_comm_hook(state, gradgate.torch.gated_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    chooser = torch.Generator().manual_seed(rank)
    for _ in range(arguments.steps):
        picked = train[torch.randint(len(train), (arguments.batch,), generator=chooser)]
        optimizer.zero_grad()
        loss = cross_entropy(ddp(images[picked]), labels[picked])
        loss.backward()
        optimizer.step()

    with torch.no_grad():
        right = (ddp.module(images[test]).argmax(1) == labels[test]).float().mean().item()
    if rank == 0:
        print(f"{arguments.steps} steps on {size} ranks, gate {arguments.gate or 'none'}: {right:.1%} of test images")
        if arguments.gate:
            sent = {name: value for name, value in state.stats().items() if "bytes" in name}
            print("\n".join(state.explain()), sent, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
