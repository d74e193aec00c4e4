"""Asking for a device: what is wrong is said precisely, and the CPU is no device."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from shared.card import check_budget, checked_device, open_card
from shared.demand import DecodeSettings, PrefillSettings, decode_demand, prefill_demand
from shared.device_demand import decode_tiers, prefill_tiers
from shared.errors import ConfigurationError, UnsupportedModelError
from shared.pack.reader import Pack
from tests.conftest import FamilyPack, TinyPack

GIB = 1 << 30
DECODE = DecodeSettings(context_length=256, batch=4, draft_length=4, receives=True, prompt_tokens=0)
PREFILL = PrefillSettings(context_length=256, pass_tokens=512, spool_bytes=1 << 20)


def test_the_cpu_is_no_device_and_has_one_budget() -> None:
    assert open_card("cpu", None) is None
    with pytest.raises(ConfigurationError, match="--device-memory is for a CUDA device; the CPU's budget is --memory"):
        open_card("cpu", "1GiB")


@pytest.mark.parametrize(("name", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_device_that_is_there_is_found(name: str, index: int) -> None:
    assert checked_device(name, built=True, count=2) == torch.device("cuda", index)


@pytest.mark.parametrize(
    ("name", "built", "count", "message"),
    [
        ("gpu", True, 2, "'gpu' is not a device; write cpu, cuda or cuda:N"),
        ("cuda:", True, 2, "'cuda:' is not a device"),
        ("cuda:-1", True, 2, "'cuda:-1' is not a device"),
        ("cuda", False, 0, r"--device cuda: this build of torch \(.*\) has no CUDA; install one that has, or leave"),
        ("cuda", True, 0, "--device cuda: torch finds no CUDA device; see whether nvidia-smi lists one"),
        ("cuda:2", True, 2, "--device cuda:2: there are 2 CUDA devices, cuda:0 to cuda:1"),
    ],
)
def test_a_device_that_is_not_there_is_refused_by_name(name: str, built: bool, count: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{message}"):
        checked_device(name, built, count)


def test_a_budget_that_the_device_cannot_hold_is_refused() -> None:
    device = torch.device("cuda", 0)
    check_budget(device, 8 * GIB, free_bytes=8 * GIB, whole_bytes=24 * GIB)
    with pytest.raises(ConfigurationError, match="of 25600 MiB: cuda:0 has 24576 MiB; give less"):
        check_budget(device, 25 * GIB, free_bytes=24 * GIB, whole_bytes=24 * GIB)
    with pytest.raises(ConfigurationError, match="of 20480 MiB: only 8192 MiB of cuda:0 are free; give less, or stop"):
        check_budget(device, 20 * GIB, free_bytes=8 * GIB, whole_bytes=24 * GIB)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has CUDA")
@pytest.mark.parametrize("module", ["prefill_service", "decode_service"])
def test_a_service_that_is_asked_for_a_device_it_does_not_have_ends_with_one_line(
    tiny_pack: TinyPack, module: str
) -> None:
    command = [sys.executable, "-m", module, str(tiny_pack("fp32")), "--device", "cuda", "--memory", "1GiB"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("error: --device cuda: this build of torch")


@pytest.mark.parametrize("scheme", ["fp32", "int8", "nf4"])
def test_what_a_process_needs_is_divided_and_nothing_is_lost(tiny_pack: TinyPack, scheme: str) -> None:
    pack = Pack.open(tiny_pack(scheme))
    for alone, tiers in (
        (decode_demand(pack, None, DECODE, 7), decode_tiers(pack, None, DECODE, 7, 5)),
        (prefill_demand(pack, PREFILL, 7), prefill_tiers(pack, PREFILL, 7, 5)),
    ):
        host, device = tiers.host, tiers.device
        assert (host.runtime_bytes, device.runtime_bytes) == (7, 5)
        assert (host.outer_bytes, device.outer_bytes) == (0, alone.outer_bytes)
        assert (host.transfer_bytes, device.transfer_bytes) == (alone.transfer_bytes, 0)
        assert host.kv_block_bytes + device.kv_block_bytes == alone.kv_block_bytes
        assert host.workspace_bytes + device.workspace_bytes >= alone.workspace_bytes
        assert host.workspace_bytes >= max(pack.outer_bytes, pack.layer_layout.data_bytes), "room to load"
        assert (device.layers, device.most_kv_blocks) == (alone.layers, alone.most_kv_blocks)


def test_a_model_with_experts_is_refused_on_a_device_by_name(family_pack: FamilyPack) -> None:
    pack = Pack.open(family_pack("fp32", "Mixtral"))
    for divide in (
        lambda: decode_tiers(pack, None, DECODE, 0, 0),
        lambda: prefill_tiers(pack, PREFILL, 0, 0),
    ):
        with pytest.raises(UnsupportedModelError, match="has experts, which run on the CPU only; leave --device out"):
            divide()
