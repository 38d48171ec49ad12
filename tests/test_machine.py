"""The machine: device, dtype, compiler, memory, signals, and the environment of a process group."""

import os
import signal

import numpy as np
import pytest
import torch

from harness.configurator import PROCESS_GROUP, OneProcessError, UserError
from harness.machine import (
    compile_blocks,
    group_from_environment,
    memory_for,
    pick_device,
    pick_dtype,
    stop_on_signals,
)

# Device and dtype


@pytest.mark.parametrize("name", ["gpu", "cuda:7", "cuda:x", "cuda:", "cpu:0", ""])
def test_a_device_that_is_not_there_is_named_with_those_that_are(name):
    with pytest.raises(UserError, match=f"--device={name}: this machine has .*cpu"):
        pick_device(name)


@pytest.mark.parametrize("native, expected", [(True, torch.bfloat16), (False, torch.float16)])
def test_auto_takes_bfloat16_only_where_it_is_not_emulated(monkeypatch, native, expected):
    def supported(including_emulation=True):
        return native or including_emulation  # as on a GPU that emulates it

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert pick_dtype("auto", torch.device("cuda")) == expected


def test_auto_is_float32_on_a_cpu_and_float16_is_refused_there():
    assert pick_dtype("auto", torch.device("cpu")) == torch.float32
    with pytest.raises(UserError, match="--dtype=float16 needs cuda"):
        pick_dtype("float16", torch.device("cpu"))


# Compiler


@pytest.mark.parametrize("error", [RuntimeError("no g++"), PermissionError(13, "read-only")])
def test_without_a_compiler_or_a_cache_there_is_a_notice_and_eager_blocks(
    monkeypatch, capsys, error
):
    def broken(function):
        raise error

    monkeypatch.setattr(torch, "compile", broken)
    block = torch.nn.Linear(2, 2)
    assert not compile_blocks([block], torch.device("cpu"))
    assert block._compiled_call_impl is None
    notice = capsys.readouterr().err
    assert "--compile: no working compiler" in notice and "continuing in eager" in notice
    for name in PROCESS_GROUP:  # of several processes the first alone says so
        monkeypatch.setenv(name, "1")
    assert not compile_blocks([block], torch.device("cpu"))
    assert capsys.readouterr().err == ""


# Memory


def test_out_of_memory_names_the_flags_for_each_allocator():
    def cpu_allocator():
        torch.empty(2**60)

    def overflowing():
        torch.empty(2**40, 2**40)

    def numpy():
        np.zeros(2**50)

    def numpy_beyond_numbers():
        np.zeros(2**62)

    def beyond_int64():
        torch.empty(10**20)

    def generator():
        np.random.default_rng(1).integers(5, size=2**70)

    def cuda():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore lines")

    allocators = (
        cpu_allocator, overflowing, numpy, numpy_beyond_numbers, beyond_int64, generator, cuda
    )
    for work in allocators:
        with pytest.raises(OneProcessError, match="out of memory .*; lower --this") as caught:
            with memory_for("--this"):
                work()
        assert "\n" not in str(caught.value)


def test_other_errors_are_not_called_a_lack_of_memory():
    with pytest.raises(RuntimeError, match="shapes"):
        with memory_for("--this"):
            raise RuntimeError("the shapes differ")


# Signals


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_is_noted_and_the_handler_before_comes_back(name):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with stop_on_signals() as signals:
        assert not signals
        signal.raise_signal(number)
        assert signals == [number]
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_the_same_signal_again_interrupts_at_once(name):
    number = getattr(signal, name)
    with pytest.raises(KeyboardInterrupt):
        with stop_on_signals():
            signal.raise_signal(number)
            signal.raise_signal(number)


def test_a_closing_terminal_and_a_launcher_send_several_signals_that_are_one():
    with stop_on_signals() as signals:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert len(signals) == 4


def test_under_nohup_a_hangup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as signals:
            signal.raise_signal(signal.SIGHUP)
        assert not signals and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# A process group's environment

WHOLE = dict(zip(PROCESS_GROUP, ("1", "1", "2", "localhost", "29500"), strict=True))


@pytest.fixture
def environment(monkeypatch):
    """environment(RANK="1", ...) sets these of the group's variables, and no others."""

    def put(**variables):
        for name in PROCESS_GROUP:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


def test_no_variables_are_one_process_and_all_of_them_a_group(environment):
    environment()
    assert group_from_environment() == (0, 0, 1)
    environment(MASTER_ADDR="login-node")  # a cluster's setting, which starts nothing
    assert group_from_environment() == (0, 0, 1)
    environment(**WHOLE)
    assert group_from_environment() == (1, 1, 2)


@pytest.mark.parametrize("name", PROCESS_GROUP)
def test_a_missing_variable_is_named(environment, name):
    environment(**{other: value for other, value in WHOLE.items() if other != name})
    with pytest.raises(UserError, match=f"{name} is missing: start with torchrun, or unset"):
        group_from_environment()


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
def test_a_single_leftover_variable_is_refused_and_the_way_out_works(environment, name):
    environment(**{name: "1"})
    with pytest.raises(UserError, match=f"^{name}=1 in the environment.*unset {name}$"):
        group_from_environment()
    del os.environ[name]
    assert group_from_environment() == (0, 0, 1)


@pytest.mark.parametrize("change", [{"RANK": "2"}, {"WORLD_SIZE": "two"}, {"RANK": "-1"}])
def test_ranks_that_cannot_be_are_refused(environment, change):
    environment(**WHOLE | change)
    with pytest.raises(UserError, match="start with torchrun"):
        group_from_environment()
