"""How long does a training step take beside a busy process, by how threads wait for each other?

    python -m benchmarks.busy_neighbour [--rounds N] [--seconds S] [--spins N ...]

Steps of F-FC+CONV as `ella-cuda train` does them on digits, in a process of its own for each choice, in turns. A line for each choice
has milliseconds a step, the median of the rounds, and in brackets the ratio to the best choice in the same condition:

idle    nothing else runs
busy    one process computes without a pause, from before the choice is made
comes   it starts when the choice is made and the network is warm
leaves  it ends then

"ella-cuda" is what the command chooses by itself. The numbers are those of a machine on which nothing else runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

import ella_cuda_command

CONDITIONS = {"idle": (False, False), "busy": (True, True), "comes": (False, True), "leaves": (True, False)}
OWN, WARM = "ella-cuda", "warm"


def choices(spins: list[int]) -> dict[str, dict[str, str]]:
    """By name, the environment variables of each."""
    fixed = {"torch's own": {}, "passive": {"OMP_WAIT_POLICY": "passive"}, "one thread": {"OMP_NUM_THREADS": "1"}}
    return {OWN: {}, **fixed, **{f"spin {n}": {"GOMP_SPINCOUNT": str(n)} for n in spins}}


def milliseconds(choice: str, settings: dict[str, str], condition: str, seconds: float) -> float:
    """Of a step, in a process of its own."""
    before, during = CONDITIONS[condition]
    environ = {n: v for n, v in os.environ.items() if not n.startswith(("OMP_", "GOMP_", ella_cuda_command.NOTE))}
    command = [sys.executable, "-m", "benchmarks.busy_neighbour", "--seconds", str(seconds), "--steps"]
    command += ["--choose"] if choice == OWN else []
    neighbour = start_neighbour() if before else None
    try:
        with subprocess.Popen(
            command, env={**environ, **settings}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            if child.stdout.readline().strip() != WARM:
                raise RuntimeError("the process that was to be measured ended before it was warm; its error is above.")
            if before and not during:
                neighbour = end(neighbour)
            elif during and not before:
                neighbour = start_neighbour()
            measured, _ = child.communicate("\n")
        return float(measured)
    finally:
        end(neighbour)


def start_neighbour() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "while True: pass"])


def end(neighbour: subprocess.Popen[bytes] | None) -> None:
    if neighbour is not None:
        neighbour.kill()
        neighbour.wait()


def take_steps(choose: bool, seconds: float) -> None:
    """Make steps, say when they are warm, wait for a line, and print how long one takes."""
    if choose:
        os.environ.update(ella_cuda_command.choose_threads())
    import torch
    from torch.nn import functional as F

    from ella_cuda.experiments import adam_for, configure
    from ella_cuda.experiments.run import build_network
    from ella_cuda.workers import prepare_process

    prepare_process()
    torch.manual_seed(0)
    config = configure("digits", "digit", "f_fc+conv", "map", 0)
    model = build_network(config, in_channels=1, num_classes=10)
    optimizer = adam_for(model, config.fan_in_limit)(model.parameters(), lr=config.lr, fused=True)
    x, y = torch.randn(config.batch_size, 1, 32, 32), torch.randint(10, (config.batch_size,))

    def steps(seconds: float) -> float:
        done, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < seconds:
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            done += 1
        return 1000 * passed / done

    steps(0.5)
    print(WARM, flush=True)
    sys.stdin.readline()
    print(steps(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=3, help="times that each choice is measured in each condition (3)"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="of steps, each time (2)")
    parser.add_argument("--spins", type=int, nargs="*", default=[0, 100, 1000, 10_000, 100_000], help="turns")
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS), help="(all)")
    parser.add_argument("--steps", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--choose", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps:
        take_steps(args.choose, args.seconds)
        return
    named = choices(args.spins)
    for condition in args.conditions:
        found: dict[str, list[float]] = {choice: [] for choice in named}
        for _ in range(args.rounds):
            for choice, settings in named.items():
                found[choice].append(milliseconds(choice, settings, condition, args.seconds))
        medians = {choice: statistics.median(times) for choice, times in found.items()}
        best = min(medians.values())
        for choice, median in medians.items():
            print(f"{condition:8}{choice:12}{median:9.1f} ms  ({median / best:.2f})", flush=True)


if __name__ == "__main__":
    main()
