"""Writing packs: contents, atomicity, resuming, and what is refused."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shared.errors import ConfigurationError, DataLossError
from shared.pack.format import FUSED, matrix_shapes, norm_shapes
from shared.pack.manifest import encoded_names, model_digest
from shared.pack.reader import Pack
from shared.pack.sources import open_source
from shared.pack.workspace import workspace_of
from shared.pack.writer import PackProgress, bytes_to_write, check_free_space, file_sizes, write_pack
from shared.quant.kernels import nf4_separate
from shared.quant.schemes import SCHEMES, scheme_named
from tests.models import tiny_checkpoint
from tests.shared.pack.checkpoints import FULL, files_of, write_gguf

TinyModel = Callable[..., Path]
TinyPack = Callable[..., Path]


class InterruptionError(Exception):
    """Stands for whatever stops a packer."""


def stopping_after(files: int) -> Callable[[PackProgress], None]:
    """A progress callback that interrupts the packing when that many more files are finished."""
    reports = 0

    def report(_: PackProgress) -> None:
        nonlocal reports
        reports += 1
        if reports > files:
            raise InterruptionError

    return report


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_safetensors_library_reads_every_file_and_finds_the_encoded_values(
    scheme: str, tiny_pack: TinyPack, tiny_model: TinyModel
) -> None:
    path, source, kind = tiny_pack(scheme, **FULL), open_source(tiny_model(**FULL)), scheme_named(scheme)
    for layer in range(source.spec.layers):
        stored = load_file(path / f"layers/{layer:05d}.safetensors")
        for norm in norm_shapes(source.spec):
            expected = source.layer_tensor(layer, f"{norm}.weight").to(kind.compute_dtype)
            assert torch.equal(stored[f"{norm}.weight"], expected)
        for name, parts in FUSED.items():
            encoded = [kind.encode(source.layer_tensor(layer, f"{part}.weight")) for part in parts]
            for suffix, fused in kind.fuse(encoded).items():
                assert torch.equal(stored[f"{name}.{suffix}"], fused)
            biases = [source.layer_tensor(layer, f"{part}.bias") for part in parts]
            assert torch.equal(stored[f"{name}.bias"], torch.cat(biases).to(kind.compute_dtype))
    outer = load_file(path / "outer.safetensors")
    for name in ("embedding.weight", "final_norm.weight", "output.weight"):
        assert torch.equal(outer[name], source.tensor(name).to(kind.compute_dtype))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_data_is_aligned_for_direct_reads_and_padding_is_zero(scheme: str, tiny_pack: TinyPack) -> None:
    pack = Pack.open(tiny_pack(scheme))
    assert pack.layer_layout.data_start % 4096 == 0
    assert pack.layer_path(0).stat().st_size % 4096 == 0
    assert {path.stat().st_size for path in (pack.path / "layers").iterdir()} == {pack.layer_layout.file_bytes}
    pads = [tensor for name, tensor in load_file(pack.layer_path(0)).items() if name.startswith("pad.")]
    assert pads
    assert not any(tensor.any() for tensor in pads)


def test_gguf_and_safetensors_of_one_model_have_one_digest(tiny_model: TinyModel, tmp_path: Path) -> None:
    checkpoint = tiny_model(**FULL)
    gguf = write_gguf(tmp_path / "m.gguf", checkpoint, "F32")
    for scheme in SCHEMES.values():
        first = write_pack(open_source(checkpoint), tmp_path / f"folder-{scheme.name}", scheme)
        second = write_pack(open_source(gguf), tmp_path / f"gguf-{scheme.name}", scheme)
        assert first.model_digest == second.model_digest
        assert files_of(tmp_path / f"folder-{scheme.name}/layers") == files_of(tmp_path / f"gguf-{scheme.name}/layers")


def test_the_digest_depends_on_values_and_scheme(tiny_pack: TinyPack) -> None:
    packs = [tiny_pack(scheme) for scheme in SCHEMES] + [tiny_pack("bf16", seed=1), tiny_pack("bf16", rope_theta=1e5)]
    assert len({Pack.open(path).manifest.model_digest for path in packs}) == len(packs)


def _rows_first(scheme: str, suffix: str, tensor: torch.Tensor) -> torch.Tensor:
    """Undoes the order in which nf4 is stored for its kernel."""
    if scheme == "nf4" and suffix != "bias":
        return nf4_separate(tensor) if suffix == "weight" else tensor.t()
    return tensor


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_digest_does_not_depend_on_the_file_layout(scheme: str, tiny_pack: TinyPack) -> None:
    """It is recomputed here from logical tensors alone, which are cut out of the fused ones."""
    pack = Pack.open(tiny_pack(scheme, **FULL))
    tensors = load_file(pack.outer_path)
    for layer in range(pack.spec.layers):
        stored = load_file(pack.layer_path(layer))
        for norm in norm_shapes(pack.spec):
            tensors[f"layers.{layer}.{norm}.weight"] = stored[f"{norm}.weight"]
        for name, parts in FUSED.items():
            rows = [matrix_shapes(pack.spec)[part][0] for part in parts]
            for suffix in [*pack.scheme.components(64, 64), "bias"]:
                fused = _rows_first(scheme, suffix, stored[f"{name}.{suffix}"])
                for part, tensor in zip(parts, fused.split(rows), strict=True):
                    tensors[f"layers.{layer}.{part}.{suffix}"] = tensor
    digests = {}
    for name in encoded_names(pack.spec, pack.scheme):
        tensor = tensors[name].contiguous()
        head = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\n".encode()
        digests[name] = hashlib.sha256(head + tensor.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
    assert model_digest(pack.spec, pack.scheme, digests) == pack.manifest.model_digest


def test_a_pack_interrupted_anywhere_is_finished_byte_for_byte(
    tiny_pack: TinyPack, tiny_model: TinyModel, tmp_path: Path
) -> None:
    source, expected = open_source(tiny_model()), files_of(tiny_pack("int8"))
    for stops in ([0], [1, 1], [2, 0, 3], random.Random(5).choices(range(4), k=2)):
        out = tmp_path / f"pack-{'-'.join(map(str, stops))}"
        for files in stops:
            with pytest.raises(InterruptionError):
                write_pack(source, out, scheme_named("int8"), progress=stopping_after(files))
            assert not out.exists()
        write_pack(source, out, scheme_named("int8"))
        assert files_of(out) == expected
        assert not out.with_name(f"{out.name}.partial").exists()


def test_a_pack_whose_process_is_killed_is_finished_byte_for_byte(
    tiny_pack: TinyPack, tiny_model: TinyModel, tmp_path: Path
) -> None:
    script = f"""
