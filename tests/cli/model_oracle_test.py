#!/usr/bin/env python3
"""`gradgate model --json` against exact rational arithmetic, on random inputs.

The formulas below are written from docs/cost-models.md, independently of gate/models/, and are first checked themselves against
tests/golden/cost_model_golden.json. Inputs are doubles, passed with all their digits, so that both sides compute from the same numbers.
"""
import json
import pathlib
import random
import subprocess
import sys
from decimal import Decimal, getcontext
from fractions import Fraction as F

getcontext().prec = 50
ROOT = pathlib.Path(__file__).resolve().parents[2]
TOLERANCE = F(1, 10**12)
CASES = 100


def log2(n):
    return F(n.bit_length() - 1) if n & (n - 1) == 0 else F(Decimal(n).ln() / Decimal(2).ln())


def expected(a, b, n, m, r=None, codec=None, g=None, inside=None):
    """All keys of `gradgate model --json`; the second value is what a key's error is relative to where that is not its value."""
    whole = F((n - 1).bit_length())
    power = 1 << (n.bit_length() - 1)
    share = F(n - 1, n)
    ring = 2 * share * m / b + 2 * (n - 1) * a
    one_pass = share * m / b + (n - 1) * a
    fold = 0 if power == n else 2 * (a + m / b)
    want = {
        "p2p": a + m / b,
        "crossover_bytes": a * b,
        "ring_allreduce": ring,
        "tree_allreduce": 2 * log2(n) * (a + m / b),
        "halving_doubling_allreduce": 2 * share * m / b + 2 * log2(n) * a,
        "allgather": one_pass,
        "reduce_scatter": one_pass,
        "alltoall": one_pass,
        "broadcast": log2(n) * (a + m / b),
        "ring_tree_crossover": None if n <= 2 else a * b * (n - 1 - log2(n)) / (log2(n) - share),
        "tree_allreduce_steps": 2 * whole * (a + m / b),
        "broadcast_steps": whole * (a + m / b),
        "halving_doubling_allreduce_steps": 2 * F(power - 1, power) * m / b + 2 * (power.bit_length() - 1) * a + fold,
    }
    scale = {}
    keys = ["gather_exchange", "two_shot_exchange", "codec_budget_ring", "codec_budget_gather", "codec_budget_two_shot",
            "hierarchical_representative", "hierarchical_sharded", "breakeven_bandwidth_ring", "breakeven_ratio_ring", "breakeven_ranks_gather"]
    want.update(dict.fromkeys(keys))
    if r is not None:
        p = m / r
        gather, two_shot = (n - 1) * (a + p / b), 2 * (share * p / b + (n - 1) * a)
        want.update({"gather_exchange": gather, "two_shot_exchange": two_shot, "codec_budget_two_shot": ring - two_shot,
                     "codec_budget_ring": 2 * share * (m - p) / b, "codec_budget_gather": ring - gather})
        scale["codec_budget_gather"] = max(ring, gather)
    if codec is not None:
        full = 2 * share * m / b
        if codec < full:
            want["breakeven_ratio_ring"] = 1 / (1 - codec / full)
            scale["breakeven_ratio_ring"] = want["breakeven_ratio_ring"] ** 2  # as sensitive to its inputs
    if r is not None and codec is not None:
        want["breakeven_bandwidth_ring"] = 2 * share * m * (1 - 1 / r) / codec if codec > 0 else None
        best = 1
        for ranks in range(2, 4097):  # budget > codec, without divisions
            dense, gathered = 2 * (ranks - 1) * (m / ranks + a * b), (ranks - 1) * (a * b + m / r)
            if dense - gathered > codec * b:
                best = ranks
        want["breakeven_ranks_gather"] = F(best)
    if g is not None:
        a1, b1 = inside
        k = n // g
        want["hierarchical_representative"] = 2 * log2(g) * (a1 + m / b1) + 2 * F(k - 1, k) * m / b + 2 * (k - 1) * a
        want["hierarchical_sharded"] = 2 * (F(g - 1, g) * m / b1 + (g - 1) * a1) + 2 * F(k - 1, k) * (m / g) / b + 2 * (k - 1) * a
    return want, scale


