#!/usr/bin/env bash
# Check the package on one GPU in at most six minutes, and write the figures as JSON.
#
#     benchmarks/gpu_check.sh [OUTPUT_DIR]          # PYTHON=… chooses the environment
#
# Runs the test of TRL's signatures, a few training steps of the embedded model in bfloat16 on the transformers engine, and the same
# on colocated vLLM, under both schedules, where PYTHON has it installed. What can't run is skipped, and said so. A failed part
# does not stop the others; the exit code is 1 if one failed, and 2 without a GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
OUT=${1:-outputs/gpu_check}
STEPS=6
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} # or a plain process would wrap the model for several
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
mkdir -p "$OUT"
rm -f "$OUT"/*.status

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "No GPU that torch can use: nothing was checked. Run it on a machine with one, or set PYTHON to an environment" \
        "whose torch fits the driver." >&2
    exit 2
fi

# part NAME SECONDS COMMAND…: run a part, and note its status and its wall-clock seconds.
part() {
    local name=$1 limit=$2 started=$SECONDS status=0
    shift 2
    echo "== $name (at most $limit s)"
    timeout "$limit" "$@" >"$OUT/$name.log" 2>&1 || status=$?
    echo "$status $((SECONDS - started))" >"$OUT/$name.status"
    [ "$status" = 0 ] || { echo "   failed with status $status; the end of $OUT/$name.log:" >&2; tail -n 20 "$OUT/$name.log" >&2; }
}

skip() {
    echo "== $1: skipped, $2"
    echo "skipped: $2" >"$OUT/$1.status"
}

# train NAME SECONDS OPTION…: a few steps of the demo in bfloat16, with a small held-out set before and after.
train() {
    local name=$1 limit=$2
    shift 2
    rm -rf "${OUT:?}/$name"
    part "$name" "$limit" "$PYTHON" examples/train_qwen3.py --config examples/configs/demo.yaml --use_cpu false --bf16 true \
        --max_steps "$STEPS" --eval_problems 64 --eval_k 2 --output_dir "$OUT/$name" "$@"
}

if "$PYTHON" -c 'import pytest' 2>/dev/null; then
    part contract 60 "$PYTHON" -m pytest -q -m "slow or not slow" -k signatures tests/integration/test_trainer.py
else
    skip contract "pytest is not installed"
fi
train transformers 90
if "$PYTHON" -c 'import vllm' 2>/dev/null; then
    train vllm_segment 100 --engine vllm --vllm_gpu_memory_utilization 0.3
    train vllm_continuous 100 --engine vllm --vllm_gpu_memory_utilization 0.3 --rollout_schedule continuous
else
    skip vllm_segment "vllm is not installed"
    skip vllm_continuous "vllm is not installed"
fi

"$PYTHON" - "$OUT" <<'PYTHON'
import json
import sys
from pathlib import Path

import torch

out = Path(sys.argv[1])
result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda, "parts": {}}
has_failed = False
for path in sorted(out.glob("*.status")):
    text = path.read_text().strip()
    if text.startswith("skipped"):
        result["parts"][path.stem] = {"status": text}
        continue
    status, seconds = map(int, text.split())
    has_failed |= status != 0
    part = {"status": "passed" if status == 0 else f"failed with {status}", "seconds": seconds}
    summary = out / path.stem / "summary.json"
    if summary.exists():
        part["summary"] = json.loads(summary.read_text())
    result["parts"][path.stem] = part
(out / "gpu_check.json").write_text(json.dumps(result, indent=2) + "\n")
for name, part in result["parts"].items():
    train = part.get("summary", {}).get("train_seconds")
    print(f"{name:18} {part['status']}" + (f", {train:.1f} s of training" if train else ""))
print(f"Figures: {out / 'gpu_check.json'}")
sys.exit(has_failed)
PYTHON