import os, signal
from pathlib import Path
from shared.pack.sources import open_source
from shared.pack.writer import write_pack
from shared.quant.schemes import scheme_named

reports = iter(range(100))

def kill_at_the_fourth(progress):
    if next(reports) == 4:
        os.kill(os.getpid(), signal.SIGKILL)

source = open_source(Path({str(tiny_model())!r}))
write_pack(source, Path({str(tmp_path / "pack")!r}), scheme_named("bf16"), progress=kill_at_the_fourth)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    killed = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    first_report: list[PackProgress] = []
    write_pack(open_source(tiny_model()), tmp_path / "pack", scheme_named("bf16"), progress=first_report.append)
    assert first_report[0].done_bytes == first_report[0].resumed_bytes > 0
    assert files_of(tmp_path / "pack") == files_of(tiny_pack("bf16"))


def test_a_journal_line_and_a_file_cut_off_by_a_crash_are_done_again(
    tiny_pack: TinyPack, tiny_model: TinyModel, tmp_path: Path
) -> None:
    source, out = open_source(tiny_model()), tmp_path / "pack"
    with pytest.raises(InterruptionError):
        write_pack(source, out, scheme_named("bf16"), progress=stopping_after(4))
    partial = out.with_name("pack.partial")
    journal = partial / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-40])
    (partial / "pack/layers/00000.safetensors").write_bytes(b"short")
    (partial / "pack/layers/00001.safetensors.tmp").write_bytes(b"half")
    with pytest.raises(InterruptionError):
        write_pack(source, out, scheme_named("bf16"), progress=stopping_after(1))
    write_pack(source, out, scheme_named("bf16"))
    assert files_of(out) == files_of(tiny_pack("bf16"))


def test_other_work_in_the_same_place_starts_afresh(tiny_pack: TinyPack, tiny_model: TinyModel, tmp_path: Path) -> None:
    checkpoint, out = Path(shutil.copytree(tiny_model(), tmp_path / "model")), tmp_path / "pack"
    for scheme in ("nf4", "bf16"):
        with pytest.raises(InterruptionError):
            write_pack(open_source(checkpoint), out, scheme_named(scheme), progress=stopping_after(3))
    tiny_checkpoint(checkpoint, seed=1)  # the source changes under the same name
    reports: list[PackProgress] = []
    manifest = write_pack(open_source(checkpoint), out, scheme_named("bf16"), progress=reports.append)
    assert reports[0].resumed_bytes == 0
    assert manifest.model_digest == Pack.open(tiny_pack("bf16", seed=1)).manifest.model_digest


