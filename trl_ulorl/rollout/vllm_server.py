"""TRL's client of a vLLM server: checks of what it talks to, and the policy's weights on their way there.

On GPUs TRL broadcasts the weights with NCCL. Where the trainer's device is no CUDA device they go through files that
trainer and server can both read. `vllm_client.py` decodes.
"""

from __future__ import annotations

import json
import re
import shutil
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from accelerate.utils import broadcast_object_list, is_peft_model
from safetensors.torch import save_file
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

WEIGHTS_FOLDER = "served_weights"  # in the trainer's output folder

_RESET_SECONDS = 10.0  # how long requests that were broken off may still occupy the prefix cache

_T = TypeVar("_T")


class ServedVLLM(VLLMGeneration):
    """TRL's client of a vLLM server that checks what it talks to, and that hands over weights without NCCL too.

    Args:
        *args: As in TRL's `VLLMGeneration`.
        output_dir: Where weights are put for a server that can't be reached by NCCL.
        **kwargs: As in TRL's `VLLMGeneration`.

    Attributes:
        instance_id: Names this start of the server: another one means that it has lost the policy's weights.
        max_model_len: Most tokens of a sequence on the server, prompt and completion together.

    Raises:
        ValueError: If the server has another model, or was started with flags that don't fit.
    """

    def __init__(self, *args: Any, output_dir: str, **kwargs: Any) -> None:
        # Set first: the parent's constructor connects.
        self._weights_root = Path(output_dir).resolve() / WEIGHTS_FOLDER
        super().__init__(*args, **kwargs)

    @property
    def base_url(self) -> str:
        """The server's address, on every rank."""
        return self.server_base_url or f"http://{self.server_host}:{self.server_port}"

    @property
    def _has_nccl(self) -> bool:
        return bool(self.accelerator.device.type == "cuda")

    def _init_vllm(self) -> None:
        if self.server_base_url is not None:
            self.server_base_url = self.server_base_url.rstrip("/")  # TRL would ask for //health, for ever
        self._on_main(self._wait_for_server)
        if self._has_nccl:
            super()._init_vllm()
        else:
            with _without_communicator():
                super()._init_vllm()
        self.instance_id, self.max_model_len = self._on_main(self._checked_server)

    def _on_main(self, action: Callable[[], _T]) -> _T:
        """Act on the main process; every rank returns its result or fails with it, so that none waits for ever."""
        outcome: list[Any] = [None, None]
        failure: Exception | None = None
        if self.accelerator.is_main_process:
            try:
                outcome[0] = action()
            except Exception as error:  # noqa: BLE001 - told to the other ranks first
                failure, outcome[1] = error, str(error)
        broadcast_object_list(outcome, from_process=0)
        if failure is not None:
            raise failure
        if outcome[1] is not None:
            raise RuntimeError(f"The main process has failed with the vLLM server: {outcome[1]}")
        result: _T = outcome[0]
        return result

    # ----------------------------------------------------------------------------------------------------- the checks

    def _wait_for_server(self) -> None:
        """Wait as long as `vllm_server_timeout`; TRL's own wait never ends where something else answers."""
        deadline = time.monotonic() + self.server_timeout
        while True:
            try:
                self._read("/health")
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ConnectionError(
                        f"No vLLM server has answered at {self.base_url} within `vllm_server_timeout` "
                        f"({self.server_timeout:g} s): {error}. Start one as the documentation of served vLLM says, "
                        "or correct `vllm_server_base_url`, or `vllm_server_host` and `vllm_server_port`."
                    ) from error
            time.sleep(0.5)

    def _checked_server(self) -> tuple[str, int]:
        config = self.vllm_client.get_server_info()
        settings = config["model_config"]
        self._check_logprobs_mode(settings["logprobs_mode"])
        self._check_model(settings["model"], settings.get("hf_overrides"))
        if settings["max_model_len"] <= self.max_completion_length:
            raise ValueError(
                f"The vLLM server at {self.base_url} was started for sequences of {settings['max_model_len']} tokens, "
                f"which leaves no room for a prompt before `max_completion_length` ({self.max_completion_length}). "
                "Restart it with `--max-model-len` of at least the longest prompt plus `max_completion_length`."
            )
        return str(config["instance_id"]), settings["max_model_len"]

    def _check_logprobs_mode(self, mode: str) -> None:
        is_plain = mode == "raw_logprobs" and (
            (self.temperature, self.top_p, self.top_k, self.min_p or 0, self.repetition_penalty) == (1, 1, 0, 0, 1)
        )
        if mode != "processed_logprobs" and not is_plain:
            raise ValueError(
                f"The vLLM server at {self.base_url} runs with `--logprobs-mode {mode}`: with `temperature` "
                f"({self.temperature}) its log-probabilities would not be those that tokens are sampled with. Restart "
                "it with `--logprobs-mode processed_logprobs`."
            )

    def _check_model(self, name: str, overrides: Any) -> None:
        """Compare shapes and rotary embeddings, not names: trainer and server may see one model under different paths."""
        (description, *_) = self._post("/collective_rpc", {"method": "get_model_inspection"})["results"]
        policy = self.model.config.get_text_config()
        for what, pattern, expected in (
            ("a vocabulary of", r"org_vocab_size=(\d+)", policy.vocab_size),
            ("a hidden size of", r"embedding_dim=(\d+)", policy.hidden_size),
        ):
            found = re.search(pattern, description)
            if found is None:
                raise RuntimeError(
                    f"The vLLM server at {self.base_url} does not say that it has {what} some size, so its model can't be "
                    "compared with the policy: this release of vLLM is not supported. See the extra `vllm` in "
                    "pyproject.toml for those that are."
                )
            if int(found[1]) != expected:
                raise ValueError(
                    f"The vLLM server at {self.base_url} serves {name!r} with {what} {found[1]}, but the "
                    f"policy ({self.model.name_or_path!r}) has {expected}: its weights would not fit. Restart the "
                    "server with the policy's model."
                )
        wanted = getattr(policy, "rope_parameters", None)
        fault = rotary_fault(description, overrides, wanted)
        if fault is not None:
            raise ValueError(
                f"The vLLM server at {self.base_url} has {fault}, but the policy's `rope_parameters` are {wanted}: the two would "
                "see the same tokens at other positions. Restart the server with `--hf-overrides` "
                f"'{json.dumps({'rope_parameters': wanted, 'max_position_embeddings': policy.max_position_embeddings})}'."
            )

    def _current_instance_id(self) -> str:
        info = self._get("/server_info?config_format=json")
        return str(info["vllm_config"]["instance_id"])

    def _check_not_restarted(self) -> None:
        if self._current_instance_id() != self.instance_id:
            raise RuntimeError(restarted_message(self.base_url))

    # ---------------------------------------------------------------------------------------------------- the weights

    def sync_weights(self) -> None:
        """Hand the policy's weights to the server, and make it drop every key and value of the old ones.

        Every rank must call it: parameters are gathered one by one, and no rank returns before the server is ready.

        Raises:
            RuntimeError: If the server can't take them.
        """
        if self._has_nccl:
            self._on_main(self._check_not_restarted)  # a new one is in no NCCL group: the broadcast would hang
            super().sync_weights()
        else:
            tensors = {}
            for name, parameter in self._iter_named_params():  # on every rank, as gathering is a collective operation
                if self.accelerator.is_main_process:
                    # A copy: under ZeRO-3 the gathered values are gone in the next iteration.
                    tensors[name] = parameter.detach().to("cpu", copy=True).contiguous()
            self.instance_id = self._on_main(lambda: self._hand_over(tensors))
        self._on_main(self._drop_prefix_cache)

    def _hand_over(self, tensors: dict[str, torch.Tensor]) -> str:
        model = cast(Any, self.model)
        policy = model.get_base_model() if is_peft_model(model) else model
        for name, source in policy.all_tied_weights_keys.items():
            # Under its own name too: on a CPU vLLM keeps a tied head as a packed copy, which else stays as it was.
            tensors[name] = tensors[source].clone()
        instance_id = self._current_instance_id()  # before: if it restarts meanwhile, the next check tells
        folder = self._weights_root / uuid.uuid4().hex
        partial = folder.with_suffix(".partial")
        partial.mkdir(parents=True)
        self.model.config.save_pretrained(partial)
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        partial.rename(folder)
        try:
            self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        except OSError as error:
            raise RuntimeError(
                f"The vLLM server at {self.base_url} could not load the policy's weights from {folder} ({error}). "
                "Without a CUDA device they go through files, so server and trainer must see the same file system: "
                "set `output_dir` to a folder that both can read under the same path, and restart the server, whose "
                "weights are now incomplete."
            ) from error
        for other in self._weights_root.iterdir():
            if other != folder:
                shutil.rmtree(other)
        return instance_id

    def _drop_prefix_cache(self) -> None:
        deadline = time.monotonic() + _RESET_SECONDS
        # vLLM before 0.26 gives an empty answer, whether it could or not.
        while not (self._post("/reset_prefix_cache") or {"success": True})["success"]:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"The vLLM server at {self.base_url} kept keys and values of the old weights, because sequences "
                    "are decoding on it. Stop whatever else uses this server: it belongs to one run."
                )
            time.sleep(0.1)

    def _get(self, path: str) -> Any:
        return json.loads(self._read(path))

    def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        content = self._read(path, json.dumps(body or {}).encode())
        return json.loads(content) if content else None

    def _read(self, path: str, body: bytes | None = None) -> bytes:
        # Not by TRL's client, which sends a failed request again and then hides what the server answered.
        request = urllib.request.Request(self.base_url + path, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.server_timeout) as response:
                content: bytes = response.read()
                return content
        except urllib.error.HTTPError as error:
            raise OSError(f"HTTP {error.code}: {error.read().decode(errors='replace')}") from error


