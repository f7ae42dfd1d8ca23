"""Scripts of bash as people write them, read without being run."""

from __future__ import annotations

import pytest

from stretto.errors import StrettoError
from stretto.run.frameworks.shell import commands, parameters, unknown_in


def said(text: str, *words: str, **variables: str) -> list[str]:
    """The words of every command, joined."""
    known = {**parameters(words), **variables}
    return [" ".join(command.words) for command in commands(text, "run.sh", known)]


@pytest.mark.parametrize(
    ("text", "out"),
    [
        ('[ -z "$B" ] && B=5\necho $B', "5"),
        ('A=1\n[ -n "$A" ] || A=7\necho $A', "1"),
        ("A=2\ncd /x || A=1\necho $A", "2"),
        ('A=3\nif [[ "$A" == "2" ]] || [ "$A" -eq 3 ]; then B=yes; else B=no; fi\necho $B', "yes"),
        ('A=3\nif [[ "$A" == "3" ]] && [ "$A" -eq 2 ]; then B=yes; else B=no; fi\necho $B', "no"),
        ('A=1; C=c\nif [[ "$A" == "1" && -n "$C" ]]; then D=both; fi\necho $D', "both"),
        ('A=1\nif [[ "$A" == "2" || -z "$A" ]]; then D=one; else D=none; fi\necho $D', "none"),
        ("if [ ! -f x ]; then echo no pretrain_gpt.py; exit 1; fi\necho on", "on"),
        ("while [[ $# -gt 0 ]]; do case $1 in --tp) TP=$2; shift 2;; esac; done\nTP=${TP:-4}\necho $TP", "4"),
        ("for host in a b; do ssh $host date; done\necho on", "on"),
        ("cat <<EOT > ds.json\n{ 'a': 1, }\nEOT\necho on", "on"),
        ("python x.py --a 1 > log.txt 2>&1 < /dev/null | tee log", "tee log"),
    ],
)
def test_the_last_command(text: str, out: str) -> None:
    last = said(text)[-1]
    assert last.removeprefix("echo ") == out


OWN = """TP=2
PP=1
while [[ $# -gt 0 ]]; do
  case "$1" in
    --tp) TP="$2"; shift 2 ;;
    --pp=*)  # joined
      PP="${1#*=}"
      shift
      ;;
    -b|--bf16) ARGS=(--bf16); shift ;;
    *) usage; exit 1 ;;
  esac
done
echo $TP $PP ${ARGS[@]} $#
"""
LETTERS = """TP=2
while getopts "t:b" opt; do
  case $opt in
    t) TP=$OPTARG ;;
    b) BF=1 ;;
  esac
done
shift $((OPTIND-1))
echo $TP ${BF:-0}
"""


@pytest.mark.parametrize(
    ("text", "words", "out"),
    [
        (OWN, "", "2 1 0"),
        (OWN, "--tp 8 --pp=4 -b", "8 4 --bf16 0"),
        (LETTERS, "", "2 0"),
        (LETTERS, "-b -t 8", "8 1"),
        (LETTERS, "-bt8", "8 1"),
        ("A=x.tar.gz; echo ${A%.*} ${A%%.*} ${A#*.} ${A##*.} ${A#y}", "", "x.tar x tar.gz gz x.tar.gz"),
    ],
)
def test_options_of_the_script_itself(text: str, words: str, out: str) -> None:
    assert said(text, *words.split())[-1] == f"echo {out}"


def test_a_word_that_the_script_refuses() -> None:
    with pytest.raises(StrettoError, match=r"run\.sh:3: the script ends at '--tq'"):
        said(OWN, "--tq", "8")


def test_other_loops_are_no_options_and_lines_keep_their_numbers() -> None:
    with pytest.raises(StrettoError, match=r"run\.sh:1: while is not read"):
        said("while [[ $# -gt 0 ]]; do case $1 in a) ARGS+=(--a) ;; esac; done", "a")
    with pytest.raises(StrettoError, match=r"run\.sh:15: for is not read"):
        said(f"{OWN}for i in 1 2; do ARGS=(--a); done", "--tp", "8")


def test_what_is_redirected_is_no_argument() -> None:
    assert said("python x.py --a 1 > log.txt 2>&1 &> all 2> errors")[0] == "python x.py --a 1"


def test_positional_words_are_those_behind_the_script() -> None:
    text = 'echo "$1" ${2:-none} "${3:-none}" $#\npython x.py "$@"'
    assert said(text, "a", "b c") == ["echo a b c none 2", "python x.py a b c"]
    assert said('python x.py "$@" --b') == ["python x.py --b"]


def test_a_text_and_a_document_hold_commands() -> None:
    options = 'options="--lr 1e-4 \\\n  --bf16"\nrun="python pretrain_gpt.py ${options}"\n'
    once = "python pretrain_gpt.py --lr 1e-4 --bf16"
    assert said(f'{options}srun -l --nodes=4 bash -c "${{run}}" > log')[-1] == f"srun -l --nodes=4 {once}"
    assert said(f"{options}srun bash <<EOF\n  $run\nEOF\n")[-1] == f"srun bash {once}"
    assert said(f"{options}cat > job.sh <<EOF\n$run\nEOF\nsbatch job.sh")[0] == once
    plain = "A=1\nbash <<'EOF'\necho \"$A\" --b\nEOF\n"
    assert said(plain) == ["bash echo 1 --b"]


def test_what_only_running_would_tell_is_unknown() -> None:
    text = "if [ -d /scratch ]; then DIR=/scratch; fi\necho $DIR"
    assert unknown_in(said(text)[-1]) == "DIR"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("if [ -d /x ]; then ARGS+=(--bf16); fi", "nothing tells whether `if [ -d /x ]` holds"),
        ('[ -d /x ] && ARGS="--bf16"', "nothing tells whether what stands before && or || holds"),
        ("for i in 1 2; do ARGS=(--bf16); done", "for is not read"),
        ("for i in 1 2; do python pretrain_gpt.py; done", "for is not read"),
        ("cat <<EOF\nnever ended", "a document <<EOF that does not end"),
    ],
)
def test_arguments_that_may_be_there_or_not_are_an_error(text: str, message: str) -> None:
    with pytest.raises(StrettoError) as caught:
        said(text)
    assert message.replace("`if ", "`") in caught.value.message.replace("`if ", "`")
