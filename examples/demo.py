"""`make demo`: plan a real model for real machines, then plan, run and check a small one on this machine.

Everything is done by the commands that a user would type; they are printed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "demo-out"
BIN = Path(sys.executable).parent
CONFIGS = ROOT / "examples" / "configs"
PROCESSES, GLOBAL_BATCH, SEQ_LEN, STEPS = 4, 16, 128, 6
TIME_LIMIT_S = "40"  # for each search: a busy machine then gets a plan with a gap instead of a late proof


def run(title: str, *command: str | Path) -> None:
    """Print a command and run it; end the demo if it fails."""
    words = [str(part) for part in command]
    shown = [os.path.relpath(w, ROOT) if w.startswith(str(ROOT)) else w for w in words]
    print(f"\n\033[1m{title}\033[0m\n$ {' '.join([Path(words[0]).name, *shown[1:]])}", flush=True)
    begin = time.perf_counter()
    # The repository's modules first on the path; each process computes on one thread.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(words, cwd=ROOT, env=environment, check=False)
    if done.returncode:
        sys.exit(f"that failed with exit status {done.returncode}")
    print(f"({time.perf_counter() - begin:.1f} s)", flush=True)


def plan_a_real_model() -> None:
    """Llama-3.1-8B on two nodes of eight H100: no GPU needed."""
    strategy = OUT / "llama-3.1-8b.toml"
    run(
        "1. Plan Llama-3.1-8B for two nodes of eight H100",
        BIN / "autoparallel", "plan", f"hf:{CONFIGS / 'llama-3.1-8b.json'}", "--cluster", "h100-sxm:2x8",
        "--seq-len", "8192", "--global-batch", "128", "--time-limit", TIME_LIMIT_S, "--explain", "-o", strategy,
    )  # fmt: skip
    run("   … and show why", BIN / "autoparallel", "report", strategy, "-o", OUT / "llama-3.1-8b.html")


def plan_and_run_a_small_model() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A small Llama on four processes of this machine: predicted, measured, and one process's own."""
    config, strategy = CONFIGS / "llama-tiny.json", OUT / "llama-tiny.toml"
    run(
        f"2. Plan a small Llama for {PROCESSES} processes of this machine",
        BIN / "autoparallel", "plan", f"hf:{config}", "--cluster", f"cpu-gloo:1x{PROCESSES}",
        "--seq-len", str(SEQ_LEN), "--global-batch", str(GLOBAL_BATCH), "--time-limit", TIME_LIMIT_S,
        "--set", "execution.dtype=fp32", "--set", "execution.param_dtype=fp32",
        "--set", "execution.master_weights=false", "--set", "execution.kernels=eager", "--runnable", "-o", strategy,
    )  # fmt: skip
    run("   … and show why", BIN / "autoparallel", "report", strategy, "-o", OUT / "llama-tiny.html")
    with strategy.open("rb") as handle:
        plan = tomllib.load(handle)
    common = [
        "--cpu",
        "--steps",
        str(STEPS),
        "--global-batch",
        str(GLOBAL_BATCH),
        "--seq-len",
        str(SEQ_LEN),
        "--json",
    ]
    run(
        "3. Run it",
        BIN / "torchrun", "--standalone", "--nproc-per-node", str(PROCESSES), ROOT / "examples" / "train_llama.py",
        config, "--strategy", strategy, *common, OUT / "parallel.json",
    )  # fmt: skip
    run(
        "4. The same steps in one process, in plain PyTorch",
        sys.executable, ROOT / "examples" / "train_llama.py", config, "--plain",
        "--micro", str(plan["batch"]["micro"]), *common, OUT / "plain.json",
    )  # fmt: skip
    parallel = json.loads((OUT / "parallel.json").read_text(encoding="utf-8"))
    plain = json.loads((OUT / "plain.json").read_text(encoding="utf-8"))
    return plan, parallel, plain


def compare(plan: dict[str, Any], parallel: dict[str, Any], plain: dict[str, Any]) -> None:
    """Losses side by side, and the step time that was predicted beside the one measured."""
    print("\n\033[1m5. Side by side\033[0m\n  step   four processes   one process   difference")
    for step, (ours, theirs) in enumerate(zip(parallel["losses"], plain["losses"], strict=True)):
        print(f"  {step:>4}   {ours:14.8f}   {theirs:11.8f}   {abs(ours - theirs):.1e}")
    predicted_s = plan["predicted"]["step_time_s"]
    measured_s = statistics.median(parallel["step_times_s"][1:])  # the first step allocates and warms up
    print(f"  step time: predicted {predicted_s * 1e3:.0f} ms, measured {measured_s * 1e3:.0f} ms (median)")
    sure = plan["predicted"]["confidence"]
    low_s, high_s = sure["step_time_low_s"], sure["step_time_high_s"]
    if not low_s <= measured_s <= high_s:
        print(
            f"    outside the {low_s * 1e3:.0f} to {high_s * 1e3:.0f} ms that the plan stated for nine of ten: the profile cpu-gloo is "
            f"another machine's, and here {PROCESSES} processes share {os.cpu_count()} cores with whatever else runs"
        )
    print(f"  one process: {statistics.median(plain['step_times_s'][1:]) * 1e3:.0f} ms")
    worst = max(abs(a - b) for a, b in zip(parallel["losses"], plain["losses"], strict=True))
    if worst > 1e-3:
        sys.exit(f"the losses differ by {worst}: that is a bug")
    print(f"\nStrategies and reports are in {OUT.relative_to(ROOT)}/: open llama-3.1-8b.html in a browser.")


def main() -> None:
    OUT.mkdir(exist_ok=True)
    begin = time.perf_counter()
    plan_a_real_model()
    compare(*plan_and_run_a_small_model())
    print(f"The demo took {time.perf_counter() - begin:.0f} s.")


if __name__ == "__main__":
    main()