def rotary_fault(description: str, overrides: Any, wanted: dict[str, Any] | None) -> str | None:
    """Return in what a server's rotary embedding differs from the policy's, as far as the server tells.

    It tells its class, base and original length; YaRN's factor only where it was started with `--hf-overrides`.

    Args:
        description: The server's model, as vLLM prints it.
        overrides: The server's `--hf-overrides`.
        wanted: The policy's `rope_parameters`.
    """
    found = re.search(r"(\w*RotaryEmbedding)\([^)]*max_position_embeddings=(\d+), base=([\d.e+]+)", description)
    if found is None or not wanted or "rope_type" not in wanted:
        return None  # another kind of positions, or other ones for each kind of layer
    kind, original, base = found[1], int(found[2]), float(found[3])
    if base != wanted["rope_theta"]:
        return f"rotary positions of base {base:g}"
    is_yarn, rope_type = kind == "YaRNScalingRotaryEmbedding", wanted["rope_type"]
    if is_yarn != (rope_type == "yarn") or (rope_type == "default" and kind != "RotaryEmbedding"):
        return f"rotary positions of the kind {kind}"
    if is_yarn and original != wanted["original_max_position_embeddings"]:
        return f"an original length of {original} positions"
    given = overrides.get("rope_parameters") if isinstance(overrides, dict) else None
    if is_yarn and given and given.get("factor") != wanted["factor"]:
        return f"a factor of {given.get('factor')}"
    return None


def restarted_message(base_url: str) -> str:
    """Say that a server has lost the policy's weights."""
    return (
        f"The vLLM server at {base_url} was restarted and has the weights that it starts with, not the policy's: "
        "tokens decoded by it would be of another policy. Resume the run from its last checkpoint, which hands the "
        "server the current weights."
    )


@contextmanager
def _without_communicator() -> Iterator[None]:
    """Let TRL connect to a server without an NCCL group between trainer and server."""
    kept = vllm_generation.VLLMClient
    vllm_generation.VLLMClient = _ClientWithoutCommunicator  # type: ignore[misc]
    try:
        yield
    finally:
        vllm_generation.VLLMClient = kept  # type: ignore[misc]


class _ClientWithoutCommunicator(VLLMClient):
    def init_communicator(self, device: Any = 0) -> None:
        pass
