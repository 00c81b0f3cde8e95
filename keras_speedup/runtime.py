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
from .flavor import FLAVOR, KERAS_MAJOR, keras, tensorflow
from .precision import best_precision, cpu_flags, devices
from .report import table

Status = Literal["ok", "warning", "broken"]

_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly", "intel-tensorflow")

#: Settings that do nothing, with the reason; looked for in the environment.
_IDLE = {
    "TF_USE_CUDA_STREAM_EXECUTOR": "TensorFlow never reads it",
    "TF_ENABLE_AUTO_MIXED_PRECISION": "only NVIDIA's containers of TensorFlow 1 read it; use set_precision",
    "TF_ENABLE_CUDNN_TENSOR_OP_MATH_FP32": "only NVIDIA's containers of TensorFlow 1 read it",
    "TF_ENABLE_XLA": "TensorFlow never reads it",
    "KMP_AFFINITY": "TensorFlow's oneDNN does not use OpenMP",
    "KMP_BLOCKTIME": "TensorFlow's oneDNN does not use OpenMP",
    "KMP_SETTINGS": "TensorFlow's oneDNN does not use OpenMP",
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
    counts = (
        ("intra_op_threads", intra_op_threads),
        ("inter_op_threads", inter_op_threads),
        ("gpu_thread_count", gpu_thread_count),
    )
    for name, count in counts:
        if count is not None and (isinstance(count, bool) or count < 0):
            raise ValueError(f"{name} must be a number of threads, 0 for the runtime's own choice, got {count!r}.")
    if FLAVOR == "jax":
        _configure_jax(memory_growth, compile_cache)
    elif FLAVOR == "torch":
        _configure_torch(intra_op_threads, inter_op_threads)
    else:
        _configure_tensorflow(
            memory_growth, intra_op_threads, inter_op_threads, gpu_thread_mode, gpu_thread_count, autoclustering
        )
    if deterministic:
        if KERAS_MAJOR == 3 and FLAVOR != "tensorflow":
            keras.utils.set_random_seed(0)
        else:
            tensorflow("configure(deterministic=True)").config.experimental.enable_op_determinism()


def _configure_tensorflow(
    memory_growth: bool,
    intra: int | None,
    inter: int | None,
    mode: str | None,
    count: int | None,
    autoclustering: bool | None,
) -> None:
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
    if intra is not None:
        apply("intra_op_threads", lambda: tf.config.threading.set_intra_op_parallelism_threads(intra))
    if inter is not None:
        apply("inter_op_threads", lambda: tf.config.threading.set_inter_op_parallelism_threads(inter))
    if mode is not None:
        os.environ["TF_GPU_THREAD_MODE"] = mode
    if count is not None:
        os.environ["TF_GPU_THREAD_COUNT"] = str(count)
    if autoclustering is not None:
        tf.config.optimizer.set_jit("autoclustering" if autoclustering else False)


def _configure_jax(memory_growth: bool, compile_cache: bool) -> None:
    import jax

    if memory_growth:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if compile_cache and os.environ.get("KERAS_SPEEDUP_CACHE") != "off":
        folder = cache_folder() / "jax"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        jax.config.update("jax_compilation_cache_dir", str(folder))


def _configure_torch(intra: int | None, inter: int | None) -> None:
    import torch

    if intra:
        torch.set_num_threads(intra)
    if inter:
        try:
            torch.set_num_interop_threads(inter)
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
    return [check() for check in _CHECKS]


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
    names = {
        "tensorflow": "Keras 3 on TensorFlow",
        "jax": "Keras 3 on JAX",
        "torch": "Keras 3 on PyTorch",
        "legacy": "Keras 2",
    }
    return Check("flavour", "ok", names[FLAVOR])


def check_packages(installed: Sequence[str] | None = None) -> Check:
    """Returns whether several builds of TensorFlow lie over one another."""
    if installed is None:
        installed = [str(dist.metadata["Name"]).lower() for dist in distributions() if dist.metadata["Name"]]
    found = sorted(set(_TENSORFLOWS) & {name.replace("_", "-") for name in installed})
    if len(found) > 1:
        fix = f"pip uninstall {' '.join(found)}, then install the one you want"
        return Check("packages", "broken", f"{' and '.join(found)} overwrite one another", fix)
    return Check("packages", "ok", found[0] if found else "no TensorFlow")


def check_devices(gpus: int | None = None, driver: bool | None = None, has_cuda: bool | None = None) -> Check:
    """Returns which devices the framework sees, and why it misses a GPU that is there."""
    if gpus is None:
        gpus = sum(device.kind in ("GPU", "TPU") for device in devices())
    if driver is None:
        driver = os.path.exists("/proc/driver/nvidia/version") or shutil.which("nvidia-smi") is not None
    if has_cuda is None:
        has_cuda = FLAVOR not in ("tensorflow", "legacy") or bool(tensorflow().test.is_built_with_cuda())
    if gpus:
        return Check("devices", "ok", f"{gpus} accelerator{'s' if gpus > 1 else ''}")
    if driver and not has_cuda:
        return Check(
            "devices",
            "broken",
            "there is a GPU, and this TensorFlow is built without CUDA",
            'pip install "keras-speedup[gpu]"',
        )
    if driver:
        fix = "install the CUDA libraries: pip install 'tensorflow[and-cuda]'"
        return Check("devices", "broken", "there is a GPU driver, and the framework sees no GPU", fix)
    return Check("devices", "ok", f"CPU, {_cores()} cores")


def check_memory_growth(environment: Mapping[str, str] = os.environ) -> Check:
    value = environment.get("TF_FORCE_GPU_ALLOW_GROWTH")
    if value is not None and value not in ("true", "false"):
        return Check(
            "memory growth",
            "warning",
            f"TF_FORCE_GPU_ALLOW_GROWTH={value} is ignored",
            'the value must be "true" or "false"',
        )
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
        lines = str(error).splitlines()
        return Check(
            "XLA",
            "broken",
            lines[0] if lines else type(error).__name__,
            "reinstall TensorFlow; on a GPU, XLA needs CUDA's libdevice",
        )
    return Check("XLA", "ok", "compiles")


def check_onednn(environment: Mapping[str, str] = os.environ) -> Check:
    if environment.get("TF_ENABLE_ONEDNN_OPTS") == "0":
        return Check("oneDNN", "warning", "turned off by TF_ENABLE_ONEDNN_OPTS=0", "unset it for faster CPU operations")
    return Check("oneDNN", "ok", "as the framework sets it (on for x86 Linux)")


def check_threads(environment: Mapping[str, str] = os.environ, cores: int | None = None) -> Check:
    cores = cores or _cores()
    asked = {
        name: value
        for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
        if (value := environment.get(name, "")).isdigit()
    }
    for name, value in asked.items():
        if int(value) > cores:
            return Check(
                "threads", "warning", f"{name}={value} on {cores} cores", "unset it, or set it to the number of cores"
            )
    return Check("threads", "ok", f"{cores} cores")


def check_limits(cores: int | None = None, host_cores: int | None = None) -> Check:
    """Returns whether a container allows less than the host has, which thread pools do not see."""
    cores, host_cores = cores or _cores(), host_cores or os.cpu_count() or 1
    if cores < host_cores:
        fix = f"configure(intra_op_threads={cores}, inter_op_threads={cores})"
        return Check("limits", "warning", f"{cores} of the host's {host_cores} cores may be used", fix)
    free = free_memory_bytes()
    return Check("limits", "ok", f"{free / 2**30:.1f} GB of memory are free" if free else "none found")


def check_precision() -> Check:
    choice = best_precision(devices(), cpu_flags())
    return Check("precision", "ok", f'set_precision("auto") takes {choice.policy}: {choice.reason}')


def check_settings(environment: Mapping[str, str] = os.environ) -> Check:
    """Returns the settings in the environment that do nothing."""
    found = [f"{name} ({reason})" for name, reason in _IDLE.items() if name in environment]
    if found:
        return Check("settings", "warning", f"do nothing: {'; '.join(found)}", "unset them")
    return Check("settings", "ok", "none that do nothing")


def check_cache(environment: Mapping[str, str] = os.environ) -> Check:
    if environment.get("KERAS_SPEEDUP_CACHE") == "off":
        return Check("cache", "ok", "off")
    folder = cache_folder()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not os.access(there, os.W_OK):
        return Check(
            "cache", "warning", f"{folder} cannot be written", "set KERAS_SPEEDUP_CACHE to a folder of your own"
        )
    if shutil.disk_usage(there).free < 100 * 2**20:
        return Check(
            "cache", "warning", f"less than 100 MB are free for {folder}", "free some, or KERAS_SPEEDUP_CACHE=off"
        )
    return Check("cache", "ok", str(folder))


_CHECKS = (
    check_versions,
    check_flavor,
    check_packages,
    check_devices,
    check_memory_growth,
    check_xla,
    check_onednn,
    check_threads,
    check_limits,
    check_precision,
    check_settings,
    check_cache,
)


def _cores() -> int:
    """Returns the cores that this process may use, by its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            found = re.match(r"(\d+) (\d+)", file.read())
        return min(cores, max(1, int(found[1]) // int(found[2]))) if found else cores
    except OSError:
        return cores
