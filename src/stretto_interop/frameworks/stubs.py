"""A script that is run, if the user asks for it, with launchers that only record their arguments."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from stretto.errors import StrettoError
from stretto_interop.frameworks.bash import batch_variables

LAUNCHERS = ("torchrun", "srun", "sbatch", "mpirun", "mpiexec", "deepspeed", "python", "python3")
_SECONDS = 60
# python is really run if its arguments name no program: scripts ask it for versions and numbers
_STUB = """#!{python}
import json, os, sys
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
program = any(word.endswith(".py") or word.startswith("torch.distributed") for word in words)
if name.startswith("python") and not program:
    os.execv({python!r}, [{python!r}, *words])
if name in ("srun", "sbatch") and "-c" not in words and not sys.stdin.isatty():
    text = sys.stdin.read()
    words += ["bash", "-c", text] if text.strip() else []
with open({record!r}, "a") as file:
    print(json.dumps([name, *words]), file=file)
"""


def run_script(script: Path, arguments: Sequence[str], variables: Mapping[str, str]) -> str:
    """Run a script in this folder with stubs in place of `LAUNCHERS`; return the commands that they received.

    Whatever else the script does, it does, programs that it names by their paths included.

    Args:
        arguments: of the script.
        variables: added to the environment, as are those of its #SBATCH lines.

    Raises:
        StrettoError: the script takes longer than a minute, or launches nothing.
    """
    text = script.read_text(encoding="utf-8", errors="surrogateescape")
    with TemporaryDirectory() as folder:
        record = Path(folder, "record")
        for name in LAUNCHERS:
            stub = Path(folder, name)
            stub.write_text(_STUB.format(python=sys.executable, record=str(record)), encoding="utf-8")
            stub.chmod(0o755)
        path = os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])
        environment = {**batch_variables(text), **os.environ, **variables, "PATH": path}
        try:
            done = subprocess.run(
                ["bash", str(script), *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise StrettoError(f"{script} did not end within {_SECONDS} s", hint="give its command") from None
        sys.stderr.write(done.stdout)
        if not record.exists():
            raise StrettoError(
                f"{script} launched nothing and ended with {done.returncode}",
                hint=f"it has to start {', '.join(LAUNCHERS[:-1])} or {LAUNCHERS[-1]} by name",
            )
        launches = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    batch = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    return "\n".join([*batch, *(shlex.join(launch) for launch in launches)]) + "\n"