def compare(where, got, want, scale=None, failures=None):
    for key, exact in want.items():
        value = got.get(key)
        if exact is None or value is None:
            if exact is not value:
                failures.append(f"{where}: {key} is {value}, expected {exact}")
            continue
        allowed = TOLERANCE * max(abs(exact), (scale or {}).get(key, 0))
        if abs(F(value) - exact) > allowed:
            failures.append(f"{where}: {key} is {value!r}, expected {float(exact)!r}")


def check_golden(failures):
    golden = json.loads((ROOT / "tests/golden/cost_model_golden.json").read_text())
    for i, row in enumerate(golden["random_cases"]):
        want, scale = expected(F(row["alpha"]), F(row["beta"]), row["N"], F(row["M"]), F(row["r"]))
        compare(f"golden random_cases[{i}]", row, {k: v for k, v in want.items() if k in row}, scale, failures)
    for i, row in enumerate(golden["extended_cases"]):
        want, scale = expected(F(row["alpha"]), F(row["beta"]), row["N"], F(row["M"]), F(row["r"]), F(row["codec_time"]), row["ranks_per_node"],
                               (F(row["intra_alpha"]), F(row["intra_beta"])))
        compare(f"golden extended_cases[{i}]", row, {k: v for k, v in want.items() if k in row}, scale, failures)
    return len(golden["random_cases"]) + len(golden["extended_cases"])


def main(program):
    failures = []
    golden = check_golden(failures)
    rnd = random.Random(20240607)
    for case in range(CASES):
        a, b = 10 ** rnd.uniform(-9, -3), 10 ** rnd.uniform(6, 12)
        g = rnd.choice([1, 2, 4, 8])
        n = g * rnd.choice([1, 2, 3, 4, 5, 7, 16, 31, 100, 128, 512])
        m = rnd.choice([0, 1, rnd.randint(2, 10**6), rnd.randint(10**6, 4 * 10**9)])
        arguments = ["--alpha", f"{a!r}s", "--beta", f"{b!r}B/s", "--ranks", str(n), "--bytes", f"{float(m)!r}B"]
        inputs = {}
        if rnd.random() < 0.8:
            inputs["r"] = rnd.choice([2.0, 3.94, 64.0, 1000.0, 10 ** rnd.uniform(0.01, 3)])
            arguments += ["--ratio", repr(inputs["r"])]
        if rnd.random() < 0.7:
            inputs["codec"] = rnd.choice([0.0, 10 ** rnd.uniform(-7, 0)])
            arguments += ["--codec-time", f"{inputs['codec']!r}s"]
        if rnd.random() < 0.6:
            inside = (10 ** rnd.uniform(-8, -5), 10 ** rnd.uniform(9, 12))
            arguments += ["--ranks-per-node", str(g), "--intra-alpha", f"{inside[0]!r}s", "--intra-beta", f"{inside[1]!r}B/s"]
            inputs.update(g=g, inside=tuple(map(F, inside)))
        run = subprocess.run([program, "model", "--json", *arguments], capture_output=True, text=True, timeout=60)
        where = "gradgate model " + " ".join(arguments)
        if run.returncode != 0:
            failures.append(f"{where}: exit {run.returncode}: {run.stderr}")
            continue
        got = json.loads(run.stdout, parse_constant=lambda name: failures.append(f"{where}: {name} is not strict JSON"))
        exact = {k: (F(v) if isinstance(v, float) else v) for k, v in inputs.items()}
        want, scale = expected(F(a), F(b), n, F(m), **exact)
        if set(got) != set(want):
            failures.append(f"{where}: keys {sorted(set(got) ^ set(want))} are missing or too many")
        compare(where, got, want, scale, failures)
        if n == 1 and any(got[k] != 0 for k in ("ring_allreduce", "tree_allreduce", "broadcast", "allgather")):
            failures.append(f"{where}: one rank costs something")
    print("\n".join(failures[:20]) if failures else f"{golden} golden rows and {CASES} random inputs agree to 1e-12")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
