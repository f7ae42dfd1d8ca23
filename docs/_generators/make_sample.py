"""Write the token folder that comes with the package (`data.source: stretto-sample`) from a commit's text.

    python docs/_generators/make_sample.py [COMMIT]    # default: HEAD

The text is Stretto's own, so it has no licence but ours. Every version of the folder stays in the history of
git: make it again when its format or its tokenizer changes, not when the text does.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from stretto.run.config.sources import SAMPLE, SAMPLE_FOLDER
from stretto.run.data.build import build
from stretto.run.data.token_folder import TokenFolder

ROOT = Path(__file__).parents[2]
SOURCES = ("README.md", "docs/**/*.md", "src/stretto/engine/**/*.py", "src/stretto/run/**/*.py")
VOCAB = 4096


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=True).stdout


def describe(folder: TokenFolder, commit: str) -> str:
    """The folder's README."""
    return f"""# {SAMPLE}

{folder.documents} documents, {folder.size:,} tokens: Stretto's own text (Apache-2.0) at commit
{commit}. Each document is one of the files
{" ".join(SOURCES)}.

Made by `python docs/_generators/make_sample.py`. The tokenizer is a byte-level BPE of {folder.vocab:,}
tokens, trained on the same text.
"""


def make(folder: Path, commit: str) -> None:
    """Write the tokens of a commit's text into a new folder, and a README beside them."""
    archive = io.BytesIO(git("archive", commit))
    with tempfile.TemporaryDirectory() as at, contextlib.chdir(at), tarfile.open(fileobj=archive) as text:
        text.extractall(at, filter="data")
        built = build(SOURCES, out=folder, vocab=VOCAB)  # from here, for names without a path
    (folder / "README.md").write_text(describe(built, commit), encoding="utf-8")


def main() -> None:
    commit = git("rev-parse", sys.argv[1] if len(sys.argv) > 1 else "HEAD").decode().strip()
    with tempfile.TemporaryDirectory(dir=SAMPLE_FOLDER.parent) as new:
        sample = Path(new, "sample")
        make(sample, commit)
        SAMPLE_FOLDER.mkdir(exist_ok=True)
        for path in sample.iterdir():
            os.replace(path, SAMPLE_FOLDER / path.name)
    size = sum(path.stat().st_size for path in SAMPLE_FOLDER.iterdir())
    print(f"wrote {SAMPLE_FOLDER.relative_to(ROOT)}: {size:,} bytes")


if __name__ == "__main__":
    main()
