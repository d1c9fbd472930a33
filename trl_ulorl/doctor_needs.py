"""What a training needs, measured on the trainer that the doctor examines: memory, and a target for its entropy."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from .config import DMMPTsConfig
from .doctor_patient import Check, Figures, Patient
from .memory import key_value_sizes
from .planner import BYTES_PER_HELD_TOKEN


@dataclass(frozen=True)
class Machine:
    """Bytes that the machine has for this process.

    Args:
        host: Memory of the host, shared by all processes on it.
        device: Memory of the accelerator; None without one.
    """

    host: int
    device: int | None

    @classmethod
    def here(cls) -> Machine:
        """Look at this machine."""
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = Path("/sys/fs/cgroup/memory.max")
        text = limit.read_text(encoding="utf-8").strip() if limit.is_file() else "max"
        host = host if text == "max" else min(host, int(text))
        return cls(host, torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None)


def check_memory(patient: Patient, machine: Machine, num_processes: int = 1) -> Check:
    """Add up what pools at their limit, weights, optimizer state and keys and values take, against what there is.

    Args:
        patient: Its figures are those of one process.
        machine: What there is.
        num_processes: Processes of the training on this machine. Each holds the batch; what is in flight lives on one.
    """
    trainer, args = patient.trainer, patient.trainer.args
    config = trainer.model.config.get_text_config()
    assert args.max_inflight_groups is not None
    groups = args.max_inflight_groups * num_processes + args.groups_per_batch * num_processes**2
    pools = groups * args.num_generations * args.max_completion_length * BYTES_PER_HELD_TOKEN
    parameters = list(trainer.model.parameters())
    weights = sum(value.numel() * value.element_size() for value in parameters)
    # A gradient and the two moments of Adam, each in the precision of the weight it belongs to.
    states = sum(3 * value.numel() * value.element_size() for value in parameters if value.requires_grad)
    kv_heads, head_size = key_value_sizes(config)
    kv_token = 2 * config.num_hidden_layers * kv_heads * head_size * trainer.model.dtype.itemsize
    at_once = (
        args.sequences_per_engine
        if args.use_vllm
        else args.decode_batch_size or args.per_device_train_batch_size * args.steps_per_generation
    )
    sequence = max(len(ids) for ids in patient.prompts) + args.max_completion_length
    cache = kv_token * sequence * (1 if args.use_vllm else at_once)  # vLLM queues what does not fit, beyond one
    host_needed, device_needed = pools, weights + states + cache
    if machine.device is None:
        host_needed, device_needed = pools + device_needed * num_processes, 0
    figure: Figures = {
        "host_needed_gib": host_needed / 2**30,
        "host_gib": machine.host / 2**30,
        "device_needed_gib": device_needed / 2**30,
        "device_gib": None if machine.device is None else machine.device / 2**30,
        "pools_gib": pools / 2**30,
        "weights_gib": weights / 2**30,
        "gradients_and_optimizer_gib": states / 2**30,
        "kv_gib": cache / 2**30,
        "kv_bytes_per_token": kv_token,
    }
    problems = []
    if host_needed > machine.host:
        problems.append(f"the host needs {host_needed / 2**30:.3g} GiB and has {machine.host / 2**30:.3g}")
    if machine.device is not None and device_needed > machine.device:
        problems.append(f"the device needs {device_needed / 2**30:.3g} GiB and has {machine.device / 2**30:.3g}")
    if not problems:
        message = (
            f"Pools at their limit, weights, optimizer and cache need {(host_needed + device_needed) / 2**30:.3g} GiB."
        )
        return Check("memory_will_do", True, figure, message + " Activations come on top.")
    message = "; ".join(problems) + (
        ", without activations. Lower `decode_batch_size` for the cache, `max_inflight_groups` for the pools; shard "
        "weights and optimizer over devices with ZeRO-3 or FSDP2 (this counts one device alone), or train a LoRA adapter."
    )
    return Check("memory_will_do", False, figure, message[0].upper() + message[1:])


# ------------------------------------------------------------------------------------------------------- sigma and tau

TAUS = (0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999)
MASTERED_RANGE = (0.2, 0.9)


def measure_entropy(patient: Patient) -> Check:
    """Measure the starting entropy and the share of mastered tokens, and propose `sigma` and `tau`."""
    scores = [patient.score(c.all_ids, len(c.token_ids)) for c in patient.samples]
    logps = np.concatenate([logp for logp, _ in scores])
    entropies = np.array([entropy.mean() for _, entropy in scores])
    sigma, tau = proposed_sigma(entropies), proposed_tau(logps)
    given = cast(DMMPTsConfig | None, patient.trainer.args.dmmpts)
    error = float(entropies.std(ddof=1) / np.sqrt(entropies.size)) if entropies.size > 1 else None
    figure: Figures = {
        "sigma_proposed": sigma,
        "tau_proposed": tau,
        "entropy_mean": float(entropies.mean()),
        "entropy_standard_error": error,
        "mastered_frac": float((logps >= np.log(0.99)).mean()),
        "mastered_frac_at_proposed_tau": float((logps >= np.log(tau)).mean()),
        "sigma": None if given is None else given.sigma,
        "tau": None if given is None else given.tau,
        "outputs": len(scores),
    }
    message = (
        f"Starting entropy {entropies.mean():.3g} nats, {figure['mastered_frac']:.0%} of the tokens above 0.99: sigma "
        f"{sigma:g} and tau {tau:g} would keep it there."
    )
    return Check("entropy", bool(np.isfinite(entropies).all()), figure, message)


def proposed_sigma(response_entropies: NDArray[np.float64]) -> float:
    """Return the mean entropy of the responses in nats, to two digits: masking then holds it where training starts.

    The paper's 0.2 is 0.8 to 1.4 times the starting entropies of its three models.

    Example:
        >>> proposed_sigma(np.array([0.1, 0.2, 0.168]))
        0.16
    """
    return float(f"{max(float(response_entropies.mean()), 1e-3):.2g}")


def proposed_tau(per_token_logps: NDArray[np.float64]) -> float:
    """Return the paper's 0.99 if 20 to 90 % of the tokens are at least so likely, else the nearest that does this.

    Fewer, and masking could not hold the entropy; more, and a masked response would teach next to nothing.

    Example:
        >>> proposed_tau(np.log([0.999, 0.5, 0.5, 0.5]))
        0.99
        >>> proposed_tau(np.log([0.9992] * 99 + [0.99995]))
        0.9995
    """
    shares = {tau: float((per_token_logps >= np.log(tau)).mean()) for tau in TAUS}
    least, most = MASTERED_RANGE
    if shares[0.99] > most:
        return next((tau for tau in TAUS if tau > 0.99 and shares[tau] <= most), TAUS[-1])
    if shares[0.99] < least:
        return next((tau for tau in reversed(TAUS) if tau < 0.99 and shares[tau] >= least), TAUS[0])
    return 0.99
