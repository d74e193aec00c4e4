"""Packs of models with experts: what lies where, resuming, both ways that checkpoints store them, and refusals."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import ConfigurationError, UnsupportedModelError
from shared.model.spec import Experts
from shared.pack.format import EXPERT_FUSED
from shared.pack.manifest import encoded_names
from shared.pack.reader import Pack
from shared.pack.sources import open_source
from shared.pack.sources.config_json import spec_of_config
from shared.pack.writer import PackProgress, file_sizes, write_pack
from shared.quant.schemes import SCHEMES, scheme_named
from tests.conftest import FamilyPack, pack
from tests.shared.model.families import CASES, SIZES, family_checkpoint
from tests.shared.pack.checkpoints import edit_json, files_of

FAMILIES = ("Mixtral", "Qwen3-MoE", "OLMoE")
LAYERS = SIZES["num_hidden_layers"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_expert_is_one_aligned_range_with_the_encoded_values_and_a_digest(
    family_pack: FamilyPack, tmp_path: Path, scheme: str
) -> None:
    opened = Pack.open(family_pack(scheme, "Qwen3-MoE"))
    source, kind = open_source(family_checkpoint(tmp_path, "Qwen3-MoE")), scheme_named(scheme)
    layout, size_bytes = opened.experts_layout, opened.expert_bytes
    assert (layout.data_start % 4096, size_bytes % 4096) == (0, 0)
    for layer in range(LAYERS):
        data = opened.experts_path(layer).read_bytes()[layout.data_start :]
        ranges = [data[start : start + size_bytes] for start in range(0, len(data), size_bytes)]
        assert [hashlib.sha256(part).hexdigest() for part in ranges] == list(opened.expert_digests(layer))
        stored = load_file(opened.experts_path(layer))
        for expert in range(opened.experts_per_layer):
            for name, parts in EXPERT_FUSED.items():
                encoded = [kind.encode(source.layer_tensor(layer, f"experts.{expert}.{p}.weight")) for p in parts]
                for suffix, fused in kind.fuse(encoded).items():
                    assert torch.equal(stored[f"experts.{expert}.{name}.{suffix}"], fused)
    opened.verify()


def test_the_layer_part_has_a_router_in_the_compute_dtype_and_no_mlp(family_pack: FamilyPack) -> None:
    opened = Pack.open(family_pack("int8", "Qwen3-MoE"))
    stored = load_file(opened.layer_path(1))
    assert stored["router.weight"].shape == (12, SIZES["hidden_size"])
    assert stored["router.weight"].dtype == torch.bfloat16
    assert not any(name.startswith("mlp.") for name in stored)
    assert opened.layers_bytes == sum(
        opened.manifest.files[path].size_bytes - layout.data_start
        for path, layout in (
            *((f"layers/{layer:05d}.safetensors", opened.layer_layout) for layer in range(LAYERS)),
            *((f"experts/{layer:05d}.safetensors", opened.experts_layout) for layer in range(LAYERS)),
        )
    )


@pytest.mark.parametrize("case", FAMILIES)
def test_experts_stored_one_by_one_and_stacked_make_the_same_pack(tmp_path: Path, case: str) -> None:
    from transformers import AutoModelForCausalLM

    one_by_one = family_checkpoint(tmp_path / "checkpoint", case)
    stacked = Path(shutil.copytree(one_by_one, tmp_path / "stacked" / "checkpoint"))
    model: Any = AutoModelForCausalLM.from_pretrained(one_by_one, dtype=torch.float32)
    model.save_pretrained(stacked, save_original_format=False)
    names = [load_file(folder / "model.safetensors").keys() for folder in (one_by_one, stacked)]
    assert [any(name.endswith(".mlp.experts.gate_up_proj") for name in found) for found in names] == [False, True]
    packs = [pack(folder, tmp_path / folder.parent.name / "pack", "bf16") for folder in (one_by_one, stacked)]
    assert files_of(packs[0]) == files_of(packs[1])


def test_the_digest_depends_on_every_expert_and_on_the_router(family_pack: FamilyPack) -> None:
    opened = Pack.open(family_pack("int8", "Qwen3-MoE"))
    names = set(encoded_names(opened.spec, opened.scheme))
    for layer in range(LAYERS):
        assert f"layers.{layer}.router.weight" in names
        for expert in range(12):
            assert {f"layers.{layer}.experts.{expert}.{m}.SCB" for m in ("gate", "up", "down")} <= names


def test_a_pack_interrupted_among_experts_is_finished_byte_for_byte(tmp_path: Path) -> None:
    class InterruptionError(Exception):
        pass

    reports: list[PackProgress] = []

    def stop(report: PackProgress) -> None:
        reports.append(report)
        if len(reports) % 6 == 0:
            raise InterruptionError

    source, kind = open_source(family_checkpoint(tmp_path / "checkpoint", "OLMoE")), scheme_named("int8")
    assert sum(path.startswith("experts/") for path in file_sizes(source, kind)) == LAYERS
    for _ in range(2):
        with pytest.raises(InterruptionError):
            write_pack(source, tmp_path / "pack", kind, progress=stop)
    manifest = write_pack(source, tmp_path / "pack", kind)
    write_pack(source, tmp_path / "at-once", kind)
    assert files_of(tmp_path / "pack") == files_of(tmp_path / "at-once")
    assert file_sizes(source, kind) == {path: record.size_bytes for path, record in manifest.files.items()}


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.pop("expert_sha256"),
        lambda record: record["expert_sha256"].pop(),
        lambda record: record.update(expert_sha256="0" * 64),
        lambda record: record["expert_sha256"].__setitem__(0, "none"),
    ],
)
def test_a_manifest_without_a_digest_of_every_expert_is_refused(
    family_pack: FamilyPack, tmp_path: Path, damage: Any
) -> None:
    copy = Path(shutil.copytree(family_pack("int8", "OLMoE"), tmp_path / "pack"))
    manifest = json.loads((copy / "manifest.json").read_text())
    damage(manifest["files"]["experts/00002.safetensors"])
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigurationError, match=r"manifest is not valid: file 'experts/00002\.safetensors'"):
        Pack.open(copy)


@pytest.mark.parametrize(
    ("case", "changes", "named"),
    [
        ("Qwen3-MoE", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ("Qwen3-MoE", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]"),
        ("Qwen3-MoE", {"shared_expert_intermediate_size": 64}, "does not know: shared_expert_intermediate_size"),
        ("Qwen3-MoE", {"n_shared_experts": 1}, "does not know: n_shared_experts"),
        ("Qwen3-MoE", {"num_experts": 12, "num_local_experts": 8}, "num_local_experts is 8, but num_experts differs"),
        ("Qwen3-MoE", {"num_experts_per_tok": 13}, "num_experts_per_tok is 13, but each layer has 12 experts"),
        ("Qwen3-MoE", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0; expected a positive integer"),
        ("Qwen3-MoE", {"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'; expected true or false"),
        ("Qwen3-MoE", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("OLMoE", {"clip_qkv": -1.0}, "clip_qkv is -1.0; expected a positive number"),
        ("OLMoE", {"num_experts": 2**20}, "num_experts is 1048576"),
        ("OLMoE", {"num_experts": 60_000}, "4 layers of 60000 experts are more than"),
        ("Mixtral", {"norm_topk_prob": False}, "does not know: norm_topk_prob"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(case: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        spec_of_config(SIZES | CASES[case] | changes, "model")


def test_a_tensor_of_a_shared_expert_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = family_checkpoint(tmp_path / "checkpoint", "Qwen3-MoE")
    path, shared = checkpoint / "model.safetensors", "model.layers.0.mlp.shared_expert.up_proj.weight"
    save_file(load_file(path) | {shared: torch.zeros(64, 64)}, path)
    with pytest.raises(UnsupportedModelError, match=f"tensors that this version does not know: {shared}"):
        open_source(checkpoint)


def test_other_experts_than_the_description_says_are_refused(tmp_path: Path) -> None:
    checkpoint = family_checkpoint(tmp_path / "checkpoint", "Mixtral")
    edit_json(checkpoint / "config.json", num_local_experts=3)
    with pytest.raises(UnsupportedModelError, match=r"tensor .*gate\.weight has shape \[4, 64\]"):
        open_source(checkpoint)
    edit_json(checkpoint / "config.json", num_local_experts=5)
    with pytest.raises(UnsupportedModelError, match=r"no tensor model\.layers\.0.*experts\.4|gate\.weight has shape"):
        open_source(checkpoint)


def test_fields_of_experts_mean_what_transformers_means_by_them() -> None:
    def experts(case: str, **changes: Any) -> Experts | None:
        return spec_of_config(SIZES | CASES[case] | changes, "model").experts

    assert experts("Mixtral") == Experts(count=4, chosen=2, normalized=True, rounded=False)
    assert experts("Qwen3-MoE") == Experts(count=12, chosen=4, normalized=True, rounded=True)
    assert experts("Qwen3-MoE", norm_topk_prob=None) == Experts(count=12, chosen=4, normalized=False, rounded=True)
    assert experts("OLMoE") == Experts(count=8, chosen=3, normalized=False, rounded=True)
    clamped = spec_of_config(SIZES | CASES["OLMoE, clamped"], "model")
    assert clamped.qkv_clip == 0.8
