"""`stretto launch`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from command_line import CommandLine
from stretto.cli import main

CONFIG = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


def test_ranks_are_shared_out_over_the_nodes(stretto: CommandLine) -> None:
    text = stretto("launch", "slurm", CONFIG, "optim.lr=2e-4", "--nodes", "2", "--time", "2:00:00")
    assert text.startswith("#!/bin/bash\n")
    assert "--nnodes=2 --nproc-per-node=2 " in text
    assert "# 2 nodes x 2 ranks = 4 ranks\n" in text
    assert "#SBATCH --time=2:00:00" in text
    assert "optim.lr=2e-4 train.grace_s=120 --resume auto" in text


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "sky", "ray", "torchrun"])
def test_one_node_and_one_rank_are_in_the_singular(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(CONFIG).parent)
    arguments = ["layout.dp=1", "layout.pp=1", "--gpus-per-node", "1"]
    arguments += ["--requeues", "1"] if kind in ("slurm", "ray") else []
    arguments += {"kubernetes": ["--own-runtime", "--image", "a"], "sky": ["--accelerator", "H100"]}.get(
        kind, []
    )
    assert main.run(["launch", kind, "quickstart.yaml", *arguments]) == 0
    captured = capsys.readouterr()
    assert "# 1 node x 1 rank = 1 rank\n" in captured.out
    assert captured.err.startswith("1 node x 1 rank = 1 rank (single), 1 GPU per node")
    assert " 1 requeues" not in captured.out


@pytest.mark.parametrize(
    ("arguments", "ranks_per_node", "nodes"),
    [
        ([], 4, 1),
        (["layout.dp=8"], 8, 2),
        (["layout.dp=8", "--gpus-per-node", "4"], 4, 4),
        (["layout.dp=8", "--ranks-per-node", "2"], 2, 8),
        (["layout.dp=8", "--nodes", "1"], 16, 1),
    ],
)
def test_nodes_follow_from_the_layout(
    arguments: list[str], ranks_per_node: int, nodes: int, stretto: CommandLine
) -> None:
    text = stretto("launch", "slurm", CONFIG, *arguments)
    assert f"--nnodes={nodes} --nproc-per-node={ranks_per_node} " in text
    assert f"#SBATCH --nodes={nodes}\n" in text


@pytest.mark.parametrize(
    ("arguments", "gpus"),
    [
        (["train.device=auto"], 2),
        (["--gpus-per-node", "8"], 8),
        (["--gpus-per-node", "0"], 0),
        ([], 0),
        (["train.device=auto", "--sbatch=--gres=gpu:h100:2"], None),
    ],
)
def test_a_rank_has_a_gpu_unless_said_otherwise(
    arguments: list[str], gpus: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["launch", "slurm", CONFIG, "--nodes", "2", *arguments]) == 0
    captured = capsys.readouterr()
    assert (f"#SBATCH --gpus-per-node={gpus}\n" in captured.out) == bool(gpus)
    assert ("gpus-per-node" in captured.out) == bool(gpus)
    assert captured.err.startswith("2 nodes x 2 ranks = 4 ranks (")
    assert f", {gpus or 'no'} GPUs per node" in captured.err or gpus is None


@pytest.mark.parametrize(
    ("arguments", "warns"),
    [([], True), (["--cpus-per-rank", "4"], False), (["--sbatch=--cpus-per-gpu=8"], False)],
)
def test_cores_that_are_not_requested_are_a_warning(
    arguments: list[str], warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["launch", "slurm", CONFIG, "--nodes", "2", *arguments]) == 0
    assert ("requests no CPU cores" in capsys.readouterr().err) == warns


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--job-name=quickstart\n"),
        (["run.name=llama-7b"], "--job-name=llama-7b\n"),
        (["run.name=llama-7b", "--job-name", "l7"], "--job-name=l7\n"),
    ],
)
def test_the_job_has_the_run_s_name(arguments: list[str], says: str, stretto: CommandLine) -> None:
    text = stretto("launch", "slurm", CONFIG, "--nodes", "2", "--requeues", "7", *arguments)
    assert says in text
    assert '[ "${SLURM_RESTART_COUNT:-0}" -ge 7 ]' in text


@pytest.mark.parametrize(
    ("launcher", "folder"),
    [
        (["kubernetes", "--image", "i", "--mount", "c:/claim"], "/claim"),
        (["sky", "--mount", "volume:/claim"], "/claim"),
        (["ray"], "/shared"),
        (["slurm", "--image", "i.sif", "--mount", "/scratch/me:/claim"], "/claim"),
    ],
)
def test_paths_of_other_machines_are_not_looked_for(
    launcher: list[str], folder: str, stretto: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # no user but root may write to /
    monkeypatch.chdir(Path(CONFIG).parent)
    paths = [f"data.source={folder}/text", f"run.dir={folder}/runs"]
    assert f"data.source={folder}/text" in stretto("launch", *launcher, "quickstart.yaml", *paths)


@pytest.mark.parametrize("mount", ["/scratch/me:/other", "/claim:/claim"])
def test_paths_of_this_machine_are_looked_for(mount: str, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["slurm", CONFIG, "--image", "i.sif", "--mount", mount, "data.source=/claim/text"]
    assert main.run(["launch", *arguments]) == 2
    assert "data.source is /claim/text" in capfd.readouterr().err


def test_srun_takes_further_options(stretto: CommandLine) -> None:
    options = ["--srun=--cpu-bind=cores", "--srun=--container-image=a b.sqsh"]
    line = next(
        line
        for line in stretto("launch", "slurm", CONFIG, "--nodes", "2", *options).splitlines()
        if line.startswith("srun ")
    )
    assert line == "srun --kill-on-bad-exit=1 --cpu-bind=cores '--container-image=a b.sqsh' \\"
    assert "hint: write --exclusive" in stretto.error(
        "launch", "slurm", CONFIG, "--nodes", "2", "--srun", "exclusive"
    )


@pytest.mark.parametrize(
    ("image", "runs"), [("a.sif", "apptainer exec "), ("a#b:1", "--container-image='a#b:1'")]
)
def test_the_image_says_what_runs_it(image: str, runs: str, stretto: CommandLine) -> None:
    assert runs in stretto("launch", "slurm", CONFIG, "--image", image, "--mount", "/data:/data:ro")


def test_json_holds_the_script(stretto: CommandLine) -> None:
    report = stretto.json("launch", "slurm", CONFIG, "--nodes", "1")
    assert report["ranks_per_node"] == 4
    assert report["script"].endswith("\n")


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["--nodes", "3"], "error: --nodes 3", "--nodes 2 --ranks-per-node 2"),
        (["--nodes", "2", "--ranks-per-node", "8"], "= 16", "--nodes 2 --ranks-per-node 2"),
        (["--nodes", "2", "--time", "soon"], "--time is 'soon'", "HH:MM:SS"),
        (
            ["layout.dp=4", "--gpus-per-node", "6"],
            "--gpus-per-node 6 does not divide the 8 ranks",
            "--nodes 2 ",
        ),
        (["--gpus-per-node", "1", "--nodes", "2"], "--gpus-per-node 1", "--gpus-per-node 2"),
        (["--ranks-per-node", "3"], "--ranks-per-node 3 does not", "--nodes 2 --ranks-per-node 2"),
        (["--signal-seconds", "70000"], "'--signal-seconds': 70000 is not in the range", ""),
        (["train.grace_s=70000"], "train.grace_s is 70000: must be from 1 to 65535", ""),
        (["--port", "80"], "--port is 80", ""),
        (["--env", "A"], "--env is 'A': must be NAME=VALUE", "--env"),
        (["--env", "A-B=1"], "--env is 'A-B'", "--env"),
        (["--mount", "/data:/data"], "need --image", ""),
        (["--image", "a", "--mount", "/data"], "--mount is '/data': must be SOURCE:TARGET[:ro]", ""),
        (["--image", "a", "--container", "docker"], "--container is 'docker', must be one of pyxis, app", ""),
        (["no.such=1", "--nodes", "2"], "no", ""),
    ],
)
def test_bad_input(arguments: list[str], error: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["launch", "slurm", CONFIG, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert error in lines[0]
    assert hint in lines[-1]


def test_ranks_know_how_long_they_have_to_save(stretto: CommandLine) -> None:
    command = ["launch", "slurm", CONFIG, "train.grace_s=45.5", "--nodes", "2"]
    text = stretto(*command)
    assert "--signal=B:TERM@46\n" in text
    assert "train.grace_s=45.5 --resume auto" in text
    assert "train.grace_s is 45.5, and ranks have only --signal-seconds=30" in stretto.error(
        *command, "--signal-seconds", "30"
    )


KUBERNETES = ("launch", "kubernetes", CONFIG, "--nodes", "2", "--image", "a:1")


@pytest.mark.parametrize(
    ("arguments", "kinds"),
    [
        ([], ["TrainJob"]),
        (["--own-runtime", "--requeues", "3"], ["TrainingRuntime", "TrainJob"]),
        (["--kind", "jobset", "--restarts", "3"], ["JobSet"]),
        (["--kind", "volcano"], ["Job"]),
    ],
)
def test_manifests_of_each_kind(
    arguments: list[str], kinds: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([*KUBERNETES, *arguments, "--namespace", "team"]) == 0
    captured = capsys.readouterr()
    assert "create secret generic quickstart-key --from-file=key=/dev/stdin -n team\n" in captured.out
    documents = list(yaml.safe_load_all(captured.out))
    assert [document["kind"] for document in documents] == kinds
    assert all(
        document["metadata"] == documents[-1]["metadata"] | document["metadata"] for document in documents
    )
    assert documents[-1]["metadata"] == {"name": "quickstart", "namespace": "team"}
    assert "warning: runs/quickstart lies on no --mount, so a pod that ends takes its" in captured.err
    assert main.run([*KUBERNETES, *arguments, "--mount", "claim:/all", "run.dir=/all/runs"]) == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--kind", "job"], "--kind is 'job', must be one of trainjob, jobset, volcano"),
        (["--kind", "jobset", "--own-runtime"], "--kind jobset has no runtime"),
        (["--runtime", "mine", "--own-runtime"], "exclude each other"),
        (["--requeues", "3"], "stands in its runtime, torch-distributed"),
        (["--namespace", "My_team"], "namespace is 'My_team'"),
    ],
)
def test_bad_input_of_kubernetes(arguments: list[str], error: str, stretto: CommandLine) -> None:
    assert error in stretto.error(*KUBERNETES, *arguments)


def test_torchrun_needs_a_host_for_several_nodes(stretto: CommandLine) -> None:
    text = stretto("launch", "torchrun", CONFIG, "--nodes", "2", "--host", "n0", "--setup", "module load a")
    assert text.index("module load a\n") < text.index("# on node 0\n") < text.index("# on node 1\n")
    assert "--node-rank=1 --master-addr=n0 --master-port=29400 " in text
    assert "hint: --host NAME" in stretto.error("launch", "torchrun", CONFIG, "--nodes", "2")
    assert "--master-addr=127.0.0.1" in stretto("launch", "torchrun", CONFIG)


def test_a_task_of_sky(capsys: pytest.CaptureFixture[str]) -> None:
    # a config in this folder: SkyPilot copies the folder
    command = ["launch", "sky", os.path.relpath(CONFIG), "--nodes", "2", "--image", "a:1"]
    assert main.run([*command, "--spot", "--cpus-per-rank", "3"]) == 0
    captured = capsys.readouterr()
    document = yaml.safe_load(captured.out)
    assert document["num_nodes"] == 2
    assert document["resources"]["use_spot"] is True
    assert document["resources"]["cpus"] == "6+"
    assert "accelerators" not in document["resources"]
    assert "lies on no --mount, so a node that is lost takes its checkpoints along" in captured.err
    assert main.run([*command, "train.device=auto"]) == 2
    assert "hint: --accelerator H100" in capsys.readouterr().err


def test_a_script_for_ray(stretto: CommandLine, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["launch", "ray", CONFIG, "--nodes", "2", "--requeues", "3", "--cpus-per-rank", "4"]
    assert main.run(command) == 0
    assert "warning: runs/quickstart would lie in each node's own copy" in capsys.readouterr().err
    text = stretto(*command)
    compile(text, "job.py", "exec")
    assert "RESTARTS = 3\n" in text
    assert "BUNDLE = {'CPU': 8}" in text
