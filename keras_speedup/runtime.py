"""The runtime's settings, and what this machine, these packages and this environment allow."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from typing import Any, Literal

from .engines.shadow import cache_folder, free_memory_bytes
from .flavor import FLAVOR, keras, tensorflow
from .precision import devices, native_precision
from .report import table

Status = Literal["ok", "warning", "broken"]

_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly", "intel-tensorflow")

#: Settings that do nothing, with the reason; looked for in the environment.
_IDLE = {
    "TF_USE_CUDA_STREAM_EXECUTOR": "TensorFlow never reads it",
    "TF_ENABLE_AUTO_MIXED_PRECISION": "only NVIDIA's containers of TensorFlow 1 read it; use set_precision",
    "TF_ENABLE_CUDNN_TENSOR_OP_MATH_FP32": "only NVIDIA's containers of TensorFlow 1 read it",
    "TF_ENABLE_XLA": "TensorFlow never reads it",
}

#: Settings that slow a training down.
_HARMFUL = {
    "CUDA_LAUNCH_BLOCKING": "waits for every kernel",
    "JAX_DISABLE_JIT": "compiles nothing",
    "JAX_DEBUG_NANS": "looks for NaN after every operation",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "asks the driver for every tensor",
    "TF_DETERMINISTIC_OPS": "takes the slower kernels",
}


def configure(
    memory_growth: bool = True,
    intra_op_threads: int | None = None,
    inter_op_threads: int | None = None,
    gpu_thread_mode: str | None = None,
    gpu_thread_count: int | None = None,
    autoclustering: bool | None = None,
    deterministic: bool | None = None,
    compile_cache: bool = True,
) -> None:
    """Applies the runtime settings that are real; call it before anything uses a device.

    Args:
        memory_growth: Whether GPU memory is taken as it is needed.
        intra_op_threads: Threads within one operation.
        inter_op_threads: Operations at once.
        gpu_thread_mode: "global", "gpu_private" or "gpu_shared": whose threads launch kernels.
        gpu_thread_count: How many threads launch kernels, unless the mode is "global".
        autoclustering: Whether XLA compiles clusters of every graph's operations.
        deterministic: Whether operations give equal bits in every run; slower.
        compile_cache: Whether JAX keeps compiled programs on disk.

    Settings that do nothing, such as `TF_USE_CUDA_STREAM_EXECUTOR`, which TensorFlow never reads, have no argument.

    Raises:
        ValueError: A value is not one of those named.
        RuntimeError: It is too late for a setting; the message says which and what to do.

    Example:

    >>> import keras_speedup as ks
    >>> ks.configure(memory_growth=True)
    """
    if gpu_thread_mode not in (None, "global", "gpu_private", "gpu_shared"):
        raise ValueError(f'gpu_thread_mode must be "global", "gpu_private" or "gpu_shared", got {gpu_thread_mode!r}.')
    asked: dict[str, Any] = {
        "intra_op_threads": intra_op_threads,
        "inter_op_threads": inter_op_threads,
        "gpu_thread_mode": gpu_thread_mode,
        "gpu_thread_count": gpu_thread_count,
        "autoclustering": autoclustering,
        "deterministic": deterministic or None,
    }
    asked = {name: value for name, value in asked.items() if value is not None}
    for name in asked:
        if "thread" in name and name != "gpu_thread_mode" and (isinstance(asked[name], bool) or asked[name] < 0):
            raise ValueError(f"{name} must be a number of threads, 0 for the runtime's own, got {asked[name]!r}.")
        if why := _ELSEWHERE.get(FLAVOR, {}).get(name):
            raise ValueError(f"{name} is no setting of Keras on {FLAVOR}: {why}.")
    if FLAVOR == "jax":
        _configure_jax(memory_growth, compile_cache)
    elif FLAVOR == "torch":
        _configure_torch(asked)
    else:
        _configure_tensorflow(memory_growth, asked)


_CLUSTERS = dict.fromkeys(("gpu_thread_mode", "gpu_thread_count", "autoclustering"), "TensorFlow alone has it")
_AFFINITY = "limit the process with `taskset`"

#: What a flavour cannot be told here, and what to do.
_ELSEWHERE: dict[str, dict[str, str]] = {
    "torch": _CLUSTERS,
    "jax": {
        **_CLUSTERS,
        "intra_op_threads": _AFFINITY,
        "inter_op_threads": _AFFINITY,
        "deterministic": "start the process with XLA_FLAGS=--xla_gpu_deterministic_ops=true",
    },
}


def _configure_tensorflow(memory_growth: bool, asked: Mapping[str, Any]) -> None:
    tf = tensorflow("keras_speedup.configure")

    def apply(name: str, setting: Callable[[], Any]) -> None:
        try:
            setting()
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(
                f"It is too late for {name}: {error}. Call keras_speedup.configure(...) before anything uses "
                "TensorFlow, at the top of the script."
            ) from error

    if memory_growth:
        for gpu in tf.config.list_physical_devices("GPU"):
            apply("memory_growth", lambda gpu=gpu: tf.config.experimental.set_memory_growth(gpu, True))  # type: ignore[misc]
    for name in {"intra_op_threads", "inter_op_threads"} & set(asked):
        setting = getattr(tf.config.threading, f"set_{name.removesuffix('threads')}parallelism_threads")
        apply(name, lambda setting=setting, name=name: setting(asked[name]))  # type: ignore[misc]
    for name in {"gpu_thread_mode", "gpu_thread_count"} & set(asked):
        os.environ[f"TF_{name.upper()}"] = str(asked[name])
    if "autoclustering" in asked:
        tf.config.optimizer.set_jit("autoclustering" if asked["autoclustering"] else False)
    if "deterministic" in asked:
        tf.config.experimental.enable_op_determinism()


def _configure_jax(memory_growth: bool, compile_cache: bool) -> None:
    import jax

    if memory_growth:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if compile_cache and os.environ.get("KERAS_SPEEDUP_CACHE") != "off":
        folder = cache_folder() / "jax"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        jax.config.update("jax_compilation_cache_dir", str(folder))


def _configure_torch(asked: Mapping[str, Any]) -> None:
    import torch

    if asked.get("intra_op_threads"):
        torch.set_num_threads(asked["intra_op_threads"])
    if "deterministic" in asked:
        torch.use_deterministic_algorithms(True)
    if asked.get("inter_op_threads"):
        try:
            torch.set_num_interop_threads(asked["inter_op_threads"])
        except RuntimeError as error:
            raise RuntimeError(f"It is too late for inter_op_threads: {error}. Call configure at the top.") from error


# The doctor


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What was looked at.
        status: "ok", "warning" or "broken".
        detail: What was found.
        fix: What to do; empty where nothing is to be done.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""


def doctor() -> list[Check]:
    """Returns what this machine, these packages and these settings allow, each with the fix."""
    return [_guarded(check) for check in _CHECKS]


def _guarded(check: Callable[[], Check]) -> Check:
    """Returns what a check found; one that fails is a finding itself."""
    try:
        return check()
    except Exception as error:
        return Check(
            check.__name__.removeprefix("check_"),
            "broken",
            f"{type(error).__name__}: {error}",
            "reinstall the packages of this flavour",
        )


def format_checks(checks: Sequence[Check]) -> str:
    """Returns the checks as a table for a terminal."""
    rows = [(check.status, check.name, check.detail + (f" -> {check.fix}" if check.fix else "")) for check in checks]
    return "\n".join(table(("", "check", "found"), rows))


def check_versions() -> Check:
    found = [f"Python {platform.python_version()}", f"{keras.__name__} {keras.__version__}"]
    if importlib.util.find_spec("tensorflow") is not None:
        found.append(f"TensorFlow {tensorflow().__version__}")
    return Check("versions", "ok", ", ".join(found))


def check_flavor() -> Check:
    names = {"tensorflow": "Keras 3 on TensorFlow", "jax": "Keras 3 on JAX", "torch": "Keras 3 on PyTorch"}
    return Check("flavour", "ok", names.get(FLAVOR, "Keras 2"))


def check_packages(installed: Sequence[str] | None = None) -> Check:
    """Returns whether several builds of TensorFlow lie over one another."""
    if installed is None:
        installed = [str(dist.metadata["Name"]).lower() for dist in distributions() if dist.metadata["Name"]]
    found = sorted(set(_TENSORFLOWS) & {name.replace("_", "-") for name in installed})
    if len(found) > 1:
        fix = f"pip uninstall {' '.join(found)}, then install the one you want"
        return Check("packages", "broken", f"{' and '.join(found)} overwrite one another", fix)
    return Check("packages", "ok", found[0] if found else "no TensorFlow")


def check_devices(
    gpus: int | None = None, driver: bool | None = None, has_cuda: bool | None = None, visible: str | None = None
) -> Check:
    """Returns which devices the framework sees, and why it misses a GPU that is there."""
    if gpus is None:
        gpus = sum(device.kind in ("GPU", "TPU") for device in devices())
    if driver is None:
        driver = os.path.exists("/proc/driver/nvidia/version") or shutil.which("nvidia-smi") is not None
    if has_cuda is None:
        has_cuda = FLAVOR not in ("tensorflow", "legacy") or bool(tensorflow().test.is_built_with_cuda())
    if gpus:
        return Check("devices", "ok", f"{gpus} accelerator{'s' if gpus > 1 else ''}")
    if driver and (os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible) in ("", "-1"):
        return Check("devices", "warning", "CUDA_VISIBLE_DEVICES hides every GPU", "unset it to train on the GPU")
    if driver and not has_cuda:
        found, fix = "there is a GPU, and this TensorFlow is built without CUDA", 'pip install "keras-speedup[gpu]"'
        return Check("devices", "broken", found, fix)
    if driver:
        fix = "install the CUDA libraries: pip install 'tensorflow[and-cuda]'"
        return Check("devices", "broken", "there is a GPU driver, and the framework sees no GPU", fix)
    return Check("devices", "ok", f"CPU, {usable_cores()} cores")


def check_memory_growth(environment: Mapping[str, str] = os.environ) -> Check:
    value = environment.get("TF_FORCE_GPU_ALLOW_GROWTH")
    if value is not None and value not in ("true", "false"):
        found = f"TF_FORCE_GPU_ALLOW_GROWTH={value} is ignored"
        return Check("memory growth", "warning", found, 'the value must be "true" or "false"')
    return Check("memory growth", "ok", f"TF_FORCE_GPU_ALLOW_GROWTH={value}" if value else "as the script sets it")


def check_xla() -> Check:
    if FLAVOR == "torch":
        return Check("XLA", "ok", "not used on PyTorch")
    if FLAVOR == "jax":
        return Check("XLA", "ok", "JAX compiles every step")
    tf = tensorflow()
    try:
        tf.function(lambda x: x * 2.0, jit_compile=True)(tf.constant(1.0))
    except Exception as error:
        found, fix = str(error).partition("\n")[0], "reinstall TensorFlow; on a GPU, XLA needs CUDA's libdevice"
        return Check("XLA", "broken", found or type(error).__name__, fix)
    return Check("XLA", "ok", "compiles")


def check_onednn(environment: Mapping[str, str] = os.environ) -> Check:
    if environment.get("TF_ENABLE_ONEDNN_OPTS") == "0":
        return Check("oneDNN", "warning", "turned off by TF_ENABLE_ONEDNN_OPTS=0", "unset it for faster CPU operations")
    return Check("oneDNN", "ok", "as the framework sets it (on for x86 Linux)")


def check_threads(environment: Mapping[str, str] = os.environ, cores: int | None = None) -> Check:
    cores = cores or usable_cores()
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
        value = environment.get(name, "")
        if value.isdigit() and int(value) > cores:
            fix = "unset it, or set it to the number of cores"
            return Check("threads", "warning", f"{name}={value} on {cores} cores", fix)
    return Check("threads", "ok", f"{cores} cores")


def check_limits(cores: int | None = None, host_cores: int | None = None) -> Check:
    """Returns whether a container allows less than the host has, which thread pools do not see."""
    cores, host_cores = cores or usable_cores(), host_cores or os.cpu_count() or 1
    if cores < host_cores:
        fix = f"configure(intra_op_threads={cores}, inter_op_threads={cores})"
        return Check("limits", "warning", f"{cores} of the host's {host_cores} cores may be used", fix)
    free = free_memory_bytes()
    return Check("limits", "ok", f"{free / 2**30:.1f} GB of memory are free" if free else "none found")


def check_precision() -> Check:
    choice = native_precision()
    return Check("precision", "ok", f'set_precision("auto") takes {choice.policy}: {choice.reason}')


def check_settings(environment: Mapping[str, str] = os.environ, flavor: str = FLAVOR) -> Check:
    """Returns the settings in the environment that do nothing, and those that harm."""
    idle = {name: reason for name, reason in _IDLE.items() if name in environment}
    if flavor != "torch":  # PyTorch's CPU operations do use OpenMP
        idle.update({name: "nothing here uses OpenMP" for name in sorted(environment) if name.startswith("KMP_")})
    on = {name for name, value in environment.items() if value.lower() not in ("", "0", "false", "off")}
    harmful = {name: reason for name, reason in _HARMFUL.items() if name in on}
    found = [f"{name} does nothing ({reason})" for name, reason in idle.items()]
    found += [f"{name} slows training down: it {reason}" for name, reason in harmful.items()]
    if found:
        return Check("settings", "warning", "; ".join(found), f"unset {', '.join([*idle, *harmful])}")
    return Check("settings", "ok", "none that do nothing or harm")


def check_cache(environment: Mapping[str, str] = os.environ) -> Check:
    if environment.get("KERAS_SPEEDUP_CACHE") == "off":
        return Check("cache", "ok", "off")
    folder = cache_folder()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not os.access(there, os.W_OK):
        fix = "set KERAS_SPEEDUP_CACHE to a folder of your own"
        return Check("cache", "warning", f"{folder} cannot be written", fix)
    if shutil.disk_usage(there).free < 100 * 2**20:
        fix = "free some, or KERAS_SPEEDUP_CACHE=off"
        return Check("cache", "warning", f"less than 100 MB are free for {folder}", fix)
    return Check("cache", "ok", str(folder))


_CHECKS = tuple(value for name, value in list(globals().items()) if name.startswith("check_"))


def usable_cores() -> int:
    """Returns the cores that this process may use, by its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            found = re.match(r"(\d+) (\d+)", file.read())
        return min(cores, max(1, int(found[1]) // int(found[2]))) if found else cores
    except OSError:
        return cores