def test_progress_ends_at_the_size_of_the_files(tiny_model: TinyModel, tmp_path: Path) -> None:
    source, reports = open_source(tiny_model()), list[PackProgress]()
    manifest = write_pack(source, tmp_path / "pack", scheme_named("int8"), progress=reports.append)
    done = [report.done_bytes for report in reports]
    assert done == sorted(done)
    assert done[-1] == reports[0].total_bytes == sum(record.size_bytes for record in manifest.files.values())


def test_disk_space_is_compared_with_what_will_be_written(tiny_model: TinyModel, tmp_path: Path) -> None:
    source, scheme = open_source(tiny_model()), scheme_named("int8")
    sizes = file_sizes(source, scheme)
    manifest = write_pack(source, tmp_path / "pack", scheme)
    assert sizes == {path: record.size_bytes for path, record in manifest.files.items()}
    finished = {"outer.safetensors", "layers/00002.safetensors"}
    on_disk = sum(len(content) for path, content in files_of(tmp_path / "pack").items() if path not in finished)
    needed = bytes_to_write(sizes, finished)
    assert on_disk <= needed <= on_disk + 4096 * (len(sizes) + 1)
    check_free_space(tmp_path, needed, needed)
    with pytest.raises(ConfigurationError, match=f"has {needed - 5:,} free; free 5 more"):
        check_free_space(tmp_path, needed, needed - 5)


def test_a_pack_that_is_there_is_kept_unless_it_may_be_replaced(tiny_model: TinyModel, tmp_path: Path) -> None:
    source, out = open_source(tiny_model()), tmp_path / "pack"
    write_pack(source, out, scheme_named("bf16"))
    before = files_of(out)
    with pytest.raises(ConfigurationError, match="already holds .* use it"):
        write_pack(source, out, scheme_named("bf16"))
    with pytest.raises(ConfigurationError, match="already holds .* in bf16; choose another place"):
        write_pack(source, out, scheme_named("int8"))
    with pytest.raises(InterruptionError):
        write_pack(source, out, scheme_named("int8"), overwrite=True, progress=stopping_after(2))
    assert files_of(out) == before
    write_pack(source, out, scheme_named("int8"), overwrite=True)
    assert Pack.open(out).manifest.scheme == "int8"
    assert [path.name for path in tmp_path.iterdir()] == ["pack"]


def test_a_folder_that_is_no_pack_is_never_touched(tiny_model: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.txt").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(ConfigurationError, match="no intact pack"):
            write_pack(open_source(tiny_model()), tmp_path / "thesis", scheme_named("bf16"), overwrite=overwrite)
    assert files_of(tmp_path) == {"thesis/chapter.txt": b"precious"}


def test_two_packers_do_not_share_a_place(tiny_model: TinyModel, tmp_path: Path) -> None:
    out = tmp_path / "pack"
    with workspace_of(out), pytest.raises(ConfigurationError, match="another process is packing"):
        write_pack(open_source(tiny_model()), out, scheme_named("bf16"))
    write_pack(open_source(tiny_model()), out, scheme_named("bf16"))


@pytest.mark.parametrize("pattern", [0xFFFFFFFF, 0x7F7FFFFF], ids=["not a number", "infinite in bfloat16"])
def test_damaged_weights_are_not_packed(pattern: int, tiny_model: TinyModel, tmp_path: Path) -> None:
    checkpoint = write_gguf(tmp_path / "m.gguf", tiny_model())
    content = bytearray(checkpoint.read_bytes())
    content[-4096:] = pattern.to_bytes(4, "little") * 1024
    checkpoint.write_bytes(content)
    with pytest.raises(DataLossError, match="not finite"):
        write_pack(open_source(checkpoint), tmp_path / "pack", scheme_named("bf16"))
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize("out", ["/", "."])
def test_a_place_without_a_name_is_refused(out: str, tiny_model: TinyModel) -> None:
    with pytest.raises(ConfigurationError, match="no name for a pack"):
        write_pack(open_source(tiny_model()), Path(out), scheme_named("fp32"))
