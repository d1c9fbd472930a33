"""Train under one backend on every rank, one short run after the other, and write what this rank ended with.

Started by test_backends.py. The first argument is a folder, the second the backend, the third a JSON object of runs:
names and options. `own` options are `engine` ("scripted" or "transformers"), `lora`, `resume_from` (the name of a run and a
step) and `fails_on_rank`; the rest are settings of `UloRLConfig`.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from accelerate.state import DistributedType, PartialState
from conftest import make_dataset, make_model, make_tokenizer
from helpers import ScriptedEngine, arguments
from torch.distributed.tensor import DTensor
from transformers import ProgressCallback

from trl_ulorl import UloRLTrainer

# Adam's epsilon is large against a gradient: without it an update is the sign of what rounding left where there is none.
COMMON = {"adam_epsilon": 1e-2, "num_segments": 4, "gradient_accumulation_steps": 2}
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def deepspeed_config(stage):
    """Return a configuration in which parameters of any size are sharded, as those of a large model are."""
    zero = {"stage": stage, "overlap_comm": False}
    if stage == 3:
        zero |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_model_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    return {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
    }


def reach_fsdp_on_a_cpu():
    """Let accelerate take two gloo processes without a GPU for a place where it may shard.

    It starts FSDP on accelerators alone, though PyTorch's `fully_shard` runs on a CPU over gloo as well.
    """
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda self, *args: ("gloo", DistributedType.MULTI_GPU)


def choose_backend(backend, folder):
    """Set what `accelerate launch` would set, and return the settings of `UloRLConfig` that choose it on a CPU."""
    if backend == "ddp":
        return {"ddp_backend": "gloo"}
    if backend == "fsdp2":
        reach_fsdp_on_a_cpu()
        os.environ.update(FSDP2)
    else:
        path = folder / "deepspeed.json"
        path.write_text(json.dumps(deepspeed_config(int(backend.removeprefix("zero")))))
        os.environ.update(
            DS_ACCELERATOR="cpu", ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE=str(path)
        )
    return {"ddp_backend": "gloo", "use_cpu": False}


def short_or_odd(completions, **kwargs):
    """Reward by length, with about every fourth group of four left without a difference."""
    lengths = [len(completion[0]["content"]) for completion in completions]
    return [float(length < 4 or length % 2) for length in lengths]


def failing_generate(*args, **kwargs):
    raise OSError("this rank's memory is full")


def run_once(folder, *, engine="scripted", lora=False, resume_from=None, fails_on_rank=None, **settings):
    """Train once and return this rank's result; the model is saved to `folder / "final"`."""
    peft_config = None
    if lora:
        from peft import LoraConfig

        peft_config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    args = arguments(folder, **{**COMMON, **settings})
    trainer = UloRLTrainer(
        make_model(),
        short_or_odd,
        args,
        make_dataset(256),
        processing_class=make_tokenizer(),
        peft_config=peft_config,
    )
    trainer.remove_callback(ProgressCallback)
    if engine == "scripted":
        trainer._collector.engine = ScriptedEngine(args.num_generations, args.max_completion_length)
    if fails_on_rank == trainer.accelerator.process_index:
        trainer.model.generate = failing_generate
    decoded = []
    decode = trainer._collector.engine.decode

    def counting_decode(requests):
        decoded.append(len(requests))
        return decode(requests)

    trainer._collector.engine.decode = counting_decode
    error = None
    try:
        trainer.train(resume_from_checkpoint=resume_from)
    except Exception as raised:
        if fails_on_rank is None:
            raise
        error = f"{type(raised).__name__}: {raised}"
    else:
        trainer.save_model(str(folder / "final"))
    held = [value.to_local() if isinstance(value, DTensor) else value for value in trainer.model.parameters()]
    return trainer, {
        "backend": str(trainer.accelerator.distributed_type.value),
        "error": error,
        "ledger": trainer.ledger() if error is None else None,
        "decoded": decoded,
        "held_numbers": sum(value.numel() for value in held),
        "history": trainer.state.log_history,
    }


def main(folder, backend, runs):
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(int(os.environ["TIME_LIMIT"]), exit=True)  # a hang says where
    chosen = choose_backend(backend, folder)
    for name, options in runs.items():
        if options.get("resume_from"):
            run, step = options["resume_from"]
            options["resume_from"] = str(folder / run / "run" / f"checkpoint-{step}")
        (folder / name).mkdir(exist_ok=True)
        trainer, result = run_once(folder / name, **chosen, **options)
        (folder / name / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(result))
    trainer.end()  # a process group that is still up at exit may abort the process


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
