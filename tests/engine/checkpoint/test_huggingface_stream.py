"""Import and export tensor by tensor: little memory, and no folder, however hostile, that loses a weight."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stretto.engine.checkpoint.folder import checkpoints
from stretto.engine.checkpoint.huggingface.exporting import export_huggingface
from stretto.engine.checkpoint.huggingface.importing import Importing, import_huggingface
from stretto.engine.checkpoint.manifest import problems
from stretto.engine.checkpoint.read import StoredTensors, read_whole
from stretto.engine.checkpoint.save import save
from stretto.engine.parallel.fragment import ShardPlacement, TensorBox
from stretto.errors import StrettoError
from stretto.job.parameters import parameter_shapes
from stretto.job.shape import ModelShape, shape_to_record

LLAMA = ModelShape(family="llama", layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=31, sequence=12)
MIB = 1 << 20


def anonymous() -> int:
    """Bytes of this process that are not of mapped files."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def peak(act: Callable[[Callable[[int, int], object]], object]) -> int:
    """The most anonymous memory that was added at any tensor while it acted."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed earlier would hide what is allocated now
    before, most = anonymous(), 0

    def look(done: int, total: int) -> None:
        nonlocal most
        most = max(most, anonymous() - before)

    act(look)
    return most


def saved(folder: Path, shape: ModelShape, ranks: int = 1) -> Path:
    """A checkpoint of random weights in bfloat16 as ranks of tp would write them: rows dealt out in turn."""
    state: dict[str, tuple[Tensor, ShardPlacement]] = {}
    generator = torch.Generator().manual_seed(1)
    for name, sizes in parameter_shapes(shape).items():
        tensor = torch.empty(sizes, dtype=torch.bfloat16).normal_(generator=generator)
        rows, zeros = sizes[0] // ranks, (0,) * (len(sizes) - 1)
        cuts = [(r * rows, rows if r < ranks - 1 else sizes[0] - r * rows) for r in range(ranks)]
        pieces = tuple(
            TensorBox(offsets=(at, *zeros), sizes=(n, *sizes[1:]), local=(at, *zeros)) for at, n in cuts
        )
        state[f"model.{name}"] = (tensor, ShardPlacement(f"model.{name}", tuple(sizes), pieces))
    return save(folder, 3, state, {"model": shape_to_record(shape)})


WIDE = ModelShape(family="llama", layers=24, hidden=256, heads=4, ffn=1024, vocab=2048, sequence=64)


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    """48 MiB of weights, the largest tensor 1 MiB; a whole copy in memory would be seen."""
    full_bytes = sum(torch.Size(sizes).numel() for sizes in parameter_shapes(WIDE).values()) * 2
    largest = max(torch.Size(sizes).numel() for sizes in parameter_shapes(WIDE).values()) * 2
    assert full_bytes > 40 * MIB > 20 * largest
    checkpoint = saved(tmp_path / "run", WIDE, ranks=4)
    allowed = 4 * largest + 8 * MIB  # ours, what it is split into, and what the allocator keeps
    out = tmp_path / "out"
    assert peak(lambda look: export_huggingface(checkpoint, out, 10 * MIB, progress=look)) < allowed
    with Importing(out) as model:
        assert peak(lambda look: model.write(tmp_path / "new", progress=look)) < allowed
    tensors, _ = read_whole(tmp_path / "new" / "checkpoints" / "step-00000000")
    with StoredTensors(checkpoint) as stored:
        assert all(torch.equal(stored.read(name), tensor) for name, tensor in tensors.items())
    del tensors
    results = list[object]()
    assert peak(lambda look: (results.append(read_whole(checkpoint)), look(0, 1))) > 40 * MIB


def test_large_checkpoints_are_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that ranks can verify them side by side."""
    tensors, _ = read_whole(saved(tmp_path / "one", LLAMA))
    monkeypatch.setattr("stretto.engine.checkpoint.storage.LARGEST_FILE", 2500)
    checkpoint = saved(tmp_path / "run", LLAMA, ranks=2)
    files = sorted(checkpoint.glob("*.safetensors"))
    assert len(files) > 3
    assert [files[0].name, files[1].name] == ["shard-00000.1.safetensors", "shard-00000.2.safetensors"]
    assert files[-1].name == "shard-00000.safetensors"
    assert not problems(checkpoint)
    again, _ = read_whole(checkpoint)
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors.items())


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "run", LLAMA)
    seen = list[tuple[int, int]]()
    export_huggingface(checkpoint, tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    with Importing(tmp_path / "out") as model:
        seen.clear()
        model.write(tmp_path / "new", progress=lambda done, total: seen.append((done, total)))
        assert seen[-1] == (model.bytes, model.bytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_are_converted_on_the_way_out(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint = saved(tmp_path / "run", LLAMA, ranks=2)
    export_huggingface(checkpoint, tmp_path / "as-is")
    export_huggingface(checkpoint, tmp_path / "other", dtype=dtype)
    plain, other = (load_file(tmp_path / name / "model.safetensors") for name in ("as-is", "other"))
    assert all(torch.equal(plain[name].to(dtype), other[name]) for name in plain)
    described = json.loads((tmp_path / "other" / "config.json").read_text())
    assert described["dtype"] == str(dtype).removeprefix("torch.")


def test_an_interrupted_import_leaves_nothing_and_can_be_run_again(tmp_path: Path) -> None:
    export_huggingface(saved(tmp_path / "run", LLAMA), tmp_path / "out")

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with Importing(tmp_path / "out") as model, pytest.raises(KeyboardInterrupt):
        model.write(tmp_path / "new", progress=stop)
    assert not checkpoints(tmp_path / "new" / "checkpoints")
    assert not list((tmp_path / "new" / "checkpoints").iterdir())
    folder = import_huggingface(tmp_path / "out", tmp_path / "new")
    assert not problems(folder)


def test_a_killed_import_does_not_look_whole(tmp_path: Path) -> None:
    export_huggingface(saved(tmp_path / "run", LLAMA), tmp_path / "out")
    child = os.fork()
    if not child:
        with Importing(tmp_path / "out") as model:
            model.write(tmp_path / "new", progress=lambda done, total: os._exit(9))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    folder = tmp_path / "new" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-00000000.partial"]
    assert not checkpoints(folder)
    assert not problems(import_huggingface(tmp_path / "out", tmp_path / "new"))


def test_an_interrupted_export_leaves_nothing_that_loads(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "run", LLAMA)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_huggingface(checkpoint, tmp_path / "out", progress=stop)
    assert not list((tmp_path / "out").iterdir())
    export_huggingface(checkpoint, tmp_path / "out")


class TestHostileFolders:
    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        export_huggingface(saved(tmp_path / "run", LLAMA), tmp_path / "in", 3000)
        return tmp_path / "in"

    def refused(self, source: Path, match: str) -> StrettoError:
        with pytest.raises(StrettoError, match=match) as caught:
            import_huggingface(source, source.parent / "new")
        assert not (source.parent / "new").exists()
        assert len(caught.value.message) < 2000
        return caught.value

    def change(self, source: Path, **values: Any) -> None:
        body = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**body, **values}))

    def add(self, source: Path, tensors: dict[str, Tensor]) -> None:
        """Put tensors into their files, or new ones into the last."""
        index = source / "model.safetensors.index.json"
        body = json.loads(index.read_text())
        last = sorted(set(body["weight_map"].values()))[-1]
        for name, tensor in tensors.items():
            file = source / body["weight_map"].setdefault(name, last)
            stored = {name: stored_tensor.clone() for name, stored_tensor in load_file(file).items()}
            save_file({**stored, name: tensor}, file, {"format": "pt"})
        index.write_text(json.dumps(body))

    def test_a_billion_layers(self, source: Path) -> None:
        self.change(source, num_hidden_layers=10**9)
        self.refused(source, "num_hidden_layers is 1000000000")
        self.change(source, num_hidden_layers=9000)
        self.refused(source, r"has 9000 layers, but the files have \d+ tensors")

    @pytest.mark.parametrize(
        "name", ["config.json", "tokenizer.json", "notes.txt", "more/a.jinja", "model.safetensors"]
    )
    def test_links_out_of_the_folder(self, source: Path, name: str) -> None:
        (source / "more").mkdir()
        outside = source.parent / "outside"
        outside.write_bytes((source / name).read_bytes() if (source / name).exists() else b"{}")
        for target in (outside, Path("../../outside"), source.parent / "missing", source / name):
            (source / name).unlink(missing_ok=True)
            (source / name).symlink_to(target)
            self.refused(source, rf"{name} is a link to .*, out of the folder")

    def test_a_folder_that_is_linked_in(self, source: Path) -> None:
        (source.parent / "elsewhere").mkdir()
        (source / "additional_chat_templates").symlink_to(source.parent / "elsewhere")
        self.refused(source, "additional_chat_templates is a link to .*elsewhere, out of the folder")

    def test_the_links_of_the_hub_cache(self, source: Path, tmp_path: Path) -> None:
        """The cache of huggingface_hub: a snapshot links to blobs, which are named by their hashes."""
        model = tmp_path / "models--org--name"
        snapshot, blobs = model / "snapshots" / "0123abcd", model / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for number, file in enumerate(sorted(source.iterdir())):
            file.rename(blobs / f"{number:040x}")
            (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
        (snapshot / "again.json").symlink_to("config.json")  # and inside of it
        with Importing(snapshot) as opened:
            assert opened.shape.layers == LLAMA.layers
        (tmp_path / "outside").write_text("{}")
        (blobs / "escape").symlink_to(tmp_path / "outside")
        for target in ("../../blobs/escape", "../../../outside", "../../blobs/../../outside"):
            (snapshot / "notes.json").unlink(missing_ok=True)
            (snapshot / "notes.json").symlink_to(target)
            self.refused(snapshot, "notes.json is a link to")

    def test_a_name_without_place(self, source: Path) -> None:
        self.add(source, {"model.layers.0.self_attn.q_proj.bias": torch.ones(16)})
        self.refused(source, r"q_proj.bias' has no place in the model")

    def test_a_known_buffer_is_no_weight(self, source: Path, tmp_path: Path) -> None:
        self.add(source, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
        with Importing(source) as model:
            assert any("inv_freq" in note for note in model.notes)
            model.write(tmp_path / "new")

    def test_a_weight_of_another_size(self, source: Path) -> None:
        self.add(source, {"model.norm.weight": torch.ones(17)})
        self.refused(source, r"model.norm.weight' is \[17\], but \[16\] in the model")

    def test_another_size_in_the_config(self, source: Path) -> None:
        self.change(source, vocab_size=32)
        self.refused(source, r"is \[31, 16\], but \[32, 16\]")

    def test_a_weight_of_whole_numbers(self, source: Path) -> None:
        self.add(source, {"model.norm.weight": torch.ones(16, dtype=torch.int32)})
        self.refused(source, "has type int32")

    def test_an_index_that_names_another_file(self, source: Path) -> None:
        index = source / "model.safetensors.index.json"
        body = json.loads(index.read_text())
        first, *_, last = sorted(set(body["weight_map"].values()))
        moved = next(name for name, file in body["weight_map"].items() if file == first)
        body["weight_map"][moved] = last
        index.write_text(json.dumps(body))
        self.refused(source, f"lists {moved} in {last}, which does not contain it")

    def test_a_tensor_in_two_files(self, source: Path) -> None:
        files = sorted(source.glob("model-*.safetensors"))
        twice = {name: tensor.clone() for file in files[:2] for name, tensor in load_file(file).items()}
        save_file(twice, files[0], {"format": "pt"})
        self.refused(source, "is in model-00001-of-.* and in model-00002-of-")

    @pytest.mark.parametrize(
        "name", ["/etc/passwd", "../x.safetensors", ".hidden", "a/b.safetensors", 7, None]
    )
    def test_files_outside(self, source: Path, name: Any) -> None:
        index = source / "model.safetensors.index.json"
        body = json.loads(index.read_text())
        body["weight_map"]["lm_head.weight"] = name
        index.write_text(json.dumps(body))
        self.refused(source, "names the file")

    def test_a_header_that_lies(self, source: Path) -> None:
        file = sorted(source.glob("model-*.safetensors"))[0]
        content = file.read_bytes()
        file.write_bytes((10**12).to_bytes(8, "little") + content[8:])
        self.refused(source, "is damaged")
        file.write_bytes(b"")
        self.refused(source, "is damaged")

    def test_no_room_on_the_disk(self, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = shutil.disk_usage(source)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        self.refused(source, r"needs [\d.]+ KiB, and .* has 1000 bytes free")

    def test_the_run_is_a_file(self, source: Path) -> None:
        (source.parent / "file").write_text("")
        with pytest.raises(StrettoError, match="is a file"):
            import_huggingface(source, source.parent / "file" / "run")

    def test_a_folder_that_is_not_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(StrettoError, match=r"config\.json does not exist") as caught:
            import_huggingface("meta-llama/Llama-3.1-8B", "new")
        assert caught.value.hint is not None
        assert "hf download meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B" in caught.value.hint

    @pytest.mark.parametrize(
        "values",
        [
            {"hidden_size": "wide"},
            {"hidden_size": []},
            {"num_attention_heads": 0},
            {"num_attention_heads": -4},
            {"num_attention_heads": 1e300},
            {"rms_norm_eps": "small"},
            {"rms_norm_eps": {}},
            {"rope_parameters": 7},
            {"rope_parameters": {"rope_type": ["yarn"]}},
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": "x"}},
            {"vocab_size": None},
            {"vocab_size": 10**30},
            {"model_type": {}},
            {"tie_word_embeddings": "perhaps"},
            {"head_dim": "1" * 100_000},
        ],
        ids=lambda values: f"{values}"[:40],
    )
    def test_values_that_no_config_has(self, source: Path, values: dict[str, Any]) -> None:
        self.change(source, **values)
        self.refused(source, r"\S")

    def test_a_head_that_is_not_the_embedding(self, source: Path) -> None:
        self.change(source, tie_word_embeddings=True)
        self.refused(source, "'lm_head.weight' differs from the embedding")
