"""A small transformer over the bytes of the Python standard library's sources, data-parallel, with gradgate.

    torchrun --standalone --nproc-per-node 2 examples/torch/train_bytes_lm.py --gate auto --decisions run.jsonl

Without --gate it is the plain trainer. The default model has 3.3 million parameters.
"""

import argparse
import pathlib
import sysconfig
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradgate.torch


class BytesLM(nn.Module):
    """Predicts the next byte: embeddings, pre-norm transformer layers with a causal mask, a linear head."""

    def __init__(self, width: int, layers: int, heads: int, length: int):
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: (batch, length) bytes as int64; the logits of the byte after each, (batch, length, 256)."""
        length = tokens.shape[1]
        x = self.token(tokens) + self.place(torch.arange(length))
        return self.head(self.layers(x, mask=self.mask[:length, :length], is_causal=True))


def corpus(limit: int = 8_000_000) -> torch.Tensor:
    """Bytes of the standard library's top-level modules, in name order."""
    text = bytearray()
    for path in sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def batch_of(data: torch.Tensor, batch: int, length: int, chooser: torch.Generator):
    starts = torch.randint(len(data) - length - 1, (batch,), generator=chooser)
    window = torch.stack([data[start : start + length + 1] for start in starts.tolist()]).long()
    return window[:, :-1], window[:, 1:]


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--length", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--gate", choices=["auto", "on", "off", "observe"], help="default: no gradgate at all")
    parser.add_argument("--codecs", default="bf16,int8")
    parser.add_argument("--decisions", help="decision log (JSON lines), for `gradgate report`")
    return parser.parse_args()


def main() -> None:
    arguments = arguments_of()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    data = corpus()
    ddp = DistributedDataParallel(BytesLM(arguments.width, arguments.layers, 4, arguments.length), bucket_cap_mb=2)
    if arguments.gate:
        state = gradgate.torch.GateState(
            ddp, codecs=arguments.codecs.split(","), mode=arguments.gate, log=arguments.decisions
        )
        ddp.register_comm_hook(state, gradgate.torch.gated_hook)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    chooser = torch.Generator().manual_seed(100 + rank)
    begin = time.perf_counter()
    for step in range(arguments.steps):
        tokens, targets = batch_of(data, arguments.batch, arguments.length, chooser)
        optimizer.zero_grad()
        loss = cross_entropy(ddp(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}, {time.perf_counter() - begin:.1f} s", flush=True)
    if rank == 0:
        print(f"{arguments.steps} steps on {size} ranks, gate {arguments.gate or 'none'}: loss {loss.item():.3f}")
        if arguments.gate:
            print("\n".join(state.explain()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
